"""Collectives: operations in which all ranks take part.

A collective is a pattern of messages with a name. All ranks of the group must call it, in the same
order. The tables show what each rank has before and after.
"""

# %%
# ## From one rank to all: broadcast and scatter
#
# `broadcast` copies the tensor of one rank to all. Training uses it to start from equal weights.
# `scatter` gives each rank another part.
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, run, table

n = num_ranks()


def broadcast():
    x = torch.arange(4.0) + 10 * dist.get_rank()
    before = x.clone()
    dist.broadcast(x, src=0)
    return {"before": before, "after": x}


def scatter():
    rank, size = dist.get_rank(), dist.get_world_size()
    x, whole = torch.zeros(2), torch.tensor([[10.0 * part, 10.0 * part + 1] for part in range(size)])
    dist.scatter(x, list(whole) if rank == 0 else None, src=0)
    return {"before": whole if rank == 0 else None, "after": x}


results = run(broadcast)
table("broadcast from rank 0", results)
check("all ranks have the values of rank 0", column(results, "after"), [[0, 1, 2, 3]] * n)
results = run(scatter)
table("scatter from rank 0", results)
check("rank r has part r", column(results, "after"), [[10 * r, 10 * r + 1] for r in range(n)])

# %%
# ## From all ranks to one: gather and reduce
#
# `gather` collects the tensors on one rank, the **root**, and `reduce` adds them up there.


def gather():
    rank, size = dist.get_rank(), dist.get_world_size()
    x, parts = torch.tensor([float(rank)]), [torch.zeros(1) for _ in range(size)]
    dist.gather(x, parts if rank == 0 else None, dst=0)
    return {"before": x, "after": torch.cat(parts) if rank == 0 else None}


def reduce():
    x = torch.arange(4.0) + dist.get_rank()
    before = x.clone()
    dist.reduce(x, dst=0)
    return {"before": before, "after": x if dist.get_rank() == 0 else None}


results = run(gather)
table("gather to rank 0", results)
check("rank 0 has one value of each rank", results[0]["after"], list(range(n)))
results = run(reduce)
table("reduce to rank 0", results)
check("rank 0 has the sum", results[0]["after"], [n * i + sum(range(n)) for i in range(4)])

# %%
# ## From all to all: all-gather, reduce-scatter, all-reduce
#
# `all_gather` gives the parts of all ranks to everybody. `reduce_scatter` adds up and gives each rank
# only its part of the sum. `all_reduce` gives the whole sum to everybody: data parallel training uses it
# to average gradients. An all-reduce equals a reduce-scatter followed by an all-gather, and here is the
# proof.


def compose():
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(float(size)) + rank
    part = torch.zeros(1)
    dist.reduce_scatter(part, list(x.split(1)))
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, part)
    whole = x.clone()
    dist.all_reduce(whole)
    return {"before": x, "reduce-scatter": part, "then all-gather": torch.cat(parts), "all-reduce": whole}


composed = run(compose)
table("An all-reduce in two steps", composed)
sums = [n * i + sum(range(n)) for i in range(n)]
check("rank r has element r of the sum", column(composed, "reduce-scatter"), [[s] for s in sums])
check("both ways give the same sum", column(composed, "then all-gather"), [sums] * n)
check("all-reduce gives it in one call", column(composed, "all-reduce"), [sums] * n)

# %%
# ## Other operations than the sum


def reduce_by_each_operation():
    x = torch.arange(4.0) + dist.get_rank()
    results = {"before": x}
    for name in ("SUM", "MIN", "MAX", "PRODUCT", "AVG"):
        results[name] = x.clone()
        dist.all_reduce(results[name], op=getattr(dist.ReduceOp, name))
    return results


reduced = run(reduce_by_each_operation)
table("all-reduce of [0, 1, 2, 3] + rank", reduced)
check("the average is the sum divided by the world size", reduced[0]["AVG"], reduced[0]["SUM"] / n)


@picture("all-reduce of [0, 1, 2, 3] + rank: each color is the share of a rank")
def draw(figure):
    axes = figure.subplots()
    for rank, line in enumerate(reduced):
        below = sum(column(reduced[:rank], "before"), torch.zeros(4))
        axes.bar(range(4), line["before"], bottom=below, label=f"rank {rank}")
    axes.legend()


# %%
# ## All-to-all
#
# Every rank sends a different part to every rank: the table of parts is transposed. Mixtures of experts
# use it to send tokens to the ranks of their experts.


def transpose():
    x = 10 * dist.get_rank() + torch.arange(float(dist.get_world_size()))
    y = torch.zeros_like(x)
    dist.all_to_all_single(y, x)
    dist.barrier()  # waits until all ranks are here; it moves no data
    return {"before": x, "after": y}


swapped = run(transpose)
table("all-to-all", swapped)
expected = [[10 * s + r for s in range(n)] for r in range(n)]
check("rank r has part r of every rank", column(swapped, "after"), expected)

# %%
# ## Question
ask(
    "Rank 2 skips one all-reduce of a program with 4 ranks. What happens?",
    "Its next collective meets the all-reduce of the others. If it is another operation or has another "
    "size, the result is an error or a hang; if it happens to match, the sums are silently wrong, and "
    "the last collective of the others waits until the timeout.",
)
