"""The journal of a study: events of its trials, append only, and the state of the trials that follows."""

import contextlib
import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import RunError
from paceline.files import append_whole, end_of_lines, open_regular, reason

MAX_LINE_BYTES = 2**20
Values = dict[str, bool | int | float | str]
Metrics = dict[str, float | None]  # None: not a finite number


class StudyEvent(BaseModel):
    """Base class of the events of a journal. time: seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    time: float = Field(default_factory=time.time)


class Suggested(StudyEvent):
    """A sampler chose the values of a new trial."""

    trial: int = Field(ge=0)
    values: Values


class Launched(StudyEvent):
    """A trial starts or continues on some ranks."""

    trial: int = Field(ge=0)
    ranks: int
    plan: str | None = None  # None: that of the request
    predicted: dict[str, float] = {}


class Predicted(StudyEvent):
    """A trial was predicted while it trained. problem: why it cannot be predicted."""

    trial: int = Field(ge=0)
    predicted: dict[str, float] = {}
    problem: str = ""


class Reached(StudyEvent):
    """A trial was trained and evaluated. metrics: of its last evaluation, and measured quantities."""

    trial: int = Field(ge=0)
    samples: int
    metrics: Metrics
    seconds: float  # of training since `Launched`


class Exploited(StudyEvent):
    """A trial continues from the checkpoint of another trial of its generation, with other values."""

    trial: int = Field(ge=0)
    parent: int = Field(ge=0)
    generation: int
    values: Values


class Finished(StudyEvent):
    """A trial is over. message: why it failed or was stopped."""

    trial: int = Field(ge=0)
    state: Literal["complete", "failed", "pruned", "refused"]
    message: str = ""


KINDS: dict[str, type[StudyEvent]] = {
    kind.__name__.lower(): kind for kind in (Suggested, Launched, Predicted, Reached, Exploited, Finished)
}


class JournalWriter:
    """Appends events to a journal, each in one write that is on the disk when `write` returns.

    is_locked: refuse a journal that another process has opened like this.
    """

    def __init__(self, path: Path, is_locked: bool = False):
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            if is_locked:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            end = end_of_lines(self._file)  # a last line without a newline is from a controller that died
            if end < os.fstat(self._file).st_size:
                os.ftruncate(self._file, end)
        except BlockingIOError:
            os.close(self._file)
            raise RunError(
                f"{path} is used by another process; wait for it, or use another journal"
            ) from None
        except OSError as error:
            raise RunError(f"cannot write {path}: {reason(error)}") from error

    def write(self, event: StudyEvent) -> None:
        """Append an event. Raises RunError if it cannot be written: a study cannot continue without it."""
        name = type(event).__name__.lower()
        line = event.model_dump_json().replace("{", f'{{"event":"{name}",', 1) + "\n"
        if not append_whole(self._file, line.encode()):
            raise RunError(
                f"cannot write {self._path}: the disk is full; free space, then continue the study"
            )
        try:
            os.fsync(self._file)
        except OSError as error:  # a network file system reports a quota or an error of the disk late
            raise RunError(f"cannot write {self._path}: {reason(error)}; then continue the study") from error

    def close(self) -> None:
        os.close(self._file)


@dataclass
class Trial:
    """The state of a trial, as its events say."""

    number: int
    values: dict[str, Any]
    state: Literal["waiting", "running", "paused", "complete", "failed", "pruned", "refused"] = "waiting"
    ranks: int | None = None
    plan: str | None = None
    predicted: dict[str, float] = field(default_factory=dict)
    not_predicted: str = ""  # why
    stages: list[Reached] = field(default_factory=list)
    message: str = ""
    seconds: float = 0.0  # of training
    rank_seconds: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.state in ("complete", "failed", "pruned", "refused")

    @property
    def metrics(self) -> Metrics:
        """The metrics at the end of the last stage, and the predictions of its start."""
        if not self.stages:
            return {}
        return {f"predicted.{name}": value for name, value in self.predicted.items()} | self.stages[
            -1
        ].metrics


@dataclass
class StudyState:
    """The state of a study: its trials in the order in which they were suggested, and its events."""

    trials: dict[int, Trial] = field(default_factory=dict)
    events: list[StudyEvent] = field(default_factory=list)
    skipped: int = 0  # lines that could not be used
    exploited: dict[int, set[int]] = field(default_factory=dict)  # trials by generation

    @property
    def next_number(self) -> int:
        """The number of the next new trial: the least that is free, since a lost line leaves a gap."""
        return next(number for number in itertools.count() if number not in self.trials)

    def apply(self, event: StudyEvent) -> None:
        """Update the trials with the next event. Events that do not fit those before are skipped."""
        trial = self.trials.get(getattr(event, "trial", -1))
        if isinstance(event, Suggested):
            if trial is not None:
                self.skipped += 1
                return
            self.trials[event.trial] = Trial(event.trial, event.values)
        else:
            if trial is None or not _follows(event, trial):
                self.skipped += 1
                return
            _update(trial, event)
            if isinstance(event, Exploited):
                self.exploited.setdefault(event.generation, set()).add(event.trial)
        self.events.append(event)


def _follows(event: StudyEvent, trial: Trial) -> bool:
    """Return whether an event is possible in the state of a trial; not so if lines before it were damaged."""
    if not isinstance(event, Finished):
        return True
    return not trial.is_over and (event.state != "complete" or bool(trial.stages))


def _update(trial: Trial, event: StudyEvent) -> None:
    match event:
        case Launched():
            trial.state, trial.ranks, trial.plan = "running", event.ranks, event.plan
            trial.predicted = event.predicted or trial.predicted
        case Predicted():
            trial.predicted, trial.not_predicted = event.predicted, event.problem
        case Reached():
            trial.state = "paused"
            trial.stages.append(event)
            trial.seconds += event.seconds
            trial.rank_seconds += event.seconds * (trial.ranks or 1)
        case Exploited():
            trial.values = event.values
        case Finished():
            trial.state, trial.message = event.state, event.message


def read_events(path: Path) -> Iterator[StudyEvent | None]:
    """Yield the events of a journal, and None for each line that is damaged or of an unknown kind.

    Raises RunError if the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            while line := file.readline(MAX_LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    return  # its writer was killed, or is still writing
                yield _parse(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from error


def _parse(line: bytes) -> StudyEvent | None:
    with contextlib.suppress(ValidationError):
        kind = KINDS.get(_Named.model_validate_json(line).event)
        if kind is not None:
            return kind.model_validate_json(line)
    return None


class _Named(BaseModel):
    event: str


def read_state(path: Path) -> StudyState:
    """Return the state of a study from its journal. Raises RunError if the file cannot be read."""
    state = StudyState()
    for event in read_events(path):
        if event is None:
            state.skipped += 1
        else:
            state.apply(event)
    return state
