"""Each rank reads its part of a tensor of a file: consecutive rows without mapping the file."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import harness
from paceline.errors import TaskError
from paceline.training.init.pretrained import PretrainedWeights

pytestmark = pytest.mark.processes

SHAPES = {"rows": (7, 3), "cube": (4, 2, 5), "row": (1, 6), "vector": (5,), "scalar": (), "empty": (0, 3)}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def make_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        f"{name}_{str(dtype).removeprefix('torch.')}": torch.randint(2, 90, shape, generator=generator).to(
            dtype
        )
        for name, shape in SHAPES.items()
        for dtype in DTYPES
    }


def open_weights(file: Path, dtype: torch.dtype | None = None) -> PretrainedWeights:
    """Return the weights of a file for a model on the meta device. dtype: of the model; None: of the file."""
    model = nn.Module()
    for name, tensor in make_tensors().items():
        model.register_buffer(name, tensor.to(device="meta", dtype=dtype or tensor.dtype))
    return PretrainedWeights(file, model)


def find_differences(file: Path, dim: int | None, dtype: torch.dtype | None, is_mapped: bool) -> list[str]:
    """Return the tensors whose part on this rank is wrong, or that cannot be read without mapping the file.

    dim: along which they are sharded; None: they are replicated.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = open_weights(file, dtype)
    if not is_mapped:
        weights._files = {name: (path, None) for name, (path, _) in weights._files.items()}
    differences = []
    for name, whole in make_tensors().items():
        if dim is not None and dim >= whole.dim():
            continue
        expected = whole.to(dtype or whole.dtype)
        placement: Any = Replicate() if dim is None else Shard(dim)
        blank = torch.full_like(expected, 1)
        tensor: Any = distribute_tensor(blank, mesh, [placement], src_data_rank=None)
        try:
            weights.fill_shard_(name, tensor)
        except AttributeError:  # of the file that is not mapped
            differences.append(f"{name} is mapped")
            continue
        if dim is not None:
            parts = expected.chunk(dist.get_world_size(), dim)
            rank = dist.get_rank()
            expected = parts[rank] if rank < len(parts) else expected.narrow(dim, 0, 0)
        if not torch.equal(tensor.to_local(), expected):
            differences.append(name)
    return differences


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(make_tensors(), path)
    return path


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_consecutive_rows_are_read_without_mapping(ranks: int, file: Path) -> None:
    for dim in (0, None):
        assert harness.ranks(ranks)(find_differences, file, dim, None, False) == [[]] * ranks


def test_other_blocks_and_dtypes_are_read_from_the_mapped_file(file: Path) -> None:
    assert harness.ranks(2)(find_differences, file, 1, None, True) == [[], []]
    assert harness.ranks(2)(find_differences, file, 0, torch.float64, True) == [[], []]
    for found in harness.ranks(2)(find_differences, file, 1, None, False):
        assert f"rows_{str(DTYPES[0]).removeprefix('torch.')} is mapped" in found


def test_a_file_that_was_cut_is_named(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes())
    [found] = harness.ranks(1)(error_of_cut_file, cut)
    assert found.startswith(f"{cut} ends within ")
    assert found.endswith("; download the weights again")


def error_of_cut_file(file: Path) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    weights = open_weights(file)
    os.truncate(file, file.stat().st_size - 1)
    try:
        for name, whole in make_tensors().items():
            weights.fill_shard_(name, distribute_tensor(whole, mesh, [Replicate()], src_data_rank=None))
    except TaskError as error:
        return str(error)
    return ""
