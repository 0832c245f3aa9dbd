"""A file for TensorBoard: scalars, histograms, hyper-parameters and texts."""

import itertools
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

from paceline.files import append_whole
from paceline.plotting.png import read_size
from paceline.report.tensorboard.graph_node import GraphNode
from paceline.report.tensorboard.histogram import Histogram
from paceline.report.tensorboard.record_format import encode_record

_numbers = itertools.count()


def _encode(histogram: Histogram) -> HistogramProto:
    """Return a histogram with the bins from the first to the last that have values."""
    filled = [at for at, count in enumerate(histogram.counts) if count]
    # The bin before the first, so that TensorBoard knows its lower end.
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
    """A file of values for TensorBoard. A full disk loses points, but never damages the file.

    (torch's SummaryWriter writes in a thread, which prints a traceback if the disk is full.)
    """

    def __init__(self, folder: Path):
        """Create the folder and a new file in it. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        seconds = int(time.time())
        name = f"events.out.tfevents.{seconds:010d}.{platform.node()}.{os.getpid()}.{next(_numbers)}"
        self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self._has_version = False

    def write_hyperparameters(self, values: Mapping[str, bool | float | str], wall_time: float) -> None:
        """Append what TensorBoard compares runs by. `wall_time`: when the training started."""
        start = SessionStartInfo(start_time_secs=wall_time)
        for name, value in values.items():
            if isinstance(value, bool):
                start.hparams[name].bool_value = value
            elif isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = value
        content = HParamsPluginData(session_start_info=start).SerializeToString()
        nothing = TensorProto(dtype=DT_FLOAT, tensor_shape=TensorShapeProto(dim=[{"size": 0}]))
        self._write_for_plugin("_hparams_/session_start_info", "hparams", content, nothing, 0, wall_time)

    def write_graph(self, nodes: Iterable[GraphNode], wall_time: float) -> None:
        """Append the graph of a model."""
        graph = GraphDef()
        for node in nodes:
            encoded = graph.node.add(name=node.name, op=node.kind, input=node.sources)
            shape = encoded.attr["_output_shapes"].list.shape.add()
            for size in node.shape:
                shape.dim.add(size=size)
        self._append_event(Event(wall_time=wall_time, graph_def=graph.SerializeToString()))

    def write_text(self, tag: str, text: str, step: int, wall_time: float) -> None:
        """Append a text, which TensorBoard shows as Markdown."""
        tensor = TensorProto(
            dtype=DT_STRING, tensor_shape=TensorShapeProto(), string_val=[text.encode("utf-8", "replace")]
        )
        self._write_for_plugin(tag, "text", TextPluginData().SerializeToString(), tensor, step, wall_time)

    def _write_for_plugin(
        self, tag: str, plugin: str, content: bytes, tensor: TensorProto, step: int, wall_time: float
    ) -> None:
        data = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=data), tensor=tensor)
        self._write_values([value], step, wall_time)

    def write(self, values: Mapping[str, float | None], step: int, wall_time: float) -> None:
        """Append the values of a step, by name. `wall_time`: in seconds since the epoch."""
        scalars = [
            Summary.Value(tag=name, simple_value=value) for name, value in values.items() if value is not None
        ]
        self._write_values(scalars, step, wall_time)

    def write_histograms(self, histograms: Mapping[str, Histogram], step: int, wall_time: float) -> None:
        """Append the histograms of a step, by name."""
        values = [Summary.Value(tag=name, histo=_encode(value)) for name, value in histograms.items()]
        self._write_values(values, step, wall_time)

    def write_images(self, images: Mapping[str, bytes], step: int, wall_time: float) -> None:
        """Append PNG files by name."""
        values = []
        for name, png in images.items():
            height, width, channels = read_size(png)
            image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=png)
            values.append(Summary.Value(tag=f"figures/{name}", image=image))
        self._write_values(values, step, wall_time)

    def _write_values(self, values: Sequence[Summary.Value], step: int, wall_time: float) -> None:
        if values:
            self._append_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))

    def _append_event(self, event: Event) -> None:
        self._has_version = self._has_version or self._append(
            Event(wall_time=event.wall_time, file_version="brain.Event:2")
        )
        if self._has_version:
            self._append(event)

    def close(self) -> None:
        os.close(self._file)

    def _append(self, event: Event) -> bool:
        return append_whole(self._file, encode_record(event.SerializeToString()))
