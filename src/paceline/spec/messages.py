"""Sentences about requests that are wrong, with the nearest known name."""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import ValidationError

MAX_NAMES = 20  # names that a message lists
MIN_SIMILARITY = 0.65  # by difflib: accepts rr for r and bach for batch, but not ema for betas
MAX_CHOICES = 3  # words of a key that a message lists without naming the nearest: gpu is not like cpu
LISTING = "paceline train --keys"


def abbreviate(value: Any, as_text: Callable[[Any], str] = repr) -> str:
    """Return the text of a value for a message; a long text is truncated."""
    text = as_text(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text):,} characters)"


class RequestKeys(list[str]):
    """The keys of a request: too many for a message, which names the command that lists them."""


def describe_error(error: ValidationError, known: list[str], what: str = "key") -> str:
    """Return one sentence about the first error, with the nearest known name if a name is unknown."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown {what} {abbreviate(key, str)}{_suggest_key(key, known)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{what} {key} has no value; specify it with --set {key}=VALUE"
    message = first["msg"].replace("Input should be", "must be")
    message = re.sub(r"a valid dictionary( or instance of \w+)?", "a table", message)
    message = message.replace("a valid tuple", 'a list, such as ["A","B"]')
    message = re.sub(r"a valid (?=[aeiou])", "an ", message).replace("a valid ", "a ")
    hint, choices = "", re.findall(r"'([^']*)'", first.get("ctx", {}).get("expected", ""))
    if first["type"] == "literal_error" and isinstance(first["input"], str) and len(choices) > MAX_CHOICES:
        hint = suggest(first["input"], choices)
    return f"{key} {message}, got {abbreviate(first['input'])}{hint if hint.startswith('; did') else ''}"


def _suggest_key(key: str, known: list[str]) -> str:
    """Return the hint for an unknown key.

    Dotted keys are compared within their table: the common prefix does not make `optimizer.ema` similar
    to `optimizer.eps`.
    """
    if key.startswith("optimizer.groups."):
        return """; specify all groups at once: --set 'optimizer.groups={"PATTERN"={lr_scale=10}}'"""
    table, _, leaf = key.rpartition(".")
    if inside := [name.rpartition(".")[2] for name in known if table and name.rpartition(".")[0] == table]:
        return suggest(leaf, inside).replace("did you mean ", f"did you mean {table}.")
    hint = suggest(key, known)
    if isinstance(known, RequestKeys) and not hint.startswith("; did"):
        return f"; {LISTING} lists them"
    return hint


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the hint for an unknown name: `"; did you mean batch?"`, or else `"; available: batch, seed"`.

    A known name matches if its spelling is similar, in upper or lower case, or if `name` is its last part
    (`lr`, `optimizer.lr`).
    The hint is empty if no names are known.
    """
    known = list(known)
    ends = [key for key in known if "." in key and key.rpartition(".")[2] == name]
    lower = {key.lower(): key for key in known}
    similar = difflib.get_close_matches(name.lower(), lower, 1, cutoff=MIN_SIMILARITY)
    if matches := ends or [lower[key] for key in similar]:
        return f"; did you mean {matches[0]}?"
    more = f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else ""
    return f"; available: {', '.join(known[:MAX_NAMES])}{more}" if known else ""
