"""Find where a model can be cut into stages, by one forward pass on fake parameters.

A cut lies before the call of a part (see `parallel.module_hooks`). The arguments of that call that depend
on parameters cross the cut. Each stage recomputes what depends on the inputs alone. A cut is possible if
nothing else that depends on parameters before it is used after it. The tracer follows these dependencies
through every operation, including those that autograd does not know, such as masks and the choice of an
expert.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from paceline.distributed.dtensor import storage_id
from paceline.parallel.module_hooks import CallInterceptor, Run
from paceline.parallel.pipeline.buffers import BufferUse
from paceline.parallel.pipeline.capturing_hooks import record_hooks
from paceline.parallel.pipeline.forward_trace import (
    ForwardTrace,
    PartCall,
    PassedThrough,
    Returned,
    TensorMeta,
)

EMPTY: Mapping[int, int] = MappingProxyType({})
Mask = int  # bit c is set: depends on values before cut c that do not cross it


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_training(func: Any, args: Any, kwargs: Any) -> bool:
    named = {
        argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
    } | dict(kwargs)
    return bool(named.get("training", True))


def _is_checkpointed() -> bool:
    """Return whether the user's code is inside torch.utils.checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class DependencyTracer(TorchDispatchMode):
    """Follow which values depend on which parameters.

    interceptor: of the calls of the parts of `model`. parameter_names: by id of a parameter.
    local_buffers: names of buffers whose values only the stage that changes them knows.
    """

    def __init__(
        self,
        model: nn.Module,
        interceptor: CallInterceptor,
        parameter_names: Mapping[int, str],
        local_buffers: frozenset[str],
        grad_enabled: bool,
    ):
        super().__init__()
        from torch.utils.flop_counter import flop_registry

        aten = torch.ops.aten
        on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
        self.flops = {on_cpu: flop_registry[aten._scaled_dot_product_flash_attention], **flop_registry}
        self.interceptor = interceptor
        self.parameter_names = parameter_names
        self.local_buffers = local_buffers
        self.trace = ForwardTrace()
        self.own_parameters = {
            name: {id(tensor) for module in part.modules() for tensor in module._parameters.values()}
            for name, part in interceptor.parts.items()
        }
        self.now = -1  # index of the latest call
        self.operations = 0  # that compute, so far
        self.grad_enabled = grad_enabled  # for the pass as a whole
        self.inside = False  # inside a part
        self.inside_own = False  # inside a part with parameters: later stages do not have its values
        self.masks: dict[int, Mask] = {}  # by id of a tensor
        self.written: dict[int, Mask] = {}  # by storage
        self.outputs: dict[int, int] = {}  # storage -> call that returned it
        # id of a tensor that crossed a cut, or of a view of it -> the storage it would have after the cut
        self.storage_after_cut: dict[int, int] = {}
        self.kept: list[Any] = []  # objects kept alive so that no id is used twice
        self.buffers = {storage_id(buffer): name for name, buffer in model.named_buffers()}  # by storage
        self.assigned = [
            (module._buffers, key, buffer)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]

    def mask_of(self, tensor: Tensor) -> Mask:
        return self.masks.get(id(tensor), 0) | self.written.get(self.storage(tensor), 0)

    def storage(self, tensor: Tensor) -> int:
        return self.storage_after_cut.get(id(tensor), storage_id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        self.operations += func is not torch.ops.aten.detach.default
        mask = 0
        for tensor in inputs:
            mask |= self.mask_of(tensor)
            if name := self.parameter_names.get(id(tensor)):
                mask |= -1 << (self.now + 1)
                self.trace.uses.setdefault(name, set()).add(max(self.now, 0))
                if not self.inside or id(tensor) not in self.own_parameters[self.trace.calls[self.now].part]:
                    self.trace.used_outside.add(name)
        for tensor in inputs:
            if (name := self._note_buffer_use(tensor)) in self.local_buffers:
                mask |= -1 << (self.now + 1)
        if self.inside:
            if self.inside_own:
                mask |= -1 << (self.now + 1)
            self._bar(
                mask,
                self.now,
                f"{self.trace.calls[self.now].part} also needs values computed earlier",
            )
        result = func(*args, **kwargs)
        self._note_writes(func, args, kwargs, mask)
        moved = {
            storage_id(tensor): self.storage_after_cut[id(tensor)]
            for tensor in inputs
            if id(tensor) in self.storage_after_cut
        }
        for tensor in _tensors(result):
            if mask or id(tensor) in self.masks:
                self.masks[id(tensor)] = mask
                self.kept.append(tensor)
                if storage_id(tensor) in moved:
                    self.storage_after_cut[id(tensor)] = moved[storage_id(tensor)]
        if self.now >= 0:
            self._count(self.trace.calls[self.now], func, args, kwargs, result)
        return result

    def _count(self, call: PartCall, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation to the FLOPs and to the hash of a call."""
        count = self.flops.get(func._overloadpacket)
        if count is not None:
            call.flops += count(*args, **kwargs, out_val=result)
        signature = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else str(leaf)
            for leaf in tree_leaves((args, kwargs, result))
        ]
        call.ops_hash = hash(
            (call.ops_hash, func, tuple(signature), torch.is_grad_enabled(), _is_checkpointed())
        )

    def _note_writes(self, func: Any, args: Any, kwargs: Any, mask: Mask) -> None:
        for argument, value in (*zip(func._schema.arguments, args, strict=False), *kwargs.items()):
            is_written = argument == "out" or (
                getattr(argument, "alias_info", None) is not None and argument.alias_info.is_write
            )
            # The schema of most BatchNorm kernels does not declare that they write these.
            is_written |= getattr(argument, "name", argument) in (
                "running_mean",
                "running_var",
            ) and _is_training(func, args, kwargs)
            for tensor in _tensors(value) if is_written else ():
                if name := self.buffers.get(storage_id(tensor)):
                    self._note_buffer_change(name, mask)
                storage = self.storage(tensor)
                if mask:
                    self.written[storage] = self.written.get(storage, 0) | mask
                    self.kept.append(tensor.untyped_storage())
                if storage_id(tensor) in self.outputs:
                    self.trace.calls[self.outputs[storage_id(tensor)]].is_written = True

    def _note_buffer_use(self, tensor: Tensor) -> str | None:
        """Return the name of the buffer that `tensor` is, or is a view of."""
        name = self.buffers.get(storage_id(tensor))
        if name is not None:
            use = self.trace.buffers.setdefault(name, BufferUse())
            use.touched.add(max(self.now, 0))
            use.outside |= not self.inside_own
        return name

    def _note_buffer_change(self, name: str, mask: Mask) -> None:
        use = self.trace.buffers.setdefault(name, BufferUse())
        use.touched.add(max(self.now, 0))
        use.changed.add(max(self.now, 0))
        use.outside |= not self.inside_own
        use.learned |= bool(mask)
        if not self.inside_own:
            self.trace.barred_by_buffers |= self._bar(
                mask, self.now, f"buffer {name} is changed by values computed earlier"
            )

    def _note_buffer_assignments(self) -> None:
        """Find the buffers to which the model assigned other tensors since the previous check."""
        for at, (buffers, key, before) in enumerate(self.assigned):
            now = buffers.get(key)
            if now is not None and now is not before:
                name = self.buffers[storage_id(before)]
                self.kept.append(before)
                self.assigned[at] = buffers, key, now
                self.buffers[storage_id(now)] = name
                self._note_buffer_change(name, self.mask_of(now))

    def visit_call(self, name: str, run: Run, args: Any, kwargs: Any) -> Any:
        """Trace a call of the part `name`, and return what it returns."""
        self._note_buffer_assignments()
        calls = self.trace.calls
        at = self.now = len(calls)
        call = PartCall(name, [], [])
        calls.append(call)
        for tensor in _tensors((args, kwargs)):
            self._note_buffer_use(tensor)
        for index, leaf in enumerate(tree_leaves((args, kwargs))):
            if at and isinstance(leaf, Tensor) and (mask := self.mask_of(leaf)) >> at & 1:
                self.masks[id(leaf)] = mask & ~(1 << at)
                self.storage_after_cut[id(leaf)] = -len(self.kept) - 1
                self.kept.append(leaf)
                call.crossing.append(index)
                call.crossing_metas.append(TensorMeta(tuple(leaf.shape), leaf.dtype))
        self._bar_cuts_around(call, at)
        has_parameters = any(True for _ in self.interceptor.parts[name].parameters())
        self.inside = self.interceptor.inside = True
        self.inside_own = has_parameters
        with record_hooks(self.interceptor.parts[name], lambda: self.operations) as hooks:
            result = run(*args, **kwargs)
        self._note_buffer_assignments()
        self.inside = self.interceptor.inside = self.inside_own = False
        call.is_replicated = not has_parameters and not any(map(self.mask_of, _tensors(result)))
        given = {id(leaf): index for index, leaf in enumerate(tree_leaves((args, kwargs)))}
        # Not tree_map: a user's class may check what it is built from.
        leaves, structure = tree_flatten(result)
        call.output = (
            [self._meta(leaf, given) for leaf in leaves],
            structure,
        )
        returned = {id(leaf): index for index, leaf in enumerate(leaves)}
        for hook in hooks:
            self.kept += _tensors(hook.leaves)
            call.hooks.append(
                replace(hook, leaves=[self._meta(leaf, given, returned) for leaf in hook.leaves])
            )
        for tensor in _tensors(result):
            if id(tensor) not in given:
                if not call.is_replicated:  # later stages do not have it, whatever it depends on
                    self.masks[id(tensor)] = self.mask_of(tensor) | -1 << (at + 1)
                self.outputs[storage_id(tensor)] = at
            self.kept.append(tensor)
        return result

    def _bar_cuts_around(self, call: PartCall, at: int) -> None:
        """Bar the cuts that the call at index `at` makes impossible."""
        name = call.part
        earlier = [index for index, before in enumerate(self.trace.calls[:-1]) if before.part == name]
        if earlier:
            for cut in range(earlier[0] + 1, at + 1):
                self.trace.barred.setdefault(cut, f"{name} is called more than once")
        if _is_checkpointed():
            self.trace.barred.setdefault(
                at, f"the model itself, and not recompute=full, recomputes {name} in the backward pass"
            )
        if torch.is_grad_enabled() != self.grad_enabled:
            self.trace.barred.setdefault(at, f"{name} is called without gradients")
        if not call.crossing or not all(meta.dtype.is_floating_point for meta in call.crossing_metas):
            self.trace.barred.setdefault(at, f"{name} does not take values computed before it")

    @staticmethod
    def _meta(leaf: Any, given: Mapping[int, int], returned: Mapping[int, int] = EMPTY) -> Any:
        """Return what stands for a leaf on stages that do not run the part."""
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in given:
            return PassedThrough(given[id(leaf)])
        if id(leaf) in returned:
            return Returned(returned[id(leaf)])
        return TensorMeta(tuple(leaf.shape), leaf.dtype)

    def finish(self, results: Iterable[Any]) -> None:
        """Complete the trace. `results`: what the task computes from the output of the model."""
        self._note_buffer_assignments()
        mask = 0
        for tensor in _tensors(list(results)):
            mask |= self.mask_of(tensor)
        last = len(self.trace.calls) - 1
        self._bar(mask, last, "the model's output also needs values computed earlier")
        self.trace.bar_buffer_cuts()
        for call in self.trace.calls:
            if call.is_written:
                leaves, structure = call.output
                call.output = (
                    [
                        TensorMeta(leaf.shape, leaf.dtype, True) if isinstance(leaf, TensorMeta) else leaf
                        for leaf in leaves
                    ],
                    structure,
                )

    def _bar(self, mask: Mask, last: int, why: str) -> set[int]:
        """Bar those cuts up to `last` that are in the mask, and return them."""
        cuts = set()
        remaining = mask & ((1 << (last + 1)) - 1) & ~1
        while remaining:
            cut = remaining.bit_length() - 1
            remaining ^= 1 << cut
            cuts.add(cut)
            self.trace.barred.setdefault(cut, why)
        return cuts
