"""Exercise: an accuracy that counts every sample once."""

# %% exercise
# Write `accuracy(model, x, y)`. All ranks have the same samples x and labels y, in a tensor each. Every rank
# must evaluate only its part of them, at most one sample more than any other rank. Return the share of all
# samples for which `model(x).argmax(dim=1)` is the label, as a float that is equal on all ranks. The number
# of samples need not be a multiple of the number of ranks, and no sample may count twice.
import torch
import torch.distributed as dist


def accuracy(model, x, y):
    raise NotImplementedError


# %% solution
import torch
import torch.distributed as dist


def accuracy(model, x, y):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, labels = x[rank::size], y[rank::size]
    right = (model(mine).argmax(dim=1) == labels).sum() if len(mine) else torch.tensor(0)
    dist.all_reduce(right)
    return right.item() / len(x)


# %% grade
import torch
import torch.distributed as dist

from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import require, run_solution
from paceline.units import several

n = num_ranks()
COUNTS = (1, 7, 12)


def try_solution():
    results = []
    for count in COUNTS:
        seen = []

        def model(x, seen=seen):
            require(len(x), "the model must not be called with an empty batch", x)
            seen.extend(x[:, 2].int().tolist())
            return x[:, :2]

        x = torch.stack((torch.ones(count), torch.arange(count) % 3.0, torch.arange(float(count))), dim=1)
        results.append((accuracy(model, x, torch.ones(count, dtype=torch.long)), seen))
    return results


results = run_solution(try_solution)
for at, count in enumerate(COUNTS):
    expected = sum(number % 3 > 1 for number in range(count)) / count
    seen = [line[at][1] for line in results]
    evaluated = sorted(number for part in seen for number in part)
    check(f"{several(count, 'sample')}: each is evaluated once", evaluated, list(range(count)))
    check(f"{several(count, 'sample')}: equal work", max(map(len, seen)) - min(map(len, seen)) <= 1)
    check(
        f"{several(count, 'sample')}: the accuracy on all ranks",
        [r[at][0] for r in results],
        [expected] * n,
        1e-6,
    )
