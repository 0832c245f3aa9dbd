"""Scales the learning rate, and what depends on it, with the batch."""

import math
from collections.abc import Mapping
from typing import Any

from paceline.errors import SpecError
from paceline.optimizer_options import DECOUPLED, OPTIMIZERS
from paceline.spec import Optimizer, Schedule, Spec


def lr_scale_factor(spec: Spec) -> float:
    """Return the factor on learning rates by `schedule.lr_scale` and `schedule.base_batch`."""
    return _factor(spec, spec.batch)


def lr_factor_of_batch(spec: Spec, step: int) -> float:
    """Return the factor on the learning rate in a step with a smaller batch than that of the request."""
    batch = spec.batches.batch_of(step)
    if batch == spec.batch or spec.schedule.base_batch is None:
        return 1.0
    return _factor(spec, batch) / _factor(spec, spec.batch)


def _factor(spec: Spec, batch: int) -> float:
    ratio = batch / spec.schedule.base_batch if spec.schedule.base_batch is not None else 1.0
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[spec.schedule.lr_scale or "linear"]


def scale_optimizer(spec: Spec, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with the values that it has for the batch of the request. Raises SpecError.

    Learning rate and weight decay of groups are scaled, too. `scale_betas` and `scale_decay`
    follow Malladi et al., On the SDEs and scaling rules for adaptive gradient algorithms, 2022, and Wang,
    Aitchison, How to set AdamW's weight decay as you scale model and dataset size, 2024.
    """
    factor, schedule = lr_scale_factor(spec), spec.schedule
    if schedule.base_batch is None:
        return optimizer
    ratio = spec.batch / schedule.base_batch
    values: dict[str, Any] = {}
    if schedule.scale_betas:
        values |= _scale_betas(optimizer, ratio)
    if schedule.scale_decay:
        if optimizer.name not in DECOUPLED:
            raise SpecError(
                f"schedule.scale_decay applies to decoupled weight decay ({', '.join(sorted(DECOUPLED))}), "
                f"got {optimizer.name}; leave it out"
            )
        optimizer = _multiply_decay(optimizer, ratio / factor)
    return multiply_rates(optimizer, factor).model_copy(update=values)


def multiply_rates(optimizer: Optimizer, factor: float) -> Optimizer:
    """Return the optimizer with all learning rates multiplied, also those of groups and of AdamW in muon."""
    values: dict[str, Any] = {"lr": optimizer.lr * factor}
    if optimizer.adamw_lr is not None:
        values["adamw_lr"] = optimizer.adamw_lr * factor
    if optimizer.groups is not None:
        values["groups"] = {
            pattern: group.model_copy(update={"lr": group.lr * factor}) if group.lr is not None else group
            for pattern, group in optimizer.groups.items()
        }
    return optimizer.model_copy(update=values)


def _multiply_decay(optimizer: Optimizer, factor: float) -> Optimizer:
    """Return the optimizer with weight decay multiplied, also that of groups."""
    values: dict[str, Any] = {"weight_decay": optimizer.weight_decay * factor}
    if optimizer.groups is not None:
        values["groups"] = {
            pattern: group.model_copy(update={"weight_decay": group.weight_decay * factor})
            if group.weight_decay is not None
            else group
            for pattern, group in optimizer.groups.items()
        }
    return optimizer.model_copy(update=values)


def _scale_betas(optimizer: Optimizer, ratio: float) -> dict[str, Any]:
    if not {"betas", "eps"} <= OPTIMIZERS[optimizer.name].keys():
        raise SpecError(
            f"schedule.scale_betas applies to optimizers with betas and eps, such as adamw, got "
            f"{optimizer.name}; leave it out"
        )
    betas = tuple(1 - ratio * (1 - beta) for beta in optimizer.options["betas"])
    if min(betas) < 0:
        raise SpecError(
            f"schedule.scale_betas: the batch is {ratio:g} × schedule.base_batch, so betas would become "
            f"{', '.join(f'{beta:.4g}' for beta in betas)}; use betas closer to 1, or leave it out"
        )
    return {"betas": betas, "eps": optimizer.options["eps"] / math.sqrt(ratio)}


def describe_scaling(spec: Spec, optimizers: Mapping[str, Optimizer], is_own: bool = False) -> list[str]:
    """Return a note on what the batch scales; empty if it scales nothing.

    optimizers: of the request, by the names of their updates; "" is the only one. is_own: whether the task
    defines its optimizer instead. Raises SpecError if that has values which only the request could scale.
    """
    schedule: Schedule = spec.schedule
    if schedule.base_batch is None:
        return []
    if is_own:
        for key in ("scale_betas", "scale_decay"):
            if getattr(schedule, key):
                raise SpecError(
                    f"schedule.{key} applies to the optimizer of the request, and the task defines its "
                    "own in optimizer(); leave it out"
                )
        parts = [f"learning rates of the task's optimizer() × {lr_scale_factor(spec):g}"]
    else:
        parts = [
            f"{name} {change}".lstrip()
            for name, optimizer in optimizers.items()
            for change in _list_changes(spec, optimizer)
        ]
    rule = schedule.lr_scale or "linear"
    return [
        f"the batch {spec.batch} is {spec.batch / schedule.base_batch:g} × schedule.base_batch="
        f"{schedule.base_batch}: {'; '.join(parts)} ({rule})"
    ]


def _list_changes(spec: Spec, before: Optimizer) -> list[str]:
    """Return the values of an optimizer that the batch scales, before and after."""
    after, schedule = scale_optimizer(spec, before), spec.schedule
    parts = [f"lr {before.lr:g} × {lr_scale_factor(spec):g} = {after.lr:g}"]
    if before.adamw_lr is not None:
        parts.append(f"adamw_lr {before.adamw_lr:g} → {after.adamw_lr:g}")
    if schedule.scale_betas:
        betas = ", ".join(f"{beta:g}" for beta in after.options["betas"])
        parts.append(f"betas {betas}, eps {after.options['eps']:g}")
    if schedule.scale_decay:
        parts.append(f"weight decay {before.weight_decay:g} → {after.weight_decay:g}")
    for pattern, group in (before.groups or {}).items():
        scaled = (after.groups or {})[pattern]
        parts += [
            f"{name} of {pattern} {getattr(group, key):g} → {getattr(scaled, key):g}"
            for key, name in (("lr", "lr"), ("weight_decay", "weight decay"))
            if getattr(group, key) != getattr(scaled, key)
        ]
    return parts
