"""Device mesh: several kinds of parallelism at once.

Large models need several kinds of parallelism at once. Ranks are then arranged in a grid, the **device
mesh**, with an axis for each kind. A rank communicates with the ranks of its row for one purpose, and of
its column for another.
"""

# %%
# ## Coordinates
#
# The last axis has neighboring ranks. Tensor parallelism communicates most, so it gets the last axis:
# its ranks are on one machine. Data parallelism communicates least, and gets the first axis.
#
# Start this lesson with `--ranks 8` to see three axes of 2 ranks.
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

n = num_ranks()
AXES = ("dp", "pp", "tp")


def shape_of(size):
    """Give each axis 2 ranks in turn, from the last, and the first axis the rest."""
    shape = [1, 1, 1]
    for axis in (2, 0, 1):
        if size % 2 == 0:
            shape[axis], size = 2, size // 2
    shape[0] *= size
    return tuple(shape)


SHAPE = shape_of(n)


def build():
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=AXES)
    result = dict(zip(AXES, mesh.get_coordinate(), strict=True))
    for axis in AXES:
        group = mesh.get_group(axis)
        result[f"{axis} group"] = dist.get_process_group_ranks(group)
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x, group=group)
        result[f"{axis} sum"] = x.item()
    return result


results = run(build)
grid = torch.arange(n).view(SHAPE)
table(
    f"A mesh of {SHAPE[0]} x {SHAPE[1]} x {SHAPE[2]}: coordinates",
    [{axis: line[axis] for axis in AXES} for line in results],
)
table(
    "The group of each axis, and the sum of its ranks",
    [{key: line[key] for axis in AXES for key in (f"{axis} group", f"{axis} sum")} for line in results],
)
for rank, line in enumerate(results):
    d, p, t = (line[axis] for axis in AXES)
    check(f"rank {rank} = (dp · {SHAPE[1]} + pp) · {SHAPE[2]} + tp", (d * SHAPE[1] + p) * SHAPE[2] + t, rank)
    expected = {"dp": grid[:, p, t], "pp": grid[d, :, t], "tp": grid[d, p, :]}
    check(f"rank {rank} has the groups of the grid", {axis: line[f"{axis} group"] for axis in AXES}, expected)


@picture("The ranks in the grid: a box for each rank, a panel for each coordinate of dp")
def draw(figure):
    panels = figure.subplots(1, SHAPE[0], squeeze=False)[0]
    for d, axes in enumerate(panels):
        axes.imshow(grid[d].tolist(), cmap="Blues", vmin=0, vmax=2 * n)
        for p in range(SHAPE[1]):
            for t in range(SHAPE[2]):
                axes.text(t, p, str(int(grid[d, p, t])), ha="center", va="center")
        axes.set(title=f"dp = {d}", xlabel="tp", ylabel="pp", xticks=range(SHAPE[2]), yticks=range(SHAPE[1]))


# %%
# ## A layer under data and tensor parallelism
#
# The columns of W are cut over `tp`, the batch over `dp`. Then the gradient of a part of W is averaged
# over `dp` only: ranks with other columns have another gradient. An average over all ranks would mix
# them.


def train_layer(average_over):
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=AXES)
    d, _, t = mesh.get_coordinate()
    draw = torch.Generator().manual_seed(0)
    w = torch.randn(4, 4, generator=draw, dtype=torch.float64)
    x = torch.randn(4 * SHAPE[0], 4, generator=draw, dtype=torch.float64)
    mine = w.chunk(SHAPE[2], dim=1)[t].clone().requires_grad_()
    (x.chunk(SHAPE[0])[d] @ mine).square().sum(dim=1).mean().backward()
    group = mesh.get_group("dp") if average_over == "dp" else dist.group.WORLD
    dist.all_reduce(mine.grad, op=dist.ReduceOp.AVG, group=group)
    return {"gradient": mine.grad}


draw_whole = torch.Generator().manual_seed(0)
w = torch.randn(4, 4, generator=draw_whole, dtype=torch.float64).requires_grad_()
x = torch.randn(4 * SHAPE[0], 4, generator=draw_whole, dtype=torch.float64)
(x @ w).square().sum(dim=1).mean().backward()
right, wrong = run(train_layer, "dp"), run(train_layer, "all")
table(
    "First row of the gradient",
    [
        {"averaged over dp": a["gradient"][0], "over all ranks": b["gradient"][0]}
        for a, b in zip(right, wrong, strict=True)
    ],
)
parts = [w.grad.chunk(SHAPE[2], dim=1)[rank % SHAPE[2]] for rank in range(n)]
check("averaged over dp: the columns of the whole gradient", column(right, "gradient"), parts, 1e-12)
is_wrong = any(not torch.allclose(line["gradient"], part) for line, part in zip(wrong, parts, strict=True))
check("averaged over all ranks: wrong if tp > 1", is_wrong, SHAPE[2] > 1)

# %%
# ## How large should each axis be?
rows(
    "A rule of thumb",
    ("axis", "communicates", "as large as"),
    [
        ("tp", "activations, twice in each layer and direction", "needed to fit a layer; inside one machine"),
        (
            "pp",
            "activations between stages",
            "needed to fit the model; enough micro-batches for a small bubble",
        ),
        ("dp", "gradients, once in each step", "the rest; until the batch becomes too large"),
    ],
)
ask(
    "A machine has 8 GPUs, and 4 machines are used with tp=8, pp=2. Which ranks are in the pp group of "
    "rank 3, and do their messages cross machines?",
    "The mesh is dp=2, pp=2, tp=8: rank = (dp · 2 + pp) · 8 + tp. Rank 3 has dp 0, pp 0, tp 3; its pp "
    "group is ranks 3 and 11, which are on different machines. Only the messages of tp stay inside a "
    "machine.",
)
