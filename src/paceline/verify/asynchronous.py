"""Plans whose update is another one than that of one process: what must hold instead, tried on the user's task."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline import task as tasks
from paceline.distributed.world import read_world
from paceline.events import Ended, Step
from paceline.plan.plan import Plan, parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Spec
from paceline.task import Task
from paceline.training.checkpoint.save import load_weights
from paceline.training.loop import train
from paceline.training.parameter_server.coordinator import STALENESS
from paceline.verify.capture import Reference
from paceline.verify.compare import RTOL, apart, apart_numbers
from paceline.verify.disable_dropout import quiet


@dataclass(frozen=True)
class Condition:
    """One thing that must hold. `holds` is None where it does not apply to the task, and `detail` says why."""

    what: str
    holds: bool | None
    detail: str

    def as_json(self) -> dict[str, Any]:
        return vars(self).copy()


@dataclass(frozen=True)
class TrainingOutcome:
    """What one rank saw of a training."""

    losses: list[float]
    weights: str | None  # a digest of the parameters in the end, where this rank trains a model of its own
    lead: int | None  # most steps that a worker was ahead


Run = Callable[[Spec, Plan, Path], list[TrainingOutcome]]  # on all ranks


def on_rank(spec: Spec, plan: str, path: Path) -> TrainingOutcome:
    """Train on this rank, with a checkpoint at the end. All ranks of the process group call it."""
    models: list[nn.Module] = []

    def observe(model: nn.Module, what: str, step: int) -> None:
        models[:] = [model]

    path.mkdir(parents=True, exist_ok=True)
    task = quiet(tasks.load_task(spec.task, spec.set))
    events = list(
        train(spec, parse(plan), read_world(), task=task, run=RunFolder(path), device="cpu", observe=observe)
    )
    dist.barrier()
    ended = next((event for event in events if isinstance(event, Ended)), None)
    return TrainingOutcome(
        losses=[event.loss for event in events if isinstance(event, Step)],
        weights=_digest(models[0]) if models else None,
        lead=ended.lead if ended is not None else None,
    )


def _digest(model: nn.Module) -> str:
    digest = hashlib.blake2b()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def must_hold(
    spec: Spec, task: Task, asked: Plan, reference: Reference, run: Run, folder: Path
) -> list[Condition]:
    """`spec`: in float64, without workers. `run` trains on all ranks; checkpoints go below `folder`."""
    if asked.servers is not None:
        return _of_servers(spec, asked, reference, run, folder)
    return _of_local_sgd(spec, task, asked, reference, run, folder)


def _of_local_sgd(
    spec: Spec, task: Task, asked: Plan, reference: Reference, run: Run, folder: Path
) -> list[Condition]:
    assert asked.period is not None
    plan = replace(asked, switch=None)
    outcomes = run(spec.model_copy(update={"steps": asked.period, "epochs": None}), plan, folder / "averaged")
    alike = len({outcome.weights for outcome in outcomes}) == 1
    equal = Condition(
        f"all ranks are equal after an average (step {asked.period}), to the last bit",
        alike,
        "" if alike else "they differ",
    )
    what = "with period=1, SGD without momentum is the same training as ddp"
    weighed = type(task).weights is not Task.weights
    if weighed or reference.has_batch_norm:
        why = (
            "items have weights" if weighed else "BatchNorm takes its statistics from each rank's own samples"
        )
        return [equal, Condition(what, None, f"not of this task: {why}")]
    plain = spec.model_copy(update={"optimizer": Optimizer(name="sgd", lr=spec.optimizer.lr, momentum=0.0)})
    own = run(plain, replace(plan, period=1), folder / "own")[0]
    ddp = run(plain, Plan(microbatches=asked.microbatches), folder / "ddp")[0]
    return [
        equal,
        _same(what, own.losses, ddp.losses, _weights(folder / "own", spec), _weights(folder / "ddp", spec)),
    ]


def _of_servers(spec: Spec, asked: Plan, reference: Reference, run: Run, folder: Path) -> list[Condition]:
    staleness = asked.staleness if asked.staleness is not None else STALENESS
    lead = max((outcome.lead or 0 for outcome in run(spec, asked, folder / "asked")), default=0)
    bounded = Condition(
        f"no worker is more than {staleness} steps ahead of the slowest",
        lead <= staleness,
        f"at most {lead} seen",
    )
    what = "with staleness=0 it is the same training as one process"
    if reference.has_batch_norm:
        return [
            bounded,
            Condition(
                what, None, "not of this task: BatchNorm takes its statistics from each worker's own samples"
            ),
        ]
    exact = run(spec, replace(asked, staleness=0), folder / "exact")[0]
    last = {name: tensor for name, tensor in reference.looks[-1].parameters.items() if tensor is not None}
    return [bounded, _same(what, exact.losses, reference.losses, _weights(folder / "exact", spec), last)]


def _weights(path: Path, spec: Spec) -> dict[str, Tensor]:
    assert spec.steps is not None
    return load_weights(RunFolder(path).checkpoint(spec.steps))


def _same(
    what: str,
    losses: list[float],
    expected: list[float],
    weights: dict[str, Tensor],
    others: dict[str, Tensor],
) -> Condition:
    largest = max(tensor.abs().max().item() for tensor in others.values() if tensor.numel())
    of_losses = (
        max(map(apart_numbers, losses, expected), default=float("inf"))
        if len(losses) == len(expected)
        else float("inf")
    )
    of_weights = max(
        apart(weights[name], tensor, largest) for name, tensor in others.items() if tensor.is_floating_point()
    )
    return Condition(
        what, max(of_losses, of_weights) <= RTOL, f"Δ loss {of_losses:.1e}, Δ parameters {of_weights:.1e}"
    )
