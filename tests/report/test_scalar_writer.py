"""The file of scalars that TensorBoard reads."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.events import Evaluated, Step
from paceline.report.progress import _write_scalars

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
ScalarWriter = pytest.importorskip("paceline.report.scalar_writer").ScalarWriter


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
    with _write_scalars(tmp_path) as show:
        show(step)
        show(Evaluated(step=1, metrics={"loss": 2.0, "kl": 0.25}, seconds=1.0))
    found = {name: read(tmp_path, name) for name in ("train/loss", "train/kl", "validation/kl")}
    assert found == {"train/loss": [(1, 1.5)], "train/kl": [(1, 0.5)], "validation/kl": [(1, 0.25)]}


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(OSError, match="exists"):
        ScalarWriter(tmp_path / "tensorboard")
