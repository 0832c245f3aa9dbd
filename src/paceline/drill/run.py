"""A drill: an undisturbed training, then a training for each fault, and its outcome."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline import events
from paceline.drill import clock
from paceline.drill.compare import find_loss_difference, find_weight_difference
from paceline.drill.disk import SmallDisk
from paceline.drill.faults import FaultMoment
from paceline.drill.flip_run import choose_guard, is_found_for_certain, prepare_flip, train_with_flip
from paceline.drill.inject import INJECT, REPAIR, FaultContext, UntriedFault
from paceline.drill.request import REQUEST, write_request
from paceline.drill.sample_audit import Indices, audit, audit_reference, merge_ranks
from paceline.drill.training import SLOW_STEP_S, STEP_S, Training, UnexpectedCourse
from paceline.errors import RankError
from paceline.events import Started, Step
from paceline.plan.plan import ResolvedPlan
from paceline.run import RunFolder
from paceline.spec import Launch, Spec
from paceline.units import format_bytes

# How long ranks wait for one another: at least the first, and this multiple of the longest step.
MIN_TIMEOUT_S, TIMEOUT_STEPS = 5.0, 20
# How long the drill waits: at least the first, and this multiple of a whole training.
MIN_LIMIT_S, LIMIT_RUNS = 90.0, 20
DISK_CHECKPOINTS, DISK_EXTRA_BYTES = 4, 16 * 2**20  # size of the small disk; the extra is for logs
MAX_DISK_SHARE = 0.25  # of the free memory


@dataclass(frozen=True, kw_only=True)
class UndisturbedRun:
    """The training without a fault."""

    run: RunFolder
    samples: list[Indices | None]  # of each step
    seconds: float
    timeout_s: float
    checkpoint_bytes: int

    @property
    def limit_s(self) -> float:
        return max(MIN_LIMIT_S, LIMIT_RUNS * self.seconds)


@dataclass(kw_only=True)
class FaultOutcome:
    """The outcome of one fault."""

    moment: FaultMoment
    untried: str | None = None  # the reason
    done: str = ""  # what exactly
    noticed_s: float | None = None  # after the fault; None: there was nothing to notice
    again_s: float | None = None  # until the first update of a later start; None: there was none
    starts: int = 0
    # "course", "weights", "losses", "samples", "left" -> a sentence
    wrong: dict[str, str] = field(default_factory=dict)
    found: str | None = None  # what the run reported of a flipped bit
    escaped: str | None = None  # the effect of a flipped bit that the run could not find

    def as_json(self) -> dict[str, Any]:
        fields = {
            "fault": self.moment.fault.name,
            "step": self.moment.step,
            "rank": self.moment.rank,
            **asdict(self),
        }
        del fields["moment"]
        return fields


@dataclass(frozen=True)
class Drill:
    """What is trained, how and where. `spec` has its number of steps and `plan` its data degree."""

    spec: Spec
    launch: Launch
    plan: ResolvedPlan
    folder: Path

    @property
    def steps(self) -> int:
        assert self.spec.steps is not None
        return self.spec.steps

    @property
    def ranks(self) -> int:
        assert self.launch.ranks is not None
        return self.launch.ranks

    def run_reference(self) -> UndisturbedRun:
        """Train without a fault. Raises RankError if the training fails or consumes wrong samples."""
        folder = self.folder / "reference"
        write_request(folder, self.spec, self.launch, self.plan)
        began = time.monotonic()
        with Training(folder, RunFolder(folder / "run"), self.plan, float("inf")) as training:
            _start(training)
            if training.wait_for_end():
                raise RankError(
                    f"the training fails also without a fault: {training.last_line()}; "
                    f"more in {training.output}"
                )
            seconds, starts, run = time.monotonic() - began, training.read_starts(), training.run
        samples, wrong = merge_ranks(starts[0], self.plan)
        run_events = list(events.read(run.events))
        epoch = next(event.samples for event in run_events if isinstance(event, Started))
        if wrong := wrong or audit_reference(samples, self.spec.batch, epoch):
            raise RankError(f"samples are lost or repeated also without a fault: {wrong[0]}")
        longest_s = max(event.step_s for event in run_events if isinstance(event, Step) and event.step > 2)
        return UndisturbedRun(
            run=run,
            samples=samples,
            seconds=seconds,
            timeout_s=max(MIN_TIMEOUT_S, TIMEOUT_STEPS * longest_s),
            checkpoint_bytes=sum(path.stat().st_size for path in run.checkpoint(self.steps).iterdir()),
        )

    def run_fault(self, moment: FaultMoment, reference: UndisturbedRun, name: str) -> FaultOutcome:
        """Train in the folder `name` with a fault, and compare with the reference."""
        outcome, folder = FaultOutcome(moment=moment), self.folder / name
        if moment.fault.ranks > self.ranks:
            outcome.untried = "one rank waits for no other rank; use --ranks 2 or more"
            return outcome
        guard = choose_guard(moment.fault, self.plan, self.steps)
        write_request(folder, self.spec, self.launch, self.plan, reference.timeout_s, guard)
        prepare_flip(folder, moment)
        try:
            with self._prepare(moment, reference, folder) as context, context.training:
                try:
                    if moment.fault.flips is not None:
                        _start(context.training)
                        flipped = train_with_flip(context)
                        outcome.done, outcome.found, outcome.starts = flipped
                    else:
                        _train_with_fault(context, outcome)
                except UnexpectedCourse as error:
                    outcome.wrong["course"] = str(error)
                else:
                    self._compare(context.training, reference, outcome)
        except UntriedFault as error:
            outcome.untried = str(error)
        return outcome

    @contextlib.contextmanager
    def _prepare(
        self, moment: FaultMoment, reference: UndisturbedRun, folder: Path
    ) -> Iterator[FaultContext]:
        """Prepare a training that has not started, and what its fault needs."""
        disk, clocks, env = None, folder / "clock", dict[str, str]()
        with contextlib.ExitStack() as stack:
            if moment.fault.name == "disk":
                disk = stack.enter_context(_mount_small_disk(folder / "disk", reference.checkpoint_bytes))
            if moment.fault.name in ("clock", "clock-stop"):
                env = clock.install_clock(clocks)
            run = RunFolder((disk.path if disk is not None else folder) / "run")
            training = Training(folder, run, self.plan, reference.limit_s, env)
            yield FaultContext(
                training, moment, self.steps, reference.timeout_s, clocks if env else None, disk
            )

    def _compare(self, training: Training, reference: UndisturbedRun, outcome: FaultOutcome) -> None:
        is_flip = outcome.moment.fault.flips is not None
        if is_flip and outcome.found is None and not is_found_for_certain(outcome.moment.fault, self.plan):
            outcome.escaped = (
                find_weight_difference(training.run, reference.run, self.steps) or "the weights are equal"
            )
            return
        outcome.wrong |= _check_course(training, outcome)
        starts = [merge_ranks(start, self.plan) for start in training.read_starts()]
        first_steps = [event.step for event in events.read(training.run.events) if isinstance(event, Started)]
        wrong_samples = [sentence for _, wrong in starts for sentence in wrong] + audit(
            reference.samples, [steps for steps, _ in starts], first_steps
        )
        for check, sentence in (
            ("weights", find_weight_difference(training.run, reference.run, self.steps)),
            ("losses", find_loss_difference(training.run, reference.run, last_only=is_flip)),
            ("samples", wrong_samples[0] if wrong_samples else None),
        ):
            if sentence is not None:
                outcome.wrong[check] = sentence


def _start(training: Training) -> None:
    request = str(training.folder / REQUEST)
    training.start("train", request, "--run-dir", str(training.run.path), "--restarts", "1")


def _train_with_fault(context: FaultContext, outcome: FaultOutcome) -> None:
    training, fault = context.training, context.moment.fault
    training.set_pace(STEP_S)
    _start(training)
    training.wait_for_step(context.moment.step, fault.checkpoints)
    # Slow steps: the fault comes before the last step also if this process has to wait for a core.
    training.set_pace(SLOW_STEP_S)
    time.sleep(context.moment.share * SLOW_STEP_S)
    training.record_processes(disturbed=context.moment.rank)
    fault_time = time.monotonic()
    outcome.done = INJECT[fault.name](context)
    if fault.starts > 1 and training.count_steps() >= context.steps:
        raise UntriedFault(
            f"the training had done its last step, {context.steps}, before the fault came; use more --steps"
        )
    training.set_pace(None)
    status = training.wait_for_end()
    if status != fault.status:
        raise UnexpectedCourse(
            f"exit status must be {fault.status}, got {status}; last output: {training.last_line()}"
        )
    left = training.end_leftovers()
    if training.noticed is not None and fault.name not in REPAIR:
        outcome.noticed_s = training.noticed - fault_time
    if status:
        outcome.done = _resume(context) or outcome.done
        left = left or training.end_leftovers()
    if left is not None:
        outcome.wrong["left"] = left
    outcome.starts = training.count_starts()
    if len(starts := training.read_starts()) > 1:
        outcome.again_s = min(updates[0].time for updates in starts[1].values()) - fault_time


def _resume(context: FaultContext) -> str | None:
    """Repair and resume the run, as a user would after the command has ended."""
    training, repair = context.training, REPAIR.get(context.moment.fault.name)
    done = repair(context) if repair is not None else None
    training.start("resume", str(training.run.path))
    if status := training.wait_for_end():
        raise UnexpectedCourse(
            f"exit status of resume must be 0, got {status}; last output: {training.last_line()}"
        )
    return done


def _check_course(training: Training, outcome: FaultOutcome) -> dict[str, str]:
    """Return {"course": a sentence} if the number of starts or the reports of the run are unexpected."""
    fault = outcome.moment.fault
    if fault.flips is not None and outcome.found is None:
        return {"course": f"the flipped {fault.flips} was not found"}
    if fault.starts == 1 and training.noticed is not None:
        return {"course": f"the training must continue without a report, got: {training.symptom}"}
    if outcome.starts != fault.starts:
        return {"course": f"the ranks must start {fault.starts} times, got {outcome.starts}"}
    if fault.name == "damage":
        notes = [
            note
            for event in events.read(training.run.events)
            if isinstance(event, Started)
            for note in event.notes
        ]
        if not any("is damaged" in note for note in notes):
            return {"course": "the damaged checkpoint was not reported"}
    return {}


@contextlib.contextmanager
def _mount_small_disk(path: Path, checkpoint_bytes: int) -> Iterator[SmallDisk]:
    disk_bytes = DISK_CHECKPOINTS * checkpoint_bytes + DISK_EXTRA_BYTES
    if disk_bytes > MAX_DISK_SHARE * psutil.virtual_memory().available:
        raise UntriedFault(
            f"a small disk in memory for {DISK_CHECKPOINTS} checkpoints of {format_bytes(checkpoint_bytes)} "
            f"requires more than {MAX_DISK_SHARE:.0%} of the free memory"
        )
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(SmallDisk(path, disk_bytes))
        except OSError as error:
            raise UntriedFault(str(error)) from error
        yield disk
