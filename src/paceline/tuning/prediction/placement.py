"""Placement: on how many ranks and under which plan a trial trains."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Placement:
    """On how many ranks and under which plan a trial trains, and what is predicted of it."""

    ranks: int
    plan: str | None  # None: that of the request
    predicted: Mapping[str, float] = field(default_factory=dict)


class RefusedTrial(Exception):
    """A trial cannot fit, or violates a condition. The message is a sentence."""
