"""Finding: what one check of a training found out before anything is started."""

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
class Finding:
    check: str
    verdict: Verdict
    message: str  # a sentence: the fact, the value, the way out


Says = Iterator[tuple[Verdict, str]]


class Check(NamedTuple):
    """`run` says what it finds; an exception fails it, and skips those that need it."""

    run: Callable[[PreflightContext], Says]
    needs: frozenset[str] = frozenset()


def findings(flight: PreflightContext, checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Of each check in turn, also after one that fails."""
    failed: set[str] = set()
    skipped: set[str] = set()
    for name, check in checks.items():
        if lacking := sorted(check.needs & failed or check.needs & skipped):
            skipped.add(name)
            yield Finding(name, "skipped", f"needs what {' and '.join(lacking)} would tell")
            continue
        try:
            for verdict, message in check.run(flight):
                yield Finding(name, verdict, message)
        except Error as error:
            failed.add(name)
            yield Finding(name, "fails", str(error))
        except Exception as error:  # of the task, mostly
            failed.add(name)
            stack = [
                Frame(frame.filename, frame.lineno or 0, frame.name)
                for frame in traceback.extract_tb(error.__traceback__)
            ]
            where = describe_location(
                [frame for frame in stack if not frame.file.startswith(PACKAGE)]
            ) or describe_location(stack)
            yield Finding(name, "fails", f"{type(error).__name__} in {where}: {error}")
