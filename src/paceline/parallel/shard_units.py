"""Which modules `fully_shard` may gather on their own: those whose parameters are used while they run, and at no other time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.data.fake import fake_parameters
from paceline.data.loader import Batch
from paceline.distributed.rng import seeded_rngs
from paceline.parallel.blocks import find_blocks, select_unshared
from paceline.task import Task, read_layout
from paceline.user_code import UserCode

Slot = tuple[int, str]  # id of a module, and the name of a parameter there


@dataclass(frozen=True)
class ShardUnits:
    """The modules of a model that `fully_shard` gathers on their own."""

    names: tuple[str, ...]  # in the order of their first calls
    all_used: bool  # whether one pass is known to use every parameter


def find_shard_units(model: nn.Module, task: Task, batch: Batch, seed: int) -> ShardUnits:
    """Find the blocks of `model`, which is on the meta device; in place of a block that is entered through a module inside of it, the
    largest modules inside that are not. A model that looks at values is taken to enter its blocks whole."""
    from paceline.parallel.forward import call_model

    running: dict[Slot, set[int]] = {}
    try:
        with (
            UserCode("the forward pass without values", task.model),
            seeded_rngs(seed),
            fake_parameters(model) as imagine,
        ):
            inputs = imagine(batch)
            running = _find_modules_running_at_uses(model, lambda: call_model(task, model, inputs))
    except Exception:  # the user's code, which meets tensors without values
        running = {}
    names = {id(module): name for name, module in model.named_modules()}
    found = select_unshared(
        model,
        [
            module
            for unit in find_blocks(model, read_layout(task))
            for module in _split_unless_entered(unit, running)
        ],
    )
    order = {slot: at for at, slot in enumerate(running)}
    slots = {slot for slots in _find_slots_by_parameter(model).values() for slot in slots[:1]}
    at = 0
    begins: dict[int, int] = {}  # a unit that was not called comes behind the one before it
    for module in found:
        at = min((order[slot] for slot in _list_slots(module) if slot in order), default=at)
        begins[id(module)] = at
    found.sort(key=lambda module: begins[id(module)])
    return ShardUnits(tuple(names[id(module)] for module in found), slots <= running.keys())


def _split_unless_entered(module: nn.Module, running: dict[Slot, set[int]]) -> list[nn.Module]:
    slots = _list_slots(module)
    if all(id(module) in running[slot] for slot in slots if slot in running):
        return [module] if slots else []
    return [found for child in module.children() for found in _split_unless_entered(child, running)]


def _find_modules_running_at_uses(model: nn.Module, run: Callable[[], Any]) -> dict[Slot, set[int]]:
    """Return, for each parameter that is used, the ids of the modules that run at all of its uses."""
    now: set[int] = set()
    places = _find_slots_by_parameter(model)
    found: dict[Slot, set[int]] = {}

    class Uses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for leaf in tree_leaves((args, kwargs)):
                for slot in places.get(id(leaf), ()) if isinstance(leaf, Tensor) else ():
                    found[slot] = found.get(slot, now) & now
            return func(*args, **(kwargs or {}))

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, args: now.add(id(module)), prepend=True))
        hooks.append(
            module.register_forward_hook(
                lambda module, args, output: now.discard(id(module)), always_call=True
            )
        )
    try:
        with Uses():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _list_slots(module: nn.Module) -> list[Slot]:
    return [
        (id(inner), key)
        for inner in module.modules()
        for key, parameter in inner._parameters.items()
        if parameter is not None
    ]


def _find_slots_by_parameter(model: nn.Module) -> dict[int, list[Slot]]:
    """Return where each parameter is, by its id."""
    places: dict[int, list[Slot]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((id(module), key))
    return places
