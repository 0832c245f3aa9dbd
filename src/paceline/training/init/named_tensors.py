"""Names of the parameters and buffers of a model."""

from torch import Tensor, nn


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; a tied tensor by its first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def find_aliases(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tied parameter and buffer, by its other names."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in named if first.setdefault(id(tensor), name) != name}
