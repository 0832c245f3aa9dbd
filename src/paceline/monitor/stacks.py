"""Python stacks of processes that were not prepared for it, by py-spy."""

import shutil
import subprocess
from collections.abc import Mapping

from paceline.units import several, without_controls

LIMIT_S = 10.0  # time for one process
MAX_PROCESSES = 16
MISSING = "py-spy is not installed (pip install py-spy)"


def dump_stacks(pids: Mapping[int, int]) -> list[str]:
    """Return the stacks of ranks as lines of text. A stack that cannot be read is replaced by the reason.

    pids: process ids by rank
    """
    program = shutil.which("py-spy")
    if program is None:
        return [f"stacks are missing: {MISSING}"]
    lines = []
    for rank, pid in list(pids.items())[:MAX_PROCESSES]:
        lines += [f"rank {rank} (process {pid}):", *(f"  {line}" for line in _dump(program, pid))]
    if len(pids) > MAX_PROCESSES:
        lines.append(f"stacks of {several(len(pids) - MAX_PROCESSES, 'more rank')} are left out")
    return lines


def _dump(program: str, pid: int) -> list[str]:
    try:
        # Without --nonblocking py-spy would stop the process while it reads.
        result = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return [f"stack is missing: py-spy did not answer within {LIMIT_S:g} s"]
    except OSError as error:
        return [f"stack is missing: {error.strerror}"]
    text = result.stdout if result.returncode == 0 else result.stderr
    lines = [without_controls(line).rstrip() for line in text.splitlines() if line.strip()]
    return lines if result.returncode == 0 else [f"stack is missing: {' '.join(lines) or 'py-spy failed'}"]
