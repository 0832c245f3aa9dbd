"""What checkpoints hold of an optimizer, as tensors by name.

Optimizers of user code keep more than tensors of a parameter: numbers, lists and None in their state,
counters in parameter groups and attributes, random generators, and whole inner optimizers.

    exp_avg, precond:0       a tensor of the state of a parameter, and one in a list
    step:int, precond:list2  a value that is no tensor: its kind, and the length of a list
    base.exp_avg             of the optimizer in the attribute `base`
    group:step:int           of the group of a parameter, if its value has changed since the first step

A name follows that of its parameter, as in `layers.0.weight/exp_avg`; the parameter of attributes is "".
"""

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.distributed.dtensor import is_dtensor
from paceline.errors import CheckpointError

NUMBERS: Mapping[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
KIND = re.compile(r":(bool|int|float|none|generator|object|(?:list|tuple)\d+)$")
GROUP = "group:"
SCHEDULED = {"params", "lr", "initial_lr"}  # options of a group that are set anew in each step
START = "_paceline_start"  # attribute of an optimizer of user code: digests of its values at the start
# Of torch's base class and of its learning-rate schedulers
TORCH_ATTRIBUTES = {
    *("defaults", "state", "param_groups", "step", "_step_count", "_opt_called", START),
    *("_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
}


def remember_start(optimizer: torch.optim.Optimizer) -> None:
    """Keep the values of an optimizer of user code before its first step, to find what steps change."""
    for part in find_parts(optimizer).values():
        if not type(part).__module__.startswith(("torch.optim.", "paceline.")):
            vars(part)[START] = {key: _digest(value) for key, value in _extra_values(part)}


def is_of_user_code(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `remember_start` has found an optimizer of user code."""
    return any(START in vars(part) for part in find_parts(optimizer).values())


def collect_values(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], index: int = 0
) -> dict[str, Tensor]:
    """Return the values that a checkpoint holds. names: of the parameters. index: of several optimizers."""
    found: dict[str, Tensor] = {}
    for prefix, part in find_parts(optimizer).items():
        for parameter, values in part.state.items():
            if parameter in names:
                for key, value in values.items():
                    found |= encode_value(f"{names[parameter]}/{prefix}{key}", value)
        if (start := vars(part).get(START)) is None:
            continue
        for (at, key), value in _extra_values(part):
            if start.get((at, key)) == _digest(value):
                continue
            if at is None:
                found |= encode_value(f"/{index}.{prefix}{key}", value, is_shared=True)
                continue
            for parameter in part.param_groups[at]["params"]:
                if parameter in names:
                    found |= encode_value(f"{names[parameter]}/{prefix}{GROUP}{key}", value, is_shared=True)
    return found


def allocate_values(
    stored: Mapping[str, Any], optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], index: int = 0
) -> dict[str, Tensor]:
    """Return empty tensors for the values of this rank's parameters in a checkpoint, for `restore_values`.

    stored: metadata of the tensors in the checkpoint by name. Raises CheckpointError for a value that the
    checkpoint does not hold, and for tensors that this plan cannot shard.
    """
    parts = find_parts(optimizer)
    groups = {
        names[parameter]: (parameter, group)
        for part in parts.values()
        for group in part.param_groups
        for parameter in group["params"]
    }
    wanted: dict[str, Tensor] = {}
    for entry, meta in stored.items():
        name, _, key = entry.rpartition("/")
        if name not in groups and not (name == "" and key.startswith(f"{index}.")):
            continue
        kind = type(optimizer).__name__
        if key.endswith(":object"):
            raise CheckpointError(
                f"checkpoints cannot hold {key.removesuffix(':object')!r} of {kind}"
                f"{f' for {name}' if name else ''}, which is not a tensor, a number or a list of them; this "
                "training cannot continue exactly: start a new run"
            )
        if name == "":
            wanted[entry] = torch.empty(meta.size, dtype=meta.properties.dtype)
            continue
        parameter, group = groups[name]
        if meta.size == parameter.shape and parameter.dim():
            wanted[entry] = torch.empty_like(parameter, dtype=meta.properties.dtype, requires_grad=False)
            continue
        if is_of_user_code(optimizer) and is_dtensor(parameter) and meta.size.numel() > 1:
            raise CheckpointError(
                f"{key} of {name} has shape {tuple(meta.size)} in the checkpoint, not that of the parameter, "
                f"{tuple(parameter.shape)}, so that it is not known how to shard it; resume with ddp or zero1"
            )
        on_cpu = KIND.search(key) or not (group.get("fused") or group.get("capturable"))
        device = "cpu" if on_cpu else parameter.device
        wanted[entry] = torch.empty(meta.size, dtype=meta.properties.dtype, device=device)
    return wanted


def restore_values(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    tensors: Mapping[str, Tensor],
    index: int = 0,
) -> None:
    """Give an optimizer the values that `allocate_values` returned, after they have been read."""
    parts = find_parts(optimizer)
    prefixes = sorted(parts, key=len, reverse=True)
    of_parameters: dict[str, dict[str, Tensor]] = {}
    for entry, tensor in tensors.items():
        name, _, key = entry.rpartition("/")
        of_parameters.setdefault(name, {})[key] = tensor
    attributes = of_parameters.pop("", {})
    for name, value in decode_values(attributes).items():
        key = name.removeprefix(f"{index}.")
        prefix = next(prefix for prefix in prefixes if key.startswith(prefix))
        _set_attribute(parts[prefix], key.removeprefix(prefix), value)
    for prefix, part in parts.items():
        for group in part.param_groups:
            for parameter in group["params"]:
                values = decode_values(of_parameters.get(names[parameter], {}))
                for key, value in values.items():
                    owner = next(each for each in prefixes if key.startswith(each))
                    if owner != prefix:
                        continue
                    own = key.removeprefix(prefix)
                    if own.startswith(GROUP):
                        group[own.removeprefix(GROUP)] = value
                    else:
                        part.state[parameter][own] = value


def find_parts(optimizer: torch.optim.Optimizer, prefix: str = "") -> dict[str, torch.optim.Optimizer]:
    """Return an optimizer and those in its attributes, by the prefix of the names of their values."""
    parts = {prefix: optimizer}
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            parts |= find_parts(value, f"{prefix}{name}.")
    return parts


def _extra_values(part: torch.optim.Optimizer) -> Iterator[tuple[tuple[int | None, str], Any]]:
    """Yield values besides the state of parameters, by the index of their group, if any, and their key."""
    for at, group in enumerate(part.param_groups):
        yield from (((at, key), value) for key, value in group.items() if key not in SCHEDULED)
    others: dict[Any, Any] = dict(part.state)  # MADGRAD has state of no parameter
    yield from (((None, key), value) for key, value in others.items() if isinstance(key, str))
    yield from (
        ((None, key), value)
        for key, value in vars(part).items()
        if key not in TORCH_ATTRIBUTES
        and not key.endswith("_hooks")
        and not isinstance(value, torch.optim.Optimizer)
    )


def _set_attribute(part: torch.optim.Optimizer, key: str, value: Any) -> None:
    if isinstance(generator := vars(part).get(key), torch.Generator):
        generator.set_state(value)
    elif key in vars(part):
        setattr(part, key, value)
    else:
        part.state[key] = value  # type: ignore[index]


def _digest(value: Any) -> Any:
    """Return something that changes with a value, and is equal for all objects of unknown kinds."""
    match value:
        case bool() | int() | float() | str() | None:
            return repr(value)
        case Tensor():
            return id(value), value._version
        case torch.Generator():
            return hashlib.sha256(value.get_state().numpy().tobytes()).hexdigest()
        case random.Random():
            return hash(value.getstate())
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case np.ndarray():
            return hashlib.sha256(value.tobytes()).hexdigest()
        case list() | tuple():
            return [_digest(item) for item in value]
        case dict():
            return {repr(key): _digest(item) for key, item in value.items()}
    return None


def encode_value(name: str, value: Any, is_shared: bool = False) -> dict[str, Tensor]:
    """Return tensors that hold a value, by names that begin with `name`.

    is_shared: whether it belongs to several parameters, so that a large tensor may be different on each rank
    and cannot be held.
    """
    if isinstance(value, Tensor) and not (is_shared and (value.numel() > 1 or is_dtensor(value))):
        return {name: value.detach()}
    for kind, dtype in NUMBERS.items():
        if type(value) is kind and not (isinstance(value, int) and abs(value) >= 2**63):
            return {f"{name}:{kind.__name__}": torch.tensor(value, dtype=dtype)}
    if value is None:
        return {f"{name}:none": torch.zeros(())}
    if isinstance(value, torch.Generator):
        return {f"{name}:generator": value.get_state()}
    if type(value) in (list, tuple):
        found = {f"{name}:{type(value).__name__}{len(value)}": torch.zeros(())}
        for at, item in enumerate(value):
            found |= encode_value(f"{name}:{at}", item, is_shared)
        return found
    return {f"{name}:object": torch.zeros(())}


def decode_values(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the values that tensors hold, by name: the reverse of `encode_value`."""
    found: dict[str, Any] = {}
    inner: list[str] = []
    for name, tensor in tensors.items():
        match = KIND.search(name)
        key, kind = (name[: match.start()], match[1]) if match else (name, "tensor")
        length = int(re.sub(r"\D", "", kind) or 0) if kind.startswith(("list", "tuple")) else None
        if length is not None:
            values = [decode_values(_below(tensors, f"{key}:{at}"))[f"{key}:{at}"] for at in range(length)]
            found[key] = tuple(values) if kind.startswith("tuple") else values
            inner += [f"{key}:{at}" for at in range(length)]
        elif kind in ("tensor", "generator"):
            found[key] = tensor
        else:
            found[key] = None if kind == "none" else tensor.item()
    return {key: value for key, value in found.items() if key not in inner}


def _below(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the tensors of one value: those with this name, and with names that continue it."""
    return {key: tensor for key, tensor in tensors.items() if key == name or key.startswith(f"{name}:")}
