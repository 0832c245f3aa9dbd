"""Planning: predict, run, compare.

A reservation of 64 GPUs costs money, also while an error of memory is found. What a training needs can be
computed before: first the memory, then the time. A prediction is only worth something if it is compared
with a measurement afterwards.
"""

# %%
# ## Predict the memory
#
# A parameter in float32 has 4 bytes, its gradient 4, and the two moments of Adam 8: 16 bytes. ZeRO shards
# the moments (stage 1), the gradients (2) and the weights (3) over n ranks.
#
# The model is a stack of 4 linear layers of 256 × 256, so that its parameters can be counted by hand.
import time

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

WIDTH, LAYERS, BATCH = 256, 4, 64
n = num_ranks()
P = LAYERS * WIDTH * WIDTH
PLANS = ("ddp", "zero1", "zero2", "zero3") if n > 1 else ("single",)


def predict_bytes(plan, ranks):
    """Return the bytes of weights, gradients and moments on a rank."""
    stage = int(plan[-1]) if plan.startswith("zero") else 0
    weights = 4 * P / (ranks if stage == 3 else 1)
    gradients = 4 * P / (ranks if stage >= 2 else 1)
    moments = 8 * P / (ranks if stage >= 1 else 1)
    return weights, gradients, moments


predicted = {plan: predict_bytes(plan, n) for plan in PLANS}

# %%
# ## Run, and count
#
# `paceline.setup` distributes the model. After a step, each rank adds up the bytes of the tensors that it
# holds. Under `zero2` and `zero3` a rank keeps shards of the weights between steps, and joins them for
# the forward pass. `zero2` does not free them between the forward and the backward pass. So the gradients
# and moments are compared here; a plan needs the peak, which includes joined weights.


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def count_bytes(plan):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = paceline.setup(model, optimizer, plan=plan)
    trainer.backward(trainer.model(torch.ones(BATCH, WIDTH)).square().mean())
    gradients = sum(local(w.grad).nbytes for w in trainer.model.parameters() if w.grad is not None)
    trainer.step()
    inner = getattr(trainer.optimizer, "optim", trainer.optimizer)  # of ZeroRedundancyOptimizer
    states = [state for state in inner.state.values() if state]
    moments = sum(local(s[key]).nbytes for s in states for key in ("exp_avg", "exp_avg_sq"))
    return {"gradients": gradients, "moments": moments}


counted = {plan: run(count_bytes, plan) for plan in PLANS}
lines = []
for plan, results in counted.items():
    mean = [sum(column(results, key)) / n for key in ("gradients", "moments")]
    lines.append((plan, *predicted[plan][1:], *mean))
    check(f"{plan}: the prediction is right", mean, predicted[plan][1:], 0.01)
title = "Bytes on a rank (mean): predicted and counted"
rows(title, ("plan", "gradients", "moments", "gradients, counted", "moments, counted"), lines)

# %%
# ## Predict the time
#
# A linear layer multiplies and adds once for each weight and sample: 2 FLOPs forward and 4 backward. So a
# step has 6 · P · batch FLOPs. The rate of this machine is measured with one product. Then the time of
# the whole step is predicted, and measured.


def measure(function, repeats=5):
    """Return the median of the seconds of a call, after a warm-up."""
    function()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2]


def compare_times():
    x, w = torch.ones(BATCH, WIDTH), torch.ones(WIDTH, WIDTH)
    dist.barrier()
    rate = 2 * BATCH * WIDTH * WIDTH / measure(lambda: x @ w)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    step_s = measure(lambda: model(x).square().mean().backward())
    return {"GFLOP/s": rate / 1e9, "predicted ms": 6e3 * P * BATCH / rate, "measured ms": 1e3 * step_s}


times = run(compare_times)
table("The time of a forward and a backward pass", times, is_measured=True)
check("a step has 6 · P · batch FLOPs", 6 * P * BATCH, 100_663_296)

# %%
# The two differ, and this is the lesson: the prediction has no overhead of starting operations, no
# activations to write and read, and a rate of one shape. `paceline plan` measures such parts separately,
# prints error bars, and `paceline report` shows the prediction beside the measurement of each run.
#
# ## Before you reserve
#
# The same rule for a model of 70 billion parameters in mixed precision: 16 bytes for each parameter under
# Adam (weights and gradients in 2 bytes, float32 weights and moments in 12). Activations come on top.
lines = []
for gpus in (8, 16, 32, 64):
    shared = 16 * 70 / gpus
    lines.append((gpus, shared, "yes" if shared < 0.8 * 80 else "no"))
rows("70 billion parameters under ZeRO-3, on GPUs of 80 GB", ("GPUs", "GB each", "fits into 80 %"), lines)
check("18 GPUs are the fewest", next(g for g in range(1, 65) if 16 * 70 / g < 0.8 * 80), 18)


@picture("GB on each GPU, by the number of GPUs")
def draw(figure):
    axes = figure.subplots()
    counts = [8, 16, 32, 64, 128]
    axes.loglog(counts, [16 * 70 / count for count in counts], "o-", label="ZeRO-3")
    axes.axhline(64, color="black", linewidth=0.5, label="80 % of 80 GB")
    axes.legend()


ask(
    "A plan predicts 1.0 s for a step, and 1.6 s are measured. What do you do?",
    "Compare the parts, not the sum: computation, communication, waiting, input. If the input takes 0.6 s, "
    "the plan was right and the loader is slow. If the computation is slower than predicted, compare the "
    "rate of one product with that of the data sheet: throttling, a shared node, another number type. "
    "Then change one thing, predict again, and measure again.",
)
