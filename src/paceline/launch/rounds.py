"""The starts of ranks over several nodes: which nodes were there, and which were lost between two of them."""

import contextlib
from collections.abc import Sequence

from paceline import events
from paceline.doctor.ask import beats
from paceline.errors import RankError
from paceline.events import Failed, Started, Step
from paceline.run import RunFolder


class Rounds:
    """`speaks`: whether this agent writes down what happened between two starts."""

    def __init__(self, run: RunFolder, speaks: bool):
        self.run, self.speaks = run, speaks
        self.count = 0
        self._names: list[str] = []
        self._ranks: dict[int, str] = {}  # of the last start, and where each was
        self._from = events.end(run.events)

    def begin(self, names: Sequence[str]) -> None:
        """The ranks are about to start on these nodes."""
        self.count += 1
        if self.speaks and self.count > 1:
            self._tell(names)
        self._names, self._from = list(names), events.end(self.run.events)

    def too_few(self, least: int) -> RankError:
        lost, step = self._why(()), self._step()
        return RankError(
            f"{lost or 'nodes were lost'}, after step {step}; fewer nodes than the least, {least}, came together; {self.run.way_out()}"
        )

    def _tell(self, names: Sequence[str]) -> None:
        why, step = self._why(names), self._step()
        if why is None:
            return
        on = f"{len(names)} node{'s' * (len(names) > 1)}"
        message = f"{why}, after step {step}; all ranks are started again on {on}: {', '.join(names)}"
        with contextlib.closing(events.Writer(self.run.events)) as writer:
            writer.write(Failed(what="node", step=step, rank=None, message=message))

    def _why(self, names: Sequence[str]) -> str | None:
        """Why the last start ended: nodes that did not come back, else what a rank said, else ranks that said nothing."""
        told = {event.rank: event for event in self._last() if isinstance(event, Failed) and event.what == "run"}
        ranks = {one.rank: one.host for one in beats(self.run) if one is not None}
        lost = {host: [str(rank) for rank, its in ranks.items() if its == host] for host in self._names if host not in names}
        silent = [rank for rank in ranks if rank not in told]
        if names and lost:
            each = [f"node {host} with rank{'s' * (len(its) > 1)} {', '.join(its)}" for host, its in lost.items()]
            return f"{' and '.join(each)} was lost"
        if own := [event for event in told.values() if not event.lost_peer]:
            return f"rank {own[0].rank} failed: {own[0].message}"
        if silent:
            where = sorted({ranks[rank] for rank in silent})
            return f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} on {', '.join(where)} ended without a word"
        return None

    def _last(self) -> list[events.Event]:
        happened = list(events.read(self.run.events, self._from)) if self.run.events.exists() else []
        return happened[max((at for at, event in enumerate(happened) if isinstance(event, Started)), default=0) :]

    def _step(self) -> int:
        return max((event.step for event in self._last() if isinstance(event, (Started, Step))), default=0)
