"""Read, build and write a request: Spec and Launch together."""

import copy
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from paceline.errors import SpecError
from paceline.optimizer_options import OPTIMIZERS
from paceline.spec.keys import KEYS, leaves
from paceline.spec.launch import Launch
from paceline.spec.messages import describe_error
from paceline.spec.toml_values import read_toml
from paceline.spec.training import Spec


def load(path: Path | None, overrides: Mapping[str, Any]) -> tuple[Spec, Launch]:
    """Return Spec and Launch from a TOML file and overrides. Raises SpecError.

    path: the file; None for the defaults.
    overrides: values by dotted key, such as `optimizer.lr`; None removes the key of the file.
    """
    return _build_with(read_toml(path) if path is not None else {}, overrides)


def load_own(path: Path, overrides: Mapping[str, Any], edited: bool = False) -> tuple[Spec, Launch]:
    """Return Spec and Launch from the file that `save` wrote for a run. Raises SpecError.

    The file must be complete: no key may fall back to its default.
    edited: a person changed the file; its checksum is ignored, but every key with a default is required.
    """
    tree = read_toml(path)
    if not edited and not _is_sealed(path.read_bytes()):
        raise SpecError(
            f"{path} is not as Paceline wrote it (its checksum in the last line is missing or wrong);"
            f" restore it, or if you edited it, accept it: paceline resume {path.parent} --edited"
        )
    _drop_former_defaults(tree)
    request = _build_with(copy.deepcopy(tree), overrides)
    if edited and (missing := [key for key in _required_keys() if not _has(tree, key.split("."))]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise SpecError(
            f"{path} lacks {missing[0]}{more}; the request of a run requires all keys"
            " that paceline train --keys lists"
        )
    return request


# Up to version 0.2, requests stored these options for each optimizer, also for one that has no such option.
FORMER_DEFAULTS = {"momentum": 0.9, "nesterov": False, "betas": [0.9, 0.999], "eps": 1e-8}


def _drop_former_defaults(tree: dict[str, Any]) -> None:
    """Remove defaults that an earlier version stored and that the optimizer does not have."""
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict):
        options = OPTIMIZERS.get(str(optimizer.get("name")), FORMER_DEFAULTS)
        for key, default in FORMER_DEFAULTS.items():
            if key not in options and optimizer.get(key) == default:
                del optimizer[key]


def _required_keys() -> list[str]:
    """Return the keys that `save` always writes: those whose default is not None."""
    kinds: tuple[type[BaseModel], ...] = (Launch, Spec)
    return [".".join(path) for kind in kinds for path, field in leaves(kind) if field.default is not None]


def _has(tree: Any, path: list[str]) -> bool:
    return not path or (isinstance(tree, dict) and path[0] in tree and _has(tree[path[0]], path[1:]))


def _build_with(tree: dict[str, Any], overrides: Mapping[str, Any]) -> tuple[Spec, Launch]:
    apply_overrides(tree, overrides)
    return build(tree)


def apply_overrides(tree: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set values of nested tables by dotted key; None removes a key. Raises SpecError."""
    for key, value in overrides.items():
        *parents, leaf = key.split(".", -1 if key.startswith("set.") else 1)
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                raise SpecError(f"{name}={node!r} has no keys below it, got {key}")
        if value is None:
            node.pop(leaf, None)
        else:
            node[leaf] = value


def build(tree: Mapping[str, Any]) -> tuple[Spec, Launch]:
    """Return Spec and Launch from nested tables. Raises SpecError."""
    launch = {key: value for key, value in tree.items() if key in Launch.model_fields}
    spec = {key: value for key, value in tree.items() if key not in launch}
    try:
        return Spec.model_validate(spec), Launch.model_validate(launch)
    except ValidationError as error:
        raise SpecError(describe_error(error, KEYS)) from error


def save(path: Path, spec: Spec, launch: Launch) -> None:
    """Write a request for `load` and `load_own`. It is on the disk when this returns."""
    tree = launch.model_dump(exclude_none=True) | spec.model_dump(exclude_none=True)
    with open(path, "wb") as file:
        file.write(_sealed(tomli_w.dumps(tree).encode()))
        file.flush()
        os.fsync(file.fileno())


SEAL = b"# checksum "


def _sealed(text: bytes) -> bytes:
    return text + SEAL + f"{zlib.crc32(text):08x}\n".encode()


def _is_sealed(content: bytes) -> bool:
    return content == _sealed(content[: max(content.rfind(SEAL), 0)])
