"""A drill: a training that nobody disturbs, then one for each fault, and what came of it."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from paceline import events
from paceline.drill import clock, request
from paceline.drill.compare import losses_differ, weights_differ
from paceline.drill.disk import SmallDisk
from paceline.drill.faults import FaultMoment
from paceline.drill.inject import DISTURB, REPAIR, FaultContext, UntriedFault
from paceline.drill.sample_audit import Indices, audit, audit_alone, consumed
from paceline.drill.training import SLOW_STEP_S, STEP_S, Training, UnexpectedCourse
from paceline.errors import RankError
from paceline.events import Started, Step
from paceline.plan.plan import ResolvedPlan
from paceline.run import RunFolder
from paceline.spec import Launch, Spec
from paceline.units import format_bytes

LEAST_TIMEOUT_S, STEPS_TIMEOUT = 5.0, 20  # how long ranks wait for one another: so many of the longest steps
LEAST_LIMIT_S, TIMES_LIMIT = (
    90.0,
    20,
)  # after which something counts as not happening: so many times what a whole training takes
DISK_CHECKPOINTS, DISK_MORE_BYTES = 4, 16 * 2**20  # on the small disk, besides logs and the like
DISK_SHARE = 0.25  # of the free memory, at the most


@dataclass(frozen=True, kw_only=True)
class UndisturbedRun:
    """The training that nobody disturbed."""

    run: RunFolder
    samples: list[Indices | None]  # of each step
    seconds: float
    timeout_s: float
    checkpoint_bytes: int

    @property
    def limit_s(self) -> float:
        return max(LEAST_LIMIT_S, TIMES_LIMIT * self.seconds)


@dataclass(kw_only=True)
class FaultOutcome:
    """What came of one fault."""

    moment: FaultMoment
    untried: str | None = None  # why
    done: str = ""  # what exactly
    noticed_s: float | None = None  # after the fault; None: there was nothing to notice
    again_s: float | None = None  # until the first update of a later start; None: there was none
    starts: int = 0
    wrong: dict[str, str] = field(
        default_factory=dict
    )  # "course", "weights", "losses", "samples", "left" -> a sentence

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
    """What is trained, how and where. `spec` has its steps and `plan` its data degree said."""

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

    def reference(self) -> UndisturbedRun:
        """Raises RankError where the task does not even train by itself, or consumes what it should not."""
        folder = self.folder / "reference"
        request.write(folder, self.spec, self.launch, self.plan)
        began = time.monotonic()
        with Training(folder, RunFolder(folder / "run"), self.plan, float("inf")) as training:
            _begin(training)
            if training.until_ended():
                raise RankError(
                    f"the training fails without any fault, too: {training.said()}; more in {training.output}"
                )
            seconds, starts, run = time.monotonic() - began, training.starts(), training.run
        samples, wrong = consumed(starts[0], self.plan)
        happened = list(events.read(run.events))
        epoch = next(event.samples for event in happened if isinstance(event, Started))
        if wrong := wrong or audit_alone(samples, self.spec.batch, epoch):
            raise RankError(f"without any fault samples are lost or repeated, too: {wrong[0]}")
        longest_s = max(event.step_s for event in happened if isinstance(event, Step) and event.step > 2)
        return UndisturbedRun(
            run=run,
            samples=samples,
            seconds=seconds,
            timeout_s=max(LEAST_TIMEOUT_S, STEPS_TIMEOUT * longest_s),
            checkpoint_bytes=sum(path.stat().st_size for path in run.checkpoint(self.steps).iterdir()),
        )

    def hit(self, moment: FaultMoment, reference: UndisturbedRun, name: str) -> FaultOutcome:
        """Train once more and let a fault happen. `name`: of the folder for it."""
        outcome, folder = FaultOutcome(moment=moment), self.folder / name
        if moment.fault.ranks > self.ranks:
            outcome.untried = "one rank waits for no other one; use --ranks 2 or more"
            return outcome
        request.write(folder, self.spec, self.launch, self.plan, reference.timeout_s)
        try:
            with self._scene(moment, reference, folder) as scene, scene.training:
                try:
                    _go_through(scene, outcome)
                except UnexpectedCourse as error:
                    outcome.wrong["course"] = str(error)
                else:
                    self._judge(scene.training, reference, outcome)
        except UntriedFault as error:
            outcome.untried = str(error)
        return outcome

    @contextlib.contextmanager
    def _scene(self, moment: FaultMoment, reference: UndisturbedRun, folder: Path) -> Iterator[FaultContext]:
        """A training that is not started yet, with what its fault needs."""
        disk, clocks, env = None, folder / "clock", dict[str, str]()
        with contextlib.ExitStack() as held:
            if moment.fault.name == "disk":
                disk = held.enter_context(_small_disk(folder / "disk", reference.checkpoint_bytes))
            if moment.fault.name in ("clock", "clock-stop"):
                env = clock.settable(clocks)
            run = RunFolder((disk.path if disk is not None else folder) / "run")
            training = Training(folder, run, self.plan, reference.limit_s, env)
            yield FaultContext(
                training, moment, self.steps, reference.timeout_s, clocks if env else None, disk
            )

    def _judge(self, training: Training, reference: UndisturbedRun, outcome: FaultOutcome) -> None:
        outcome.wrong |= _course(training, outcome)
        found = [consumed(start, self.plan) for start in training.starts()]
        states = [event.step for event in events.read(training.run.events) if isinstance(event, Started)]
        told = [sentence for _, wrong in found for sentence in wrong] + audit(
            reference.samples, [steps for steps, _ in found], states
        )
        for what, sentence in (
            ("weights", weights_differ(training.run, reference.run, self.steps)),
            ("losses", losses_differ(training.run, reference.run)),
            ("samples", told[0] if told else None),
        ):
            if sentence is not None:
                outcome.wrong[what] = sentence


def _begin(training: Training) -> None:
    training.start(
        "train",
        str(training.folder / request.REQUEST),
        "--run-dir",
        str(training.run.path),
        "--restarts",
        "1",
    )


def _go_through(scene: FaultContext, outcome: FaultOutcome) -> None:
    training, fault = scene.training, scene.moment.fault
    training.pace(STEP_S)
    _begin(training)
    training.until_step(scene.moment.step, fault.checkpoints)
    training.pace(
        SLOW_STEP_S
    )  # also where this process must wait for a core, the fault comes before the last step
    time.sleep(scene.moment.share * SLOW_STEP_S)
    training.hold(but=scene.moment.rank)
    at = time.monotonic()
    outcome.done = DISTURB[fault.name](scene)
    if fault.starts > 1 and training.steps_done() >= scene.steps:
        raise UntriedFault(
            f"the training had done its last step, {scene.steps}, before the fault came; use more --steps"
        )
    training.pace(None)
    status = training.until_ended()
    if status != fault.status:
        raise UnexpectedCourse(
            f"it ended with exit status {status}, and {fault.status} was due; it said: {training.said()}"
        )
    left = training.remains()
    if training.noticed is not None and fault.name not in REPAIR:
        outcome.noticed_s = training.noticed - at
    if status:
        outcome.done = _go_on(scene) or outcome.done
        left = left or training.remains()
    if left is not None:
        outcome.wrong["left"] = left
    outcome.starts = training.started()
    if len(starts_with_updates := training.starts()) > 1:
        outcome.again_s = min(updates[0].time for updates in starts_with_updates[1].values()) - at


def _go_on(scene: FaultContext) -> str | None:
    """What a person would do after the command has ended."""
    training, repair = scene.training, REPAIR.get(scene.moment.fault.name)
    done = repair(scene) if repair is not None else None
    training.start("resume", str(training.run.path))
    if status := training.until_ended():
        raise UnexpectedCourse(f"resume ended with exit status {status}; it said: {training.said()}")
    return done


def _course(training: Training, outcome: FaultOutcome) -> dict[str, str]:
    """Whether the ranks were started as often as they should, and what should be said was said."""
    fault = outcome.moment.fault
    if fault.starts == 1 and training.noticed is not None:
        return {"course": f"it should have gone on, and said: {training.sign}"}
    if outcome.starts != fault.starts:
        return {"course": f"the ranks were started {outcome.starts} times, and {fault.starts} were due"}
    if fault.name == "damage":
        notes = [
            note
            for event in events.read(training.run.events)
            if isinstance(event, Started)
            for note in event.notes
        ]
        if not any("is damaged" in note for note in notes):
            return {"course": "nothing was said of the damaged checkpoint"}
    return {}


@contextlib.contextmanager
def _small_disk(at: Path, checkpoint_bytes: int) -> Iterator[SmallDisk]:
    bytes = DISK_CHECKPOINTS * checkpoint_bytes + DISK_MORE_BYTES
    if bytes > DISK_SHARE * psutil.virtual_memory().available:
        raise UntriedFault(
            f"a small disk in memory for some checkpoints of {format_bytes(checkpoint_bytes)} would take too much of it"
        )
    with contextlib.ExitStack() as held:
        try:
            disk = held.enter_context(SmallDisk(at, bytes))
        except OSError as error:
            raise UntriedFault(str(error)) from error
        yield disk
