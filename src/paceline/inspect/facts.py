"""RunFacts: everything that the rules of findings read of a run, read once from its folder."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from paceline.doctor.heartbeat import Heartbeat
from paceline.events import Ended, Evaluated, Failed, Profiled, Saved, Started
from paceline.inspect.windows import Window
from paceline.plan.plan import ResolvedPlan
from paceline.report.profile import PredictionReport
from paceline.spec import Launch, Spec

WARM_UP_STEPS = 5  # of each start, excluded: they allocate, connect, compile and fill caches


class StepPoint(NamedTuple):
    """A step, which represents `num_steps` steps that end with it."""

    step: int
    time: float
    loss: float
    grad_norm: float | None
    lr: float
    step_s: float
    data_s: float
    samples_per_s: float
    num_steps: int
    since_start: int  # steps since the start or resume before it


class Sibling(NamedTuple):
    """A run in the same folder with the same task, fields, batch, precision and device."""

    name: str
    plan: str
    ranks: int
    threads: int
    samples_per_s: float  # median


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a run, or of a recording of samples. What is unknown is None or empty.

    path          the run folder or the recording
    is_recording  whether these are samples without a run
    is_own_loop   whether a loop of the user trains, which records heartbeats and samples only
    spec, launch  the request; None if it cannot be read
    started       the last start
    steps         the steps in their order; repeated steps of a resume replace the earlier ones
    run_s         seconds of steps, evaluations and saves
    remaining_s   expected seconds until the end of the training; 0 if it has ended; None if unknown
    beats         the last heartbeat of each rank
    siblings      comparable runs in the same folder
    disk_free_bytes  free space of the disk of a running run, and of the quota if doctor asked for it
    notes         sentences about data that could not be read
    plan          the plan for the number of ranks
    facts         numbers about the machine and the model, as `Started.facts` describes them
    windows       the samples of each node while the training stepped
    why_no_samples  why there are none, after a colon; or empty
    prediction    the prediction next to the profile; None for the reason in `why_not_predicted`
    """

    path: Path
    is_recording: bool = False
    is_own_loop: bool = False
    spec: Spec | None = None
    launch: Launch | None = None
    started: Started | None = None
    is_running: bool = False
    steps: tuple[StepPoint, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()
    saved: tuple[Saved, ...] = ()
    profiled: tuple[Profiled, ...] = ()
    failures: tuple[Failed, ...] = ()
    ended: Ended | None = None
    run_s: float = 0.0
    remaining_s: float | None = None
    beats: tuple[Heartbeat | None, ...] = ()
    siblings: tuple[Sibling, ...] = ()
    disk_free_bytes: int | None = None
    notes: tuple[str, ...] = ()
    plan: ResolvedPlan | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    why_no_samples: str = ""
    prediction: PredictionReport | None = None
    why_not_predicted: str = "it needs a prediction: paceline doctor RUN --predict"

    @cached_property
    def warm(self) -> tuple[StepPoint, ...]:
        """The steps that represent the run: without the first of each start and without profiled steps."""
        profiled = {
            event.step - k for event in self.profiled for k in range(min(event.num_steps, MAX_PROFILED))
        }
        return tuple(
            point for point in self.steps if point.since_start > WARM_UP_STEPS and point.step not in profiled
        )

    @cached_property
    def num_warm(self) -> int:
        """The number of steps that `warm` represents."""
        return sum(point.num_steps for point in self.warm)

    @cached_property
    def num_steps(self) -> int:
        return sum(point.num_steps for point in self.steps)

    @cached_property
    def step_s(self) -> float | None:
        """The median time of a step."""
        return statistics.median(point.step_s for point in self.warm) if self.warm else None

    @property
    def start(self) -> Started:
        """The last start, for rules that need it."""
        assert self.started is not None
        return self.started

    @property
    def request(self) -> Spec:
        """The request, for rules that need it."""
        assert self.spec is not None
        return self.spec

    @property
    def again(self) -> str:
        """The command that repeats the training; options may follow."""
        return f"paceline train {self.path}/spec.toml"

    @property
    def is_cpu(self) -> bool:
        return self.started is not None and self.started.device == "cpu"


MAX_PROFILED = 1000  # steps of one profile; a damaged line may have more


def sum_over_steps(points: Sequence[StepPoint], values: Sequence[float]) -> float:
    """Return the sum of a value over all steps that the points represent."""
    return sum(point.num_steps * value for point, value in zip(points, values, strict=True))
