"""Modes under which a model's constructor runs: on the meta device, recorded, or with poisoned memory.

The constructor cannot tell that it runs on the meta device: its tensors report that they are on the CPU,
and so does the default device. Libraries skip their initialization on the meta device (transformers 5 and
parts of torch.nn.init do).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from paceline.training.init.operation_tape import (
    CPU,
    META,
    OperationTape,
    is_on_meta,
    is_uninitialized,
    may_be_poisoned,
    poison_,
)

FROM_VALUES = (
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    torch.from_numpy,
)  # that take the caller's values
REPORTED_ATTRIBUTES = {  # what tensors on the meta device report to the constructor
    Tensor.device.__get__: CPU,
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}


class RecordOperations(TorchDispatchMode):
    """Record the operations on the meta device."""

    def __init__(self, tape: OperationTape):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        ]
        written += [value for name, value in kwargs.items() if name == "out" and isinstance(value, Tensor)]
        if any(is_on_meta(item) for item in inputs):
            lifted = {
                id(item): self._lift(item)
                for item in inputs
                if not is_on_meta(item) and not any(item is tensor for tensor in written)
            }
            args, kwargs = tree_map(lambda item: lifted.get(id(item), _actual_device(item)), (args, kwargs))
        result = func(*args, **kwargs)
        if any(
            isinstance(item, Tensor) and is_on_meta(item) for item in tree_flatten((args, kwargs, result))[0]
        ):
            self.tape.add(func, args, kwargs, result, written, torch.Tag.nondeterministic_seeded in func.tags)
        return result

    def _lift(self, real: Tensor) -> Tensor:
        """Return a tensor on the meta device for a tensor that the constructor made on another device."""
        values = real.detach().clone()
        stand_in = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=META)
        self.tape.add(values.clone, (), {}, stand_in, [stand_in], random=False)
        return stand_in


def _actual_device(item: Any) -> Any:
    """Return the meta device for the CPU, else `item`.

    Tensors on the meta device report the CPU, so `.to("cpu")` must not move them.
    """
    return META if item in ("cpu", CPU) and isinstance(item, (str, torch.device)) else item


class MetaConstruction(TorchFunctionMode):
    """Create tensors on the meta device, unless a device is named, that report to be on the CPU.

    Values that the constructor passes in are kept. An operation that fails, such as reading values, makes
    the tape incomplete.
    """

    def __init__(self, tape: OperationTape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REPORTED_ATTRIBUTES:
            return REPORTED_ATTRIBUTES[func] if is_on_meta(args[0]) else func(*args, **kwargs)
        try:
            if (
                func in FROM_VALUES
                and kwargs.get("device") is None
                and not (args and isinstance(args[0], Tensor))
            ):
                return self._from_values(func(*args, **kwargs))
            if func in _device_constructors():
                device = kwargs.get("device")
                # A constructor that names the meta device wants no values.
                self.tape.is_complete &= device is None or torch.device(device).type != "meta"
                return func(*args, **{**kwargs, "device": META if device is None else device})
            if args and isinstance(args[0], Tensor) and is_on_meta(args[0]):
                if func is Tensor.cpu:
                    return args[0]
                args, kwargs = tree_map(_actual_device, (args, kwargs))
            return func(*args, **kwargs)
        except Exception:  # of any kind, which the code of the model may catch
            self.tape.is_complete = False
            raise

    def _from_values(self, real: Tensor) -> Tensor:
        stand_in = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=META)
        self.tape.add(lambda: real.detach().clone(), (), {}, stand_in, [stand_in], random=False)
        return stand_in.requires_grad_(real.requires_grad)


class PoisonUninitialized(TorchDispatchMode):
    """Fill uninitialized memory with recognizable values."""

    def __init__(self, second: bool):
        super().__init__()
        self.second = second
        self.dtypes: set[torch.dtype] = set()  # of the filled tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if is_uninitialized(func) and not is_on_meta(result):
            poison_(result, self.second)
            self.dtypes.add(result.dtype)
        return result

    def may_be_in(self, tensor: Tensor) -> bool:
        return may_be_poisoned(tensor) and (
            tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in self.dtypes
        )


@contextlib.contextmanager
def record_trunc_normal(tape: OperationTape) -> Iterator[None]:
    """Record trunc_normal_ as one operation.

    torch 2.13: it draws until all values are in range, which a tensor on the meta device cannot tell.
    """
    original = nn.init._no_grad_trunc_normal_

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not is_on_meta(tensor):
            return original(tensor, *args, **kwargs)
        tape.add(original, (tensor, *args), kwargs, tensor, [tensor], random=True)
        return tensor

    nn.init._no_grad_trunc_normal_ = record
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
