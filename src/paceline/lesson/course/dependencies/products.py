"""Three matrix products: who waits, and what moves.

A = B·C, D = E·F, G = A·D. Two products are independent, the third needs both. This small graph has all
questions of parallel computing: who computes what, who waits for whom, and which data moves.
"""

# %%
# ## Two ranks, one synchronization
#
# Rank 0 computes A and rank 1 computes D, at the same time. Then one of them must receive the other's
# result: the point where it waits is the **synchronization**, and the matrix that it receives is the
# **data movement**. With more than two ranks, the others have nothing to do: the graph has only two
# independent tasks.
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

SIZE = 8
n = num_ranks()


def matrices():
    draw = torch.Generator().manual_seed(0)
    return torch.randint(-3, 4, (4, SIZE, SIZE), generator=draw).double()


def by_task():
    rank, size = dist.get_rank(), dist.get_world_size()
    b, c, e, f = matrices()
    products, moved = 0, 0
    a = d = g = None
    if rank == 0:
        a, products = b @ c, products + 1
    if rank == min(1, size - 1):
        d, products = e @ f, products + 1
    if size > 1 and rank == 1:
        dist.send(d, dst=0)
    if rank == 0:
        if size > 1:
            d = torch.empty(SIZE, SIZE, dtype=torch.float64)
            dist.recv(d, src=1)  # rank 0 waits here
            moved = d.numel()
        g, products = a @ d, products + 1
    return {
        "products": products,
        "elements received": moved,
        "G[0, 0]": g[0, 0].item() if g is not None else None,
    }


tasks = run(by_task)
b, c, e, f = matrices()
g = (b @ c) @ (e @ f)
table("A task for each rank", tasks)
check("rank 0 has G", tasks[0]["G[0, 0]"], g[0, 0].item())

# %%
# ## All ranks, by rows
#
# Give each rank some rows of B and E. Rows of A need all of C, and rows of G = A·D need all of D: an
# all-gather of D. Now every rank works all the time, whatever their number, and the work of each is 1/n
# of the whole.


def by_rows():
    rank, size = dist.get_rank(), dist.get_world_size()
    b, c, e, f = matrices()
    mine = slice(rank * SIZE // size, (rank + 1) * SIZE // size)
    counts = [(other + 1) * SIZE // size - other * SIZE // size for other in range(size)]
    a, d = b[mine] @ c, e[mine] @ f
    wide = torch.zeros(max(counts), SIZE, dtype=torch.float64)
    wide[: len(d)] = d
    parts = [torch.empty_like(wide) for _ in range(size)]
    dist.all_gather(parts, wide)
    d = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
    g = a @ d
    share = len(a) / SIZE
    return {"rows": len(a), "products": 3 * share, "elements received": d.numel() - len(a) * SIZE, "g": g}


by_row = run(by_rows)
table(
    "Rows for each rank",
    [{key: line[key] for key in ("rows", "products", "elements received")} for line in by_row],
)
check("the rows together are G", torch.cat(column(by_row, "g")), g)
check("all products are computed once", sum(column(by_row, "products")), 3.0)

# %%
# ## Without rows of D: a sum
#
# The other way: give rank r some columns of A and the same rows of D. Its product is a part of every
# element of G, and an all-reduce adds the parts up. This is the split of tensor parallelism.


def by_sum():
    rank, size = dist.get_rank(), dist.get_world_size()
    b, c, e, f = matrices()
    mine = slice(rank * SIZE // size, (rank + 1) * SIZE // size)
    part = (b @ c[:, mine]) @ (e[mine] @ f)
    g = part.clone()
    dist.all_reduce(g)
    return {"part of G[0, 0]": part[0, 0].item(), "G[0, 0]": g[0, 0].item()}


summed = run(by_sum)
table("A part of each sum for each rank", summed)
check("every rank has G", column(summed, "G[0, 0]"), [g[0, 0].item()] * n)
check("the parts add up", sum(column(summed, "part of G[0, 0]")), g[0, 0].item())

# %%
# ## Which is best?
#
# For N x N matrices, each product takes 2 N³ operations. The table counts the longest chain of products,
# and the elements that the busiest rank receives, for n ranks.
worlds = (2, 4, 8)
lines = [(size, 2.0, 3 / size, (size - 1) / size, 2 * (size - 1) / size) for size in worlds]
rows(
    "Products in the longest chain, and N² elements received",
    ("ranks", "by task", "by rows", "moved by rows", "moved by a sum"),
    lines,
)


@picture("The longest chain of products")
def draw(figure):
    axes = figure.subplots()
    axes.plot(worlds, [line[1] for line in lines], "o-", label="by task")
    axes.plot(worlds, [line[2] for line in lines], "o-", label="by rows")
    axes.legend()


# %%
# ## Question
ask(
    "In the first program, both ranks call `send` or `recv` at the right place. What would change if "
    "rank 1 needed G, too?",
    "Rank 0 would send G back: a second movement, and rank 1 would wait during the third product. "
    "Alternatively both ranks exchange A and D and compute G twice: more work, but no second wait. "
    "Recomputing is often cheaper than moving.",
)
