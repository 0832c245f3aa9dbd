"""The folder of a run: its files, its creation, its origin."""

from paceline.run.creation import choose_path, create, create_folder, release, reserve
from paceline.run.existing import find_latest, open_run
from paceline.run.folder import RUNS, RunFolder
from paceline.run.provenance import collect_provenance

__all__ = [
    "RUNS",
    "RunFolder",
    "choose_path",
    "collect_provenance",
    "create",
    "create_folder",
    "find_latest",
    "open_run",
    "release",
    "reserve",
]
