"""Decides when all ranks restart because a node joins a running training, or leaves it on request.

A node that joins waits until the training has saved its next checkpoint. The agent of the first node notices
the checkpoint, and tells the other agents through the store of the current start.
"""

import torch.distributed as dist

from paceline.run import RunFolder

KEY = "regroup"


class Regroup:
    """A request to restart all ranks on the nodes that are there.

    is_reporter: whether this agent decides when nodes join.
    """

    def __init__(self, run: RunFolder, is_reporter: bool):
        self._run, self._is_reporter = run, is_reporter
        self._store: dist.Store | None = None
        self._first_seen: list[int] | None = None  # checkpoints when a node began to wait

    def begin(self, store: dist.Store) -> None:
        """Call at each start, with the store of the agents of this start."""
        self._store, self._first_seen = store, None

    def request(self) -> None:
        """Ask all agents to restart their ranks."""
        if self._store is not None:
            self._store.set(KEY, "")

    def is_due(self) -> bool:
        """Return whether all ranks restart."""
        return self._store is not None and self._store.check([KEY])

    def poll(self, num_waiting: int) -> bool:
        """Return whether all ranks restart. The reporter decides it from the number of waiting nodes."""
        if self._is_reporter and num_waiting and self._is_saved():
            self.request()
        elif not num_waiting:
            self._first_seen = None
        return self.is_due()

    def _is_saved(self) -> bool:
        """Return whether a checkpoint was completed since the first call."""
        steps = self._run.checkpoints()
        if self._first_seen is None:
            self._first_seen = steps
        return bool(steps) and steps[-1:] != self._first_seen[-1:]
