"""The starts of ranks on several nodes, and the nodes that were lost or joined between two starts."""

import platform
from collections import Counter
from collections.abc import Sequence

from paceline import events
from paceline.doctor.rank_state import read_heartbeats
from paceline.errors import RankError
from paceline.events import Failed, Noted
from paceline.launch.elastic.quarantine import Quarantine
from paceline.launch.failure_cause import describe_failure, read_failures
from paceline.run import RunFolder
from paceline.units import numbered, several


class RestartLog:
    """Writes to the events why ranks restarted.

    is_reporter: False for all but one of the agents, which write nothing.
    """

    def __init__(self, run: RunFolder, is_reporter: bool):
        self.run, self.is_reporter = run, is_reporter
        self._quarantine = Quarantine(run)
        self.count = 0
        self.names: list[str] = []  # nodes of the current start
        self._begin = events.end(run.events)

    def begin(self, names: Sequence[str], is_regrouped: bool) -> None:
        """Call before ranks start on the nodes with these names.

        is_regrouped: whether the ranks were asked to restart because nodes joined or left.
        """
        self.count += 1
        if self.is_reporter and self.count > 1:
            if is_regrouped:
                self._log_regrouping(names)
            else:
                self._log_restart(names)
        self.names, self._begin = list(names), events.end(self.run.events)

    def is_left_out(self, least: int) -> bool:
        """Return whether this node corrupted data, and at least `least` others can restart without it."""
        rest = [name for name in self.names if self._quarantine.find(name) is None]
        return self._quarantine.find(platform.node()) is not None and len(rest) >= max(least, 1)

    def too_few_nodes(self, least: int) -> RankError:
        """Return the error of a restart for which fewer than `least` nodes are left."""
        cause, step = self._find_cause(())
        return RankError(
            f"{cause or 'nodes were lost'}, after step {step}; a restart requires at least {least} nodes; "
            f"{self.run.hint()}"
        )

    def _log_regrouping(self, names: Sequence[str]) -> None:
        _, step = read_failures(self.run, self._begin)
        joined, left = _subtract(names, self.names), _subtract(self.names, names)
        changes = [
            f"{'nodes' if len(nodes) > 1 else 'node'} {' and '.join(nodes)} {what}"
            for nodes, what in ((joined, "joined"), (left, "left"))
            if nodes
        ]
        what = " and ".join(changes) or "a node joined and left"
        nodes = several(len(names), "node")
        message = f"{what}, after step {step}; all ranks are restarted on {nodes}: {', '.join(names)}"
        events.append(self.run.events, Noted(step=step, message=message))

    def _log_restart(self, names: Sequence[str]) -> None:
        cause, step = self._find_cause(names)
        if cause is None:
            return
        nodes = several(len(names), "node")
        message = f"{cause}, after step {step}; all ranks are restarted on {nodes}: {', '.join(names)}"
        events.append(self.run.events, Failed(what="node", step=step, rank=None, message=message))

    def _find_cause(self, names: Sequence[str]) -> tuple[str | None, int]:
        """Return why the last start ended, and its last step.

        The cause is nodes that are lost, else the failure that a rank reported, else ranks that reported
        nothing.
        """
        reports, step = read_failures(self.run, self._begin)
        hosts = {beat.rank: beat.host for beat in read_heartbeats(self.run) if beat is not None}
        lost = {
            name: [rank for rank, host in hosts.items() if host == name]
            for name in self.names
            if name not in names
        }
        if names and (corrupt := [found for name in lost if (found := self._quarantine.find(name))]):
            nodes = " and ".join(found.host for found in corrupt)
            return f"{corrupt[0].what}; node {nodes} is left out", step
        if names and lost:
            nodes = " and ".join(
                f"node {name} with {numbered('rank', ranks)}" for name, ranks in lost.items()
            )
            return f"{nodes} {'were' if len(lost) > 1 else 'was'} lost", step
        if causes := [event for event in reports.values() if not event.lost_peer]:
            return describe_failure(causes[0]), step
        if silent := [rank for rank in hosts if rank not in reports]:
            on_hosts = ", ".join(sorted({hosts[rank] for rank in silent}))
            return f"{numbered('rank', silent)} on {on_hosts} ended without an error message", step
        return None, step


def _subtract(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Return the names that are not among the others; a name counts as often as it is given."""
    return sorted((Counter(names) - Counter(others)).elements())
