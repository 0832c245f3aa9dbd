"""The end of the output of a rank."""

import os

from paceline.errors import RunError
from paceline.files import open_regular
from paceline.run import RunFolder
from paceline.units import is_whole_number, without_controls

MAX_BYTES = 2**16


def read_rank_log(run: RunFolder, rank: str) -> str:
    """Return the last 64 KiB of a rank's output. Raises RunError if there is none."""
    if not is_whole_number(rank):
        raise RunError("rank must be a number")
    path = run.rank_log(int(rank))
    try:
        if path.is_symlink():  # the owner of the run may not be the user of the page
            raise RunError(f"{path} is a link; only regular files are shown")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MAX_BYTES))
            data = file.read(MAX_BYTES)
    except FileNotFoundError:
        raise RunError(f"rank {int(rank)} has no output in {path}") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}") from error
    if size > MAX_BYTES:
        data = data[data.find(b"\n") + 1 :]
    return "\n".join(without_controls(line) for line in data.decode(errors="replace").split("\n"))
