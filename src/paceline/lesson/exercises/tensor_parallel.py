"""Exercise: a linear layer that is split by rows."""

# %% exercise
# Write `row_parallel(x, weight)`. The whole layer computes X @ W. This rank has `weight`, its rows of W
# (W is split by `tensor_split(size, dim=0)`), and `x`, the whole X of shape (batch, rows of W). Return X
# @ W on every rank. The gradient of `weight` must be that of the rows of W; that of `x` may be left
# partial. Use `SumOverRanks` below, whose backward pass is not written yet: every rank computes the same
# loss from the sum.
import torch
import torch.distributed as dist


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        raise NotImplementedError


def row_parallel(x, weight):
    raise NotImplementedError


# %% solution
import torch
import torch.distributed as dist


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


def row_parallel(x, weight):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = x.tensor_split(size, dim=1)[rank]
    return SumOverRanks.apply(mine @ weight)


# %% grade
import torch
import torch.distributed as dist

from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import require_tensor, run_solution

n = num_ranks()


def build():
    draw = torch.Generator().manual_seed(2)
    return torch.randn(3, 10, generator=draw), torch.randn(10, 2, generator=draw)


def try_solution():
    x, whole = build()
    weight = whole.tensor_split(dist.get_world_size(), dim=0)[dist.get_rank()].clone().requires_grad_()
    z = row_parallel(x, weight)
    require_tensor("row_parallel", z, (3, 2))
    z.square().sum().backward()
    return z.detach(), weight.grad


x, whole = build()
whole.requires_grad_()
expected = x @ whole
expected.square().sum().backward()
for rank, (z, gradient) in enumerate(run_solution(try_solution)):
    check(f"rank {rank} has X @ W", z, expected.detach(), 1e-4)
    check(
        f"rank {rank} has the gradient of its rows of W",
        gradient,
        whole.grad.tensor_split(n, dim=0)[rank],
        1e-3,
    )
