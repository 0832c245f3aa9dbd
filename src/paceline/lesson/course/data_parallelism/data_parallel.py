"""Data parallelism by hand: equal gradients.

In data parallel training, every rank has the whole model and a part of the batch. The local losses and
gradients differ. After an average over ranks, all gradients are equal, and so are all weights after the
step.
"""

# %%
# ## The model and the batch
#
# A regression with 24 samples. Every rank builds the same model from the same seed, and takes every n-th
# sample. Float64 makes rounding so small that equal results look equal.
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from paceline.lesson import ask, check, column, num_ranks, picture, run, table

SAMPLES, STEPS, LR = 24, 5, 0.1
n = num_ranks()


def build():
    draw = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    x = torch.randn(SAMPLES, 3, generator=draw, dtype=torch.float64)
    return model, x, x.sum(dim=1, keepdim=True).sin()


# %%
# ## One step: local losses differ, gradients become equal
#
# The average of the gradients equals the gradient of the whole batch, because the loss is a mean and all
# parts have the same size.


def one_step():
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x, y = build()
    loss = mse_loss(model(x[rank::size]), y[rank::size])
    loss.backward()
    local = model[0].weight.grad[0].clone()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    return {"local loss": loss.item(), "local gradient": local, "averaged gradient": model[0].weight.grad[0]}


model, x, y = build()
loss = mse_loss(model(x), y)
loss.backward()
steps = run(one_step)
table("One step (the first row of the first weight)", steps)
for rank, line in enumerate(steps):
    check(
        f"rank {rank} has the gradient of the whole batch",
        line["averaged gradient"],
        model[0].weight.grad[0],
        1e-12,
    )
check(
    "the mean of the local losses is the loss of the batch",
    sum(line["local loss"] for line in steps) / n,
    loss.item(),
    1e-12,
)

# %%
# ## Training, compared with DistributedDataParallel and with one process
#
# The loop is an ordinary loop with three more lines. DistributedDataParallel (DDP) does the same, but
# sends gradients in buckets while the backward pass still runs.


def train(by_hand):
    rank, size = dist.get_rank(), dist.get_world_size()
    model, x, y = build()
    wrapped = model if by_hand else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse_loss(wrapped(x[rank::size]), y[rank::size])
        loss.backward()
        if by_hand:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    return {"losses": losses, "a weight afterwards": model[0].weight[0, 0].item()}


by_hand, ddp = run(train, True), run(train, False)
table("By hand: the loss of the batch in each step", by_hand)
[alone] = run(train, True, ranks=1)
check(
    "all ranks have equal weights",
    column(by_hand, "a weight afterwards"),
    [by_hand[0]["a weight afterwards"]] * n,
)
check("DDP gives the same", ddp, by_hand, 1e-12)
check("one process gives the same losses", by_hand[0]["losses"], alone["losses"], 1e-12)
check("the loss falls", by_hand[0]["losses"][-1] < by_hand[0]["losses"][0])


@picture("The loss by step: the mean over ranks equals that of one process")
def draw(figure):
    axes = figure.subplots()
    axes.plot(alone["losses"], "o-", markersize=9, alpha=0.4, label="one process")
    axes.plot(by_hand[0]["losses"], ".-", label=f"{n} ranks by hand")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()


# %%
# ## Question
ask(
    "The last batch of an epoch has 7 samples on 2 ranks: 4 on rank 0 and 3 on rank 1. Is the average "
    "of the two gradients still the gradient of the batch?",
    "No. The mean of two means weighs each sample of rank 1 by 1/6 instead of 1/7. Sum the losses of "
    "the samples, and divide by 7 on both ranks.",
)
