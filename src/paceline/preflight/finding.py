"""Finding: what one check of a training found out before anything is started."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.errors import Error
from paceline.preflight.flight import Flight

Verdict = Literal["passes", "warns", "fails", "skipped"]


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Verdict
    message: str  # a sentence: the fact, the value, the way out


Says = Iterator[tuple[Verdict, str]]


class Check(NamedTuple):
    """`run` says what it finds; an Error fails it, and skips those that need it."""

    run: Callable[[Flight], Says]
    needs: frozenset[str] = frozenset()


def findings(flight: Flight, checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Of each check in turn, also after one that fails."""
    missing: set[str] = set()
    for name, check in checks.items():
        if lacking := sorted(check.needs & missing):
            missing.add(name)
            yield Finding(name, "skipped", f"needs what {' and '.join(lacking)} would tell")
            continue
        try:
            for verdict, message in check.run(flight):
                yield Finding(name, verdict, message)
        except Error as error:
            missing.add(name)
            yield Finding(name, "fails", str(error))
