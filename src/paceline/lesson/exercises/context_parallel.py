"""Exercise: attention over keys that are divided over ranks."""

# %% exercise
# Write `attend(q, k, v)`. Every rank has all queries q, of shape (queries, width), and a part of the keys k
# and values v, of shape (keys of this rank, width). Return softmax(q kᵀ) v over the keys of all ranks, on
# every rank. Do not send keys or values: reduce the maximum of the scores, the sums of the exponentials
# and the weighted sums of the values. Scores may be as large as 1,000: exp(score) alone would be infinite.
import torch
import torch.distributed as dist


def attend(q, k, v):
    raise NotImplementedError


# %% solution
import torch
import torch.distributed as dist


def attend(q, k, v):
    scores = q @ k.T
    top = scores.amax(dim=1, keepdim=True)
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    shares = (scores - top).exp()
    total, values = shares.sum(dim=1, keepdim=True), shares @ v
    dist.all_reduce(total)
    dist.all_reduce(values)
    return values / total


# %% grade
import torch
import torch.distributed as dist

from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import forbid, require_tensor, run_solution

n = num_ranks()
KEYS = max(11, 2 * n - 1)
MOVE_TENSORS = ("allgather", "broadcast", "gather", "scatter", "alltoall", "send")


def build(scale):
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(length, 4, generator=draw, dtype=torch.float64) for length in (3, KEYS, KEYS))
    return scale * q, k, v


def try_solution(scale):
    forbid("do not send keys or values: use dist.all_reduce", *MOVE_TENSORS)
    rank, size = dist.get_rank(), dist.get_world_size()
    q, k, v = build(scale)
    output = attend(q, k.tensor_split(size)[rank], v.tensor_split(size)[rank])
    require_tensor("attend", output, tuple(q.shape))
    return output


for scale in (1.0, 500.0):
    q, k, v = build(scale)
    expected = (q @ k.T).softmax(dim=1) @ v
    for rank, output in enumerate(run_solution(try_solution, scale)):
        check(f"rank {rank}, scale {scale:g}: the attention over all keys", output, expected, 1e-9)
