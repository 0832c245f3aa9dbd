"""What DistributedDataParallel only finds out in its first step is found out before, on a batch whose gradients are dropped.

* Whether some parameter gets no gradient, on any rank: only then its search for unused parameters, which costs a walk over the graph
  in every step, is needed.
* The order in which gradients come: torch lays its buckets out anew after the first backward pass, and on more than two
  ranks that changes the last bits of the sums. A resumed run would differ from one that never stopped.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.data.loader import Batch
from paceline.distributed.rng import derive_seed, seed_torch
from paceline.parallel.autograd_graph import find_reached_parameters
from paceline.parallel.ddp import release, replicate
from paceline.parallel.forward import autocast, compute_weighted_loss
from paceline.training.step import TrainingStep
from paceline.user_code import UserCode


def settle(step: TrainingStep, batch: Batch) -> nn.Module:
    """The model to call in all steps. Parameters, buffers and gradients are afterwards as they were."""
    model = step.model
    if not isinstance(model, DistributedDataParallel):
        return model
    kept = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    seed_torch(derive_seed(step.seed, "settle"), step.device)
    with autocast(step.precision, step.device):
        loss, _ = compute_weighted_loss(step.task, model, batch)
    leads_to = find_reached_parameters(loss)
    everywhere = torch.tensor(
        all(id(parameter) in leads_to for parameter in step.params), dtype=torch.int32, device=step.device
    )
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    if everywhere.item():
        with UserCode("the backward pass", step.task.loss):
            loss.backward()
        step.optimizer.zero_grad(set_to_none=True)
    else:
        whole = model.module
        del loss
        release(model)
        model = replicate(whole, find_unused=True)
    with torch.no_grad():
        for name, buffer in list(model.module.named_buffers()):
            if name in kept:
                buffer.copy_(kept[name])
            else:  # it was None until the forward pass
                owner, _, leaf = name.rpartition(".")
                model.module.get_submodule(owner)._buffers[leaf] = None
    return model
