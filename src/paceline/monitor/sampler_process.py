"""Start the sampler of a node, and report if it fails."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import paceline
from paceline.monitor.sample_writer import CONTINUES

MAX_TEXT_BYTES = 2**14
STOP_S = 5.0


class SamplerProcess:
    """The sampler of this node, a child of this process. A failure of it never raises.

    run     the folder of the run
    every_s seconds between two samples
    rank, local_size, size  the rank of this process, the number of ranks of this node, and of all
    """

    def __init__(self, run: Path, every_s: float, rank: int, local_size: int, size: int):
        self._process: subprocess.Popen[bytes] | None = None
        self._notes: list[str] = []
        self._error = ""  # the last line that the sampler wrote before it ended
        words = [str(run.absolute()), str(os.getpid()), str(every_s), str(rank), str(local_size), str(size)]
        root = str(Path(paceline.__file__).parents[1])
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
        try:
            self._process = subprocess.Popen(
                # -P: a file of the user named psutil.py or json.py must not be imported
                [sys.executable, "-P", "-m", "paceline.monitor.sampler_main", *words],
                env=os.environ | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            assert self._process.stderr is not None
            os.set_blocking(self._process.stderr.fileno(), False)
        except OSError as error:
            self._notes.append(f"this node is not sampled: {error.strerror}")

    @property
    def pid(self) -> int | None:
        """The process id; None if it does not run."""
        return self._process.pid if self._process is not None else None

    def new_notes(self) -> list[str]:
        """Return sentences about failures since the last call."""
        notes, self._notes = self._notes, []
        if self._process is None:
            return notes
        status = self._process.poll()
        for line in self._read():
            if line.startswith(CONTINUES):
                notes.append(line)
            else:
                self._error = line
        if status is None:
            return notes
        self._close()
        if status:
            why = self._error or _describe_status(status)
            notes.append(f"the sampler of this node ended, so that later samples are missing: {why}")
        return notes

    def _read(self) -> list[str]:
        assert self._process is not None
        assert self._process.stderr is not None
        with contextlib.suppress(BlockingIOError, OSError):
            data = os.read(self._process.stderr.fileno(), MAX_TEXT_BYTES)
            return [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        return []

    def _close(self) -> None:
        if self._process is not None and self._process.stderr is not None:
            self._process.stderr.close()
        self._process = None

    def stop(self) -> None:
        """End the sampler. Its file is complete at any time."""
        if self._process is None:
            return
        self._process.kill()
        # A file system that does not answer must not delay the end of the training.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._close()


def _describe_status(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
