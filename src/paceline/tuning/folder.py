"""StudyFolder: the file names of a study."""

import os
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RunError
from paceline.run import RunFolder, choose_path
from paceline.spec import suggest


@dataclass(frozen=True)
class StudyFolder:
    """The folder of a study.

    study.toml      the request, the space and the search; `paceline tune study.toml` repeats it
    events.jsonl    the journal, append only, which one controller writes
    lock            held by the controller
    best.toml       the request of the best trial, for `paceline train`
    trials/N/       the run folder of trial N
    job.sh          the script of the job array, with --array
    logs/N.txt      what the launcher of trial N printed
    """

    path: Path

    @property
    def definition(self) -> Path:
        return self.path / "study.toml"

    @property
    def journal(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def best(self) -> Path:
        return self.path / "best.toml"

    @property
    def job_script(self) -> Path:
        return self.path / "job.sh"

    @property
    def trials(self) -> Path:
        return self.path / "trials"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def run(self, trial: int) -> RunFolder:
        """Return the run folder of a trial."""
        return RunFolder(self.trials / str(trial))

    def log(self, trial: int) -> Path:
        """Return the path of what the launcher of a trial printed."""
        return self.logs / f"{trial}.txt"


def is_study(path: Path) -> bool:
    """Return whether a folder is a study."""
    return (path / "study.toml").is_file()


def open_study(path: Path) -> StudyFolder:
    """Return an existing study. Raises RunError."""
    if not is_study(path):
        neighbours = [str(file.parent) for file in path.parent.glob("*/study.toml")]
        what = "is not a study: it has no study.toml" if path.is_dir() else "does not exist"
        raise RunError(f"{path} {what}{suggest(str(path), neighbours[-20:])}")
    return StudyFolder(path)


def open_own_study(path: Path) -> StudyFolder:
    """Return an existing study whose task may be imported. Raises RunError if it belongs to another user."""
    folder = open_study(path)
    if (owner := folder.definition.stat().st_uid) not in (0, os.geteuid()):
        raise RunError(
            f"{folder.definition} belongs to user {owner}, whose task would run; look at it with: "
            f"paceline watch {path}"
        )
    return folder


def choose_study(path: str | None, task: str) -> StudyFolder:
    """Return the folder of a new study, by default runs/TASK-tune-TIME. Raises RunError if it exists."""
    return StudyFolder(choose_path(path, f"{task.rpartition(':')[2]}-tune"))


def create_study(path: str | None, task: str) -> StudyFolder:
    """Create the folder of a new study, as `choose_study` names it. Raises RunError."""
    chosen = choose_study(path, task).path
    try:
        for folder in (chosen, chosen / "trials", chosen / "logs"):
            folder.mkdir(parents=folder is chosen)
    except OSError as error:
        raise RunError(f"cannot create the folder of the study, {chosen}: {error.strerror}") from error
    return StudyFolder(chosen)
