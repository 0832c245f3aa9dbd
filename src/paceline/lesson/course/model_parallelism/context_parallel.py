"""Context parallelism by hand: attention around a ring.

Attention needs all keys and values for each query. If one sequence is too long for one device, each rank
keeps a part of it: its queries stay, and the keys and values travel around a ring.
"""

# %%
# ## A softmax in pieces
#
# The softmax over all keys needs the maximum and the sum over all of them. Both can be updated piece by
# piece: keep the largest score `top` so far, the sum of exp(score - top), and the weighted sum of
# values. When a new piece has a larger score, scale the old sums by exp(old top - new top). The result
# is exact, not approximate.
import math

import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

LENGTH, WIDTH = 24, 4
n = num_ranks()


def whole_sequence():
    return torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def attend(is_causal):
    """Attention of the whole sequence, on one process."""
    q, k, v = whole_sequence()
    scores = q @ k.T / math.sqrt(WIDTH)
    if is_causal:  # a token must not see later tokens
        scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(dim=1) @ v


# %%
# ## The ring
#
# In each of n steps, a rank attends to the piece that it has, and passes it to the next rank. While it
# computes, the next piece can already travel.


def pass_on(tensor, rank, size):
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, dst=(rank + 1) % size)
    dist.recv(received, src=(rank - 1) % size)
    sending.wait()
    return received


def ring_attention(is_causal, rescales=True):
    rank, size = dist.get_rank(), dist.get_world_size()
    positions = torch.arange(LENGTH).tensor_split(size)
    q, k, v = (part.tensor_split(size)[rank] for part in whole_sequence())
    piece = torch.stack((k, v))
    top = torch.full((len(q), 1), -torch.inf, dtype=torch.float64)
    weights, values = torch.zeros_like(top), torch.zeros_like(q)
    work, owners = 0, []
    for step in range(size):
        owner = (rank - step) % size  # whose keys these are
        scores = q @ piece[0].T / math.sqrt(WIDTH)
        if is_causal:
            hidden = positions[owner][None, :] > positions[rank][:, None]
            scores = scores.masked_fill(hidden, -torch.inf)
        if (seen := scores > -torch.inf).any():
            owners.append(owner)
            work += int(seen.sum())
            new_top = torch.maximum(top, scores.amax(dim=1, keepdim=True))
            shares = (scores - new_top).exp()
            scale = (top - new_top).exp() if rescales else 1.0
            weights = weights * scale + shares.sum(dim=1, keepdim=True)
            values = values * scale + shares @ piece[1]
            top = new_top
        if step < size - 1:
            piece = pass_on(piece, rank, size)
    return {"output": values / weights, "attended to the keys of": owners, "scores": work}


for is_causal in (False, True):
    name = "causal" if is_causal else "full"
    results = run(ring_attention, is_causal)
    table(
        f"{name} attention",
        [
            {
                "first output": r["output"][0],
                "attended to the keys of": r["attended to the keys of"],
                "scores": r["scores"],
            }
            for r in results
        ],
    )
    check(
        f"{name}: the parts together equal the attention of one process",
        torch.cat([r["output"] for r in results]),
        attend(is_causal),
        1e-12,
    )

# %%
# ## Without scaling the old sums
#
# This is what goes wrong if the maximum changes and the old sums are not scaled. With one rank there is
# only one piece, and the mistake cannot be seen.
wrong = torch.cat([result["output"] for result in run(ring_attention, False, False)])
error = (wrong - attend(False)).abs().max().item()
rows("Largest error without scaling", ("ranks", "error"), [(n, error)])
check("it is wrong if n > 1", error > 1e-3, n > 1)

# %%
# ## The work of causal attention is uneven
#
# Rank 0 has the first tokens, which see few others, and the last rank waits for nobody but works most. A
# **zigzag** gives rank r the pieces r and 2n - 1 - r of 2n, so that all ranks have equal work.
plain = column(results, "scores")
pieces = torch.arange(LENGTH).tensor_split(2 * n)
zigzag = [int(sum((pieces[at] + 1).sum() for at in (rank, 2 * n - 1 - rank))) for rank in range(n)]
table(
    "Scores that each rank computes",
    [{"in order": a, "zigzag": b} for a, b in zip(plain, zigzag, strict=True)],
)
check("both compute all scores", [sum(plain), sum(zigzag)], [LENGTH * (LENGTH + 1) // 2] * 2)


@picture("Scores that each rank computes in causal attention")
def draw(figure):
    axes = figure.subplots()
    axes.bar([rank - 0.2 for rank in range(n)], plain, 0.4, label="in order")
    axes.bar([rank + 0.2 for rank in range(n)], zigzag, 0.4, label="zigzag")
    axes.set(xlabel="rank", ylabel="scores", xticks=range(n))
    axes.legend()


# %%
# ## Question
ask(
    "Each rank passes on its keys and values n - 1 times. How many bytes does a rank send for a "
    "sequence of 131,072 tokens, 8 heads for keys and values of width 128, in bfloat16, on 8 ranks?",
    "Its piece has 16,384 tokens · 8 · 128 · 2 (keys and values) · 2 bytes = 64 MiB. It is sent 7 "
    "times: 448 MiB in each layer and forward pass. The backward pass sends the pieces and their "
    "gradients.",
)
