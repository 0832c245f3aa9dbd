"""Open existing runs."""

import os
from pathlib import Path

from paceline import spec as spec_file
from paceline.errors import RunError
from paceline.run.folder import RunFolder


def open_run(path: Path, needs_request: bool = True) -> RunFolder:
    """Return an existing run. Raises RunError if `path` is not a run folder, or is damaged.

    needs_request: False accepts the folder of a user's own loop, too, which has no spec.toml.
    """
    if not path.is_dir():
        neighbours = [str(run) for run in path.parent.glob("*/spec.toml")] if path.parent.is_dir() else []
        raise RunError(
            f"no such run: {path}"
            + spec_file.suggest(str(path), [str(Path(run).parent) for run in neighbours[-20:]])
        )
    is_own_loop = not needs_request and (path / "ranks").is_dir() and not (path / "events.jsonl").exists()
    if not is_own_loop and not (path / "spec.toml").is_file():
        raise RunError(f"{path} is not a run folder: it has no spec.toml")
    for names, is_right, kind in ((FOLDERS, Path.is_dir, "folder"), (FILES, Path.is_file, "file")):
        for file in (path / name for name in names):
            if os.path.lexists(file) and not is_right(file):
                raise RunError(f"{file} must be a {kind} in a run folder; move it away")
    return RunFolder(path)


FOLDERS = ("ckpt", "figures", "ranks", "tensorboard", "traces", "monitor")
FILES = (
    "provenance.json",
    "profile.json",
    "job.sh",
    "job",
    "events.jsonl",
    "log.txt",
    "lock",
    "diagnosis.txt",
    "suspects.jsonl",
)


def find_latest() -> Path:
    """Return the run in runs/ that was written to last. Raises RunError if there is no run."""

    def modified(run: Path) -> float:
        return max(
            file.stat().st_mtime for file in (run / "spec.toml", run / "events.jsonl") if file.exists()
        )

    runs = [path.parent for path in Path("runs").glob("*/spec.toml")]
    if not runs:
        raise RunError("no runs in runs/; specify the folder of a run")
    return max(runs, key=modified)
