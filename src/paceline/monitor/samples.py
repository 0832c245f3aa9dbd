"""Read sample files: RUN/monitor/NODE.csv, and recordings of nvidia-smi.

A file of Paceline is CSV in sections. A section begins when a sampler starts:

    # paceline samples 1
    # node: node17
    # cpu: 16 of 128 cores: 0-15
    # gpu0: NVIDIA H100 80GB HBM3, GPU-5f3a…
    # absent: cpu energy: /sys/class/powercap is not readable
    time [s],cpu [%],cpu0 [%],memory used [MiB],rank0 cpu [%],gpu0 utilization [%]
    1732374000.123,43.1,52,8123,98,81

`paceline.monitor.columns` lists the columns. An empty value is missing. Lines are only appended.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from paceline.errors import RunError
from paceline.files import open_regular, reason
from paceline.monitor.gpus.nvidia_smi import known_fields, parse_header
from paceline.monitor.recordings import decode, read_recording
from paceline.monitor.sections import is_own, read_sections
from paceline.monitor.table import FilePosition, SampleBuilder, SampleTable

__all__ = ["FilePosition", "SampleTable", "read_samples"]
MAX_LINE_BYTES = 2**20


def read_samples(
    path: Path,
    after: FilePosition | None = None,
    *,
    only: Callable[[str], bool] | None = None,
    max_samples: int | None = None,
) -> SampleTable:
    """Return the samples of a file, or those after a position.

    An incomplete last line is left for the next call; lines that cannot be used are counted and skipped.

    after        `position` of an earlier call, or FilePosition(0, 0) before the first call for a file
                 that grows; comments and units are those of its section. None: the whole file is read
    only         which columns to keep, by name; all by default
    max_samples  stop after about this number of samples; `SampleTable.position` tells where to continue

    Raises RunError if the file cannot be read, or if it is neither a file of Paceline nor of nvidia-smi.
    """
    try:
        with open_regular(path) as file:
            samples = SampleTable(path)
            if after is not None and os.fstat(file.fileno()).st_size < after.end:
                after, samples.restarted = None, True
            lines = _lines(file, samples)
            if after is not None:
                file.seek(after.section)
            head = next(((begin, line) for begin, line in lines if line.strip()), None)
            if head is None:
                return samples
            lines = itertools.chain([head], lines)
            builder = SampleBuilder(samples, file, only or (lambda _: True), max_samples)
            if is_own(head[1]):
                read_sections(builder, lines, after)
            elif fields := parse_header(decode(head[1])):
                read_recording(builder, lines, fields, after)
            else:
                raise _unknown(path, decode(head[1]))
            return samples
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from error


def _unknown(path: Path, line: str) -> RunError:
    return RunError(
        f"{path} has no known column in its first line {line.strip()[:60]!r}; expected a file of"
        " `paceline monitor`, or of `nvidia-smi --format=csv --query-gpu=` with its header and at least one"
        f" of: {', '.join(known_fields())}"
    )


def _lines(file: IO[bytes], samples: SampleTable) -> Iterator[tuple[int, bytes]]:
    """Yield each whole line with its position in bytes. Lines that are too long count as damaged."""
    while True:
        begin = file.tell()
        line = file.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            if len(line) < MAX_LINE_BYTES:
                return
            while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES)
            if not line.endswith(b"\n"):
                return
            samples.damaged += 1
            continue
        yield begin, line
