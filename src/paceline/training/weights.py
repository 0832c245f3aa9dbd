"""Initial weights as a pure function of (seed, parameter name), drawn one tensor at a time.

The model's constructor runs on the meta device, where it costs no memory, while every operation on its tensors is recorded.
Later each parameter is made alone: the operations that led to it are run again for real, each random one from a stream of its
own that is named after the parameter. So the user's own initialization is obeyed, tied and copied weights stay what they are,
and a rank never holds more than one whole tensor besides its share. The idea is that of torchdistx's deferred initialization.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from paceline.errors import TaskError
from paceline.spec import nearest
from paceline.training.seeds import derive, streams
from paceline.training.shards import is_cut, is_here, local, storage_of

FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy)  # what makes a tensor of the caller's numbers
IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _on_meta(tensor: Tensor) -> bool:
    """Also where `is_meta` is made to say no."""
    return tensor.device.type == "meta"


def _as_now(item: Any) -> Any:
    """A parameter may be given other data later (`model.double()`), and a real tensor other values."""
    if not isinstance(item, Tensor):
        return item
    return item.detach() if _on_meta(item) else item.detach().clone()


@dataclass
class Operation:
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    reads: list[int]  # storages
    writes: list[int]  # storages, those that it creates included
    random: bool
    seed: int = 0


@dataclass
class Tape:
    operations: list[Operation] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)  # storage -> indices of operations
    whole: bool = True  # nothing was read that came from elsewhere

    def add(self, run: Callable[..., Any], args: Any, kwargs: Any, result: Any, written: list[Tensor], random: bool) -> None:
        inputs = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
        results = [item for item in tree_flatten(result)[0] if isinstance(item, Tensor)]
        reads = [storage_of(item) for item in inputs]
        self.whole &= all(not _on_meta(item) or storage_of(item) in self.writers for item in inputs)
        writes = [storage_of(item) for item in written] + [made for item in results if (made := storage_of(item)) not in reads]
        if writes:  # the others are views
            for storage in set(writes):
                self.writers.setdefault(storage, []).append(len(self.operations))
            args, kwargs, results = tree_map(_as_now, (args, kwargs, results))
            self.operations.append(Operation(run, args, kwargs, results, reads, writes, random))

    def leading_to(self, storage: int) -> list[Operation]:
        """The operations that the content of `storage` depends on, in order."""
        found: set[int] = set()
        wanted, seen = [storage], {storage}
        while wanted:
            for index in self.writers.get(wanted.pop(), []):
                if index not in found:
                    found.add(index)
                    new = set(self.operations[index].reads + self.operations[index].writes) - seen
                    seen |= new
                    wanted += new
        return [self.operations[index] for index in sorted(found)]


class _Operations(TorchDispatchMode):
    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
        ]
        written += [value for name, value in kwargs.items() if name == "out" and isinstance(value, Tensor)]
        if any(isinstance(item, Tensor) and _on_meta(item) for item in tree_flatten((args, kwargs, result))[0]):
            self.tape.add(func, args, kwargs, result, written, torch.Tag.nondeterministic_seeded in func.tags)
        return result


class _Constants(TorchFunctionMode):
    """Numbers that the constructor brings along are kept, and the functions of torch.nn.init do not skip their work on meta tensors."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == IS_META:  # a new wrapper each time
            return False
        if func not in FROM_VALUES or (isinstance(args[0], Tensor) if args else True):
            return func(*args, **kwargs)
        real = func(*args, **kwargs) if func is torch.from_numpy else func(*args, **{**kwargs, "device": "cpu"})
        stand_in = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device="meta")
        self.tape.add(lambda: real.detach().clone(), (), {}, stand_in, [stand_in], random=False)
        return stand_in.requires_grad_(real.requires_grad)


@contextlib.contextmanager
def _whole_trunc_normal(tape: Tape) -> Iterator[None]:
    """Record trunc_normal_ as one operation: since torch 2.13 it draws until all values fit, which a meta tensor cannot tell."""
    original = nn.init._no_grad_trunc_normal_

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        tape.add(original, (tensor, *args), kwargs, tensor, [tensor], random=True)
        return tensor

    nn.init._no_grad_trunc_normal_ = record
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


@dataclass
class Weights:
    """Where the initial values of a model come from."""

    tape: Tape
    origins: dict[str, Tensor]  # name -> the tensor as the constructor left it: on meta, or real

    def draw(self, name: str) -> Tensor:
        """The whole initial tensor of one parameter or buffer, on the CPU."""
        origin = self.origins[name]
        if not origin.is_meta:
            return origin.detach()
        made: dict[int, Tensor] = {}  # storage -> all of it, one-dimensional

        def real(item: Any) -> Any:
            if isinstance(item, torch.device):
                return torch.device("cpu")
            return _view(made[storage_of(item)], item) if isinstance(item, Tensor) and item.is_meta else item

        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for operation in self.tape.leading_to(storage_of(origin)):
                if operation.random:
                    torch.default_generator.manual_seed(operation.seed)
                result = operation.run(*tree_map(real, operation.args), **tree_map(real, operation.kwargs))
                results = [item for item in tree_flatten(result)[0] if isinstance(item, Tensor)]
                for stand_in, value in zip(operation.results, results, strict=True):
                    if storage_of(stand_in) not in operation.reads:
                        made[storage_of(stand_in)] = _all_of(value, stand_in)
        return _view(made[storage_of(origin)], origin)


def _view(whole: Tensor, like: Tensor) -> Tensor:
    return whole.as_strided(like.size(), like.stride(), like.storage_offset())


def _all_of(value: Tensor, stand_in: Tensor) -> Tensor:
    """All elements in the storage of `value`, laid out as in that of `stand_in`."""
    if value.stride() != stand_in.stride() or value.storage_offset() != stand_in.storage_offset():
        value = torch.empty_strided(stand_in.size(), stand_in.stride(), dtype=value.dtype).copy_(value)
    return value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under the model's own names; a tied one under its first."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def record(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Weights, bool]:
    """The model that `build` makes, on the meta device, where its weights come from, and whether that went as above.

    A constructor that looks at the values of its tensors, or keeps some that are neither parameters nor buffers, cannot be
    recorded: it is then run for real, whole. What it draws outside of torch, or on a device that it names, comes from `seed`.
    """
    tape = Tape()
    model: nn.Module | None = None
    unrecordable = contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError)
    with unrecordable, streams(derive(seed, "model")), torch.device("meta"), _whole_trunc_normal(tape), _Constants(tape), _Operations(tape):
        model = build()
    recorded = isinstance(model, nn.Module) and tape.whole and _all_known(model, tape)
    if not recorded:
        tape = Tape()
        with streams(derive(seed, "model")):
            model = build()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() must return a torch.nn.Module, got {type(model).__name__}")
    if lazy := [name for name, tensor in named_tensors(model).items() if is_lazy(tensor)]:
        raise TaskError(f"the model's {lazy[0]} has no shape yet: Paceline cannot plan with lazy modules, give them their sizes")
    origins = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
    for name, origin in origins.items():
        for place, operation in enumerate(tape.leading_to(storage_of(origin))):
            if operation.random and not operation.seed:
                operation.seed = derive(seed, "weights", name, place)
    return (model if recorded else model.to("meta")), Weights(tape, origins), recorded


def _all_known(model: nn.Module, tape: Tape) -> bool:
    """Whether the tape leads to all tensors of a model that are on the meta device, and all of them can be found by name."""
    registered = named_tensors(model).values()
    if any(is_lazy(tensor) for tensor in registered):
        return False
    known = {id(tensor) for tensor in registered}
    others = [leaf for module in model.modules() for leaf in tree_flatten(list(vars(module).values()))[0] if isinstance(leaf, Tensor)]
    return all(id(tensor) in known or not tensor.is_meta for tensor in others) and all(
        not tensor.is_meta or storage_of(tensor) in tape.writers for tensor in registered
    )


Places = list[list[tuple[nn.Module, str]]]


def fill_(
    model: nn.Module,
    weights: Weights,
    device: torch.device,
    pretrained: Path | None = None,
    parts: Sequence[nn.Module] | None = None,
    places: Places | None = None,
) -> None:
    """Give a model on the meta device, laid out or not, its storage and its initial values. No communication.

    parts: modules with what belongs here of it; None: all of it. `places`: of each tensor, as they were before it was laid out."""
    allocate_(model, device, parts, places)
    loaded = _Pretrained(pretrained, model) if pretrained is not None else None
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if not is_here(tensor):
                continue
            whole = loaded.read(name) if loaded is not None and name in loaded.names else weights.draw(name)
            if is_cut(tensor):
                local(tensor).copy_(local(_cut_like(tensor, whole.to(device))))
            else:
                tensor.copy_(whole)


def allocate_(model: nn.Module, device: torch.device, parts: Sequence[nn.Module] | None = None, places: Places | None = None) -> None:
    """Give a model on the meta device its storage. What is tied stays so. `parts`, `places`: as for `fill_`."""
    places = places if places is not None else places_of(model)
    for part in parts if parts is not None else [model]:
        part.to_empty(device=device)
    for of_one in places:
        made = [getattr(*place) for place in of_one if is_here(getattr(*place))]
        for module, key in of_one if made else ():
            if getattr(module, key) is not made[0]:
                setattr(module, key, made[0])


def _cut_like(tensor: Any, whole: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def places_of(*models: nn.Module) -> Places:
    """The places of each parameter and buffer: `to_empty` makes a new one for each."""
    places: dict[int, dict[tuple[nn.Module, str], None]] = {}
    for module in (module for model in models for module in model.modules()):
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), {})[module, key] = None
    return [list(of_one) for of_one in places.values()]


def aliases(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters and buffers -> the first name."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in named if first.setdefault(id(tensor), name) != name}


class _Pretrained:
    def __init__(self, path: Path, model: nn.Module):
        from safetensors import SafetensorError, safe_open

        try:
            self.file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise TaskError(f"cannot read the pretrained weights {path}: {error}") from error
        own, tied = named_tensors(model), aliases(model)
        self.names: dict[str, str] = {}  # name in the model -> name in the file
        for key in self.file.keys():  # noqa: SIM118 (no mapping)
            name = tied.get(key, key)
            if name not in own:
                raise TaskError(f"{path} has weights {key}, which the model lacks{nearest(key, own)}")
            shape = tuple(self.file.get_slice(key).get_shape())
            if shape != tuple(own[name].shape):
                raise TaskError(f"{path}: {key} has shape {shape}, the model's has {tuple(own[name].shape)}")
            self.names.setdefault(name, key)

    def read(self, name: str) -> Tensor:
        return self.file.get_tensor(self.names[name])
