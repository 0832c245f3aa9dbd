"""Start the process that sends a run to MLflow, and report its failures. It never delays the training."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import paceline
from paceline.errors import LaunchError
from paceline.run import RunFolder

END_S = 30.0  # how long the end of a training waits for MLflow
RESTART_S = 10.0  # at least between two starts
MAX_BYTES = 2**14
# MLflow would try a request for minutes. It is sent again later in any case.
DEFAULTS = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


def check_mlflow(uri: str | None) -> None:
    """Raise LaunchError if runs should be sent to MLflow, and its client is not installed."""
    if uri is not None and find_spec("mlflow") is None:
        raise LaunchError('--mlflow requires mlflow, which is not installed; pip install "paceline[mlflow]"')


class MlflowProcess:
    """Sends a run to MLflow, in a process of its own. A failure of it never raises."""

    def __init__(self, run: RunFolder):
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._notes: list[str] = []
        self._start()

    def _start(self) -> None:
        self._started = time.monotonic()
        root = str(Path(paceline.__file__).parents[1])
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
        words = [str(self._run.path.absolute()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline.report.mlflow_main", *words],
                env=DEFAULTS | os.environ | {"PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # MLflow prints progress and each retry there
            )
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
        except OSError as error:
            self._notes.append(f"the run is not sent to MLflow: {error.strerror}")

    def new_notes(self) -> list[str]:
        """Return sentences about failures since the last call."""
        self._restart_if_killed()
        notes, self._notes = self._notes, []
        return notes + self._read()

    def _read(self) -> list[str]:
        if self._process is not None and self._process.stdout is not None:
            with contextlib.suppress(BlockingIOError, OSError):
                data = os.read(self._process.stdout.fileno(), MAX_BYTES)
                return [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        return []

    def _restart_if_killed(self) -> None:
        """Start again: a launcher kills all its child processes when it starts ranks again."""
        if self._process is None or time.monotonic() - self._started < RESTART_S:
            return
        if self._process.poll() == -signal.SIGKILL:
            self._close()
            self._start()

    def finish(self) -> list[str]:
        """Send the rest and the files of the run, and return notes. Waits for at most END_S seconds."""
        deadline = time.monotonic() + END_S
        if self._process is not None and self._process.poll() is not None:
            self._close()
            self._start()  # a launcher ends all its processes with the ranks; what was sent is not lost
        if self._process is None:
            return self._notes
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            status: int | None = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
            self._process.kill()
            self._process.wait()
        notes = self._notes + self._read()
        self._close()
        if status is None:
            notes.append(f"MLflow did not answer in {END_S:.0f} s; it lacks the end of this run")
        elif status and not notes:
            notes.append("MLflow lacks the end of this run")
        return notes

    def _close(self) -> None:
        if self._process is not None:
            for file in (self._process.stdin, self._process.stdout):
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.close()
        self._process = None
