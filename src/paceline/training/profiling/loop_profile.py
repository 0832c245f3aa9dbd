"""A profile of a few steps of a training loop that the user writes."""

import time
from typing import Any

import torch
from torch import nn

from paceline.distributed.unfinished import records_collectives
from paceline.distributed.world import World
from paceline.errors import RunError, TaskError
from paceline.events import Profiled
from paceline.plan.cost_model.compare import MAX_PROFILED_STEPS
from paceline.plan.plan import ResolvedPlan
from paceline.report.profile import format_profiled
from paceline.training.profiling.peak_memory import ProfiledState
from paceline.training.profiling.step_profile import Observer, Profile, gather_rows, make_profiled_event


class LoopProfile:
    """Time and memory of the steps inside a `with` block. Made by `Trainer.profile`.

        with trainer.profile() as profile:
            ...  # one step, from reading the batch to trainer.step()
        print(profile)

    After the block, on each rank:

    event  the `Profiled` event: seconds of a step and bytes of memory, by part
    """

    event: Profiled

    def __init__(
        self, state: ProfiledState, plan: ResolvedPlan, world: World, steps: int, device: torch.device
    ):
        if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MAX_PROFILED_STEPS:
            raise TaskError(f"steps must be an integer from 1 to {MAX_PROFILED_STEPS}, got {steps!r:.40}")
        self.observe: Observer | None = None  # what the trainer calls before and after an update
        self.num_steps, self.done = steps, 0
        self._state, self._plan, self._world, self._device = state, plan, world, device
        self._profile: Profile | None = None
        self._began = 0.0
        self._data_s: float | None = None  # of this step; None: the model has not been called yet

    def __str__(self) -> str:
        return format_profiled(self.event)

    def __enter__(self) -> "LoopProfile":
        if self._world.size > 1 and self._device.type == "cpu" and not records_collectives():
            raise RunError(
                "a profile needs torch's flight recorder, which is off; let paceline.setup or paceline.spawn "
                "create the process group, or set TORCH_FR_BUFFER_SIZE=64 before you create it"
            )
        self._profile = Profile(
            self._state, self._set_observer, self._device, self.num_steps, 0, may_differ=False
        )
        # Before the hook of `fully_shard`, which waits for other ranks.
        self._called = self._state.model.register_forward_pre_hook(self._end_input, prepend=True)
        self._begin_step()
        return self

    def _set_observer(self, observe: Observer | None) -> Observer | None:
        previous, self.observe = self.observe, observe
        return previous

    def _begin_step(self) -> None:
        assert self._profile is not None
        self._began, self._data_s = time.perf_counter(), None
        self._profile.begin()

    def _end_input(self, module: nn.Module, inputs: Any) -> None:
        if self._data_s is None:
            self._data_s = time.perf_counter() - self._began

    def end_step(self) -> None:
        """End a step. Called by `Trainer.step`."""
        if self._profile is None or self.done == self.num_steps:
            raise TaskError(
                f"the block of profile(steps={self.num_steps}) called step() more than {self.num_steps} "
                "times; use one call for each step"
            )
        self.done += 1
        if not self._profile.is_done(self.done, self._data_s or 0.0):
            self._begin_step()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        assert self._profile is not None
        self._called.remove()
        if kind is not None or self.done != self.num_steps:
            self._profile.stop()
            if kind is None:
                raise TaskError(
                    f"the block of profile(steps={self.num_steps}) called trainer.step() {self.done} times; "
                    f"call it {self.num_steps} times, or use profile(steps={max(1, self.done)})"
                )
            return
        rows = gather_rows(self._profile.read(), self._world, self._device)
        if not all(row[1] for row in rows):
            raise RunError("the profile did not end, because a collective of this step did not end")
        self.event = make_profiled_event(rows, self._plan, self.done, self.num_steps)
