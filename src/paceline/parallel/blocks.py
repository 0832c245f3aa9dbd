"""The blocks of a model: the repeated layers that plans shard, recompute and compile one by one."""

from collections.abc import Sequence

from torch import nn

from paceline.errors import TaskError
from paceline.spec import suggest
from paceline.task import Layout


def find_blocks(model: nn.Module, layout: Layout) -> list[nn.Module]:
    """Return the units of sharding and compilation: the layout's blocks, or the children of the longest list.

    Blocks that share a parameter with another module are left out, and belong to the root.
    """
    if layout.blocks is None:
        units = _find_longest_list(model)
    else:
        units = []
        for path in layout.blocks:
            try:
                module = model.get_submodule(path)
            except AttributeError:
                known = [name for name, _ in model.named_modules() if name]
                raise TaskError(f"layout().blocks: no such module: {path!r}{suggest(path, known)}") from None
            units += (
                list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else [module]
            )
    return select_unshared(model, units)


def select_unshared(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules with parameters that no other module of `model` uses."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return [
        block
        for block in modules
        if not isinstance(block, (nn.ModuleList, nn.ModuleDict))
        and (own := [id(parameter) for parameter in block.parameters()])
        and all(
            uses[parameter]
            == sum(parameter == id(p) for m in block.modules() for p in m._parameters.values())
            for parameter in own
        )
    ]


def _find_longest_list(model: nn.Module) -> list[nn.Module]:
    lists = [
        [child for child in module.children() if any(True for _ in child.parameters())]
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    return max(lists, key=len, default=[])
