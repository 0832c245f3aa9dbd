"""The actions of a pipeline schedule on one rank: the passes of a micro-batch on a stage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weight gradients"


class StageAction(NamedTuple):
    """What is computed, of which micro-batch, on which stage.

    what: FORWARD, BACKWARD or WEIGHTS. If a schedule computes WEIGHTS separately, BACKWARD computes only the
    gradients of the inputs.
    """

    what: str
    microbatch: int
    stage: int


class ActionObserver:
    """Calls `on_begin` at the begin of each action, and what that returns at its end."""

    def __init__(self) -> None:
        self.on_begin: Callable[[StageAction], Callable[[], None]] | None = None

    @contextmanager
    def during(self, what: str, microbatch: int, stage: int) -> Iterator[None]:
        if self.on_begin is None:
            yield
            return
        end = self.on_begin(StageAction(what, microbatch, stage))
        try:
            yield
        finally:
            end()
