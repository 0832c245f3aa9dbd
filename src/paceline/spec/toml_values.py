"""Values of requests as text: TOML files and key=value."""

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.spec.keys import TABLES
from paceline.spec.messages import abbreviate
from paceline.spec.values import MAX_DEPTH, TOO_LARGE, is_too_large

PYTHON_FLOAT = re.compile(r"[+-]?(?:\d+\.|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)  # TOML requires 0.1 and 5.0


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file. Raises SpecError if it cannot be read or is not TOML."""
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from error
    except (ValueError, RecursionError):  # a number with thousands of digits, thousands of levels
        raise SpecError(f"{path} is not TOML: {TOO_LARGE}") from None
    if is_too_large(tree):
        raise SpecError(f"{path} is not TOML: {TOO_LARGE}")
    return tree


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """Return the overrides for `load` that `["width=64", "optimizer.eps=1e-6", "spec.threads=1"]` stands for.

    A dotted name that begins with a table of the request, or with `spec.` for the keys of its top level, is a
    key of the request. Another name is a field of the task, or of a table in it: `lora.rank=16`. Raises
    SpecError.
    """
    overrides: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not all(key.split(".")):
            raise SpecError(f"--set must be NAME=VALUE, got {abbreviate(item)}")
        if key.count(".") > MAX_DEPTH:
            raise SpecError(f"--set {abbreviate(key, str)}: {TOO_LARGE}")
        table = key.partition(".")[0] if "." in key else ""
        name = key.removeprefix("spec.") if table in {"spec", *TABLES} else f"set.{key}"
        value = parse_value(text, key)
        check_same_value(key, "--set", overrides.get(name, value), "another --set", value)
        overrides[name] = value
    return overrides


def check_same_value(key: str, source: str, value: Any, other_source: str, other_value: Any) -> None:
    """Raise SpecError if two options of a command line give a key different values."""
    are_nan = value != value and other_value != other_value
    if value != other_value and not are_nan:
        raise SpecError(
            f"{abbreviate(key, str)} is {abbreviate(value)} by {source} and {abbreviate(other_value)}"
            f" by {other_source}; specify it once"
        )


def replace_length(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the overrides. If they set `epochs` or `steps`, they also remove the length of the file."""
    lengths = {key: overrides[key] for key in ("epochs", "steps") if key in overrides}
    return overrides if len(lengths) != 1 else {"epochs": None, "steps": None} | overrides


def parse_value(text: str, key: str = "VALUE") -> Any:
    """Return the TOML value of a text (`64`, `1e-3`, `true`, `[1, 2]`), or the text itself (`relu`).

    Numbers may be written as in Python, too (`.1`, `5.`).
    Raises SpecError for a value that TOML cannot represent.
    """
    try:
        tree = tomllib.loads(f"x = {text}")
    except tomllib.TOMLDecodeError:
        return float(text) if PYTHON_FLOAT.fullmatch(text) else text
    except (ValueError, RecursionError):  # thousands of digits or levels
        raise SpecError(f"--set {abbreviate(key, str)}={abbreviate(text, str)}: {TOO_LARGE}") from None
    if is_too_large(tree):
        raise SpecError(f"--set {abbreviate(key, str)}={abbreviate(text, str)}: {TOO_LARGE}")
    return (
        tree["x"] if len(tree) == 1 and isinstance(tree["x"], (bool, int, float, str, list, dict)) else text
    )
