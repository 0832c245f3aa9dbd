"""Five mistakes of data parallelism that raise no error.

Each of these programs runs to its end. Only the numbers are wrong. All five appear in course material.
"""

# %%
# ## 1. Gradients are summed, not averaged
#
# The step is then n times as long as it should be: the learning rate silently depends on the number of
# ranks. On 1 rank the mistake cannot be seen.
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

n = num_ranks()


def step(operation):
    w = torch.tensor([1.0], requires_grad=True)
    (w * 2).sum().backward()  # the gradient is 2 on every rank
    dist.all_reduce(w.grad, op=operation)
    return (w - 0.1 * w.grad).item()


right, wrong = run(step, dist.ReduceOp.AVG), run(step, dist.ReduceOp.SUM)
table("The weight after one step from 1", {"averaged": right, "summed": wrong})
check("the right step has length 0.2", right, [0.8] * n, 1e-6)
check("the wrong step has length 0.2 · n", wrong, [1 - 0.2 * n] * n, 1e-6)

# %%
# ## 2. No zero_grad
#
# `backward()` adds to the gradient. Without `zero_grad`, each step uses the sum of all gradients so far,
# like a heavy ball that no friction stops. The loss falls at first, and then rises again.


def descend(is_right):
    w = torch.tensor([1.0], requires_grad=True)
    losses = []
    for _ in range(12):
        if is_right:
            w.grad = None
        loss = (w**2).sum()
        loss.backward()
        mean = w.grad.clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        with torch.no_grad():
            w -= 0.1 * mean
        losses.append(loss.item())
    return {"losses": losses}


with_zero, without = run(descend, True)[0], run(descend, False)[0]
lines = list(zip(with_zero["losses"], without["losses"], strict=True))
rows("Losses of 12 steps", ("with zero_grad", "without"), lines)
check("with zero_grad, the loss falls", with_zero["losses"][-1], min(with_zero["losses"]))
check("without, the loss rises again", without["losses"][-1] > min(without["losses"]))


@picture("The loss with and without zero_grad")
def draw(figure):
    axes = figure.subplots()
    for name, result in (("with zero_grad", with_zero), ("without", without)):
        axes.plot(result["losses"], ".-", label=name)
    axes.legend()


# %%
# ## 3. No set_epoch
#
# DistributedSampler shuffles by seed + epoch. Without `set_epoch`, every epoch has the same order and
# the same batches.


def sample(calls_set_epoch):
    sampler = DistributedSampler(range(8), dist.get_world_size(), dist.get_rank(), shuffle=True)
    epochs = {}
    for epoch in range(2):
        if calls_set_epoch:
            sampler.set_epoch(epoch)
        epochs[f"epoch {epoch}"] = list(sampler)
    return epochs


fixed, shuffled = run(sample, False), run(sample, True)
table("Samples without set_epoch", fixed)
table("Samples with set_epoch", shuffled)
check("without set_epoch, both epochs are equal", all(line["epoch 0"] == line["epoch 1"] for line in fixed))
check("with it, they differ", any(line["epoch 0"] != line["epoch 1"] for line in shuffled))

# %%
# ## 4. Ranks start from different weights
#
# A seed of its own for each rank is right for dropout and augmentation, but not for initial weights.
# Equal gradients keep unequal weights unequal for ever. DDP and Paceline make the weights equal at the
# start.


def start(seed_is_shared):
    torch.manual_seed(0 if seed_is_shared else dist.get_rank())
    first = torch.randn(1)
    w = first.clone()
    for _ in range(3):
        gradient = w * 2
        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
        w -= 0.1 * gradient
    extremes = torch.cat((w, -w))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)  # the highest weight, and minus the lowest
    return {"first weight": first, "after 3 steps": w, "difference between ranks": extremes.sum().item()}


own, shared = run(start, False), run(start, True)
table("A seed for each rank", own)
check("one seed: the ranks are equal", column(shared, "difference between ranks"), [0.0] * n)
check("a seed for each rank: they differ if n > 1", own[0]["difference between ranks"] > 0, n > 1)

# %%
# ## 5. Evaluation counts samples twice
#
# DistributedSampler repeats samples until all ranks have the same number. For training this matters
# little. In an evaluation the repeated samples count twice. Here the model is wrong on sample 0 only.


def evaluate(is_right):
    sampler = DistributedSampler(range(10), dist.get_world_size(), dist.get_rank(), shuffle=False)
    mine = list(range(dist.get_rank(), 10, dist.get_world_size())) if is_right else list(sampler)
    counts = torch.tensor([float(sum(sample != 0 for sample in mine)), float(len(mine))])
    dist.all_reduce(counts)
    return {"samples": mine, "counted": counts[1].item(), "accuracy": (counts[0] / counts[1]).item()}


padded, exact = run(evaluate, False), run(evaluate, True)
table("With repeated samples", padded)
table("Without", exact)
check("the right accuracy is 0.9", exact[0]["accuracy"], 0.9, 1e-6)
count = -(-10 // n) * n  # 10 samples, and those that are repeated
wrong = (9 + max(count - 11, 0)) / count
check("the wrong accuracy depends on the number of ranks", padded[0]["accuracy"], wrong, 1e-6)

# %%
# ## Question
ask(
    "Which of the five mistakes would a test on 1 rank find?",
    "Only the second and the third. The others need at least 2 ranks, and the fifth a number of "
    "samples that the ranks do not divide. `paceline verify` compares a plan with one process for this "
    "reason.",
)
