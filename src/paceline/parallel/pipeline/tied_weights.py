"""Synchronization of parameters that several stages of a pipeline hold, each with a part of the gradient."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.distributed.dtensor import local_tensor
from paceline.parallel.pipeline.stage import PipelineRank, Stage, StagePartition, stage_ranks


class TiedWeightSync:
    """The tied parameters of one rank.

    `copies`: (name in the model, stage, name in the stage) of parameters that two stages of this rank hold.
    Each copy is sharded separately. The model and its optimizer know only the copy of the first stage.
    """

    def __init__(
        self,
        model: nn.Module,
        partition: StagePartition,
        rank: PipelineRank,
        copies: Sequence[tuple[str, Stage, str]],
    ):
        self.model, self.copies = model, copies
        ranks = stage_ranks(rank.plan)
        holders = {
            name: tuple(sorted({ranks[stage] for stage in partition.holders[name]}))
            for name, _ in model.named_parameters()
        }
        groups = _build_groups({pp_ranks for pp_ranks in holders.values() if len(pp_ranks) > 1}, rank)
        self.groups = {
            name: groups[pp_ranks]
            for name, pp_ranks in sorted(holders.items())
            if len(pp_ranks) > 1 and rank.place.pp in pp_ranks
        }

    @torch.no_grad()
    def renew_copies(self) -> None:
        """Update the copies after the optimizer, or a loaded checkpoint, has changed the parameters."""
        parameters = dict(self.model.named_parameters()) if self.copies else {}
        for name, stage, own_name in self.copies:
            local_tensor(getattr(stage, own_name)).copy_(local_tensor(parameters[name]))

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Sum the gradients of all holders, so that each holder has the whole gradient."""
        parameters = dict(self.model.named_parameters())
        for name, stage, own_name in self.copies:
            parameter, copy = parameters[name], getattr(stage, own_name)
            if parameter.grad is None:
                parameter.grad = copy.grad
            elif copy.grad is not None:
                local_tensor(parameter.grad).add_(local_tensor(copy.grad))
            copy.grad = None
        for name, group in self.groups.items():
            parameter = parameters[name]
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                grad: Tensor = parameter.grad
                dist.all_reduce(local_tensor(grad), group=group)


def _build_groups(
    holder_groups: set[tuple[int, ...]], rank: PipelineRank
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return, by pp ranks, the process group of those that have the same part of the batch as this rank.

    A collective call.
    """
    plan = rank.plan
    groups = {}
    for pp_ranks in sorted(holder_groups):
        for copy in range(plan.ranks_per_stage):
            group = dist.new_group([pp * plan.ranks_per_stage + copy for pp in pp_ranks])
            if copy == plan.index_in_stage(rank.place):
                groups[pp_ranks] = group
    return groups
