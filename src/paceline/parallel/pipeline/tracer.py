"""Where a model can be cut into the stages of a pipeline, found out in one forward pass on stand-ins of its parameters.

A cut lies before the call of a part (gates.py). What crosses it are the arguments of that call that depend on parameters; what
depends on the inputs alone, each stage computes again. A cut is possible where nothing else that depends on parameters before it
is used behind it. That is followed through every operation, also those that autograd does not know (masks, choices of an expert).
"""

import contextlib
import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from paceline.data.fake import without_values
from paceline.data.loader import Batch
from paceline.distributed.dtensor import storage_id
from paceline.errors import PlanError
from paceline.parallel.autograd_graph import find_reached_parameters
from paceline.parallel.forward import autocast, call_model
from paceline.parallel.module_hooks import CallInterceptor, Run, find_parts
from paceline.parallel.pipeline.buffers import BufferUse
from paceline.task import Layout, Task
from paceline.user_code import UserCode

Mask = int  # bit c: depends on what lies before cut c, not through what crosses it


@dataclass(frozen=True)
class TensorMeta:
    """A tensor by its looks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    writable: bool = False  # somebody writes into it

    def nothing(self, device: torch.device) -> Tensor:
        """What must not be used: NaN, and no memory where nobody writes into it."""
        nothing = torch.full(
            (),
            float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0,
            dtype=self.dtype,
            device=device,
        )
        return nothing.expand(self.shape).clone() if self.writable else nothing.expand(self.shape)


@dataclass(frozen=True)
class PassedThrough:
    """A tensor that a part returns as it was called with it."""

    index: int  # of the leaves of (args, kwargs)


@dataclass
class PartCall:
    """One call of a part."""

    part: str
    crossing: list[int]  # of the leaves of (args, kwargs) those that cross a cut here
    likes: list[TensorMeta]  # of these
    output: tuple[list[Any], Any] = ([], None)  # leaves, with Like or Passed for tensors, and their structure
    free: bool = False  # of parameters: every stage calls it itself
    flops: int = 0  # until the next call
    trace: int = 0  # of the operations until then, their shapes and whether they get gradients or are run again for them: a hash
    written: bool = False  # its output, by somebody else


@dataclass
class ForwardTrace:
    """What a forward pass on stand-ins has shown."""

    calls: list[PartCall] = field(default_factory=list)
    barred: dict[int, str] = field(default_factory=dict)  # cut -> why it cannot be
    uses: dict[str, set[int]] = field(
        default_factory=dict
    )  # parameter -> calls during or after which it is used
    outside: set[str] = field(
        default_factory=set
    )  # parameters that are used outside of the calls of their part, too
    buffers: dict[str, BufferUse] = field(default_factory=dict)
    together: set[int] = field(default_factory=set)  # cuts that are barred by the use of buffers

    @property
    def cuts(self) -> list[int]:
        """The calls that a stage may begin with."""
        return [at for at, call in enumerate(self.calls) if at and not call.free and at not in self.barred]

    def bar_pairs(self, styles: Mapping[str, str]) -> None:
        """Bar cuts between layers that tp splits by columns and those that take their features in parts. `styles`: by module."""
        parted = False
        for at, here in enumerate(self.calls):
            own = {style for name, style in styles.items() if f"{name}.".startswith(f"{here.part}.")}
            if parted:
                self.barred.setdefault(at, f"{here.part} takes features in the parts that tp makes of them")
            parted = "row" not in own and (parted or "column" in own)

    def bar_by_buffers(self) -> None:
        """Bar cuts between the uses of a buffer that must be in one stage."""
        for name, use in self.buffers.items():
            for cut in use.together:
                self.together.add(cut)
                self.barred.setdefault(cut, f"buffer {name} is changed, and used before and after it")

    def join(self, evaluation: "ForwardTrace") -> None:
        """Bar what an evaluation bars, too, where it calls the same parts."""
        if [call.part for call in self.calls] != [call.part for call in evaluation.calls]:
            return
        for name, use in evaluation.buffers.items():
            self.buffers.setdefault(name, BufferUse()).add(use)
        self.barred |= {cut: why for cut, why in evaluation.barred.items() if cut not in self.barred}
        self.together |= evaluation.together
        self.bar_by_buffers()


class StandInModel:
    """A copy of a model for recordings: its parameters are stand-ins. To be made while the model is as its constructor left it."""

    def __init__(self, model: nn.Module, layout: Layout, device: torch.device):
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.device = device
        self.copy = copy.deepcopy(model)
        self.gates = CallInterceptor(find_parts(self.copy, layout))
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.names: dict[int, str] = {}  # id of a stand-in of a parameter -> name
        self.local: frozenset[str] = (
            frozenset()
        )  # buffers whose values only the stage that changes them knows
        self.trained = {name for name, parameter in self.copy.named_parameters() if parameter.requires_grad}
        made: dict[int, Tensor] = {}
        owned = {id(parameter): name for name, parameter in self.copy.named_parameters()}
        for module in self.copy.modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        made[id(tensor)] = made.get(id(tensor), self.stand_in(tensor))
                        tensors[key] = made[id(tensor)]  # type: ignore[assignment]
                        if id(tensor) in owned:
                            self.names[id(made[id(tensor)])] = owned[id(tensor)]

    def stand_in(self, tensor: Tensor) -> Tensor:
        with self.mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)

    def record_step(self, task: Task, batch: Batch, precision: str) -> ForwardTrace:
        """Record a pass in training. Where it changes buffers, evaluations have to find them in the same stage."""
        recording = self.record(task, batch, precision, training=True)
        if any(use.changed and use.outside for use in recording.buffers.values()):
            with contextlib.suppress(PlanError):  # an evaluation raises it, if there is one
                recording.join(self.record(task, batch, precision, training=False))
        return recording

    def record(self, task: Task, batch: Batch, precision: str, training: bool) -> ForwardTrace:
        """Raises PlanError for a model that cannot be run without values."""
        while True:
            recording = self._record(task, batch, precision, training)
            local = {name for name, use in recording.buffers.items() if use.is_local}
            if local <= self.local:
                return recording
            self.local |= local  # what is read of these depends on parameters

    def _record(self, task: Task, batch: Batch, precision: str, training: bool) -> ForwardTrace:
        self.copy.train(training)
        buffers = [(module._buffers, dict(module._buffers)) for module in self.copy.modules()]
        recorder = _Recorder(self, training)
        self.gates.visitor = recorder.called
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with (
                torch.random.fork_rng(devices=[]),
                torch.set_grad_enabled(training),
                recorder,
                autocast(precision, self.device),
            ):
                output = call_model(task, self.copy, batch)
                recorder.ended(_results(task, output, batch, training))
        except PlanError:
            raise
        except (
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:  # the user's code, which meets tensors without values
            raise without_values(error, "where a pipeline may cut it", "a plan without pp") from error
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            self.gates.visitor, self.gates.inside = None, False
            for own, before in buffers:
                own.update(before)  # a model may assign them
        return recorder.recording

    def learns(self, task: Task, batch: Batch, precision: str) -> frozenset[str] | None:
        """Return the names of the parameters that a plain pass gives gradients; None where the task's loss looks at values."""
        parameters = [
            tensor
            for module in self.copy.modules()
            for tensor in module._parameters.values()
            if tensor is not None
        ]
        trained = [tensor for tensor in parameters if self.names[id(tensor)] in self.trained]
        self.copy.train()
        try:
            for tensor in trained:
                tensor.requires_grad_()
            without_values = UserCode("the forward pass without values", task.model)
            with (
                without_values,
                torch.random.fork_rng(devices=[]),
                torch.enable_grad(),
                autocast(precision, self.device),
            ):
                loss = task.loss(call_model(task, self.copy, batch), batch)
                return frozenset(
                    self.names[leaf] for leaf in find_reached_parameters(loss) if leaf in self.names
                )
        except Exception:  # the user's code, which meets tensors without values
            return None
        finally:
            for tensor in trained:
                tensor.requires_grad_(False)


def _results(task: Task, output: Any, batch: Batch, training: bool) -> list[Any]:
    """What is used of an output."""
    try:
        with UserCode("the forward pass without values", task.loss):
            return [task.loss(output, batch), *([] if training else task.metrics(output, batch).values())]
    except (
        Exception
    ):  # the user's code, which may look at values; the output as a whole stands for what it uses
        return tree_leaves(output)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _is_training(func: Any, args: Any, kwargs: Any) -> bool:
    named = {
        argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)
    } | dict(kwargs)
    return bool(named.get("training", True))


def _runs_again() -> bool:
    """Whether the user's code is inside of torch.utils.checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


class _Recorder(TorchDispatchMode):
    """Follows what depends on which parameters."""

    def __init__(self, model: StandInModel, gradients: bool):
        super().__init__()
        from torch.utils.flop_counter import flop_registry

        aten = torch.ops.aten
        on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
        self.flops = {on_cpu: flop_registry[aten._scaled_dot_product_flash_attention], **flop_registry}
        self.model = model
        self.recording = ForwardTrace()
        self.own = {
            name: {id(tensor) for module in part.modules() for tensor in module._parameters.values()}
            for name, part in model.gates.parts.items()
        }
        self.now = -1  # the last call
        self.gradients = gradients  # whether the pass as a whole gets them
        self.inside = False
        self.alone = False  # inside of a part with parameters: no stage behind has what is computed there
        self.masks: dict[int, Mask] = {}  # by id of a tensor
        self.written: dict[int, Mask] = {}  # by storage
        self.outputs: dict[int, int] = {}  # storage -> call that returned it
        self.places: dict[
            int, int
        ] = {}  # id of what crossed a cut, and of views of it -> storage it would have behind the cut
        self.kept: list[Any] = []  # so that no id is used twice
        self.buffers = {storage_id(buffer): name for name, buffer in model.copy.named_buffers()}  # by storage
        self.assigned = [
            (m._buffers, key, buffer)
            for m in model.copy.modules()
            for key, buffer in m._buffers.items()
            if buffer is not None
        ]

    def mask(self, tensor: Tensor) -> Mask:
        return self.masks.get(id(tensor), 0) | self.written.get(self.place(tensor), 0)

    def place(self, tensor: Tensor) -> int:
        return self.places.get(id(tensor), storage_id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        mask = 0
        for tensor in inputs:
            mask |= self.mask(tensor)
            if name := self.model.names.get(id(tensor)):
                mask |= -1 << (self.now + 1)
                self.recording.uses.setdefault(name, set()).add(max(self.now, 0))
                if not self.inside or id(tensor) not in self.own[self.recording.calls[self.now].part]:
                    self.recording.outside.add(name)
        for tensor in inputs:
            if (name := self._use(tensor)) in self.model.local:
                mask |= -1 << (self.now + 1)
        if self.inside:
            if self.alone:
                mask |= -1 << (self.now + 1)
            self._bar(
                mask,
                self.now,
                f"{self.recording.calls[self.now].part} needs what was computed further ahead as well",
            )
        result = func(*args, **kwargs)
        self._write(func, args, kwargs, mask)
        moved = {
            storage_id(tensor): self.places[id(tensor)] for tensor in inputs if id(tensor) in self.places
        }
        for tensor in _tensors(result):
            if mask or id(tensor) in self.masks:
                self.masks[id(tensor)] = mask
                self.kept.append(tensor)
                if storage_id(tensor) in moved:
                    self.places[id(tensor)] = moved[storage_id(tensor)]
        if self.now >= 0:
            self._weigh(self.recording.calls[self.now], func, args, kwargs, result)
        return result

    def _weigh(self, call: PartCall, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = self.flops.get(func._overloadpacket)
        if count is not None:
            call.flops += count(*args, **kwargs, out_val=result)
        seen = [
            (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else str(leaf)
            for leaf in tree_leaves((args, kwargs, result))
        ]
        call.trace = hash((call.trace, func, tuple(seen), torch.is_grad_enabled(), _runs_again()))

    def _write(self, func: Any, args: Any, kwargs: Any, mask: Mask) -> None:
        for argument, value in (*zip(func._schema.arguments, args, strict=False), *kwargs.items()):
            writes = argument == "out" or (
                getattr(argument, "alias_info", None) is not None and argument.alias_info.is_write
            )
            # The schema of most kernels of BatchNorm does not say that they write these.
            writes |= getattr(argument, "name", argument) in ("running_mean", "running_var") and _is_training(
                func, args, kwargs
            )
            for tensor in _tensors(value) if writes else ():
                if name := self.buffers.get(storage_id(tensor)):
                    self._change(name, mask)
                place = self.place(tensor)
                if mask:
                    self.written[place] = self.written.get(place, 0) | mask
                    self.kept.append(tensor.untyped_storage())
                if storage_id(tensor) in self.outputs:
                    self.recording.calls[self.outputs[storage_id(tensor)]].written = True

    def _use(self, tensor: Tensor) -> str | None:
        """Return the name of a buffer, or of that which a tensor is a view of."""
        name = self.buffers.get(storage_id(tensor))
        if name is not None:
            use = self.recording.buffers.setdefault(name, BufferUse())
            use.touched.add(max(self.now, 0))
            use.outside |= not self.alone
        return name

    def _change(self, name: str, mask: Mask) -> None:
        use = self.recording.buffers.setdefault(name, BufferUse())
        use.touched.add(max(self.now, 0))
        use.changed.add(max(self.now, 0))
        use.outside |= not self.alone
        use.learned |= bool(mask)
        if not self.alone:
            self.recording.together |= self._bar(
                mask, self.now, f"buffer {name} is changed by what was computed further ahead"
            )

    def _see_assignments(self) -> None:
        """Of other tensors to buffers, since the last call of this."""
        for at, (buffers, key, before) in enumerate(self.assigned):
            now = buffers.get(key)
            if now is not None and now is not before:
                name = self.buffers[storage_id(before)]
                self.kept.append(before)
                self.assigned[at] = buffers, key, now
                self.buffers[storage_id(now)] = name
                self._change(name, self.mask(now))

    def called(self, name: str, run: Run, args: Any, kwargs: Any) -> Any:
        self._see_assignments()
        calls = self.recording.calls
        at = self.now = len(calls)
        here = PartCall(name, [], [])
        calls.append(here)
        for tensor in _tensors((args, kwargs)):
            self._use(tensor)
        for index, leaf in enumerate(tree_leaves((args, kwargs))):
            if at and isinstance(leaf, Tensor) and (mask := self.mask(leaf)) >> at & 1:
                self.masks[id(leaf)] = mask & ~(1 << at)
                self.places[id(leaf)] = -len(self.kept) - 1
                self.kept.append(leaf)
                here.crossing.append(index)
                here.likes.append(TensorMeta(tuple(leaf.shape), leaf.dtype))
        earlier = [index for index, call in enumerate(calls[:-1]) if call.part == name]
        if earlier:
            for cut in range(earlier[0] + 1, at + 1):
                self.recording.barred.setdefault(cut, f"{name} is called more than once")
        if _runs_again():
            self.recording.barred.setdefault(
                at, f"the model itself, and not recompute=full, computes {name} again in the backward pass"
            )
        if torch.is_grad_enabled() != self.gradients:
            self.recording.barred.setdefault(at, f"{name} is called without gradients")
        if not here.crossing or not all(like.dtype.is_floating_point for like in here.likes):
            self.recording.barred.setdefault(at, f"{name} is not called with what was computed before it")
        has_parameters = any(True for _ in self.model.gates.parts[name].parameters())
        self.inside = self.model.gates.inside = True
        self.alone = has_parameters
        result = run(*args, **kwargs)
        self._see_assignments()
        self.inside = self.model.gates.inside = self.alone = False
        here.free = not has_parameters and not any(map(self.mask, _tensors(result)))
        given = {id(leaf): index for index, leaf in enumerate(tree_leaves((args, kwargs)))}
        leaves, structure = tree_flatten(
            result
        )  # apart: what a user's structure is made of may be checked by it
        here.output = (
            [self._returned(leaf, given) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            structure,
        )
        for tensor in _tensors(result):
            if id(tensor) not in given:
                if not here.free:  # whatever it depends on: no stage behind has it
                    self.masks[id(tensor)] = self.mask(tensor) | -1 << (at + 1)
                self.outputs[storage_id(tensor)] = at
            self.kept.append(tensor)
        return result

    @staticmethod
    def _returned(tensor: Tensor, given: Mapping[int, int]) -> TensorMeta | PassedThrough:
        return (
            PassedThrough(given[id(tensor)])
            if id(tensor) in given
            else TensorMeta(tuple(tensor.shape), tensor.dtype)
        )

    def ended(self, results: Iterable[Any]) -> None:
        self._see_assignments()
        mask = 0
        for tensor in _tensors(list(results)):
            mask |= self.mask(tensor)
        last = len(self.recording.calls) - 1
        self._bar(mask, last, "the result of the model needs what was computed further ahead as well")
        self.recording.bar_by_buffers()
        for call_ in self.recording.calls:
            if call_.written:
                leaves, structure = call_.output
                call_.output = (
                    [
                        TensorMeta(leaf.shape, leaf.dtype, True) if isinstance(leaf, TensorMeta) else leaf
                        for leaf in leaves
                    ],
                    structure,
                )

    def _bar(self, mask: Mask, last: int, why: str) -> set[int]:
        """Bar those cuts up to `last` that are in the mask, and return them."""
        found = set()
        stale = mask & ((1 << (last + 1)) - 1) & ~1
        while stale:
            cut = stale.bit_length() - 1
            stale ^= 1 << cut
            found.add(cut)
            self.recording.barred.setdefault(cut, why)
        return found
