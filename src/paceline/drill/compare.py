"""Two runs that should have come to the same: their last weights and all their losses, bit by bit."""

import torch

from paceline import events
from paceline.errors import CheckpointError
from paceline.events import Step
from paceline.run import RunFolder
from paceline.training.checkpoint.save import load_whole


def weights_differ(run: RunFolder, reference: RunFolder, steps: int) -> str | None:
    """The first tensor of the last checkpoint that is not the same in every bit."""
    if not run.checkpoints() or run.checkpoints()[-1] != steps:
        return f"there is no checkpoint of step {steps}, the last one"
    try:
        found = load_whole(run.checkpoint(steps))
    except CheckpointError as error:
        return str(error)
    expected = load_whole(reference.checkpoint(steps))
    for name, tensor in expected.items():
        if name not in found or found[name].shape != tensor.shape or found[name].dtype != tensor.dtype:
            return f"{name} is {_kind(found.get(name))} in place of {_kind(tensor)}"
        apart = int((_bytes(found[name]) != _bytes(tensor)).any(-1).sum())
        if apart:
            return f"{name} differs in {apart} of {tensor.numel()} elements"
    return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Shape (elements, bytes of one)."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _kind(tensor: torch.Tensor | None) -> str:
    return (
        "not there" if tensor is None else f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    )


def losses_differ(run: RunFolder, reference: RunFolder) -> str | None:
    """The first step, in any of its starts, whose loss or gradient norm is another one."""
    expected = {event.step: event for event in events.read(reference.events) if isinstance(event, Step)}
    for event in events.read(run.events):
        if isinstance(event, Step) and event.step in expected:
            there = expected[event.step]
            if (event.loss, event.grad_norm, event.lr) != (there.loss, there.grad_norm, there.lr):
                return f"the loss of step {event.step} was {event.loss!r} in place of {there.loss!r}"
    return None
