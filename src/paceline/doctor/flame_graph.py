"""Flame graphs of the Python stacks of a rank that trains, by py-spy."""

import shutil
import subprocess
from pathlib import Path

from paceline.doctor.rank_state import find_state, is_remote, read_heartbeats
from paceline.errors import RunError
from paceline.files import reason, replaced
from paceline.run import RunFolder
from paceline.units import several, without_controls

RATE_HZ = 100
START_S = 60.0  # that py-spy may take besides the recording
MAX_MESSAGE = 300  # characters


def record_flame_graph(run: RunFolder, rank: int, seconds: int, path: Path) -> None:
    """Sample the stacks of a rank and of its worker processes, and write them as an SVG file.

    The rank is not stopped for it. Raises RunError if the rank does not run on this machine, or if py-spy is
    missing or not permitted.
    """
    if path.suffix != ".svg":
        raise RunError(f"a flame graph is an SVG file, got {path}; name it {path.stem or 'stacks'}.svg")
    program = shutil.which("py-spy")
    if program is None:
        raise RunError("a flame graph requires py-spy, which is not installed; pip install py-spy")
    pid = _find_process(run, rank)
    # Without --nonblocking py-spy would stop the process at each sample.
    command = [program, "record", "--nonblocking", "--subprocesses", "--format", "flamegraph"]
    command += ["--rate", str(RATE_HZ), "--duration", str(seconds), "--pid", str(pid), "--output"]
    with replaced(path) as temporary:
        try:
            result = subprocess.run(
                [*command, str(temporary)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds + START_S,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"py-spy did not end within {seconds + START_S:.0f} s") from None
        except OSError as error:
            raise RunError(f"cannot start py-spy: {reason(error)}") from error
        if result.returncode or not temporary.stat().st_size:
            words = without_controls(" ".join((result.stderr or result.stdout).split()))
            raise RunError(f"py-spy failed on rank {rank} (process {pid}): {words[:MAX_MESSAGE]}")


def _find_process(run: RunFolder, rank: int) -> int:
    """Return the process id of a rank that runs on this machine. Raises RunError."""
    beats = read_heartbeats(run)
    if not beats:
        raise RunError(f"{run.path} has no ranks yet; a flame graph is of a training that runs")
    if rank >= len(beats):
        raise RunError(f"--rank {rank}, but {run.path} has {several(len(beats), 'rank')}, from 0")
    beat = beats[rank]
    state = find_state(beat)
    if beat is None or state != "runs":
        raise RunError(f"rank {rank} of {run.path} does not run; a flame graph is of a training that runs")
    if is_remote(beat):
        raise RunError(f"rank {rank} runs on {beat.host}; run this command there")
    return beat.pid
