"""Pipeline parallelism by hand: layers on different ranks.

Rank r has stage r of the model. It receives activations from the previous rank and sends its own to the
next; gradients travel back. With one batch, only one rank works at a time. Cut into **micro-batches**,
several work.
"""

# %%
# ## A stage, and two schedules
#
# A schedule is the order of forward (F) and backward (B) passes on a rank. **GPipe** runs all forward
# passes first. **1F1B** starts a backward pass as soon as it can: the same result and the same time, but
# fewer activations are kept. Each pass also sleeps, as if the layers were large: 6 ms forward and 12 ms
# backward.
import time

import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

M, ROWS, WIDTH = 8, 2, 3
SECONDS = {"F": 0.006, "B": 0.012}
n = num_ranks()


def build(stage):
    draw = torch.Generator().manual_seed(stage)  # each stage has weights of its own
    return torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64).requires_grad_()


def data():
    return torch.randn(M, ROWS, WIDTH, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def order(name, rank, stages):
    forward, backward = [("F", m) for m in range(M)], [("B", m) for m in range(M)]
    if name == "gpipe":
        return forward + backward
    warmup = min(stages - rank - 1, M)
    steady = [entry for pair in zip(forward[warmup:], backward, strict=False) for entry in pair]
    return forward[:warmup] + steady + backward[M - warmup :]


def train(schedule):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    weight, inputs = build(rank), data()
    kept, sending, losses, spans, most_kept = {}, [], [], [], 0
    dist.barrier()
    begin = time.perf_counter()
    for kind, m in order(schedule, rank, last + 1):
        if kind == "F":
            x = inputs[m].clone()
            if rank > 0:
                dist.recv(x, src=rank - 1)
            start = time.perf_counter()
            y = torch.tanh(x.requires_grad_() @ weight)
            time.sleep(SECONDS["F"])
            kept[m] = x, y
            most_kept = max(most_kept, len(kept))
            if rank < last:
                sending.append(dist.isend(y.detach(), dst=rank + 1))
        else:
            x, y = kept.pop(m)
            gradient = 2 * y.detach() / (M * y.numel())  # of the loss, the mean of y²
            if rank < last:
                dist.recv(gradient, src=rank + 1)
            start = time.perf_counter()
            losses.append(y.square().mean().item() / M)
            y.backward(gradient)
            time.sleep(SECONDS["B"])
            if rank > 0:
                sending.append(dist.isend(x.grad, dst=rank - 1))
        spans.append((kind, m, start - begin, time.perf_counter() - begin))
    for handle in sending:
        handle.wait()
    return {"gradient": weight.grad, "loss": sum(losses), "kept": most_kept, "spans": spans}


results = {name: run(train, name) for name in ("gpipe", "1f1b")}

# %%
# ## The gradients equal those of one process
#
# One process runs all stages on the whole batch. Each rank must have the gradient of its stage.
weights = [build(stage) for stage in range(n)]
x = data().view(-1, WIDTH)
for weight in weights:
    x = torch.tanh(x @ weight)
loss = x.square().mean()
loss.backward()
firsts = {name: [line["gradient"][0] for line in lines] for name, lines in results.items()}
table("First row of each gradient", {"one process": [weight.grad[0] for weight in weights], **firsts})
for name, lines in results.items():
    check(f"{name}: the loss is that of one process", lines[-1]["loss"], loss.item(), 1e-12)
    for rank, line in enumerate(lines):
        check(
            f"{name}: rank {rank} has the gradient of its stage", line["gradient"], weights[rank].grad, 1e-12
        )

# %%
# ## Memory: how many micro-batches are kept
#
# GPipe keeps the activations of all m micro-batches. With 1F1B, rank r of p keeps at most p - r.
table("Micro-batches kept", {name: column(lines, "kept") for name, lines in results.items()})
check("gpipe keeps all", column(results["gpipe"], "kept"), [M] * n)
check("1f1b keeps p - r", column(results["1f1b"], "kept"), [min(n - rank, M) for rank in range(n)])

# %%
# ## The bubble, measured
#
# While the pipeline fills and drains, ranks wait. With p stages and m micro-batches, this **bubble** is
# (p - 1)/(m + p - 1) of the time. The measured share is a little larger: messages take time, too.


def bubble(lines):
    spans = [(start, end) for line in lines for *_, start, end in line["spans"]]
    total = max(end for _, end in spans) - min(start for start, _ in spans)
    return 1 - sum(end - start for start, end in spans) / (total * n)


lines = [(name, (n - 1) / (M + n - 1), bubble(lines)) for name, lines in results.items()]
rows("The share of the time that ranks wait", ("schedule", "formula", "measured"), lines, is_measured=True)
counts = (1, 4, 8, 32)
lines = [(p, *((p - 1) / (m + p - 1) for m in counts)) for p in (2, 4, 8)]
rows("The formula", ("stages", *(f"m = {m}" for m in counts)), lines)


@picture("Both schedules, drawn from this run (blue: forward, orange: backward)", height=4.5)
def draw(figure):
    for axes, (name, lines) in zip(figure.subplots(2, 1, sharex=True), results.items(), strict=True):
        for rank, line in enumerate(lines):
            for kind, m, start, end in line["spans"]:
                color = {"F": "#8cc4f0", "B": "#f4b183"}[kind]
                axes.barh(rank, (end - start) * 1e3, left=start * 1e3, color=color, edgecolor="white")
                axes.text((start + end) * 500, rank, str(m), ha="center", va="center", fontsize=7)
        axes.set(title=name, ylabel="rank", yticks=range(n))
        axes.invert_yaxis()
    axes.set(xlabel="milliseconds")


# %%
# ## Question
ask(
    "With 4 stages, how many micro-batches keep the bubble below 10 %?",
    "3/(m + 3) < 0.1 means m > 27: at least 28. The micro-batches become small, which makes the matrix "
    "products less efficient. Interleaved stages reduce the bubble: it becomes (p - 1)/(v·m) of the "
    "ideal time with v stages on each rank.",
)
