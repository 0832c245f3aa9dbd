"""Compare the last weights and all losses of two runs bit by bit."""

import torch

from paceline import events
from paceline.errors import CheckpointError
from paceline.events import Step
from paceline.run import RunFolder
from paceline.training.checkpoint.stored import load_weights


def find_weight_difference(run: RunFolder, reference: RunFolder, steps: int) -> str | None:
    """Return a sentence about the first tensor of the last checkpoint that differs; None if all are equal."""
    if not run.checkpoints() or run.checkpoints()[-1] != steps:
        return f"there is no checkpoint of the last step, {steps}"
    try:
        weights = load_weights(run.checkpoint(steps))
    except CheckpointError as error:
        return str(error)
    expected = load_weights(reference.checkpoint(steps))
    for name, tensor in expected.items():
        actual = weights.get(name)
        if actual is None or actual.shape != tensor.shape or actual.dtype != tensor.dtype:
            return f"{name} is {_describe(actual)} instead of {_describe(tensor)}"
        count = int((_as_bytes(actual) != _as_bytes(tensor)).any(-1).sum())
        if count:
            return f"{name} differs in {count} of {tensor.numel()} elements"
    return None


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, of shape (elements, bytes per element)."""
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _describe(tensor: torch.Tensor | None) -> str:
    if tensor is None:
        return "missing"
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def find_loss_difference(run: RunFolder, reference: RunFolder, last_only: bool = False) -> str | None:
    """Return a sentence about the first step of any start whose loss, norm or lr differs; None if equal.

    last_only: of a step that was repeated, only the last execution counts."""
    expected = {event.step: event for event in events.read(reference.events) if isinstance(event, Step)}
    steps = [event for event in events.read(run.events) if isinstance(event, Step)]
    for event in {event.step: event for event in steps}.values() if last_only else steps:
        if event.step in expected:
            other = expected[event.step]
            if (event.loss, event.grad_norm, event.lr) != (other.loss, other.grad_norm, other.lr):
                return f"the loss of step {event.step} was {event.loss!r} instead of {other.loss!r}"
    return None
