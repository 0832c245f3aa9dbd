"""The file of scalars that TensorBoard reads."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


def test_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(OSError, match="exists"):
        ScalarWriter(tmp_path / "tensorboard")
