"""Builds the optimizer that a request names."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from paceline.distributed.dtensor import is_dtensor
from paceline.errors import SpecError
from paceline.spec import Optimizer
from paceline.training.optimizers.adadelta import Adadelta
from paceline.training.optimizers.adafactor import Adafactor
from paceline.training.optimizers.adamax import Adamax
from paceline.training.optimizers.lamb import Lamb
from paceline.training.optimizers.lars import Lars
from paceline.training.optimizers.lion import Lion
from paceline.training.optimizers.muon_groups import build_muon
from paceline.training.optimizers.nadam import NAdam
from paceline.training.optimizers.novograd import NovoGrad
from paceline.training.optimizers.param_groups import assign_options, merge_groups
from paceline.training.optimizers.radam import RAdam
from paceline.training.optimizers.rmsprop import RMSprop
from paceline.training.optimizers.rprop import Rprop

CLASSES: Mapping[str, type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "rprop": Rprop,
    "asgd": torch.optim.ASGD,
    "lion": Lion,
    "lars": Lars,
    "lamb": Lamb,
    "novograd": NovoGrad,
    "adafactor": Adafactor,
}
# Own code for CPUs, for which torch has no fused kernels of these. The updates are the same.
ON_CPU: Mapping[str, type[torch.optim.Optimizer]] = {
    "adamax": Adamax,
    "nadam": NAdam,
    "radam": RAdam,
    "adadelta": Adadelta,
    "rmsprop": RMSprop,
}
# A fused optimizer passes over the memory once instead of several times.
FUSED = {"adamw", "adam", "sgd", "adagrad"}
FUSED_ON_DTENSORS = {"adamw", "adam"}  # torch 2.13: the others do not support DTensor
HALVES = (torch.bfloat16, torch.float16)


def build_optimizer(
    spec: Optimizer,
    model: nn.Module,
    names: Collection[str],
    params: Mapping[str, nn.Parameter],
    dense: bool,
    notes: list[str],
) -> torch.optim.Optimizer:
    """Return the optimizer that `spec` names.

    names: of what it trains on all ranks. params: on this rank, by name in `model`. dense: whether no
    gradient is sparse. notes: for the user; are added. Raises SpecError for
    patterns that match nothing, and parameters that the optimizer does not support.
    """
    own = assign_options(spec, model, names)
    if spec.name == "adafactor" and (found := [name for name, each in params.items() if each.is_complex()]):
        raise SpecError(
            f"optimizer.name=adafactor does not support complex parameters, such as {found[0]}; use adamw"
        )
    if spec.name == "muon":
        return build_muon(spec, model, params, own, notes)
    options: dict[str, Any] = {"lr": spec.lr, **spec.options}
    if spec.name != "rprop":
        options["weight_decay"] = spec.weight_decay
    fused = dense and all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in params.values())
    if any(map(is_dtensor, params.values())):
        fused = fused and spec.name in FUSED_ON_DTENSORS
    if spec.name == "sgd" and any(p.dtype in HALVES and p.device.type == "cpu" for p in params.values()):
        fused = False  # torch 2.13: its kernel for these computes other updates
    if fused and spec.name in FUSED:
        options["fused"] = True
    groups = merge_groups((own.get(name, {}), parameter) for name, parameter in params.items())
    on_cpu = dense and all(parameter.device.type == "cpu" for parameter in params.values())
    classes = {**CLASSES, **ON_CPU} if on_cpu else CLASSES
    return classes[spec.name](groups, **options)
