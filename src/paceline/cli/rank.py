"""paceline rank: one rank of our own launcher. Not for people."""

from pathlib import Path


def rank(run: Path, launcher: int) -> None:
    """Train the request of a run as the rank that the environment says; `launcher` is the process that started it."""
    from paceline.launch.rank import run_started
    from paceline.launch.world import world
    from paceline.run import open_run

    run_started(open_run(run), world(), launcher)
