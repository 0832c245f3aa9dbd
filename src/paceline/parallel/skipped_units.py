"""Keeps ranks in step where `fully_shard` gathers units: one that a rank skips is gathered there nevertheless.

Ranks that route samples or drop layers in unlike ways would gather unlike units in one collective: they would wait for one another, or
take the weights of one unit for those of another.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

Call = tuple[tuple[Any, ...], dict[str, Any]]


class SkippedUnits:
    """`model` is sharded; `units` are the modules of it that are gathered on their own, in the order of their calls."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], device: torch.device):
        self.model, self.units, self.device = model, units, device
        self.next = 0  # the first unit that this pass has not come to
        self.passing = False
        self.used: set[str] = set()  # parameters that have got a gradient here, of those that are `followed`
        self.followed: set[int] = set()  # ids of modules
        names = {id(module): name for name, module in model.named_modules()}
        self.prefixes = tuple(f"{names[id(unit)]}." for unit in units)
        for module in model.modules():
            if set_reduce := getattr(module, "set_reduce_scatter_unused_params", None):
                set_reduce(True, recurse=False)
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)
        for at, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._enter, at), prepend=True, with_kwargs=True)

    def _begin(self, model: nn.Module, args: Any) -> None:
        self.next = 0

    def _enter(self, at: int, unit: nn.Module, args: Any, kwargs: Any) -> Call | None:
        again = torch._C._current_graph_task_id() != -1  # in a backward pass, to compute activations again
        if self.passing or again or at < self.next:
            return None
        skipped, self.next = range(self.next, at), at + 1
        return self._pass_through(skipped, args, kwargs) if skipped else None

    def _end(self, model: nn.Module, args: Any, output: Any) -> Any:
        skipped, self.next = range(self.next, len(self.units)), len(self.units)
        if not skipped:
            return None
        if isinstance(output, Tensor):
            return self._pass(skipped, output)
        if isinstance(output, dict):  # those of transformers are
            _, changed = self._pass_through(skipped, (), dict(output))
            for key, value in changed.items():
                output[key] = value
            return output
        values, _ = self._pass_through(
            skipped, tuple(output) if isinstance(output, (tuple, list)) else (), {}
        )
        return type(output)(values) if type(output) in (tuple, list) else None

    def _pass_through(self, skipped: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Let the first tensor with a gradient go through the units: its gradient comes back through them."""
        values = [*args, *kwargs.values()]
        tensors = [
            at for at, value in enumerate(values) if isinstance(value, Tensor) and value.is_floating_point()
        ]
        chosen = next((at for at in tensors if values[at].requires_grad), tensors[0] if tensors else None)
        if chosen is None:
            self._pass(skipped, torch.zeros((), device=self.device))
        else:
            values[chosen] = self._pass(skipped, values[chosen])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _pass(self, skipped: Sequence[int], value: Tensor) -> Tensor:
        self.passing = True
        try:
            for at in skipped:
                unit = self.units[at]
                inner: Callable[..., Any] | None = unit.__dict__.get("forward")
                unit.forward = _identity
                try:
                    value = unit(value)
                finally:
                    del unit.forward
                    if inner is not None:
                        unit.forward = inner
        finally:
            self.passing = False
        return value

    def follow(self) -> None:
        """From now on note which parameters get a gradient, for `drop_unused_`."""
        for at, unit in enumerate(self.units):
            unit.register_forward_pre_hook(partial(self._follow, self.prefixes[at]))
        self.model.register_forward_pre_hook(partial(self._follow, ""))

    def _follow(self, prefix: str, module: nn.Module, args: Any) -> None:
        """Its parameters are gathered now, and are the same objects each time."""
        if id(module) in self.followed:
            return
        self.followed.add(id(module))
        for name, parameter in module.named_parameters(prefix.rstrip(".")):
            if parameter.requires_grad and (prefix or not name.startswith(self.prefixes)):
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.used.add(name))

    @torch.no_grad()
    def drop_unused_(self, mesh: DeviceMesh) -> None:
        """Leave a parameter without a gradient where no rank has used it, as it is on one process; else an optimizer would decay it."""
        parameters = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and parameter.dim()
        ]
        used = torch.tensor(
            [name in self.used for name, _ in parameters], dtype=torch.uint8, device=self.device
        )
        for axis in range(mesh.ndim):
            dist.all_reduce(used, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        for at, (name, parameter) in enumerate(parameters):
            if name not in self.used and not used[at]:
                parameter.grad = None
        self.used.clear()


def _identity(value: Tensor) -> Tensor:
    return value.view_as(value)
