"""RunFolder: the only place that knows the file names of a run."""

import contextlib
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline import spec as spec_file
from paceline.errors import RunError
from paceline.files import has_open, open_regular
from paceline.spec import Launch, Spec

STEP = re.compile("step_(0|[1-9][0-9]*)")
JOB = re.compile("[0-9]+(_[0-9]+)?")
RUNS = Path("runs")  # contains the runs that no --run-dir names


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run: its paths, its request and its lock.

        run = paceline.RunFolder(Path("runs/a"))
        spec, launch = run.request()
        print(run.checkpoints(), run.events)

    The folder contains plain files:

    spec.toml           the request, with all defaults and a checksum; `paceline train spec.toml` repeats it
    spec.next.toml      the request of a resume, until its ranks have started; then it replaces spec.toml
    provenance.json     origin of the run: git revision, versions, host, command
    profile.json        measured and predicted parts of a step, written by `paceline profile`
    job.sh              the script that a scheduler runs; it may be submitted again by hand
    job                 the number of the last job of that script
    events.jsonl        the events of the run, append only
    log.txt             the events as text
    ckpt/step_N/        complete checkpoints; other names in ckpt/ are not checkpoints
    ranks/N.log         standard output and error of rank N
    ranks/N.alive       heartbeat of rank N, written about once a second
    suspects.jsonl      ranks that held corrupted weights, append only
    ranks/asked         a question of `paceline doctor`; ranks/N.said and N.stacks are the answers of rank N
    ranks/N.unfinished  exists from the start of rank N until it has finished
    diagnosis.txt       the cause of the last stall
    monitor/NODE.csv    samples of the node, append only
    report.html         the report of the run, written at its end
    mlflow.json         the run of MLflow to which this run was sent, and how far
    figures/NAME/       images of `Task.figures`, one of each evaluation
    tensorboard/        scalars
    traces/             traces of steps, in a folder for each range of steps

    RunFolder itself creates and checks nothing. Methods that read a damaged file raise RunError or SpecError.
    """

    path: Path

    @property
    def spec(self) -> Path:
        """Path of the request."""
        return self.path / "spec.toml"

    @property
    def next_spec(self) -> Path:
        """Path of the request of a resume that has not started yet."""
        return self.path / "spec.next.toml"

    @property
    def provenance(self) -> Path:
        """Path of the origin of the run."""
        return self.path / "provenance.json"

    @property
    def profile(self) -> Path:
        """Path of the last result of `paceline profile`."""
        return self.path / "profile.json"

    @property
    def job_script(self) -> Path:
        """Path of the job script."""
        return self.path / "job.sh"

    @property
    def job(self) -> str | None:
        """The number of the scheduler's last job for this run, or None. Raises RunError."""
        path = self.path / "job"
        if not path.exists():
            return None
        try:
            number = path.read_text(errors="replace").strip()
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from error
        # Another user may own the run, and Slurm could take the text for an option.
        if not JOB.fullmatch(number):
            raise RunError(f"{path} must contain the number of a job, got {number[:40]!r}; delete it")
        return number

    def write_job(self, number: str) -> None:
        """Write the number of the run's job."""
        (self.path / "job").write_text(f"{number}\n")

    @property
    def events(self) -> Path:
        """Path of the events, which `paceline.events` reads."""
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        """Path of the events as text."""
        return self.path / "log.txt"

    @property
    def ckpt(self) -> Path:
        """Path of the folder of the checkpoints."""
        return self.path / "ckpt"

    @property
    def ranks(self) -> Path:
        """Path of the folder with the files of each rank."""
        return self.path / "ranks"

    @property
    def suspects(self) -> Path:
        """Path of the list of ranks that were found to corrupt data."""
        return self.path / "suspects.jsonl"

    @property
    def temporary(self) -> Path:
        """Path of a file in a folder that is deleted when the training ends."""
        return self.path / "temporary"

    @property
    def is_temporary(self) -> bool:
        """Whether the folder is deleted when the training ends, so that no checkpoints are saved in it."""
        return self.temporary.exists()

    @property
    def tensorboard(self) -> Path:
        """Path of the folder of TensorBoard's scalars."""
        return self.path / "tensorboard"

    @property
    def figures(self) -> Path:
        """Path of the folder of the images that `Task.figures` returns."""
        return self.path / "figures"

    @property
    def traces(self) -> Path:
        """Path of the folder of the traces."""
        return self.path / "traces"

    @property
    def monitor(self) -> Path:
        """Path of the folder of the samples, which `paceline.monitor.samples` reads."""
        return self.path / "monitor"

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint after a step."""
        return self.ckpt / f"step_{step}"

    def checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        if not self.ckpt.is_dir():
            return []
        matches = {path: STEP.fullmatch(path.name) for path in self.ckpt.iterdir()}
        return sorted(int(match[1]) for path, match in matches.items() if match is not None and path.is_dir())

    def hint(self) -> str:
        """Return how to continue the run after a failure."""
        if self.is_temporary:
            return "nothing was saved; run=FOLDER saves checkpoints"
        steps = self.checkpoints()
        return (
            f"continue from step {steps[-1]} with: paceline resume {self.path}"
            if steps
            else "no checkpoint was written yet"
        )

    def rank_log(self, rank: int, attempt: int = 0) -> Path:
        """Return the path of a rank's output; `attempt` is the number of restarts before."""
        return self.ranks / (f"{rank}.restart-{attempt}.log" if attempt else f"{rank}.log")

    def alive(self, rank: int) -> Path:
        """Return the path of a rank's heartbeat."""
        return self.ranks / f"{rank}.alive"

    def unfinished(self, rank: int) -> Path:
        """Return the path of a file that exists until the rank has finished.

        The launcher creates it and the rank deletes it, because deleting works on a full disk, too.
        """
        return self.ranks / f"{rank}.unfinished"

    def said(self, rank: int) -> Path:
        """Return the path of a rank's answer to the question in `asked`."""
        return self.ranks / f"{rank}.said"

    def stacks(self, rank: int) -> Path:
        """Return the path of the stacks of a rank's threads."""
        return self.ranks / f"{rank}.stacks"

    @property
    def asked(self) -> Path:
        """Path of the question that `paceline doctor` asks all ranks."""
        return self.ranks / "asked"

    @property
    def diagnosis(self) -> Path:
        """Path of the cause of the last stall."""
        return self.path / "diagnosis.txt"

    def request(self) -> tuple[Spec, Launch]:
        """Return the request with which the run was last started. Raises SpecError if the file is damaged."""
        return spec_file.load_own(self.spec, {})

    def next_request(self) -> tuple[Spec, Launch]:
        """Return the request to train: that of a resume that has not started yet, or else that of the run.

        Raises SpecError if the file is damaged.
        """
        return spec_file.load_own(self.next_spec if self.next_spec.exists() else self.spec, {})

    def write_request(self, spec: Spec, launch: Launch) -> None:
        """Replace the request of the run and that of a resume."""
        self.write_next_request(spec, launch)
        self.accept_next_request()

    def write_next_request(self, spec: Spec, launch: Launch) -> None:
        """Write the request of a resume; `accept_next_request` makes it the request of the run."""
        temporary = self.spec.with_suffix(".tmp")
        spec_file.save(temporary, spec, launch)
        temporary.replace(self.next_spec)

    def accept_next_request(self) -> None:
        """Make the request of a resume that of the run; called when the ranks have started with it."""
        with contextlib.suppress(FileNotFoundError):  # accepted before, or the run is new
            self.next_spec.replace(self.spec)

    def delete(self) -> None:
        """Delete the run, and also the folder `runs` if this was the last run in it."""
        shutil.rmtree(self.path)
        if self.path.parent == RUNS:
            with contextlib.suppress(OSError):  # there are other runs
                RUNS.rmdir()

    def job_log(self) -> Path | None:
        """Return the output file of the last job of this run; None if the job has written nothing yet."""
        lines = self.job_script.read_text(errors="replace").splitlines() if self.job_script.is_file() else []
        output = ""
        with contextlib.suppress(ValueError):  # an unclosed quotation mark: the script is damaged
            output = next(
                (shlex.split(line)[1] for line in lines if line.startswith("#SBATCH --output=")), ""
            )
        name = re.sub(
            "%([0-9]*)([a-zA-Z])",
            lambda match: self.job or "*" if match[2] == "j" else "*",
            Path(output).name,
        )
        return (
            max(self.path.glob(name), key=lambda path: path.stat().st_mtime, default=None) if name else None
        )

    def is_locked(self) -> bool:
        """Return whether a process trains the run. Raises RunError if that cannot be determined."""
        try:
            with open(self.path / "lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise RunError(f"cannot read {self.path / 'lock'}: {error.strerror}") from error
        return False

    def origin(self) -> tuple[dict[str, Any], str]:
        """Return the contents of provenance.json, and a note if it is damaged (else an empty string)."""
        try:
            with open_regular(self.provenance) as file:
                tree = json.loads(file.read(2**22))
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"skipped damaged {self.provenance}: {error}"
        return (
            (tree, "")
            if isinstance(tree, dict)
            else ({}, f"skipped damaged {self.provenance}: it must contain an object")
        )

    def holder(self) -> str:
        """Return the process that locked the run, as `process N on HOST`."""
        return (self.path / "lock").read_text(errors="replace").strip() or "another process"

    def is_held_by(self, pid: int) -> bool:
        """Return whether a process of this user has the lock file open."""
        return has_open(pid, self.path / "lock")

    def lock(self, wait_s: float = 20.0) -> IO[str]:
        """Lock the run until the returned file is closed or this process ends.

        Raises RunError if another process still holds the lock after `wait_s` seconds.
        """
        file = open(self.path / "lock", "a+")  # noqa: SIM115 (open as long as the lock is held)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    file.close()
                    raise RunError(
                        f"{self.path} is being trained by {self.holder()}; wait for it or end it"
                    ) from None
                time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        return file
