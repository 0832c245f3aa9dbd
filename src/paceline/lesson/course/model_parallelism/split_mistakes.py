"""Four mistakes of split models that raise no error.

A model that is divided over ranks has more ways to be wrong than a data parallel one. The loss falls in
all of these programs. Each of them appears in course material.
"""

# %%
# ## 1. Equal seeds hide a wrong order
#
# Every rank draws its columns of W from the same seed. All parts are then equal, and a program that joins
# them in a wrong order gives the right result: the test passes. Draw each part from the name of what it is.
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

n = num_ranks()
WIDTH = 8


def draw_columns(part, parts, seeds_differ):
    generator = torch.Generator().manual_seed(part if seeds_differ else 0)
    return torch.randn(2, WIDTH // parts, generator=generator)


def product(seeds_differ, in_order):
    rank, size, x = dist.get_rank(), dist.get_world_size(), torch.tensor([[1.0, 2.0]])
    mine = x @ draw_columns(rank, size, seeds_differ)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    got = torch.cat(parts if in_order else parts[::-1], dim=1)
    whole = x @ torch.cat([draw_columns(part, size, seeds_differ) for part in range(size)], dim=1)
    return torch.allclose(got, whole, atol=1e-6)


def compare():
    cases = {"equal seeds": (False, False), "own seeds": (True, False), "own seeds, in order": (True, True)}
    return {name: product(*case) for name, case in cases.items()}


passes = run(compare)
table("Does a test pass with a reversed order?", passes)
check("equal seeds: a wrong order passes", column(passes, "equal seeds"), [True] * n)
check("own seeds: it fails if n > 1", column(passes, "own seeds"), [n == 1] * n)
check("own seeds: the right order passes", column(passes, "own seeds, in order"), [True] * n)

# %%
# ## 2. A backward pass that does not reach layer 0
#
# A hand-written backward pass for ZeRO-3 goes through the layers from the last to the first. With
# `range(LAYERS - 1, 0, -1)` it ends at layer 1. Python does not count the end, and the first layer never
# learns. The loss still falls, because the other layers do. Count the layers that have changed.
LAYERS, STEPS = 4, 20


def train(end):
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, generator=draw, dtype=torch.float64) / 2 for _ in range(LAYERS)]
    x, y = torch.randn(2, 24, 4, generator=draw, dtype=torch.float64)[:, rank::size]
    first, losses = [weight.clone() for weight in weights], []
    for _ in range(STEPS):
        inputs = [x]
        for weight in weights:
            inputs.append(torch.tanh(inputs[-1] @ weight))
        dist.all_reduce(loss := (inputs[-1] - y).square().mean(), op=dist.ReduceOp.AVG)
        losses.append(loss.item())
        gradient = 2 * (inputs[-1] - y) / y.numel()
        for layer in range(LAYERS - 1, end, -1):
            gradient = gradient * (1 - inputs[layer + 1] ** 2)
            of_weight, gradient = inputs[layer].T @ gradient, gradient @ weights[layer].T
            dist.all_reduce(of_weight, op=dist.ReduceOp.AVG)
            weights[layer] = weights[layer] - 0.5 * of_weight
    moved = [(weight - start).norm().item() for weight, start in zip(weights, first, strict=True)]
    return {"losses": losses, "moved": moved}


right, wrong = run(train, -1)[0], run(train, 0)[0]
lines = [(layer, right["moved"][layer], wrong["moved"][layer]) for layer in range(LAYERS)]
rows("How far each layer has moved", ("layer", "range to -1", "range to 0"), lines)
check("all layers move", min(right["moved"]) > 0)
check("with the mistake, layer 0 does not", wrong["moved"][0], 0.0)
check("and its loss still falls", wrong["losses"][-1] < 0.9 * wrong["losses"][0])


@picture("The loss by step: only a comparison shows the mistake")
def draw(figure):
    axes = figure.subplots()
    axes.plot(right["losses"], label="all layers")
    axes.plot(wrong["losses"], label="without layer 0")
    axes.legend()


# %%
# ## 3. Recomputation that loses gradients
#
# `checkpoint` with `use_reentrant=True` returns no gradients if no *input* of the block has one: the
# first block is then not trained, and torch only warns. `use_reentrant=False` has no such condition.


def count_gradients(is_reentrant):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with warnings.catch_warnings(action="ignore"):
        hidden = checkpoint(model[0], torch.ones(1, 2), use_reentrant=is_reentrant)
    model[1](hidden).sum().backward()
    return sum(parameter.grad is not None for parameter in model.parameters())


counts = [(is_reentrant, count_gradients(is_reentrant)) for is_reentrant in (True, False)]
rows("Parameters with a gradient, of 4", ("use_reentrant", "parameters"), counts)
check("the first block has none", [count for _, count in counts], [2, 4])

# %%
# ## 4. A wrap policy that nobody uses
#
# Sharding saves memory only if the weights are joined a block at a time. A program builds a policy that
# names the blocks, forgets to pass it, and shards the model as a whole: every rank then joins *all* weights
# at once. With `fully_shard`, call it for each block, and then for the model.


def count_joined(shards_blocks):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(LAYERS)))
    for unit in (*model, model) if shards_blocks else (model,):
        fully_shard(unit, mesh=mesh)
    joined = []
    for unit in filter(lambda module: isinstance(module, FSDPModule), model.modules()):
        unit.unshard()
        joined.append(sum(w.numel() for w in unit.parameters() if not hasattr(w, "to_local")))
        unit.reshard()
    return {"units": len(joined), "elements joined at once": max(joined)}


whole, blocks = run(count_joined, False), run(count_joined, True)
table("The model as a whole", whole)
table("Block by block", blocks)
most = [max(column(results, "elements joined at once")) for results in (whole, blocks)]
check("as a whole, all weights are joined at once; block by block, a quarter", most, [LAYERS * 256, 256])
ask(
    "Which test would find all four mistakes?",
    "Compare the split model with one process: the weights of *all* layers after some steps, from weights "
    "that differ in every element. It finds the first three. The fourth changes no value: compare the peak "
    "of the memory with a prediction. `paceline verify` and `paceline plan` do both.",
)
