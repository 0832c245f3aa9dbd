"""Tensor parallelism by hand: columns and rows of weights.

A layer that is too large for one device is cut. Every rank has all samples, but only a part of each
weight. Here is the MLP of a transformer, Z = gelu(X A) B: A is cut by columns and B by rows, so that
only one all-reduce is needed in each direction.
"""

# %%
# ## Two operations and their gradients
#
# With A cut by columns, rank r computes its own columns of the hidden layer. With B cut by rows, these
# columns are just what it needs, and the results of the ranks are added up. So:
#
# - `CopyToRanks` stands before A: it does nothing forward, and adds up the gradients of X backward.
# - `SumOverRanks` stands after B: it adds up forward, and does nothing backward.
#
# Leaving out the first is a common mistake: the forward pass is right, and the gradients of all earlier
# layers are wrong.
import hashlib

import torch
import torch.distributed as dist
from torch.nn.functional import gelu

from paceline.lesson import ask, check, num_ranks, picture, run, table

WIDTH, HIDDEN, BATCH = 4, 12, 3
n = num_ranks()


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, gradient):
        return gradient


# %%
# ## Weights that belong to their names
#
# Draw each weight whole, from a seed of its own name, and cut it then. If every rank drew its part from
# the same seed, all parts would be equal: the split model would be a smaller model that is repeated, and
# a wrong order of the parts could not be seen.


def draw(name, *shape):
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def whole_model():
    x, a, b = draw("x", BATCH, WIDTH), draw("A", WIDTH, HIDDEN), draw("B", HIDDEN, WIDTH)
    for tensor in (x, a, b):
        tensor.requires_grad_()
    z = gelu(x @ a) @ b
    z.square().sum().backward()
    return {"z": z.detach(), "x": x.grad, "a": a.grad, "b": b.grad}


def split_model(copies=True):
    rank, size = dist.get_rank(), dist.get_world_size()
    x = draw("x", BATCH, WIDTH).requires_grad_()
    a = draw("A", WIDTH, HIDDEN).tensor_split(size, dim=1)[rank].clone().requires_grad_()  # columns
    b = draw("B", HIDDEN, WIDTH).tensor_split(size, dim=0)[rank].clone().requires_grad_()  # rows
    hidden = gelu((CopyToRanks.apply(x) if copies else x) @ a)
    partial = hidden @ b
    z = SumOverRanks.apply(partial)
    z.square().sum().backward()
    return {"z": z.detach(), "x": x.grad, "a": a.grad, "b": b.grad, "partial": partial.detach()}


whole, split = whole_model(), run(split_model)
table(
    "First row of the output: each rank has a partial sum, and then the whole",
    [{"columns of A": r["a"].shape[1], "partial": r["partial"][0], "sum": r["z"][0]} for r in split],
)
parts_a, parts_b = whole["a"].tensor_split(n, dim=1), whole["b"].tensor_split(n, dim=0)
for rank, line in enumerate(split):
    check(f"rank {rank} has the output of the whole model", line["z"], whole["z"], 1e-10)
    check(f"rank {rank} has the gradient of X", line["x"], whole["x"], 1e-10)
    check(f"rank {rank} has its columns of the gradient of A", line["a"], parts_a[rank], 1e-10)
    check(f"rank {rank} has its rows of the gradient of B", line["b"], parts_b[rank], 1e-10)

# %%
# ## Without CopyToRanks
wrong = run(split_model, False)
table(
    "First row of the gradient of X",
    [
        {"right": right["x"][0], "without CopyToRanks": line["x"][0]}
        for right, line in zip(split, wrong, strict=True)
    ],
)
check("the output is still right", [torch.allclose(line["z"], whole["z"]) for line in wrong], [True] * n)
check(
    "the gradient of X is wrong if n > 1",
    [torch.allclose(line["x"], whole["x"]) for line in wrong],
    [n == 1] * n,
)
check("its parts add up to the right gradient", sum(line["x"] for line in wrong), whole["x"], 1e-10)


@picture("Above: partial outputs and their sum. Below: partial gradients of X and their sum", height=3.0)
def draw_parts(figure):
    panels = figure.subplots(2, n + 1)
    for key, name, lines, row in (("partial", "Z", split, panels[0]), ("x", "gradient", wrong, panels[1])):
        parts = [line[key] for line in lines]
        titles = [*(f"{name}, rank {rank}" for rank in range(n)), f"{name}, sum"]
        for axes, values, title in zip(row, [*parts, sum(parts)], titles, strict=True):
            axes.imshow(values.tolist(), cmap="RdBu", vmin=-9, vmax=9)
            axes.set(xticks=[], yticks=[])
            axes.set_title(title, fontsize=9)


# %%
# ## What it costs
#
# Each rank keeps 1/n of both weights, but all activations of X and Z. In each layer, one all-reduce of a
# tensor of the size of the batch runs in each direction, and nothing can be computed meanwhile.
# Therefore tensor parallelism stays inside a machine with fast links.
ask(
    "Why is A cut by columns and B by rows, and not both by columns?",
    "The gelu needs whole sums. With A cut by columns, every element of the hidden layer is complete "
    "on one rank. If B were cut by columns too, every rank would need the whole hidden layer: an "
    "all-gather between them. With A cut by rows, the sums would have to be added up before the gelu.",
)
