"""Nodes that were found to corrupt data while this training ran, which restarts leave out."""

from paceline.run import RunFolder
from paceline.training.guard.suspects import Suspect, read_suspects


class Quarantine:
    """The nodes of ranks that certainly held corrupted weights, since this object exists."""

    def __init__(self, run: RunFolder):
        self._run, self._known = run, len(read_suspects(run))

    def find(self, host: str) -> Suspect | None:
        """Return why a node is left out, or None if nothing is known against it."""
        found = read_suspects(self._run)[self._known :]
        return next((suspect for suspect in found if suspect.certain and suspect.host == host), None)
