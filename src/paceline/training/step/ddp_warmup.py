"""Warm-up of DistributedDataParallel on a batch whose gradients are dropped.

It determines before the first step:

* Whether a parameter gets no gradient on some rank. Only then DDP must search for unused parameters, which
  costs a walk over the graph in every step.
* The order in which gradients come. torch rebuilds its buckets after the first backward pass, and on more
  than two ranks that changes the last bits of the sums. A resumed run would differ from one that never
  stopped.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.data.samples import Batch
from paceline.distributed.rng import derive_seed, seed_torch
from paceline.parallel.autograd_graph import find_reached_parameters
from paceline.parallel.data_parallel.ddp import release, replicate
from paceline.parallel.loss.forward import autocast, compute_weighted_loss, forward
from paceline.parallel.loss.global_loss import GlobalLoss, find_gradients, gather_splits, preserved_buffers
from paceline.training.step.step import TrainingStep
from paceline.user_code import UserCode


def warm_up_ddp(step: TrainingStep, batch: Batch) -> nn.Module:
    """Return the model to call in all steps. A collective, if `step.model` is a DistributedDataParallel.

    Parameters, buffers and gradients are restored.
    """
    model = step.model
    if not isinstance(model, DistributedDataParallel):
        return model
    with preserved_buffers(model.module):
        return _warm_up(step, model, batch)


def _warm_up(step: TrainingStep, model: DistributedDataParallel, batch: Batch) -> nn.Module:
    seed_torch(derive_seed(step.seed, "settle"), step.device)
    with autocast(step.precision, step.device):
        if step.global_loss is None:
            if step.auxiliary is not None:
                step.auxiliary.begin(1, 1.0, checks=False)
            loss, _ = compute_weighted_loss(step.task, model, batch, auxiliary=step.auxiliary)
        else:
            loss = _surrogate_loss(step.global_loss, forward(step.task, model, batch), batch)
    reached = find_reached_parameters(loss)
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    all_reached = torch.tensor(
        all(id(parameter) in reached for parameter in trained), dtype=torch.int32, device=step.device
    )
    dist.all_reduce(all_reached, dist.ReduceOp.MIN)
    if all_reached.item():
        with UserCode("the backward pass", step.task.loss):
            loss.backward()
        for parameter in trained:
            parameter.grad = None
    else:
        whole = model.module
        del loss
        release(model)
        model = replicate(whole, find_unused=True)
    return model


def _surrogate_loss(global_loss: GlobalLoss, output: object, batch: Batch) -> Tensor:
    """Return a loss of one micro-batch that has the gradients of the global loss.

    All micro-batches are taken to be like the first, so that the global batch has its usual size.
    """
    output = gather_splits(output)
    count = global_loss.shares.microbatches
    _, gradients = global_loss.differentiate(
        [output] * count, [batch] * count, torch.ones_like, 0, checks=False
    )
    pairs = zip(*find_gradients(output, gradients[0]), strict=True)
    return torch.stack([(tensor * gradient).sum() for tensor, gradient in pairs]).sum()
