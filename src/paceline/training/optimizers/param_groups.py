"""Options of single parameters, by patterns of their names: weight decay, learning rate, trust ratio."""

import fnmatch
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from paceline.errors import SpecError
from paceline.spec import Optimizer, abbreviate

MAX_NAMES = 4  # in a message
KEYWORDS = ("norm", "bias", "embedding")


def assign_options(spec: Optimizer, model: nn.Module, names: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the options of parameters that differ from those of the request, by name.

    A parameter has the options of the first pattern of `optimizer.groups` that matches it. `no_decay` and
    `no_trust` come before them.

    names: of the parameters that the optimizer trains. Raises SpecError for a pattern without a match.
    """
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for pattern, group in (spec.groups or {}).items():
        found = {key: value for key, value in group if value is not None and key != "lr_scale"}
        if group.lr_scale is not None:
            found["lr"] = spec.lr * group.lr_scale
        matches = select_names(pattern, model, names, "optimizer.groups")
        fresh = [name for name in matches if not options[name]]
        if not fresh:
            raise SpecError(
                f"optimizer.groups: earlier patterns match all parameters of {abbreviate(pattern)}; put it "
                "before them"
            )
        for name in fresh:
            options[name] = dict(found)
    for key, option, value in (("no_decay", "weight_decay", 0.0), ("no_trust", "trust", False)):
        patterns = getattr(spec, key)
        if patterns is None:
            continue
        for name in select_some(patterns, model, names, f"optimizer.{key}"):
            options[name][option] = value
    return {name: found for name, found in options.items() if found}


def select_names(patterns: str, model: nn.Module, names: Collection[str], key: str) -> set[str]:
    """Return the names that match patterns or keywords, separated by commas. "" matches none.

    The keywords are norm (parameters of normalizations), bias and embedding. Beside others that match, a
    keyword may match no name, so that `norm,bias,embedding` serves every model. key: of the request, for
    SpecError if a pattern, or all keywords, match no name.
    """
    parts = [part.strip() for part in patterns.split(",") if part.strip()]
    matches = {pattern: _match(pattern, model) & set(names) for pattern in parts}
    selected = {name for found in matches.values() for name in found}
    for pattern, found in matches.items():
        if not found and not (pattern in KEYWORDS and selected):
            listed = [*names][:MAX_NAMES]
            more = ", …" if len(names) > MAX_NAMES else ""
            raise SpecError(
                f"{key}: no trained parameter of the model matches {abbreviate(pattern)}; its parameters are "
                f"{', '.join(listed)}{more}; keywords are {', '.join(KEYWORDS)}"
            )
    return selected


def select_some(patterns: str, model: nn.Module, names: Collection[str], key: str) -> set[str]:
    """Return the names that match, as `select_names` does. Raises SpecError if all names match."""
    selected = select_names(patterns, model, names, key)
    if len(selected) == len(names):
        raise SpecError(f"{key}={patterns!r} matches all {len(names)} trained parameters; leave some out")
    return selected


def _match(pattern: str, model: nn.Module) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    if pattern == "bias":
        return {name for name in names if name.rpartition(".")[2].endswith("bias")}
    if pattern in ("norm", "embedding"):
        chosen = {
            id(parameter)
            for module in model.modules()
            if (
                "norm" in type(module).__name__.lower()
                if pattern == "norm"
                else isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            )
            for parameter in module.parameters(recurse=False)
        }
        return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}
    return {*fnmatch.filter(names, pattern)}


def merge_groups(entries: Iterable[tuple[dict[str, Any], nn.Parameter]]) -> list[dict[str, Any]]:
    """Return parameter groups: parameters with equal options are together, those without options first."""
    groups: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
    for options, parameter in entries:
        groups.setdefault(tuple(sorted(options.items())), []).append(parameter)
    ordered = sorted(groups, key=lambda options: bool(options))
    return [{"params": groups[options], **dict(options)} for options in ordered]
