"""A file of scalars and histograms for TensorBoard."""

import io
import itertools
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from paceline.files import append_whole
from paceline.report.histogram import Histogram

_numbers = itertools.count()


def _encode(histogram: Histogram) -> HistogramProto:
    """Return a histogram with the bins from the first to the last that have values."""
    filled = [at for at, count in enumerate(histogram.counts) if count]
    bins = slice(max(0, filled[0] - 1), filled[-1] + 1)
    return HistogramProto(
        min=histogram.min,
        max=histogram.max,
        num=sum(histogram.counts),
        sum=histogram.sum,
        sum_squares=histogram.sum_squares,
        bucket_limit=[min(limit, sys.float_info.max) for limit in histogram.limits[bins]],
        bucket=histogram.counts[bins],
    )


class ScalarWriter:
    """A file of scalars and histograms. A full disk loses points, but never damages the file.

    (torch's SummaryWriter writes in a thread, which prints a traceback if the disk is full.)
    """

    def __init__(self, folder: Path):
        """Create the folder and a new file in it. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        seconds = int(time.time())
        name = f"events.out.tfevents.{seconds:010d}.{platform.node()}.{os.getpid()}.{next(_numbers)}"
        self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._has_version = False

    def write(self, values: Mapping[str, float | None], step: int, wall_time: float) -> None:
        """Append the values of a step, by name. `wall_time`: in seconds since the epoch."""
        self._has_version = self._has_version or self._append(
            Event(wall_time=wall_time, file_version="brain.Event:2")
        )
        scalars = [
            Summary.Value(tag=name, simple_value=value) for name, value in values.items() if value is not None
        ]
        if self._has_version and scalars:
            self._append(Event(wall_time=wall_time, step=step, summary=Summary(value=scalars)))

    def write_histograms(self, histograms: Mapping[str, Histogram], step: int, wall_time: float) -> None:
        """Append the histograms of a step, by name."""
        self._has_version = self._has_version or self._append(
            Event(wall_time=wall_time, file_version="brain.Event:2")
        )
        values = [Summary.Value(tag=name, histo=_encode(value)) for name, value in histograms.items()]
        if self._has_version and values:
            self._append(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        os.close(self._file)

    def _append(self, event: Event) -> bool:
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        return append_whole(self._file, record.getvalue())
