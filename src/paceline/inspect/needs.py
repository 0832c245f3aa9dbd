"""What rules need of the facts before their condition is checked, so that each guard is stated once.

A need is a function of the facts. It returns None, `Missing` if data lacks, or `NOT_APPLICABLE`.
"""

from collections.abc import Callable

from paceline.inspect.facts import RunFacts
from paceline.inspect.finding import NOT_APPLICABLE, Missing, NotApplicable

Need = Callable[[RunFacts], Missing | NotApplicable | None]


def needs_run(facts: RunFacts) -> Missing | NotApplicable | None:
    """A run, not a recording of samples."""
    return NOT_APPLICABLE if facts.is_recording else None


def needs_start(facts: RunFacts) -> Missing | NotApplicable | None:
    """A run that has started. The loop of a user records no start."""
    if facts.is_recording or facts.is_own_loop:
        return NOT_APPLICABLE
    return Missing("the run has not started") if facts.started is None else None


def needs_step(facts: RunFacts) -> Missing | NotApplicable | None:
    """A run that has made a step."""
    unmet = needs_start(facts)
    return unmet if unmet is not None or facts.steps else Missing("the run has no step yet")


def needs_request(facts: RunFacts) -> Missing | NotApplicable | None:
    """A run that has started, and its request."""
    unmet = needs_start(facts)
    if unmet is not None or facts.spec is not None:
        return unmet
    return Missing("the request of the run cannot be read")


def needs_cpu(facts: RunFacts) -> Missing | NotApplicable | None:
    """A run that trains on CPUs."""
    return needs_start(facts) or (None if facts.is_cpu else NOT_APPLICABLE)


def needs_gpu(facts: RunFacts) -> Missing | NotApplicable | None:
    """A run that trains on GPUs."""
    return needs_start(facts) or (NOT_APPLICABLE if facts.is_cpu else None)


def needs_ranks(facts: RunFacts) -> Missing | NotApplicable | None:
    """A run on several ranks, which update their weights together."""
    unmet = needs_start(facts)
    if unmet is not None:
        return unmet
    is_alone = facts.start.ranks < 2
    has_servers = facts.plan is not None and facts.plan.servers is not None
    return NOT_APPLICABLE if is_alone or has_servers else None
