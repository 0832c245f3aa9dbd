"""The model, the optimizer and the steps of a training loop that the user writes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.dtensor import is_dtensor
from paceline.distributed.world import World
from paceline.doctor.heartbeat import BACKWARD, FORWARD, OWN_CODE, SAVE, UPDATE
from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.errors import CheckpointError, PlanError, TaskError
from paceline.parallel.data_parallel.ddp import release, replicate
from paceline.plan.plan import ResolvedPlan
from paceline.run import RunFolder
from paceline.training.checkpoint.index import Index
from paceline.training.checkpoint.integrity import find_last_complete
from paceline.training.checkpoint.load import check_same_model, load_
from paceline.training.checkpoint.save import Saver
from paceline.training.checkpoint.state import (
    collect_model_tensors,
    collect_state,
    describe_tensors,
    find_buffers,
)
from paceline.training.optimization.gradient_norm import GradientNorm, scale_
from paceline.training.own_loop.heartbeat import create_folder
from paceline.training.profiling.loop_profile import LoopProfile
from paceline.training.profiling.peak_memory import ProfiledState

OWN_LOOP = "own loop"  # in the place of the task in checkpoints
_replicated: WeakSet[DistributedDataParallel] = WeakSet()


@dataclass
class Trainer:
    """A model and its optimizer, distributed over ranks, for a training loop of the user.

        trainer = paceline.setup(model, optimizer, plan="zero3")
        for x, y in my_batches_of_this_rank:
            loss = (trainer.model(x) - y).square().mean()
            trainer.backward(loss)
            trainer.step()

    `paceline.setup` makes it. All ranks call its methods together.

    model      the model to call
    optimizer  the optimizer; schedulers of learning rates need it
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
    _heartbeat: HeartbeatWriter | None = field(repr=False)
    steps: int = 0
    _saver: Saver | None = field(default=None, repr=False)
    _profile: LoopProfile | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._params = list(self._module.parameters())
        self._sharded = [
            module for module in self._module.modules() if hasattr(module, "set_reshard_after_forward")
        ]
        if (heartbeat := self._heartbeat) is not None:
            # Before the hook of `fully_shard`, which waits for other ranks.
            self._module.register_forward_pre_hook(
                lambda module, inputs: heartbeat.enter(FORWARD), prepend=True
            )

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
        self._enter(BACKWARD)
        loss.backward()

    def step(self, clip: float | None = None) -> None:
        """Update the weights by the gradients, and set the gradients to None.

        clip: maximum norm of the whole gradient [default: no clipping].
        Raises PlanError if a parameter has no gradient and the plan needs one.
        """
        if self.optimizer is None:
            raise TaskError("step() requires an optimizer; give one to paceline.setup")
        self._enter(UPDATE)
        self._observe("gradients")
        self.finish_gradients(clip)
        for module in self._sharded:  # a forward pass after backward may have left them gathered
            module.reshard()
        self.optimizer.step()
        for parameter in self._params:
            parameter.grad = None
        self._observe("weights")
        self.steps += 1
        if self._heartbeat is not None:
            self._heartbeat.done(self.steps)
        self._enter(OWN_CODE)
        if self._profile is not None:
            self._profile.end_step()

    def _enter(self, phase: str) -> None:
        if self._heartbeat is not None:
            self._heartbeat.enter(phase)

    def _observe(self, what: str) -> None:
        if self._profile is not None and self._profile.observe is not None:
            self._profile.observe(what, self.steps)

    @contextlib.contextmanager
    def profile(self, steps: int = 1) -> Iterator[LoopProfile]:
        """Return a context that measures where the time and memory of some steps go. A collective.

            with trainer.profile() as profile:
                loss = (trainer.model(x) - y).square().mean()
                trainer.backward(loss)
                trainer.step()
            print(profile)

        The block makes `steps` steps, and is slower for it. The time before the first call of the model
        counts as input. Profile no step among the first three, which are slow.

        Raises TaskError if the block makes another number of steps.
        """
        optimizers = [self.optimizer] if self.optimizer is not None else []
        trained = [parameter for parameter in self._params if parameter.requires_grad]
        state = ProfiledState(self._module, optimizers, trained)
        device = self._params[0].device
        world = World(rank=self.rank, size=self.ranks)
        profile = LoopProfile(state, self.plan, world, steps, device)
        with profile:
            self._profile = profile
            try:
                yield profile
            finally:
                self._profile = None

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
        tensors: dict[str, Any] = {**collect_model_tensors(self._module)}
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
        create_folder(run.ckpt, self.rank, self.ranks)
        if self._saver is None or self._saver.run != run:
            device = next(self._module.parameters()).device
            self._saver = Saver(run, self.plan, self.rank, self.ranks, device)
        index = Index(
            step=self.steps,
            samples=self.steps,
            epoch_samples=1,
            task=OWN_LOOP,
            set={},
            plan=str(self.plan),
            ranks=self.ranks,
            seed=0,
            **describe_tensors(self._module),
        )
        self._enter(SAVE)
        state = collect_state(self._module, [self.optimizer])
        self._saver.start(index, state, buffers=find_buffers(self._module))
        result = self._saver.result(wait=True)
        assert result is not None
        self._enter(OWN_CODE)
        if result.error is not None:
            raise CheckpointError(f"cannot write {run.checkpoint(self.steps)}: {result.error}")
        return run.checkpoint(self.steps)

    def load(self, folder: Path | str) -> int:
        """Read the last complete checkpoint in a folder of `save`, and return its step; 0 if there is none.

        Raises CheckpointError if it is of another model.
        """
        run = RunFolder(Path(folder))
        path, index, _ = find_last_complete(run, self.rank, self.ranks)
        if path is None or index is None:
            return 0
        check_same_model(path, index, OWN_LOOP, {}, self._module)
        load_(path, self._module, [self.optimizer] if self.optimizer is not None else [])
        self.steps = index.step
        return self.steps


def release_models() -> None:
    """Delete the references of DDP to the process group. Call it before the process group is destroyed."""
    for model in _replicated:
        release(model)
