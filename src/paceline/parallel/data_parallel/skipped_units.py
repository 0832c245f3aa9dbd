"""Keep ranks in step where `fully_shard` gathers units: a rank gathers the units that it skips, too.

Ranks that route samples or drop layers differently would gather different units in one collective. They would
wait for one another, or use the weights of one unit as those of another.
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
    """Runs the units that a pass skips, without their computation.

    `model` is sharded; `units` are its separately gathered modules, in the order of their calls.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], device: torch.device):
        self.model, self.units, self.device = model, units, device
        self.next = 0  # index of the first unit that this pass has not reached
        self.is_passing = False
        self.used: set[str] = set()  # tracked parameters that have a gradient on this rank
        self.tracked: set[int] = set()  # ids of modules
        names = {id(module): name for name, module in model.named_modules()}
        self.prefixes = tuple(f"{names[id(unit)]}." for unit in units)
        for module in model.modules():
            if set_reduce := getattr(module, "set_reduce_scatter_unused_params", None):
                set_reduce(True, recurse=False)
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)
        for index, unit in enumerate(units):
            unit.register_forward_pre_hook(partial(self._enter, index), prepend=True, with_kwargs=True)

    def _begin(self, model: nn.Module, args: Any) -> None:
        self.next = 0

    def _enter(self, index: int, unit: nn.Module, args: Any, kwargs: Any) -> Call | None:
        is_recomputing = torch._C._current_graph_task_id() != -1  # in a backward pass
        if self.is_passing or is_recomputing or index < self.next:
            return None
        skipped, self.next = range(self.next, index), index + 1
        return self._pass_arguments(skipped, args, kwargs) if skipped else None

    def _end(self, model: nn.Module, args: Any, output: Any) -> Any:
        skipped, self.next = range(self.next, len(self.units)), len(self.units)
        if not skipped:
            return None
        if isinstance(output, Tensor):
            return self._pass_value(skipped, output)
        if isinstance(output, dict):  # as in transformers
            _, changed = self._pass_arguments(skipped, (), dict(output))
            for key, value in changed.items():
                output[key] = value
            return output
        values, _ = self._pass_arguments(
            skipped, tuple(output) if isinstance(output, (tuple, list)) else (), {}
        )
        return type(output)(values) if type(output) in (tuple, list) else None

    def _pass_arguments(self, skipped: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Pass the first tensor with a gradient through the skipped units, so its gradient passes too."""
        values = [*args, *kwargs.values()]
        tensors = [
            index
            for index, value in enumerate(values)
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        chosen = next(
            (index for index in tensors if values[index].requires_grad), tensors[0] if tensors else None
        )
        if chosen is None:
            self._pass_value(skipped, torch.zeros((), device=self.device))
        else:
            values[chosen] = self._pass_value(skipped, values[chosen])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _pass_value(self, skipped: Sequence[int], value: Tensor) -> Tensor:
        self.is_passing = True
        try:
            for index in skipped:
                unit = self.units[index]
                inner: Callable[..., Any] | None = unit.__dict__.get("forward")
                unit.forward = _identity
                try:
                    value = unit(value)
                finally:
                    del unit.forward
                    if inner is not None:
                        unit.forward = inner
        finally:
            self.is_passing = False
        return value

    def track_gradients(self) -> None:
        """Record from now on which parameters get a gradient, for `drop_unused_`."""
        for index, unit in enumerate(self.units):
            unit.register_forward_pre_hook(partial(self._track, self.prefixes[index]))
        self.model.register_forward_pre_hook(partial(self._track, ""))

    def _track(self, prefix: str, module: nn.Module, args: Any) -> None:
        """Track the parameters of a module, which are gathered now and are the same objects each time."""
        if id(module) in self.tracked:
            return
        self.tracked.add(id(module))
        for name, parameter in module.named_parameters(prefix.rstrip(".")):
            if parameter.requires_grad and (prefix or not name.startswith(self.prefixes)):
                parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.used.add(name))

    @torch.no_grad()
    def drop_unused_(self, mesh: DeviceMesh) -> None:
        """Set the gradient of parameters that no rank has used to None, as on one process.

        An optimizer would otherwise apply weight decay to them.
        """
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
        for index, (name, parameter) in enumerate(parameters):
            if name not in self.used and not used[index]:
                parameter.grad = None
        self.used.clear()


def _identity(value: Tensor) -> Tensor:
    return value.view_as(value)
