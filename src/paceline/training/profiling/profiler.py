"""Profiles of a few steps of a training, on all ranks, within 1 % of the training time."""

from collections.abc import Iterator

import torch

from paceline.distributed.unfinished import records_collectives
from paceline.distributed.world import World
from paceline.events import Profiled
from paceline.plan.cost_model.compare import MAX_PROFILED_STEPS
from paceline.plan.plan import ResolvedPlan
from paceline.training.prepared import PreparedTraining
from paceline.training.profiling.peak_memory import ProfiledState
from paceline.training.profiling.step_profile import (
    Observer,
    Profile,
    gather_rows,
    make_profiled_event,
)
from paceline.training.step.update_sequence import UpdateSequence

MAX_SHARE = 0.01  # of the training time that profiles may take
WARM_UP_STEPS = 3  # before the first profiled step
MIN_PROFILES = 8  # in a training that is long enough; more often at its beginning
START_S = {"cpu": 0.03, "cuda": 4.0}  # assumed cost of a first profile; on CUDA it starts a library
COST_MARGIN = 1.5  # the next profile may cost this many times the most expensive one so far


class StepProfiler:
    """Profiles some of the steps. All ranks call `begin` before and `end` after each step."""

    def __init__(
        self,
        enabled: bool | None,  # None: profile if the training is long enough
        first: int,
        total: int,
        training: PreparedTraining,
        plan: ResolvedPlan,
        world: World,
        device: torch.device,
    ):
        self.enabled = enabled if training.servers is None else False
        self.first, self.total, self.training = first, total, training
        self.plan, self.world, self.device = plan, world, device
        self.traced = range(0)  # steps that a trace records, which are not profiled
        self.measured_s = 0.0
        self.measured_steps = -1
        self.next = first + WARM_UP_STEPS  # steps done before the next profile
        self.spent_s = 0.0
        self.max_cost_s: float | None = None  # of the most expensive profile so far
        self.open: Profile | None = None
        self._is_safe: bool | None = None  # whether profiles can end without a crash; None: not known yet

    def begin(self, step: int) -> None:
        """Begin a step, after `step` steps."""
        if self.open is None and self._is_due(step):
            self.open = self._open(step)
        if self.open is not None:
            self.open.begin()

    def end(self, step: int, data_s: float) -> Iterator[Profiled]:
        """End a step, the `step`-th, which waited `data_s` for its batch.

        Yield the event of a complete profile.
        """
        if self.open is None or not self.open.is_done(step, data_s):
            return
        profile, self.open = self.open, None
        rows = gather_rows(profile.read(), self.world, self.device)
        cost_s = max(row[0] for row in rows)
        self.max_cost_s = max(cost_s, self.max_cost_s or 0.0)
        self.spent_s += cost_s
        self.next = step + min(step - self.first, max(1, (self.total - self.first) // MIN_PROFILES))
        if all(row[1] for row in rows):
            yield make_profiled_event(rows, self.plan, step, profile.steps)

    def add_measured_steps(self, step_s: float, steps: int) -> None:
        """Add `steps` steps of `step_s` seconds each, a mean over the ranks.

        The first call does not count: first steps are slow.
        """
        self.measured_s += step_s * steps if self.measured_steps >= 0 else 0.0
        self.measured_steps += steps if self.measured_steps >= 0 else 1

    def close(self) -> None:
        """Stop a profile that is not complete when the training ends."""
        if self.open is not None:
            self.open.stop()
            self.open = None

    def _open(self, step: int) -> Profile:
        training = self.training
        return Profile(
            ProfiledState(
                training.model,
                training.optimizers,
                training.step.params,
                training.operations.averages if training.operations is not None else {},
            ),
            self._set_observer,
            self.device,
            self._count_steps(step),
            step,
            isinstance(training.update, UpdateSequence),
        )

    def _set_observer(self, observe: Observer | None) -> Observer | None:
        """Set what is called before and after the update of each pass, and return what was called before."""
        update, step = self.training.update, self.training.step
        if isinstance(update, UpdateSequence):
            previous, update.observe_pass = update.observe_pass, observe
        else:
            previous, step.observe = step.observe, observe
        return previous

    def _count_steps(self, step: int) -> int:
        """Return the steps of a profile, which repeat: a round of averaging, or of updates, else one."""
        if isinstance(self.training.update, UpdateSequence):
            return self.training.update.period
        local = self.training.local
        return local.period if local is not None and step >= local.switch else 1

    def _is_due(self, step: int) -> bool:
        steps = self._count_steps(step)
        if (
            self.enabled is False
            or step < self.next
            or step + steps > self.total
            or steps > MAX_PROFILED_STEPS
            or (self.traced and step < self.traced[-1] and self.traced[0] <= step + steps)
            or not self._is_known_to_end()
        ):
            return False
        if self.max_cost_s is None and self.enabled:
            return True
        if self.measured_steps <= 0:
            return False
        step_s = self.measured_s / self.measured_steps
        cost_s = (
            COST_MARGIN * self.max_cost_s
            if self.max_cost_s is not None
            else START_S[self.device.type] + steps * step_s
        )
        return self.spent_s + cost_s <= MAX_SHARE * step_s * (self.total - self.first)

    def _is_known_to_end(self) -> bool:
        """Return whether this process can find out when its collectives have ended (see `Profile.stop`)."""
        if self._is_safe is None:
            self._is_safe = self.world.size == 1 or self.device.type != "cpu" or records_collectives()
        return self._is_safe
