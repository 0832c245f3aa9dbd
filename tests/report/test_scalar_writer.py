"""The file of scalars that TensorBoard reads."""

import io
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from command import succeed
from paceline.events import Evaluated, Step
from paceline.report.progress import _write_scalars
from paceline.report.tensorboard.record_format import crc32c, encode_record
from paceline.run import RunFolder

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
ScalarWriter = pytest.importorskip("paceline.report.tensorboard.scalar_writer").ScalarWriter


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let no file of this process become larger than `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def read(folder: Path, name: str) -> list[tuple[int, float]]:
    board = accumulators.EventAccumulator(str(folder))
    board.Reload()
    if name not in board.Tags()["scalars"]:
        return []
    return [(point.step, point.value) for point in board.Scalars(name)]


@pytest.mark.parametrize("size", range(0, 140, 7))
def test_points_that_do_not_fit_are_lost_and_the_others_are_read(size, tmp_path):
    """The limit cuts the first record, or that of step 1 or 2, at any of its bytes."""
    writer = ScalarWriter(tmp_path)
    with limited(size):
        for step in (1, 2):
            writer.write({"loss": 0.5 * step, "grad_norm": None}, step, 1000.0 + step)
    writer.write({"loss": 1.5, "grad_norm": 8.0}, 3, 1003.0)
    writer.close()
    points = read(tmp_path, "loss")
    assert points[-1] == (3, 1.5)
    assert points[:-1] == [(1, 0.5), (2, 1.0)][: len(points) - 1]
    assert read(tmp_path, "grad_norm") == [(3, 8.0)]
    [file] = tmp_path.iterdir()
    assert len(points) == 3 or size < file.stat().st_size


def test_named_losses_are_written(tmp_path):
    step = Step(
        step=1,
        samples=8,
        loss=1.5,
        losses={"kl": 0.5},
        grad_norm=1.0,
        lr=0.1,
        step_s=1.0,
        data_s=0.0,
        samples_per_s=8.0,
    )
    with _write_scalars(RunFolder(tmp_path)) as show:
        show(step)
        show(Evaluated(step=1, metrics={"loss": 2.0, "kl": 0.25}, seconds=1.0))
    found = {
        name: read(tmp_path / "tensorboard", name) for name in ("train/loss", "train/kl", "validation/kl")
    }
    assert found == {"train/loss": [(1, 1.5)], "train/kl": [(1, 0.5)], "validation/kl": [(1, 0.25)]}


def read_plugin(folder: Path, plugin: str) -> tuple[Any, dict[str, bytes]]:
    """Return an accumulator, and the content of a plugin by tag."""
    board = accumulators.EventAccumulator(str(folder))
    board.Reload()
    return board, dict(board.PluginTagToContent(plugin))


@pytest.mark.processes
def test_request_and_notes(tmp_path):
    """TensorBoard's own readers find the hyper-parameters and the texts."""
    metadata = pytest.importorskip("tensorboard.plugins.hparams.metadata")
    words = ("--steps", "3", "--lr", "0.02", "--set", "width=24", "--trace", "2:2", "--run-dir", "run")
    succeed("train", "digits", *words, at=tmp_path)
    board, content = read_plugin(tmp_path / "run/tensorboard", "hparams")
    [start] = content.values()
    hparams = metadata.parse_session_start_info_plugin_data(start).hparams
    kinds = {name: (value.WhichOneof("kind"), value) for name, value in hparams.items()}
    assert kinds["optimizer.lr"][0] == "number_value"
    assert hparams["optimizer.lr"].number_value == 0.02
    assert hparams["set.width"].number_value == 24
    assert hparams["plan"].string_value == "single"
    assert hparams["compile"].bool_value is False
    assert kinds["compile"][0] == "bool_value"
    assert not {"run", "asked"} & set(hparams)
    board, content = read_plugin(tmp_path / "run/tensorboard", "text")
    assert set(content) == {"request", "notes"}
    [request], [note] = board.Tensors("request"), board.Tensors("notes")
    written = request.tensor_proto.string_val[0].decode()
    assert written == "\n".join(
        f"    {line}" for line in (tmp_path / "run/spec.toml").read_text().splitlines()
    )
    assert note.step == 2
    assert note.tensor_proto.string_val[0].decode().startswith("traced step 2: ")


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(OSError, match="exists"):
        ScalarWriter(tmp_path / "tensorboard")


@pytest.mark.parametrize("size", [0, 1, 3, 8, 255, 511, 512, 513, 1000, 4096, 100_001])
def test_records_are_those_of_tensorboard(size):
    """Their checksums too: a damaged byte gives another one. "123456789" is the example of the standard."""
    records = pytest.importorskip("tensorboard.summary.writer.record_writer")
    data = random.Random(size).randbytes(size)
    file = io.BytesIO()
    records.RecordWriter(file).write(data)
    assert encode_record(data) == file.getvalue()
    assert crc32c(b"123456789") == 0xE3069283
    if size:
        damaged = bytes([data[0] ^ 1]) + data[1:]
        assert crc32c(damaged) != crc32c(data)
