"""Drills of all faults under several plans: a file with a line for each, and a table of plans and faults."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from paceline.errors import RunError
from paceline.files import append_whole, end_of_lines, open_regular, reason

# Each with the number of its ranks: replicas, shards, parts of layers, stages, and combinations.
PLANS = (
    ("ddp", 2),
    ("zero1", 2),
    ("zero2", 2),
    ("zero3", 2),
    ("hsdp", 4),
    ("tp=2", 2),
    ("pp=2", 2),
    ("zero3,tp=2", 4),
)
Verdict = Literal["holds", "fails", "not found", "not tried"]
WORDS: dict[Verdict, str] = {  # in cells of the table
    "fails": "FAIL",
    "holds": "hold",
    "not found": "not found",
    "not tried": "not tried",
}
MAX_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class DrillTrial:
    """Identity of a drill: what is trained, and which fault disturbs it when."""

    task: str
    batch: int
    steps: int
    seed: int
    plan: str
    ranks: int
    fault: str
    moment: int  # the seed of the fault's random choices, which identifies its moment


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The result of a drill, a line of the file."""

    trial: DrillTrial
    verdict: Verdict
    step: int
    rank: int
    done: str = ""
    why: str = ""  # sentences about failures, or why it was not tried
    samples: bool = True  # whether no sample was lost or repeated


class TrialFile:
    """A file to which results are appended, so that an interrupted series of drills continues.

    Raises RunError if the file cannot be read or written."""

    def __init__(self, path: Path):
        self.path = path
        self.results: dict[DrillTrial, TrialResult] = {}
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.closing(open_regular(path)) as file:
                lines = file.read(MAX_BYTES).splitlines()
            os.ftruncate(self._file, end_of_lines(self._file))  # a line of a drill that was killed
        except BlockingIOError:
            raise RunError(
                f"another drill writes to {path}; wait for its end, or name another file"
            ) from None
        except OSError as error:
            raise RunError(f"cannot write {path}: {reason(error)}") from error
        for line in lines:
            with contextlib.suppress(ValidationError):
                self._keep(TypeAdapter(TrialResult).validate_json(line))
        if lines and not self.results:
            raise RunError(f"{path} has no results of drills; name another file with --record")

    def _keep(self, result: TrialResult) -> None:
        self.results[result.trial] = result

    def add(self, result: TrialResult) -> None:
        """Append a result. Raises RunError on a full disk."""
        if not append_whole(self._file, (json.dumps(asdict(result)) + "\n").encode()):
            raise RunError(f"cannot write {self.path}: no space left; make room and start the drills again")
        self._keep(result)

    def close(self) -> None:
        os.close(self._file)


def count_verdicts(results: Sequence[TrialResult]) -> dict[Verdict, int]:
    """Return how many results have each verdict, for those that occur."""
    verdicts = [result.verdict for result in results]
    return {verdict: verdicts.count(verdict) for verdict in WORDS if verdict in verdicts}


def describe_cell(results: Sequence[TrialResult]) -> str:
    """Return the results of one fault under one plan, such as "3 hold, 1 not found"."""
    return ", ".join(f"{number} {WORDS[verdict]}" for verdict, number in count_verdicts(results).items())


def build_matrix(results: Sequence[TrialResult], faults: Sequence[str]) -> list[list[str]]:
    """Return a row per fault and a column per plan, with a heading."""
    plans = list(dict.fromkeys((result.trial.plan, result.trial.ranks) for result in results))
    rows = [["fault", *(f"{plan} ({ranks})" for plan, ranks in plans)]]
    for fault in faults:
        cells = [
            describe_cell(
                [
                    result
                    for result in results
                    if (result.trial.plan, result.trial.ranks, result.trial.fault) == (*plan, fault)
                ]
            )
            for plan in plans
        ]
        if any(cells):
            rows.append([fault, *cells])
    return rows


def summarize(results: Sequence[TrialResult]) -> str:
    """Return the sum of all drills in a sentence."""
    counts = count_verdicts(results)
    tried = len(results) - counts.get("not tried", 0)
    lost = sum(not result.samples for result in results)
    return (
        f"{counts.get('holds', 0)} of {tried} drills left no trace, {counts.get('fails', 0)} failed, "
        f"{counts.get('not found', 0)} flipped bits could not be found; "
        f"samples were lost or repeated in {lost}"
    )


def describe_failures(results: Sequence[TrialResult]) -> Iterator[str]:
    """Yield a sentence for each drill that failed."""
    for result in results:
        if result.verdict == "fails":
            trial = result.trial
            yield (
                f"{trial.fault} under {trial.plan} on {trial.ranks} ranks, step {result.step}, "
                f"rank {result.rank}: {result.why}"
            )
