"""Exercise: the group of a rank along an axis of a mesh."""

# %% exercise
# Write `find_group(rank, shape, axis)`. The ranks 0, 1, 2, … fill a mesh of this shape, a tuple with the size
# of each axis; the last axis has neighboring ranks. Return the ranks, in ascending order, that have the
# same coordinates as `rank` on all axes but `axis`, which counts from 0. `rank` itself is one of them.
# Example: in a mesh of shape (2, 3), rank 4 has the group [1, 4] along axis 0 and [3, 4, 5] along axis 1.


def find_group(rank, shape, axis):
    raise NotImplementedError


# %% solution
import math


def find_group(rank, shape, axis):
    stride = math.prod(shape[axis + 1 :])
    first = rank - rank // stride % shape[axis] * stride
    return [first + at * stride for at in range(shape[axis])]


# %% grade
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import run_solution

check("the example", [find_group(4, (2, 3), axis) for axis in (0, 1)], [[1, 4], [3, 4, 5]])
for shape in ((4,), (2, 2, 2), (3, 1, 4), (2, 3, 2, 2)):
    grid = torch.arange(torch.Size(shape).numel()).view(shape)
    for axis in range(len(shape)):
        lines = grid.movedim(axis, -1).reshape(-1, shape[axis]).tolist()
        expected = [next(line for line in lines if rank in line) for rank in range(grid.numel())]
        got = [find_group(rank, shape, axis) for rank in range(grid.numel())]
        check(f"shape {shape}, axis {axis}: the group of every rank", got, expected)


def compare():
    size = dist.get_world_size()
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    real = [dist.get_process_group_ranks(mesh.get_group(name)) for name in ("a", "b")]
    return [find_group(dist.get_rank(), shape, axis) for axis in (0, 1)], real


for rank, (got, real) in enumerate(run_solution(compare)):
    check(f"rank {rank} of {num_ranks()}: the groups of a real mesh", got, real)
