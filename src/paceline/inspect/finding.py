"""Finding: what a rule found, with its evidence, its cost and its fix; Rule: a row of the table of rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paceline.inspect.facts import RunFacts


@dataclass(frozen=True)
class Evidence:
    """What a rule returns for each thing that it finds.

    sentence  the finding, without a capital and a period
    values    the measured numbers by name, with the unit in the name
    share     the part of the time of the run that it costs; None: unknown
    fix       what to change: a command where there is one
    is_simulated  whether only simulated facts showed this case of the rule, such as that of a GPU
    """

    sentence: str
    values: Mapping[str, float] = field(default_factory=dict)
    share: float | None = None
    fix: str = ""
    is_simulated: bool = False


@dataclass(frozen=True)
class Missing:
    """Why a rule cannot be checked: the data that is missing."""

    reason: str


class NotApplicable:
    """The rule has no meaning for this run, such as a rule about ranks for a run on one rank."""


NOT_APPLICABLE = NotApplicable()
Outcome = Sequence[Evidence] | Missing | NotApplicable


@dataclass(frozen=True)
class Rule:
    """A row of the table of rules.

    name          identifier, as in docs/findings.md
    checks        what is checked, as a noun phrase: "waiting for input"
    check         the condition and the evidence; an empty list if nothing is found. It may rely on `needs`
    needs         functions that return why the rule cannot be checked, or None; see `needs.py`
    is_simulated  whether the rule was tested on simulated samples only, because no device has shown it yet
    """

    name: str
    checks: str
    check: Callable[[RunFacts], Outcome]
    needs: Sequence[Callable[[RunFacts], Missing | NotApplicable | None]] = ()
    is_simulated: bool = False

    def apply(self, facts: RunFacts) -> Outcome:
        """Return what the rule finds, or which need is not met."""
        for need in self.needs:
            if (unmet := need(facts)) is not None:
                return unmet
        return self.check(facts)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that costs time, memory or quality, and how to change it.

    rule        name of the rule
    sentence    the finding, without a capital and a period
    evidence    the measured numbers by name
    cost_share  the part of the time of the run that it costs, from 0 to 1; None: unknown
    lost_s      the same in seconds until now
    to_end_s    what it will cost until the end of the training; 0 if it has ended, None if unknown
    fix         what to change: a command where there is one
    simulated   whether no device has shown this finding yet, so that only simulated samples tested the rule
    """

    rule: str
    sentence: str
    evidence: Mapping[str, float]
    cost_share: float | None
    lost_s: float | None
    to_end_s: float | None
    fix: str
    simulated: bool


@dataclass(frozen=True)
class Findings:
    """The result of all rules.

    findings  most costly first
    checked   what was checked, whether or not something was found
    missing   what could not be checked, with the reason
    notes     sentences about data that could not be read
    """

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    missing: Mapping[str, str]
    notes: tuple[str, ...] = ()
