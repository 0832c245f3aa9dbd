"""Exercise: average gradients of parts that differ in size."""

# %% exercise
# Write `average_gradients(model, samples)`. Every rank has called backward() on the mean loss of its own
# `samples` samples; the numbers differ between ranks. Afterwards every rank must have the gradient of
# the mean loss over the samples of all ranks. A parameter without a gradient (None) must stay without.
import torch
import torch.distributed as dist


def average_gradients(model, samples):
    raise NotImplementedError


# %% solution
import torch
import torch.distributed as dist


def average_gradients(model, samples):
    total = torch.tensor(float(samples))
    dist.all_reduce(total)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= samples / total.item()
            dist.all_reduce(parameter.grad)


# %% grade
import torch
import torch.distributed as dist
from torch import nn

from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import run_solution

n = num_ranks()


def build(ranks):
    draw = torch.Generator().manual_seed(1)
    model = nn.Linear(3, 2)
    model.unused = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 3, generator=draw))
        model.bias.zero_()
    return model, [torch.randn(rank + 1, 3, generator=draw) for rank in range(ranks)]


def try_solution():
    rank = dist.get_rank()
    model, parts = build(dist.get_world_size())
    model(parts[rank]).square().mean().backward()
    average_gradients(model, len(parts[rank]))
    return model.weight.grad, model.bias.grad, model.unused.weight.grad is None


model, parts = build(n)
model(torch.cat(parts)).square().mean().backward()
for rank, (weight, bias, is_none) in enumerate(run_solution(try_solution)):
    check(f"rank {rank} has the gradient of the weight over all samples", weight, model.weight.grad, 1e-5)
    check(f"rank {rank} has the gradient of the bias over all samples", bias, model.bias.grad, 1e-5)
    check(f"rank {rank}: the unused parameter has no gradient", is_none)
