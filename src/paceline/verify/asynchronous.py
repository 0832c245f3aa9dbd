"""Conditions for plans whose update differs from one process by design, checked on the user's task."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import task as tasks
from paceline.data.fake import example_batch
from paceline.distributed.world import read_world
from paceline.events import Ended, Step
from paceline.parallel.loss.forward import read_weights
from paceline.plan.plan import Plan, parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Spec
from paceline.task import Task
from paceline.training.checkpoint.stored import load_weights
from paceline.training.parameter_server.coordinator import STALENESS
from paceline.training.train import train
from paceline.verify.capture import Reference
from paceline.verify.compare import RTOL, scalar_difference, tensor_difference
from paceline.verify.disable_dropout import disable_dropout


@dataclass(frozen=True)
class Condition:
    """A condition that must hold. `holds` is None if it does not apply to the task; `detail` says why."""

    what: str
    holds: bool | None
    detail: str

    def as_json(self) -> dict[str, Any]:
        return vars(self).copy()


@dataclass(frozen=True)
class TrainingOutcome:
    """The outcome of a training on one rank."""

    losses: list[float]
    weights: str | None  # digest of the last parameters, if this rank trains a model
    lead: int | None  # maximum number of steps that a worker was ahead


Run = Callable[[Spec, Plan, Path], list[TrainingOutcome]]  # on all ranks


def train_on_rank(spec: Spec, plan: str, path: Path) -> TrainingOutcome:
    """Train on this rank and save a checkpoint at the end. All ranks of the process group call it."""
    models: list[nn.Module] = []

    def observe(model: nn.Module, what: str, step: int) -> None:
        models[:] = [model]

    path.mkdir(parents=True, exist_ok=True)
    task = disable_dropout(tasks.load_task(spec.task, spec.set))
    events = list(
        train(spec, parse(plan), read_world(), task=task, run=RunFolder(path), device="cpu", observe=observe)
    )
    dist.barrier()
    ended = next((event for event in events if isinstance(event, Ended)), None)
    return TrainingOutcome(
        losses=[event.loss for event in events if isinstance(event, Step)],
        weights=_compute_digest(models[0]) if models else None,
        lead=ended.lead if ended is not None else None,
    )


def _compute_digest(model: nn.Module) -> str:
    digest = hashlib.blake2b()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def check_conditions(
    spec: Spec, task: Task, plan: Plan, reference: Reference, run: Run, folder: Path
) -> list[Condition]:
    """Return the conditions of a local-sgd or parameter-server plan, with their results.

    spec: in float64, without workers. run: trains on all ranks. folder: for checkpoints."""
    if plan.servers is not None:
        return _check_parameter_server(spec, plan, reference, run, folder)
    return _check_local_sgd(spec, task, plan, reference, run, folder)


def _check_local_sgd(
    spec: Spec, task: Task, plan: Plan, reference: Reference, run: Run, folder: Path
) -> list[Condition]:
    assert plan.period is not None
    always = replace(plan, switch=None)
    outcomes = run(
        spec.model_copy(update={"steps": plan.period, "epochs": None}), always, folder / "averaged"
    )
    is_equal = len({outcome.weights for outcome in outcomes}) == 1
    equal = Condition(
        f"all ranks are equal after an average (step {plan.period}), to the last bit",
        is_equal,
        "" if is_equal else "they differ",
    )
    what = "with period=1, SGD without momentum is the same training as ddp"
    has_weights = read_weights(task, example_batch(spec, task, Plan(dp=1).resolve(1))) is not None
    if has_weights or reference.has_batch_norm:
        reason = (
            "items have weights"
            if has_weights
            else "BatchNorm computes its statistics from each rank's own samples"
        )
        return [equal, Condition(what, None, f"does not apply to this task: {reason}")]
    plain = spec.model_copy(update={"optimizer": Optimizer(name="sgd", lr=spec.optimizer.lr, momentum=0.0)})
    averaged = run(plain, replace(always, period=1), folder / "own")[0]
    ddp = run(plain, Plan(microbatches=plan.microbatches), folder / "ddp")[0]
    return [
        equal,
        _compare(
            what,
            averaged.losses,
            ddp.losses,
            _load_weights(folder / "own", spec),
            _load_weights(folder / "ddp", spec),
        ),
    ]


def _check_parameter_server(
    spec: Spec, plan: Plan, reference: Reference, run: Run, folder: Path
) -> list[Condition]:
    staleness = plan.staleness if plan.staleness is not None else STALENESS
    lead = max((outcome.lead or 0 for outcome in run(spec, plan, folder / "asked")), default=0)
    bounded = Condition(
        f"no worker is more than {staleness} steps ahead of the slowest",
        lead <= staleness,
        f"at most {lead} observed",
    )
    what = "with staleness=0 it is the same training as one process"
    if reference.has_batch_norm:
        return [
            bounded,
            Condition(
                what,
                None,
                "does not apply to this task: "
                "BatchNorm computes its statistics from each worker's own samples",
            ),
        ]
    exact = run(spec, replace(plan, staleness=0), folder / "exact")[0]
    last = {name: tensor for name, tensor in reference.steps[-1].parameters.items() if tensor is not None}
    weights = _load_weights(folder / "exact", spec)
    return [bounded, _compare(what, exact.losses, reference.losses, weights, last)]


def _load_weights(path: Path, spec: Spec) -> dict[str, Tensor]:
    assert spec.steps is not None
    return load_weights(RunFolder(path).checkpoint(spec.steps))


def _compare(
    what: str,
    losses: list[float],
    expected_losses: list[float],
    weights: dict[str, Tensor],
    expected_weights: dict[str, Tensor],
) -> Condition:
    largest = max(tensor.abs().max().item() for tensor in expected_weights.values() if tensor.numel())
    loss_difference = float("inf")
    if len(losses) == len(expected_losses):
        loss_difference = max(map(scalar_difference, losses, expected_losses), default=float("inf"))
    weight_difference = max(
        tensor_difference(weights[name], tensor, largest)
        for name, tensor in expected_weights.items()
        if tensor.is_floating_point()
    )
    return Condition(
        what,
        max(loss_difference, weight_difference) <= RTOL,
        f"Δ loss {loss_difference:.1e}, Δ parameters {weight_difference:.1e}",
    )
