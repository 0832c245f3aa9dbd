"""Modules that `fully_shard` may gather separately: their parameters are used only while they run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.data.fake import fake_parameters
from paceline.data.samples import Batch
from paceline.distributed.rng import seeded_rngs
from paceline.parallel.autograd_graph import find_reached_parameters
from paceline.parallel.blocks import find_blocks, select_unshared
from paceline.task import Task, read_layout
from paceline.user_code import UserCode

Slot = tuple[int, str]  # id of a module, and the name of one of its parameters


@dataclass(frozen=True)
class ShardUnits:
    """The modules of a model that `fully_shard` gathers separately."""

    names: tuple[str, ...]  # in the order of their first calls
    all_used: bool  # whether the loss of a pass is known to depend on every trained parameter


def find_shard_units(model: nn.Module, tasks: Sequence[Task], batch: Batch, seed: int) -> ShardUnits:
    """Return the units of `model`, which is on the meta device: its blocks, or modules inside of them.

    A call may enter a block through one of its submodules. Its units are then the largest submodules that are
    always entered as a whole. tasks: of the passes of a step. A model that reads values, and so cannot run
    here, is assumed to enter its blocks as a whole.
    """
    from paceline.parallel.loss.forward import call_model

    running: dict[Slot, set[int]] = {}
    all_used = False
    outputs: list[object] = []
    try:
        with (
            UserCode("the forward pass without values", tasks[0].model),
            seeded_rngs(seed),
            fake_parameters(model) as imagine,
        ):
            inputs = imagine(batch)
            running = _find_modules_running_at_uses(
                model, lambda: outputs.extend(call_model(task, model, inputs) for task in tasks)
            )
            all_used = len(tasks) == 1 and _loss_reaches_all(tasks[0], model, outputs[0], inputs)
    except Exception:  # the user's code fails on tensors without values
        running = {}
    names = {id(module): name for name, module in model.named_modules()}
    units = select_unshared(
        model,
        [
            module
            for unit in find_blocks(model, read_layout(tasks[0]))
            for module in _split_unless_entered(unit, running)
        ],
    )
    order = {slot: index for index, slot in enumerate(running)}
    index = 0
    first_uses: dict[int, int] = {}  # a unit that was not called follows its predecessor
    for module in units:
        index = min((order[slot] for slot in _list_slots(module) if slot in order), default=index)
        first_uses[id(module)] = index
    units.sort(key=lambda module: first_uses[id(module)])
    return ShardUnits(tuple(names[id(module)] for module in units), all_used)


def _loss_reaches_all(task: Task, model: nn.Module, output: object, batch: Batch) -> bool:
    """Return whether the loss is known to depend on all trained parameters.

    A pass may use parameters for outputs that the loss does not read, such as the pooler of an encoder.
    """
    from paceline.parallel.loss.forward import call_loss

    try:
        with UserCode("the loss without values", task.loss):
            reached = find_reached_parameters(call_loss(task, output, batch))
    except Exception:  # the user's code fails on tensors without values
        return False
    return all(id(parameter) in reached for parameter in model.parameters() if parameter.requires_grad)


def _split_unless_entered(module: nn.Module, running: dict[Slot, set[int]]) -> list[nn.Module]:
    """Return `module` if it runs at all uses of its parameters; else its largest submodules that do."""
    slots = _list_slots(module)
    if all(id(module) in running[slot] for slot in slots if slot in running):
        return [module] if slots else []
    return [unit for child in module.children() for unit in _split_unless_entered(child, running)]


def _find_modules_running_at_uses(model: nn.Module, run: Callable[[], Any]) -> dict[Slot, set[int]]:
    """Return for each used parameter the ids of the modules that run at all of its uses."""
    running: set[int] = set()
    slots_by_id = _find_slots_by_parameter(model)
    modules_at_uses: dict[Slot, set[int]] = {}

    class UseTracer(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for leaf in tree_leaves((args, kwargs)):
                for slot in slots_by_id.get(id(leaf), ()) if isinstance(leaf, Tensor) else ():
                    modules_at_uses[slot] = modules_at_uses.get(slot, running) & running
            return func(*args, **(kwargs or {}))

    hooks = []
    for module in model.modules():
        hooks.append(
            module.register_forward_pre_hook(lambda module, args: running.add(id(module)), prepend=True)
        )
        hooks.append(
            module.register_forward_hook(
                lambda module, args, output: running.discard(id(module)), always_call=True
            )
        )
    try:
        with UseTracer():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return modules_at_uses


def _list_slots(module: nn.Module) -> list[Slot]:
    return [
        (id(inner), key)
        for inner in module.modules()
        for key, parameter in inner._parameters.items()
        if parameter is not None
    ]


def _find_slots_by_parameter(model: nn.Module) -> dict[int, list[Slot]]:
    """Return the slots of each parameter, by its id."""
    slots: dict[int, list[Slot]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((id(module), key))
    return slots
