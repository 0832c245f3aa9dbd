"""RunFolder: the one place that knows the file names of a run."""

import contextlib
import fcntl
import getpass
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from paceline import spec as spec_file
from paceline.errors import RunError
from paceline.files import has_open, open_regular
from paceline.spec import Launch, Spec
from paceline.version import __version__

STEP = re.compile("step_(0|[1-9][0-9]*)")
JOB = re.compile("[0-9]+(_[0-9]+)?")
NAME_BYTES = 200  # of a run's folder; what is made of its name must be no longer than file systems take
RUNS = Path("runs")  # where runs go that no --run-dir names


@dataclass(frozen=True)
class RunFolder:
    """A run is a folder of plain files:

    spec.toml         the request, resolved and with a checksum; `paceline train spec.toml` starts the like again
    spec.next.toml    the request of a resume, until its ranks have started; then it takes the place of spec.toml
    provenance.json   where it came from: git revision, versions, host, command
    job.sh            the script that a scheduler runs; it may be submitted again by hand
    job               the number of the last such job
    events.jsonl      what happened, append only
    log.txt           the same for people
    ckpt/step_N/      complete checkpoints; whatever else lies in ckpt/ is not one
    ranks/N.log       what rank N wrote on its standard output and error
    ranks/N.alive     what rank N is at, written about once a second; N.said and N.stacks: more of that, when asked by ranks/asked
    ranks/N.unfinished  there from the start of rank N until it has done all that it has to do
    diagnosis.txt     why it did not go on, the last time that it did not
    tensorboard/      scalars
    """

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "spec.toml"

    @property
    def next_spec(self) -> Path:
        return self.path / "spec.next.toml"

    @property
    def provenance(self) -> Path:
        return self.path / "provenance.json"

    @property
    def job_script(self) -> Path:
        return self.path / "job.sh"

    @property
    def job(self) -> str | None:
        """The last job of a scheduler that was to train this run."""
        path = self.path / "job"
        if not path.exists():
            return None
        try:
            said = path.read_text(errors="replace").strip()
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from error
        if not JOB.fullmatch(
            said
        ):  # it may be the run of somebody else, and Slurm would take it for an option
            raise RunError(f"{path} says {said[:40]!r}, which is no number of a job; delete it")
        return said

    def write_job(self, number: str) -> None:
        (self.path / "job").write_text(f"{number}\n")

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    @property
    def ckpt(self) -> Path:
        return self.path / "ckpt"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def checkpoint(self, step: int) -> Path:
        return self.ckpt / f"step_{step}"

    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        if not self.ckpt.is_dir():
            return []
        found = {path: STEP.fullmatch(path.name) for path in self.ckpt.iterdir()}
        return sorted(int(step[1]) for path, step in found.items() if step is not None and path.is_dir())

    def hint(self) -> str:
        """After a failure."""
        kept = self.checkpoints()
        return (
            f"go on from step {kept[-1]} with: paceline resume {self.path}"
            if kept
            else "no checkpoint was written yet"
        )

    def rank_log(self, rank: int, attempt: int = 0) -> Path:
        return self.ranks / (f"{rank}.restart-{attempt}.log" if attempt else f"{rank}.log")

    def alive(self, rank: int) -> Path:
        return self.ranks / f"{rank}.alive"

    def unfinished(self, rank: int) -> Path:
        """Made by what starts a rank, deleted by the rank when the training is over: also a full disk lets files be deleted."""
        return self.ranks / f"{rank}.unfinished"

    def said(self, rank: int) -> Path:
        return self.ranks / f"{rank}.said"

    def stacks(self, rank: int) -> Path:
        return self.ranks / f"{rank}.stacks"

    @property
    def asked(self) -> Path:
        return self.ranks / "asked"

    @property
    def diagnosis(self) -> Path:
        return self.path / "diagnosis.txt"

    def request(self) -> tuple[Spec, Launch]:
        """What the run was last started with. Raises SpecError where the file is not whole."""
        return spec_file.load_own(self.spec, {})

    def next_request(self) -> tuple[Spec, Launch]:
        """What the ranks are to train: the request of a resume, if there is one that has not started yet."""
        return spec_file.load_own(self.next_spec if self.next_spec.exists() else self.spec, {})

    def write_request(self, spec: Spec, launch: Launch) -> None:
        """Replace the request of the run, and with it that of a resume."""
        self.write_next_request(spec, launch)
        self.accept_next_request()

    def write_next_request(self, spec: Spec, launch: Launch) -> None:
        beside = self.spec.with_suffix(".tmp")
        spec_file.save(beside, spec, launch)
        beside.replace(self.next_spec)

    def accept_next_request(self) -> None:
        """The ranks have started with it."""
        with contextlib.suppress(FileNotFoundError):  # accepted before, or the run is new
            self.next_spec.replace(self.spec)

    def delete(self) -> None:
        """Delete the run, and the folder of runs that nobody named if it was the last one there."""
        shutil.rmtree(self.path)
        if self.path.parent == RUNS:
            with contextlib.suppress(OSError):  # there are other runs
                RUNS.rmdir()

    def job_log(self) -> Path | None:
        """What the last job of this run wrote, if it has written yet."""
        lines = self.job_script.read_text(errors="replace").splitlines() if self.job_script.is_file() else []
        said = ""
        with contextlib.suppress(ValueError):  # a quotation without its end: the script is damaged
            said = next((shlex.split(line)[1] for line in lines if line.startswith("#SBATCH --output=")), "")
        name = re.sub(
            "%([0-9]*)([a-zA-Z])", lambda found: self.job or "*" if found[2] == "j" else "*", Path(said).name
        )
        return (
            max(self.path.glob(name), key=lambda path: path.stat().st_mtime, default=None) if name else None
        )

    def is_locked(self) -> bool:
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
        """Where the run came from, as far as that is known, and why it is not, where its file is damaged."""
        try:
            with open_regular(self.provenance) as file:
                found = json.loads(file.read(2**22))
        except FileNotFoundError:
            return {}, ""
        except (OSError, ValueError, RecursionError) as error:
            return {}, f"skipped damaged {self.provenance}: {error}"
        return (
            (found, "")
            if isinstance(found, dict)
            else ({}, f"skipped damaged {self.provenance}: it holds no object")
        )

    def holder(self) -> str:
        """Who has locked it: process N on HOST."""
        return (self.path / "lock").read_text(errors="replace").strip() or "another process"

    def is_held_by(self, pid: int) -> bool:
        return has_open(pid, self.path / "lock")

    def lock(self, wait_s: float = 20.0) -> IO[str]:
        """Hold the run until the returned file is closed or this process ends. Raises RunError when another one holds it."""
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


def default_path(path: str | None, task: str) -> Path:
    """Where a new run goes: `path`, or runs/TASK-TIME. Raises RunError when `path` exists."""
    if path is not None:
        found = Path(path)
        if len(os.fsencode(found.name)) > NAME_BYTES:
            raise RunError(
                f"the run's folder {found.name[:20]}… has a name of {len(found.name)} characters; say a shorter --run-dir"
            )
        if os.path.lexists(found):
            raise _exists(found)
        return found
    name = re.sub(r"\W+", "-", task.rpartition(":")[2]).strip("-").lower()
    stem = f"{RUNS}/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (Path(stem + (f"-{k}" if k > 1 else "")) for k in itertools.count(1))
    return next(found for found in names if not found.exists() and not _claim(found).exists())


def reserve(path: str | None, task: str) -> Path:
    """The same; a name that nobody asked for is given to nobody else until `create` has made it, or `release` gives it back.

    Raises RunError where nothing can be written."""
    found = default_path(path, task)
    if path is not None:
        return found
    try:
        found.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise _cannot_make(found, error) from error
    try:
        _claim(found).touch(exist_ok=False)
    except (FileExistsError, FileNotFoundError):  # taken, or the folder was given back meanwhile
        return reserve(path, task)
    except OSError as error:
        raise _cannot_make(found, error) from error
    if found.exists():  # made between two looks
        release(found)
        return reserve(path, task)
    return found


def release(path: Path) -> None:
    """Nothing is left of a name that was reserved, if it was."""
    with contextlib.suppress(OSError):  # it was not, or there are runs beside it
        _claim(path).unlink()
        path.parent.rmdir()


def _claim(path: Path) -> Path:
    return path.with_name(f".{path.name}")


def create(path: Path, spec: Spec, launch: Launch) -> RunFolder:
    """A new run, with its request and where it came from. Raises RunError when the folder exists or cannot be made."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise _cannot_make(path, error) from error
    release(path)
    run = RunFolder(path)
    run.write_request(spec, launch.model_copy(update={"run": None}))
    run.provenance.write_text(json.dumps(provenance(), indent=2) + "\n")
    return run


def _cannot_make(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot make the run folder {path}: {error.strerror}")


def _exists(path: Path) -> RunError:
    hint = f"go on with it: paceline resume {path}" if (path / "spec.toml").exists() else "it is no run"
    return RunError(f"{path} exists already; say another --run-dir ({hint})")


def open_run(path: Path) -> RunFolder:
    """An existing run. Raises RunError for what is none."""
    if not path.is_dir():
        near = [str(run) for run in path.parent.glob("*/spec.toml")] if path.parent.is_dir() else []
        raise RunError(
            f"there is no run {path}"
            + spec_file.nearest(str(path), [str(Path(run).parent) for run in near[-20:]])
        )
    if not (path / "spec.toml").is_file():
        raise RunError(f"{path} is no run: it has no spec.toml")
    for names, is_right, kind in ((FOLDERS, Path.is_dir, "folder"), (FILES, Path.is_file, "file")):
        for found in (path / name for name in names):
            if os.path.lexists(found) and not is_right(found):
                raise RunError(f"{found} is no {kind}, as it is in a run; move it away")
    return RunFolder(path)


FOLDERS = ("ckpt", "ranks", "tensorboard")
FILES = ("provenance.json", "job.sh", "job", "events.jsonl", "log.txt", "lock", "diagnosis.txt")


def latest() -> Path:
    """The run in runs/ that something was last written to. Raises RunError where there is none."""

    def written(run: Path) -> float:
        return max(
            file.stat().st_mtime for file in (run / "spec.toml", run / "events.jsonl") if file.exists()
        )

    runs = [path.parent for path in Path("runs").glob("*/spec.toml")]
    if not runs:
        raise RunError("there is no run in runs/ here; name its folder")
    return max(runs, key=written)


def provenance() -> dict[str, Any]:
    """Where a run came from. What cannot be known is left out."""

    def git(*words: str) -> str | None:
        try:
            return subprocess.run(
                ["git", *words], capture_output=True, text=True, check=True, timeout=5
            ).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    from paceline.cluster.cpu import cpu

    facts = {
        "command": sys.argv,
        "folder": os.getcwd(),
        "host": platform.node(),
        "user": getpass.getuser(),
        "system": platform.platform(),
        "processor": cpu().name or None,
        "python": platform.python_version(),
        "packages": {"paceline": __version__}
        | {name: found for name in ("torch", "numpy") if (found := installed(name))},
        "git_revision": git("rev-parse", "HEAD"),
        "git_changed": bool(changed)
        if (changed := git("status", "--porcelain", "--untracked-files=no")) is not None
        else None,
    }
    return {key: value for key, value in facts.items() if value is not None}
