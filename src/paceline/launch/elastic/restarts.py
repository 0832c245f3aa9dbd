"""The starts of ranks over several nodes: which nodes were there, and which were lost between two of them."""

from collections.abc import Sequence

from paceline import events
from paceline.doctor.rank_state import read_heartbeats
from paceline.errors import RankError
from paceline.events import Failed
from paceline.launch.failure_cause import last_words, words
from paceline.run import RunFolder
from paceline.units import numbered, several


class RestartLog:
    """`speaks`: whether this agent writes down what happened between two starts."""

    def __init__(self, run: RunFolder, speaks: bool):
        self.run, self.speaks = run, speaks
        self.count = 0
        self._names: list[str] = []
        self._from = events.end(run.events)

    def begin(self, names: Sequence[str]) -> None:
        """The ranks are about to start on these nodes."""
        self.count += 1
        if self.speaks and self.count > 1:
            self._tell(names)
        self._names, self._from = list(names), events.end(self.run.events)

    def too_few(self, least: int) -> RankError:
        lost, step = self._why(())
        return RankError(
            f"{lost or 'nodes were lost'}, after step {step}; fewer nodes than the least, {least}, came together; {self.run.hint()}"
        )

    def _tell(self, names: Sequence[str]) -> None:
        why, step = self._why(names)
        if why is None:
            return
        on = several(len(names), "node")
        message = f"{why}, after step {step}; all ranks are started again on {on}: {', '.join(names)}"
        events.append(self.run.events, Failed(what="node", step=step, rank=None, message=message))

    def _why(self, names: Sequence[str]) -> tuple[str | None, int]:
        """Why the last start ended, and after which step: nodes that did not come back, else what a rank said, else ranks that said
        nothing."""
        told, step = last_words(self.run, self._from)
        ranks = {one.rank: one.host for one in read_heartbeats(self.run) if one is not None}
        lost = {
            host: [rank for rank, its in ranks.items() if its == host]
            for host in self._names
            if host not in names
        }
        if names and lost:
            each = " and ".join(f"node {host} with {numbered('rank', its)}" for host, its in lost.items())
            return f"{each} {'were' if len(lost) > 1 else 'was'} lost", step
        if own := [event for event in told.values() if not event.lost_peer]:
            return words(own[0]), step
        if silent := [rank for rank in ranks if rank not in told]:
            return (
                f"{numbered('rank', silent)} on {', '.join(sorted({ranks[rank] for rank in silent}))} ended without a word",
                step,
            )
        return None, step
