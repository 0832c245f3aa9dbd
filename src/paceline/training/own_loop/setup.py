"""`paceline.setup`: distribute a model and its optimizer for a training loop that the user writes."""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from paceline.distributed.dtensor import is_dtensor
from paceline.distributed.mesh import build_mesh, select_data_mesh
from paceline.distributed.process_group import process_group
from paceline.distributed.world import World, read_world
from paceline.errors import PlanError, TaskError
from paceline.parallel.activation_checkpoint import recompute
from paceline.parallel.blocks import find_blocks
from paceline.parallel.data_parallel.batch_norm import has_batch_norm, sync_batch_norm
from paceline.parallel.data_parallel.fsdp import average_scalars_, average_whole_, check_dtypes, shard
from paceline.parallel.data_parallel.reduced_buffers import NONE, read_reductions
from paceline.plan.plan import Plan, ResolvedPlan, parse
from paceline.run import RunFolder
from paceline.spec import suggest
from paceline.task import Layout
from paceline.training.init.named_tensors import named_tensors
from paceline.training.node_sampler import check_monitor
from paceline.training.optimization.optimizer import shard_state
from paceline.training.optimization.sparse_gradients import check_sparse
from paceline.training.own_loop.heartbeat import TIMEOUT_S, start_heartbeat
from paceline.training.own_loop.trainer import Trainer, release_models


def setup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    plan: Plan | str | None = None,
    *,
    layout: Layout | None = None,
    whole: Sequence[str] = (),
    unused_parameters: bool = False,
    run: Path | str | None = None,
    monitor: float | Literal["off"] = 1.0,
) -> Trainer:
    """Distribute a model and its optimizer over the ranks, for a training loop of the user. A collective.

        trainer = paceline.setup(model, torch.optim.AdamW(model.parameters()), plan="zero3")

    Call it on each rank: under torchrun, mpirun or srun, or in a function that `paceline.spawn` calls. All
    ranks get the weights and buffers of rank 0. Each rank computes the loss of its own samples; the update
    is that of one process on the samples of all ranks. BatchNorm takes its statistics over all ranks.

    model: with its weights, on the device of this rank. It is changed in place.
    optimizer: of the parameters of `model`, before its first step. `Trainer.optimizer` replaces it.
    plan: single, ddp, zero1, zero2, zero3 or hsdp, as a Plan or as text [default: single on one rank, else
    ddp].
    layout: the blocks that zero2 and zero3 gather one by one [default: found in the model].
    whole: names of parameters that zero2, zero3 and hsdp do not shard, where * matches any part.
    unused_parameters: whether a step may leave out parameters; only ddp and zero1 need to know.
    run: a folder in which each rank reports its state, for `paceline doctor RUN` [default: none].
    monitor: with `run`: seconds between samples of processors, memory and GPUs of each node, or "off".

    Returns a `Trainer`. Raises PlanError for other plans, which need a task (`paceline.train`), and for
    optimizers that a plan cannot shard, TaskError for a model or optimizer that cannot be distributed,
    SpecError for another value of `monitor`, and RunError if another process uses `run`.
    """
    monitor = check_monitor(monitor)
    world = _join()
    resolved = _resolve(plan, world.size)
    _check_model(model, optimizer)
    reductions = read_reductions(layout, model) if layout is not None else {}
    if any(reduction != NONE for reduction in reductions.values()):
        raise PlanError(
            "paceline.setup does not combine the changes of buffers; declare 'none' in Layout.buffers, or "
            "use paceline.train"
        )
    check_sparse(resolved, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    device = next(model.parameters()).device
    if world.size > 1:
        _broadcast_(model)
        if has_batch_norm(model):
            model = sync_batch_norm(model, device, None, equal_counts=False)
    blocks = find_blocks(model, layout if layout is not None else Layout())
    if resolved.recompute != "none":
        for unit in blocks or [model]:
            recompute(unit, resolved)
    after_backward: list[Callable[[], None]] = []
    if resolved.zero >= 2 and world.size > 1:
        mesh = select_data_mesh(build_mesh(resolved, device))
        kept = _find_whole(model, whole)
        check_dtypes(model, blocks, resolved, kept)
        shard(model, blocks, resolved, mesh, kept)
        if trained := [parameter for parameter in kept if parameter.requires_grad]:
            after_backward.append(partial(average_whole_, trained, mesh))
        if scalars := [p for p in model.parameters() if p.requires_grad and not p.dim()]:
            after_backward.append(partial(average_scalars_, scalars, mesh))
    if optimizer is not None:
        _replace_parameters_(optimizer, names, dict(model.named_parameters()))
        optimizer = shard_state(optimizer, resolved)
    heartbeat = start_heartbeat(RunFolder(Path(run)), world, monitor) if run is not None else None
    return Trainer(optimizer, resolved, world.rank, model, unused_parameters, after_backward, heartbeat)


def _join() -> World:
    """Return the place of this process among the ranks, and create the process group if necessary."""
    if dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    world = read_world()
    if world.size > 1:
        from paceline.distributed.process_group import choose_device

        stack = contextlib.ExitStack()
        stack.enter_context(process_group(world, choose_device(world, None), TIMEOUT_S, Path("runs")))
        stack.callback(release_models)
        atexit.register(stack.close)
    return world


def _resolve(plan: Plan | str | None, ranks: int) -> ResolvedPlan:
    """Return the plan with all degrees. Raises PlanError for plans that need a task."""
    if plan is None:
        plan = Plan(dp=1) if ranks == 1 else Plan()
    plan = parse(plan) if isinstance(plan, str) else plan
    resolved = plan.resolve(ranks)
    if resolved.splits_model or resolved.cp > 1 or resolved.is_asynchronous:
        raise PlanError(
            f"plan {plan} needs a task, from which Paceline traces the model; paceline.setup takes single, "
            "ddp, zero1, zero2, zero3 and hsdp; use paceline.train"
        )
    if resolved.microbatches > 1:
        raise PlanError(
            f"plan {plan}: paceline.setup does not divide batches; leave out microbatches, and call backward "
            "several times before step"
        )
    return resolved


def _check_model(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise TaskError for a model or an optimizer that cannot be distributed."""
    if not isinstance(model, nn.Module):
        raise TaskError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    tensors = named_tensors(model)
    if not any(isinstance(tensor, nn.Parameter) for tensor in tensors.values()):
        raise TaskError("the model has no parameters")
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise TaskError(f"{name} is on the meta device; give the model its weights before paceline.setup")
        if is_dtensor(tensor):
            raise TaskError(f"{name} is distributed already; call paceline.setup once, with the whole model")
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TaskError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    if optimizer.state:
        raise TaskError("the optimizer has state of earlier steps; call paceline.setup before the first step")
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise TaskError(
            f"the optimizer trains {foreign} tensors that are not parameters of the model; build it from "
            "model.parameters()"
        )


def _find_whole(model: nn.Module, patterns: Sequence[str]) -> list[nn.Parameter]:
    """Return the parameters of these patterns, without scalars. Raises TaskError for one without a match."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise TaskError(f"whole: no parameter matches {pattern!r}{suggest(pattern, names)}")
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.dim() and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]


@torch.no_grad()
def _broadcast_(model: nn.Module) -> None:
    """Give all ranks the parameters and buffers of rank 0."""
    for tensor in named_tensors(model).values():
        dist.broadcast(tensor.data, 0)


def _replace_parameters_(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], params: dict[str, nn.Parameter]
) -> None:
    """Let an optimizer train the parameters that replaced those of these names."""
    for group in optimizer.param_groups:
        group["params"] = [params[names[parameter]] for parameter in group["params"]]
