"""`paceline.setup`: distribute a model and its optimizer for a training loop that the user writes."""

from __future__ import annotations

import atexit
import contextlib
import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.dtensor import is_dtensor
from paceline.distributed.mesh import build_mesh, select_data_mesh
from paceline.distributed.process_group import process_group
from paceline.distributed.world import World, read_world
from paceline.errors import CheckpointError, PlanError, TaskError
from paceline.parallel.activation_checkpoint import recompute
from paceline.parallel.apply import check_elementwise
from paceline.parallel.batch_norm import sync_batch_norm
from paceline.parallel.blocks import find_blocks
from paceline.parallel.ddp import release, replicate
from paceline.parallel.fsdp import average_scalars_, average_whole_, shard
from paceline.parallel.reduced_buffers import NONE, read_reductions
from paceline.plan.plan import Plan, ResolvedPlan, parse
from paceline.run import RunFolder
from paceline.spec import suggest
from paceline.task import Layout
from paceline.training.checkpoint import save as checkpoint
from paceline.training.init.named_tensors import named_tensors
from paceline.training.optimizer import GradientNorm, check_sparse, scale_, shard_state

TIMEOUT_S = 600.0


@dataclass
class Trainer:
    """A model and its optimizer, distributed over ranks, for a training loop of one's own.

        trainer = paceline.setup(model, optimizer, plan="zero3")
        for x, y in my_batches_of_this_rank:
            loss = (trainer.model(x) - y).square().mean()
            trainer.backward(loss)
            trainer.step()

    `paceline.setup` makes it. All ranks call its methods together.

    model      the model to call
    optimizer  the optimizer; schedulers of learning rates need this one
    plan       the plan, with all degrees
    rank       number of this rank
    ranks      number of ranks
    steps      updates made so far
    """

    optimizer: torch.optim.Optimizer | None
    plan: ResolvedPlan
    rank: int
    _module: nn.Module = field(repr=False)
    _unused_parameters: bool = field(repr=False)
    _after_backward: Sequence[Callable[[], None]] = field(repr=False)
    _params: Sequence[nn.Parameter] = field(init=False, repr=False)  # as the optimizer trains them
    _sharded: Sequence[Any] = field(init=False, repr=False)  # modules of `fully_shard`
    steps: int = 0
    _saver: checkpoint.Saver | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._params = list(self._module.parameters())
        self._sharded = [
            module for module in self._module.modules() if hasattr(module, "set_reshard_after_forward")
        ]

    @cached_property
    def model(self) -> nn.Module:
        """The model to call in place of that given to `setup`."""
        is_trained = any(parameter.requires_grad for parameter in self._module.parameters())
        if self.ranks == 1 or self.plan.zero >= 2 or not is_trained:
            return self._module
        model = replicate(self._module, self._unused_parameters)
        _replicated.add(model)
        return model

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.plan.data_ranks

    def backward(self, loss: Tensor, samples: int | None = None) -> None:
        """Add the gradient of the mean loss over all ranks to the gradients of the parameters.

        loss: a scalar, the mean over the samples of this rank.
        samples: number of samples of this rank, if ranks may have different numbers [default: the same on
        all ranks]. The gradient is then that of the mean over all samples of all ranks. A rank without
        samples gives 0 and a loss of 0 that depends on the model.
        """
        if loss.dim():
            raise TaskError(f"loss must be a scalar, got shape {tuple(loss.shape)}; write loss.mean()")
        if samples is not None and self.ranks > 1:
            whole = torch.tensor(float(samples), dtype=torch.float64, device=loss.device)
            dist.all_reduce(whole)
            if not whole:
                raise TaskError("no rank has samples, so the loss has no mean; skip this step on all ranks")
            loss = loss * (samples * self.ranks / whole.item())
        loss.backward()

    def step(self, clip: float | None = None) -> None:
        """Update the weights by the gradients, and set the gradients to None.

        clip: maximum norm of the whole gradient [default: no clipping].
        Raises PlanError if a parameter has no gradient and the plan needs one.
        """
        if self.optimizer is None:
            raise TaskError("step() requires an optimizer; give one to paceline.setup")
        self.finish_gradients(clip)
        for module in self._sharded:  # a forward pass after backward may have left them gathered
            module.reshard()
        self.optimizer.step()
        for parameter in self._params:
            parameter.grad = None
        self.steps += 1

    def finish_gradients(self, clip: float | None = None) -> None:
        """Complete the gradients, as `step` does before it calls the optimizer."""
        if isinstance(self.model, DistributedDataParallel) and not self._unused_parameters:
            for name, parameter in self._module.named_parameters():
                if parameter.requires_grad and parameter.grad is None:
                    raise PlanError(
                        f"plan {self.plan}: parameter {name!r} has no gradient on rank {self.rank}; if "
                        "a step may leave out parameters, call setup with unused_parameters=True"
                    )
        for finish in self._after_backward:
            finish()
        if clip is not None:
            place = self.plan.place(self.rank)
            params = [parameter for parameter in self._params if parameter.requires_grad]
            norm = GradientNorm(params, self.plan, place, params[0].device).global_norm()
            scale_(params, (clip / (norm + 1e-6)).clamp(max=1.0))

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights and buffers by name, on each rank."""
        tensors: dict[str, Any] = {**checkpoint.collect_model_tensors(self._module)}
        return {
            name: tensor.full_tensor() if is_dtensor(tensor) else tensor.clone()
            for name, tensor in tensors.items()
        }

    def save(self, folder: Path | str) -> Path:
        """Write a checkpoint of model and optimizer, and return its path. It is complete when this returns.

        A checkpoint can be loaded under another plan and on another number of ranks. Raises CheckpointError.
        """
        run = RunFolder(Path(folder))
        if self.optimizer is None or not self.steps:
            raise CheckpointError("save() requires an optimizer and at least one step")
        self._create(run.ckpt)
        if self._saver is None or self._saver.run != run:
            device = next(self._module.parameters()).device
            self._saver = checkpoint.Saver(run, self.plan, self.rank, self.ranks, device)
        index = checkpoint.Index(
            step=self.steps,
            samples=self.steps,
            epoch_samples=1,
            task=OWN_LOOP,
            set={},
            plan=str(self.plan),
            ranks=self.ranks,
            seed=0,
            **checkpoint.describe_model(self._module),
        )
        state = checkpoint.collect_state(self._module, [self.optimizer])
        self._saver.start(index, state, buffers=checkpoint.find_buffers(self._module))
        result = self._saver.result(wait=True)
        assert result is not None
        if result.error is not None:
            raise CheckpointError(f"cannot write {run.checkpoint(self.steps)}: {result.error}")
        return run.checkpoint(self.steps)

    def _create(self, folder: Path) -> None:
        """Create a folder on rank 0. Raises CheckpointError on all ranks if that fails."""
        problem = [""]
        if self.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem = [f"cannot create {folder}: {error.strerror}"]
        if self.ranks > 1:
            dist.broadcast_object_list(problem, 0)
        if problem[0]:
            raise CheckpointError(problem[0])

    def load(self, folder: Path | str) -> int:
        """Read the last complete checkpoint in a folder of `save`, and return its step; 0 if there is none.

        Raises CheckpointError if it is of another model.
        """
        run = RunFolder(Path(folder))
        path, index, _ = checkpoint.find_last_complete(run, self.rank, self.ranks)
        if path is None or index is None:
            return 0
        checkpoint.check_same_model(path, index, OWN_LOOP, {}, self._module)
        checkpoint.load_(path, self._module, [self.optimizer] if self.optimizer is not None else [])
        self.steps = index.step
        return self.steps


_replicated: WeakSet[DistributedDataParallel] = WeakSet()
OWN_LOOP = "own loop"  # in the place of the task in checkpoints


def setup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    plan: Plan | str | None = None,
    *,
    layout: Layout | None = None,
    whole: Sequence[str] = (),
    unused_parameters: bool = False,
) -> Trainer:
    """Distribute a model and its optimizer over the ranks, for a training loop of one's own. A collective.

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

    Returns a `Trainer`. Raises PlanError for other plans, which need a task (`paceline.train`), and for
    optimizers that a plan cannot shard, and TaskError for a model or optimizer that cannot be distributed.
    """
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
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            model = sync_batch_norm(model, device, None, equal_counts=False)
    blocks = find_blocks(model, layout if layout is not None else Layout())
    if resolved.recompute != "none":
        for unit in blocks or [model]:
            recompute(unit, resolved)
    after_backward: list[Callable[[], None]] = []
    if resolved.zero >= 2 and world.size > 1:
        mesh = select_data_mesh(build_mesh(resolved, device))
        kept = _find_whole(model, whole)
        shard(model, blocks, resolved, mesh, kept)
        if trained := [parameter for parameter in kept if parameter.requires_grad]:
            after_backward.append(partial(average_whole_, trained, mesh))
        if scalars := [p for p in model.parameters() if p.requires_grad and not p.dim()]:
            after_backward.append(partial(average_scalars_, scalars, mesh))
    if optimizer is not None:
        _replace_parameters_(optimizer, names, dict(model.named_parameters()))
        check_elementwise(resolved, optimizer)
        optimizer = shard_state(optimizer, resolved)
    return Trainer(optimizer, resolved, world.rank, model, unused_parameters, after_backward)


def _join() -> World:
    """Return the place of this process among the ranks, and create the process group if necessary."""
    if dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    world = read_world()
    if world.size > 1:
        from paceline.distributed.process_group import choose_device

        stack = contextlib.ExitStack()
        stack.enter_context(process_group(world, choose_device(world, None), TIMEOUT_S, Path("runs")))
        stack.callback(_release_models)
        atexit.register(stack.close)
    return world


def _release_models() -> None:
    for model in _replicated:
        release(model)


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
