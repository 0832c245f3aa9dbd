"""Optimizers that need sums over whole tensors, of which a rank may have only shards.

An optimizer states its sums by yielding them: for each tensor, what this rank's shard contributes. It
receives the sums over the ranks that hold the other shards. All parameter groups run in lockstep, so that a
step has one small all-reduce for each round of sums and each axis along which tensors are sharded. Tensors
that this rank holds whole (`ddp`, `zero1`, stages of a pipeline) need none.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.data.fake import is_fake
from paceline.distributed.dtensor import is_dtensor, local_tensor
from paceline.training.optimizers.compiled import CompiledUpdate, compile_update
from paceline.training.optimizers.pieces import iterate_pieces

# Yields the contributions of the shards, one flat float64 tensor for each parameter; receives their sums.
Rounds = Generator[list[Tensor], list[Tensor], None]


@dataclass
class GroupTensors:
    """The tensors of a parameter group that have gradients.

    options: of the group. params: as the model has them. weights, grads: the part on this rank, with complex
    numbers as pairs of real ones.
    """

    options: dict[str, Any]
    params: list[nn.Parameter]
    weights: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]

    def moments(self, key: str) -> list[Tensor]:
        """Return the part on this rank of a state with the shape of the parameters, at first 0."""
        for parameter, state in zip(self.params, self.states, strict=True):
            if key not in state:
                state[key] = torch.zeros_like(
                    parameter, requires_grad=False, memory_format=torch.preserve_format
                )
        return [as_real(local_tensor(state[key])) for state in self.states]

    def whole(self, key: str, make: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return a state that each rank holds whole. make: returns its first value for a parameter."""
        found = []
        for parameter, weight, state in zip(self.params, self.weights, self.states, strict=True):
            value = state[key] if key in state else make(parameter)
            state[key] = value = value.to(weight.device)  # a checkpoint may have been read to the CPU
            found.append(value)
        return found

    def count_steps(self) -> list[int]:
        """Count this step of each tensor, and return the counts."""
        for state in self.states:
            state["step"] = state.get("step", torch.zeros((), dtype=torch.int64)) + 1
        return [int(state["step"]) for state in self.states]


class WholeTensorOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that state which sums over whole tensors they need."""

    whole_from: float = math.inf  # elements from which compiled code updates a tensor, if there is any

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters. A collective if any of them is sharded."""
        assert closure is None
        groups = [tensors for group in self.param_groups if (tensors := self._collect(group)).params]
        running = [(tensors, self._update(tensors)) for tensors in groups]
        sums: list[list[Tensor] | None] = [None] * len(running)
        while running:
            parts = [_advance(rounds, known) for (_, rounds), known in zip(running, sums, strict=True)]
            running = [pair for pair, part in zip(running, parts, strict=True) if part is not None]
            yielded = [part for part in parts if part is not None]
            sums = [*sum_shards([tensors.params for tensors, _ in running], yielded)]

    def _collect(self, group: dict[str, Any]) -> GroupTensors:
        params = [parameter for parameter in group["params"] if parameter.grad is not None]
        return GroupTensors(
            options=group,
            params=params,
            weights=[as_real(local_tensor(parameter.detach())) for parameter in params],
            grads=[as_real(local_tensor(parameter.grad)) for parameter in params],
            states=[self.state[parameter] for parameter in params],
        )

    def _update_compiled(
        self, update: CompiledUpdate, piece: Sequence[Sequence[Tensor]], *numbers: float
    ) -> bool:
        """Update the tensor of a piece by compiled code; return False if that does not suit the piece.

        piece: the arguments of `update`, each a list with a tensor. numbers: may change from step to step.
        """
        first = piece[0][0]
        tensors = [tensor for of_kind in piece for tensor in of_kind]
        if first.numel() < self.whole_from or not all(map(_is_plain, tensors)):
            return False
        flat = (tensor.view(-1) for tensor in tensors)
        compile_update(update)(*flat, torch.tensor(numbers, dtype=first.dtype))
        return True

    def _update(self, tensors: GroupTensors) -> Rounds:
        """Update the parameters of a group, and yield the contributions to sums."""
        raise NotImplementedError


def _advance(rounds: Rounds, sums: list[Tensor] | None) -> list[Tensor] | None:
    """Return what the next round sums; None at the end."""
    try:
        return next(rounds) if sums is None else rounds.send(sums)
    except StopIteration:
        return None


def sum_shards(params: Sequence[Sequence[Tensor]], parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return the sums over all shards of each parameter. A collective if a parameter is sharded.

    params: by group. parts: by group and parameter, what the shard on this rank contributes.
    """
    sums = [list(of_group) for of_group in parts]
    by_axis: dict[dist.ProcessGroup, list[tuple[int, int]]] = {}
    for group, of_group in enumerate(params):
        for at, parameter in enumerate(of_group):
            for process_group in _shard_groups(parameter):
                by_axis.setdefault(process_group, []).append((group, at))
    for process_group, places in by_axis.items():
        flat = torch.cat([sums[group][at] for group, at in places])
        dist.all_reduce(flat, group=process_group)
        sizes = [sums[group][at].numel() for group, at in places]
        for (group, at), total in zip(places, flat.split(sizes), strict=True):
            sums[group][at] = total
    return sums


def _shard_groups(parameter: Any) -> Iterator[dist.ProcessGroup]:
    """Yield the process group of each axis of the mesh along which a parameter is sharded."""
    if is_dtensor(parameter):
        for axis, placement in enumerate(parameter.placements):
            if not placement.is_replicate() and parameter.device_mesh.size(axis) > 1:
                yield parameter.device_mesh.get_group(axis)


def as_real(tensor: Tensor) -> Tensor:
    """Return a view of a complex tensor with pairs of real numbers, as torch's optimizers update it."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def find_place(parameter: Any) -> tuple[slice, ...]:
    """Return the indices in the whole tensor of the part on this rank."""
    if not is_dtensor(parameter):
        return tuple(slice(0, size) for size in parameter.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def squares(*tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of squares of the shards: for each parameter as many numbers as there are lists."""
    device = tensors[0][0].device
    sums = torch.zeros(len(tensors[0]), len(tensors), dtype=torch.float64, device=device)
    for places, lists in iterate_pieces(*tensors, is_divided=False):
        columns = [_sum_squares(parts) for parts in lists]
        sums.index_add_(0, torch.tensor(places, device=device), torch.stack(columns, 1))
    return list(sums.unbind())


def _sum_squares(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of each part, in float64."""
    if all(map(_is_plain, parts)):
        flat = [part.view(-1) for part in parts]
        return torch.stack([torch.dot(part, part) for part in flat]).double()
    precise = reduce(torch.promote_types, {part.dtype for part in parts}, torch.float32)
    norms = torch._foreach_norm(list(parts), dtype=precise)
    return torch.stack(list(norms)).double().square()


def _is_plain(part: Tensor) -> bool:
    """Return whether the elements of a part are float32 or float64, in order, in the memory of the CPU."""
    is_precise = part.dtype in (torch.float32, torch.float64)
    return is_precise and part.device.type == "cpu" and part.is_contiguous()


def trust_ratios(numerators: Tensor, denominators: Tensor, clip: float | None = None) -> Tensor:
    """Return numerator / denominator for each tensor, at most `clip`; 1 where either is 0."""
    ratios = torch.where((numerators > 0) & (denominators > 0), numerators / denominators, 1.0)
    return ratios if clip is None else ratios.clamp(max=clip)


def subtract_(weights: Sequence[Tensor], updates: Sequence[Tensor], scales: Tensor) -> None:
    """Subtract scale × update from each weight. scales: a number for each. The updates may change, too."""
    if scales.device.type == "cpu" and not is_fake(scales):
        for weight, update, scale in zip(weights, updates, scales.tolist(), strict=True):
            weight.add_(update, alpha=-scale)
        return
    factors = [scale.to(weight.dtype) for scale, weight in zip(scales, weights, strict=True)]
    torch._foreach_mul_(list(updates), factors)
    torch._foreach_sub_(list(weights), list(updates))
