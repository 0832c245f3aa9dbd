"""The stacks of a model: lists of blocks that run one after the other, such as an encoder and a decoder."""

from torch import nn

from paceline.parallel.blocks import find_blocks, select_unshared
from paceline.task import Layout


def find_stacks(model: nn.Module, layout: Layout) -> list[list[nn.Module]]:
    """Return the blocks of each stack; first those that plans shard.

    Blocks of one list are a stack, and so are blocks that the layout names one by one. A layout without
    blocks adds the lists that have no block and are in no block.
    """
    units = find_blocks(model, layout)
    parents = {
        id(child): id(parent)
        for parent in model.modules()
        if isinstance(parent, (nn.ModuleList, nn.Sequential))
        for child in parent.children()
    }
    by_parent: dict[int | None, list[nn.Module]] = {}
    for unit in units:
        by_parent.setdefault(parents.get(id(unit)), []).append(unit)
    stacks = list(by_parent.values())
    if layout.blocks is not None:
        return stacks
    taken = {id(module) for unit in units for module in unit.modules()}
    for parent in model.modules():
        if not isinstance(parent, (nn.ModuleList, nn.Sequential)) or any(
            id(module) in taken for module in parent.modules()
        ):
            continue
        if children := select_unshared(model, list(parent.children())):
            stacks.append(children)
            taken |= {id(module) for module in parent.modules()}
    return stacks
