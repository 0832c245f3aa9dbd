"""Parameters that several stages of a pipeline hold: each has a part of the gradient."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.distributed.dtensor import local_tensor
from paceline.parallel.pipeline.stage import Stage, StagePartition, ranks_of
from paceline.plan.plan import MeshCoordinate, Plan


class TiedWeightSync:
    """Those of one rank. `copies`: (name in the model, stage, own name there) of what two stages of this rank hold, each sharded for
    itself; the model and its optimizer know the first one only."""

    def __init__(
        self,
        model: nn.Module,
        division: StagePartition,
        plan: Plan,
        place: MeshCoordinate,
        copies: Sequence[tuple[str, Stage, str]],
    ):
        self.model, self.copies = model, copies
        ranks, here = ranks_of(plan), place.pp
        of_name = {
            name: tuple(sorted({ranks[stage] for stage in division.holders[name]}))
            for name, _ in model.named_parameters()
        }
        groups = _groups({of for of in of_name.values() if len(of) > 1}, plan, place)
        self.groups = {name: groups[of] for name, of in sorted(of_name.items()) if len(of) > 1 and here in of}

    @torch.no_grad()
    def renew_copies(self) -> None:
        """What the optimizer has updated, or a checkpoint brought."""
        parameters = dict(self.model.named_parameters()) if self.copies else {}
        for name, stage, own in self.copies:
            local_tensor(getattr(stage, own)).copy_(local_tensor(parameters[name]))

    @torch.no_grad()
    def add_up(self) -> None:
        """The gradients of all holders, so that each has the whole."""
        parameters = dict(self.model.named_parameters())
        for name, stage, own in self.copies:
            parameter, copy = parameters[name], getattr(stage, own)
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


def _groups(
    wanted: set[tuple[int, ...]], plan: Plan, place: MeshCoordinate
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """pp ranks -> those of them that have the same part of the batch as this one. A collective."""
    groups = {}
    for of in sorted(wanted):
        for copy in range(plan.copies):
            group = dist.new_group([pp * plan.copies + copy for pp in of])
            if copy == plan.copy(place):
                groups[of] = group
    return groups
