"""The modules and names under which a model holds its tensors."""

from torch import nn

Places = list[list[tuple[nn.Module, str]]]


def find_places(*models: nn.Module) -> Places:
    """Return the places of each parameter and buffer.

    `to_empty` makes a new tensor for each place, so ties must be restored.
    """
    places: dict[int, dict[tuple[nn.Module, str], None]] = {}
    for module in (module for model in models for module in model.modules()):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), {})[module, key] = None
    return [list(tensor_places) for tensor_places in places.values()]
