"""Where the tensors of a model are kept."""

from torch import nn

Places = list[list[tuple[nn.Module, str]]]


def find_places(*models: nn.Module) -> Places:
    """The places of each parameter and buffer: `to_empty` makes a new one for each."""
    places: dict[int, dict[tuple[nn.Module, str], None]] = {}
    for module in (module for model in models for module in model.modules()):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), {})[module, key] = None
    return [list(of_one) for of_one in places.values()]
