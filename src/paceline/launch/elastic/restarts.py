"""The starts of ranks on several nodes, and the nodes that were lost between two starts."""

from collections.abc import Sequence

from paceline import events
from paceline.doctor.rank_state import read_heartbeats
from paceline.errors import RankError
from paceline.events import Failed
from paceline.launch.failure_cause import describe_failure, read_failures
from paceline.run import RunFolder
from paceline.units import numbered, several


class RestartLog:
    """Writes to the events why ranks restarted.

    is_reporter: False for all but one of the agents, which write nothing.
    """

    def __init__(self, run: RunFolder, is_reporter: bool):
        self.run, self.is_reporter = run, is_reporter
        self.count = 0
        self._names: list[str] = []
        self._begin = events.end(run.events)

    def begin(self, names: Sequence[str]) -> None:
        """Call before ranks start on the nodes with these names."""
        self.count += 1
        if self.is_reporter and self.count > 1:
            self._log_restart(names)
        self._names, self._begin = list(names), events.end(self.run.events)

    def too_few_nodes(self, least: int) -> RankError:
        """Return the error of a restart for which fewer than `least` nodes are left."""
        cause, step = self._find_cause(())
        return RankError(
            f"{cause or 'nodes were lost'}, after step {step}; a restart requires at least {least} nodes; "
            f"{self.run.hint()}"
        )

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
            for name in self._names
            if name not in names
        }
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
