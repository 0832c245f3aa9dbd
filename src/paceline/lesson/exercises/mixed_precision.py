"""Exercise: a step with loss scaling."""

# %% exercise
# Write `scaled_step(weight, gradient, scale, lr)`. `gradient` is this rank's gradient of the loss times
# `scale`, not averaged yet. If it is infinite or nan on any rank, no rank may change its weight, and the
# scale is halved. Otherwise average the gradients over the ranks, divide by the scale, and subtract lr
# times the result from `weight` in place. Return the new scale. All ranks must decide the same: ranks that
# skip different steps have different weights for the rest of the training.
import torch
import torch.distributed as dist


def scaled_step(weight, gradient, scale, lr):
    raise NotImplementedError


# %% solution
import torch
import torch.distributed as dist


def scaled_step(weight, gradient, scale, lr):
    average = gradient / dist.get_world_size()
    dist.all_reduce(average)  # an infinite or nan element stays so in the sum
    if not average.isfinite().all():
        return scale / 2
    weight -= lr * average / scale
    return scale


# %% grade
import math

import torch
import torch.distributed as dist

from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import require, run_solution

n = num_ranks()
BAD = (None, math.inf, None, math.nan)  # on the last rank, by step


def try_solution():
    rank, size = dist.get_rank(), dist.get_world_size()
    weight, scale, path = torch.ones(2), 8.0, []
    for bad in BAD:
        gradient = scale * torch.tensor([1.0 + rank, 2.0])
        if bad is not None and rank == size - 1:
            gradient[0] = bad
        scale = scaled_step(weight, gradient, scale, 0.1)
        require(isinstance(scale, int | float), "scaled_step must return the new scale, a float", scale)
        path.append((scale, weight.tolist()))
    return path


first = [1.0, 1.0]
mean = (n + 1) / 2
one, two = ([1 - k * 0.1 * mean, 1 - k * 0.2] for k in (1, 2))
expected = [(8.0, one), (4.0, one), (4.0, two), (2.0, two)]
for rank, path in enumerate(run_solution(try_solution)):
    for step, bad in enumerate(BAD):
        case = "all gradients are finite" if bad is None else f"a gradient of the last rank is {bad}"
        check(f"rank {rank}, step {step}, {case}: scale", path[step][0], expected[step][0])
        check(f"rank {rank}, step {step}, {case}: weight", path[step][1], expected[step][1], 1e-5)
