"""The results of checks: runs each check of a table and collects its findings."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.doctor.diagnose import PACKAGE, describe_location
from paceline.doctor.heartbeat import Frame
from paceline.errors import Error
from paceline.preflight.context import PreflightContext

Verdict = Literal["passes", "warns", "fails", "skipped"]


@dataclass(frozen=True)
class CheckFinding:
    """A result of one check."""

    check: str
    verdict: Verdict
    message: str  # a sentence: fact, value, fix


Results = Iterator[tuple[Verdict, str]]


class Check(NamedTuple):
    """A row of the table. `run` yields results; an exception fails the check and skips those that need it."""

    run: Callable[[PreflightContext], Results]
    needs: frozenset[str] = frozenset()


def run_checks(context: PreflightContext, checks: Mapping[str, Check]) -> Iterator[CheckFinding]:
    """Run the checks in order and yield their findings. Continue after a check that fails."""
    failed: set[str] = set()
    skipped: set[str] = set()
    for name, check in checks.items():
        if missing := sorted(check.needs & failed or check.needs & skipped):
            skipped.add(name)
            yield CheckFinding(name, "skipped", f"requires the result of {' and '.join(missing)}")
            continue
        try:
            for verdict, message in check.run(context):
                yield CheckFinding(name, verdict, message)
        except Error as error:
            failed.add(name)
            yield CheckFinding(name, "fails", str(error))
        except Exception as error:  # mostly from the task
            failed.add(name)
            stack = [
                Frame(frame.filename, frame.lineno or 0, frame.name)
                for frame in traceback.extract_tb(error.__traceback__)
            ]
            user_stack = [frame for frame in stack if not frame.file.startswith(PACKAGE)]
            location = describe_location(user_stack) or describe_location(stack)
            yield CheckFinding(name, "fails", f"{type(error).__name__} in {location}: {error}")
