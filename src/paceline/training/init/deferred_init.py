"""Initial weights as a pure function of (seed, parameter name), drawn one tensor at a time.

The model's constructor runs on the meta device, where it costs no memory, while every operation on its tensors is recorded. It
does not see this: its tensors say that they are on the CPU, and the default device is the CPU, because libraries leave out their
initialization when they find themselves on the meta device (transformers 5 and parts of torch.nn.init do).
Later each parameter is made alone: the operations that led to it are run again for real, each random one from a stream of its
own that is named after the parameter. So the user's own initialization is obeyed, tied and copied weights stay what they are,
and a rank never holds more than one whole tensor besides its share. The idea is that of torchdistx's deferred initialization.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from paceline.distributed.dtensor import is_dtensor, is_materialized, local_tensor, storage_id
from paceline.distributed.places import Places, find_places
from paceline.distributed.rng import derive_seed, seeded_rngs
from paceline.errors import TaskError
from paceline.spec import nearest

CPU, META = torch.device("cpu"), torch.device("meta")
FROM_VALUES = (
    torch.tensor,
    torch.as_tensor,
    torch.asarray,
    torch.from_numpy,
)  # what makes a tensor of the caller's numbers
SEEN_ON_CPU = {  # attributes of a tensor on the meta device, as its constructor sees them
    Tensor.device.__get__: CPU,
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}
UNWRITTEN = {  # operations whose result is whatever was in memory
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_permuted,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
}


def _on_meta(tensor: Tensor) -> bool:
    """Also where the tensor says that it is on the CPU."""
    with torch._C.DisableTorchFunction():
        return tensor.is_meta


def _leaves_unwritten(run: Any) -> bool:
    return getattr(run, "overloadpacket", None) in UNWRITTEN


def _poison_(tensor: Tensor, second: bool) -> None:
    """Fill memory that nobody wrote so that it shows: floats with NaN. `second`: with other values than at first."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(1.0 if second else math.nan)
    elif not tensor.is_quantized:
        tensor.fill_(1 if second else 0)


def _may_be_poisoned(tensor: Tensor) -> bool:
    """Whether `tensor` looks like memory that nobody wrote: floats show it, other types may always be."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return bool(torch.isnan((tensor if tensor.element_size() > 1 else tensor.float()).sum()))


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors of one shape differ; NaN equals NaN."""
    one, other = (
        item.float() if item.is_floating_point() and item.element_size() == 1 else item
        for item in (one, other)
    )
    return (one != other) & ~((one != one) & (other != other))


def _as_now(item: Any) -> Any:
    """A parameter may be given other data later (`model.double()`), and a real tensor other values."""
    if not isinstance(item, Tensor):
        return item
    return item.detach() if _on_meta(item) else item.detach().clone()


@dataclass
class RecordedOperation:
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]
    reads: list[int]  # storages
    writes: list[int]  # storages, those that it creates included
    random: bool
    seed: int = 0


@dataclass
class OperationTape:
    seed: int  # from which the constructor starts to draw
    operations: list[RecordedOperation] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)  # storage -> indices of operations
    whole: bool = True  # to replay it gives what the constructor would

    def add(
        self,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        written: list[Tensor],
        random: bool,
    ) -> None:
        inputs = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
        results = [item for item in tree_flatten(result)[0] if isinstance(item, Tensor)]
        reads = [storage_id(item) for item in inputs]
        self.whole &= all(not _on_meta(item) or storage_id(item) in self.writers for item in inputs)
        if random:  # and the user has not chosen what to draw
            own = any(isinstance(item, torch.Generator) for item in tree_flatten((args, kwargs))[0])
            self.whole &= not own and torch.default_generator.initial_seed() == self.seed
        writes = [storage_id(item) for item in written] + [
            made for item in results if (made := storage_id(item)) not in reads
        ]
        if writes:  # the others are views
            for storage in set(writes):
                self.writers.setdefault(storage, []).append(len(self.operations))
            args, kwargs, results = tree_map(_as_now, (args, kwargs, results))
            self.operations.append(RecordedOperation(run, args, kwargs, results, reads, writes, random))

    def leading_to(self, storage: int) -> list[RecordedOperation]:
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
    """Records what happens on the meta device."""

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
        if any(_on_meta(item) for item in inputs):
            lifted = {
                id(item): self._lift(item)
                for item in inputs
                if not _on_meta(item) and not any(item is one for one in written)
            }
            args, kwargs = tree_map(lambda item: lifted.get(id(item), _device_here(item)), (args, kwargs))
        result = func(*args, **kwargs)
        if any(
            isinstance(item, Tensor) and _on_meta(item) for item in tree_flatten((args, kwargs, result))[0]
        ):
            self.tape.add(func, args, kwargs, result, written, torch.Tag.nondeterministic_seeded in func.tags)
        return result

    def _lift(self, real: Tensor) -> Tensor:
        """A stand-in on the meta device for a tensor that the constructor made elsewhere."""
        values = real.detach().clone()
        stand_in = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device=META)
        self.tape.add(values.clone, (), {}, stand_in, [stand_in], random=False)
        return stand_in


def _device_here(item: Any) -> Any:
    """A tensor on the meta device is on the CPU, as its constructor sees it, so "to the CPU" leaves it there."""
    return META if item in ("cpu", CPU) and isinstance(item, (str, torch.device)) else item


class _Constructor(TorchFunctionMode):
    """Tensors are made on the meta device unless a device is named, and say that they are on the CPU.

    Numbers that the constructor brings along are kept. What fails, as looking at values does, makes the tape useless.
    """

    def __init__(self, tape: OperationTape):
        super().__init__()
        self.tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SEEN_ON_CPU:
            return SEEN_ON_CPU[func] if _on_meta(args[0]) else func(*args, **kwargs)
        try:
            if (
                func in FROM_VALUES
                and kwargs.get("device") is None
                and not (args and isinstance(args[0], Tensor))
            ):
                return self._from_values(func(*args, **kwargs))
            if func in _device_constructors():
                device = kwargs.get("device")
                self.tape.whole &= (
                    device is None or torch.device(device).type != "meta"
                )  # there the constructor wants no values
                return func(*args, **{**kwargs, "device": META if device is None else device})
            if args and isinstance(args[0], Tensor) and _on_meta(args[0]):
                if func is Tensor.cpu:
                    return args[0]
                args, kwargs = tree_map(_device_here, (args, kwargs))
            return func(*args, **kwargs)
        except Exception:
            self.tape.whole = False
            raise

    def _from_values(self, real: Tensor) -> Tensor:
        stand_in = torch.empty_strided(real.size(), real.stride(), dtype=real.dtype, device=META)
        self.tape.add(lambda: real.detach().clone(), (), {}, stand_in, [stand_in], random=False)
        return stand_in.requires_grad_(real.requires_grad)


class _Poison(TorchDispatchMode):
    """Fills memory that nobody has written yet so that it shows."""

    def __init__(self, second: bool):
        super().__init__()
        self.second = second
        self.types: set[torch.dtype] = set()  # that it filled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if _leaves_unwritten(func) and not _on_meta(result):
            _poison_(result, self.second)
            self.types.add(result.dtype)
        return result

    def may_be_in(self, tensor: Tensor) -> bool:
        return _may_be_poisoned(tensor) and (
            tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in self.types
        )


@contextlib.contextmanager
def _whole_trunc_normal(tape: OperationTape) -> Iterator[None]:
    """Record trunc_normal_ as one operation: since torch 2.13 it draws until all values fit, which a meta tensor cannot tell."""
    original = nn.init._no_grad_trunc_normal_

    def record(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _on_meta(tensor):
            return original(tensor, *args, **kwargs)
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

    tape: OperationTape
    origins: dict[str, Tensor]  # name -> the tensor as the constructor left it: on meta, or real
    unwritten: dict[
        str, int
    ]  # name -> how many of its elements nothing wrote, as far as that is known before they are drawn

    def draw(self, name: str) -> Tensor:
        """The whole initial tensor of one parameter or buffer, on the CPU. Raises TaskError where some of it is nowhere written."""
        self.check_written([name])
        origin = self.origins[name]
        if not origin.is_meta:
            return origin.detach()
        operations = self.tape.leading_to(storage_id(origin))
        drawn = _replayed(operations, origin, second=False)
        if any(_leaves_unwritten(operation.run) for operation in operations) and _may_be_poisoned(drawn):
            self.unwritten[name] = int(unequal(drawn, _replayed(operations, origin, second=True)).sum())
            self.check_written([name])
        return drawn

    def check_written(self, names: Iterable[str]) -> None:
        """Raise TaskError for a tensor of which it is known that not all of it was written."""
        for name in names:
            if count := self.unwritten.get(name, 0):
                elements = self.origins[name].numel()
                raise TaskError(
                    f"the model's {name} is not initialized: model() never writes {count:,} of its {elements:,} values; "
                    f"write them there, e.g. nn.init.zeros_({name.rpartition('.')[2]}), or load them with pretrained()"
                )


def _replayed(operations: list[RecordedOperation], origin: Tensor, second: bool) -> Tensor:
    """What the operations make of `origin`. `second`: with other values in memory that they do not write."""
    made: dict[int, Tensor] = {}  # storage -> all of it, one-dimensional

    def real(item: Any) -> Any:
        if isinstance(item, torch.device):
            return CPU
        return _view(made[storage_id(item)], item) if isinstance(item, Tensor) and item.is_meta else item

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for operation in operations:
            if operation.random:
                torch.default_generator.manual_seed(operation.seed)
            result = operation.run(*tree_map(real, operation.args), **tree_map(real, operation.kwargs))
            if _leaves_unwritten(operation.run):
                _poison_(result, second)
            results = [item for item in tree_flatten(result)[0] if isinstance(item, Tensor)]
            for stand_in, value in zip(operation.results, results, strict=True):
                if storage_id(stand_in) not in operation.reads:
                    made[storage_id(stand_in)] = _all_of(value, stand_in)
    return _view(made[storage_id(origin)], origin)


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
    start = derive_seed(seed, "model")
    tape, poison = OperationTape(start), _Poison(second=False)
    model: nn.Module | None = None
    # whatever it raises: the plain construction below shows whether that is the user's mistake
    with (
        contextlib.suppress(Exception),
        seeded_rngs(start),
        _whole_trunc_normal(tape),
        poison,
        _Constructor(tape),
        _Operations(tape),
    ):
        model = build()
    recorded = isinstance(model, nn.Module) and tape.whole and _all_known(model, tape)
    if not recorded:
        tape, poison = OperationTape(start), _Poison(second=False)
        with seeded_rngs(start), poison:
            model = build()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() must return a torch.nn.Module, got {type(model).__name__}")
    if lazy := [name for name, tensor in named_tensors(model).items() if is_lazy(tensor)]:
        raise TaskError(
            f"the model's {lazy[0]} has no shape yet: Paceline cannot plan with lazy modules, give them their sizes"
        )
    # Also the other names of a buffer that has two: to convert a module makes two of it.
    origins = {
        name: tensor.detach()
        for name, tensor in (*named_tensors(model).items(), *model.named_buffers(remove_duplicate=False))
    }
    for name, origin in origins.items():
        for place, operation in enumerate(tape.leading_to(storage_id(origin))):
            if operation.random and not operation.seed:
                operation.seed = derive_seed(seed, "weights", name, place)
    unwritten = _never_written(origins, tape)
    suspects = {
        name: origin for name, origin in origins.items() if not origin.is_meta and poison.may_be_in(origin)
    }
    if suspects:  # the same once more, with other values in memory that nobody wrote
        with seeded_rngs(start), _Poison(second=True):
            again = named_tensors(build())
        unwritten |= {
            name: int(unequal(origin, again[name].detach()).sum()) for name, origin in suspects.items()
        }
    return (model if recorded else model.to("meta")), Weights(tape, origins, unwritten), recorded


def _never_written(origins: Mapping[str, Tensor], tape: OperationTape) -> dict[str, int]:
    """Elements of tensors on the meta device on which no operation worked."""
    found = {}
    for name, origin in origins.items():
        operations = tape.leading_to(storage_id(origin)) if origin.is_meta else []
        if origin.is_meta and all(_leaves_unwritten(operation.run) for operation in operations):
            found[name] = origin.numel()
    return found


def _all_known(model: nn.Module, tape: OperationTape) -> bool:
    """Whether the tape leads to all tensors of a model that are on the meta device, and all of them can be found by name."""
    registered = named_tensors(model).values()
    if any(is_lazy(tensor) for tensor in registered):
        return False
    known = {id(tensor) for tensor in registered}
    others = [
        leaf
        for module in model.modules()
        for leaf in tree_flatten(list(vars(module).values()))[0]
        if isinstance(leaf, Tensor)
    ]
    return all(id(tensor) in known or not tensor.is_meta for tensor in others) and all(
        not tensor.is_meta or storage_id(tensor) in tape.writers for tensor in registered
    )


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
            if not is_materialized(tensor):
                continue
            whole = loaded.read(name) if loaded is not None and name in loaded.keys else weights.draw(name)
            if is_dtensor(tensor):
                local_tensor(tensor).copy_(local_tensor(_cut_like(tensor, whole.to(device))))
            else:
                tensor.copy_(whole)


def allocate_(
    model: nn.Module,
    device: torch.device,
    parts: Sequence[nn.Module] | None = None,
    places: Places | None = None,
) -> None:
    """Give a model on the meta device its storage. What is tied stays so. `parts`, `places`: as for `fill_`."""
    places = places if places is not None else find_places(model)
    for part in parts if parts is not None else [model]:
        part.to_empty(device=device)
    for of_one in places:
        made = [getattr(*place) for place in of_one if is_materialized(getattr(*place))]
        for module, key in of_one if made else ():
            if getattr(module, key) is not made[0]:
                setattr(module, key, made[0])


def _cut_like(tensor: Any, whole: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)


def aliases(model: nn.Module) -> dict[str, str]:
    """Other names of tied parameters and buffers -> the first name."""
    first: dict[int, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in named if first.setdefault(id(tensor), name) != name}


def loaded_names(path: Path | None, model: nn.Module) -> frozenset[str]:
    """The names of parameters and buffers that a file of pretrained weights brings. Raises TaskError where it does not fit."""
    return frozenset(_Pretrained(path, model).keys) if path is not None else frozenset()


INDEX = "model.safetensors.index.json"


class _Pretrained:
    """Weights of a file, or of the files that an index names. `path`: a safetensors file, an index, or a folder with either."""

    def __init__(self, path: Path, model: nn.Module):
        own, tied = named_tensors(model), aliases(model)
        self.keys: dict[str, tuple[Any, str]] = {}  # name in the model -> file, name in it
        for file, keys in _files(path):
            opened = _opened(file)
            found = set(opened.keys())
            if missing := sorted((keys or set()) - found):
                raise TaskError(
                    f"{file} lacks {missing[0]}, which the index {path} says it has; download the weights again"
                )
            for key in sorted(found if keys is None else keys):
                name = tied.get(key, key)
                if name not in own:
                    raise TaskError(f"{file} has weights {key}, which the model lacks{nearest(key, own)}")
                shape = tuple(opened.get_slice(key).get_shape())
                if shape != tuple(own[name].shape):
                    raise TaskError(
                        f"{file}: {key} has shape {shape}, the model's has {tuple(own[name].shape)}"
                    )
                self.keys.setdefault(name, (opened, key))

    def read(self, name: str) -> Tensor:
        file, key = self.keys[name]
        return file.get_tensor(key)


def _files(path: Path) -> list[tuple[Path, set[str] | None]]:
    """Each file with the names that are read of it; None: all of them."""
    if path.is_dir():
        found = [file for file in (path / INDEX, path / "model.safetensors") if file.is_file()]
        if not found:
            raise TaskError(
                f"the folder {path} has neither {INDEX} nor model.safetensors; name a safetensors file in pretrained()"
            )
        path = found[0]
    if path.suffix != ".json":
        return [(path, None)]
    try:
        places = json.loads(path.read_text())["weight_map"]
        by_file: dict[str, set[str]] = {}
        for key, file in places.items():
            by_file.setdefault(file, set()).add(key)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(
            f"cannot read the index of pretrained weights {path}: {error}; it needs a weight_map of names to files"
        ) from error
    if outside := [
        file
        for file in by_file
        if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file
    ]:
        raise TaskError(
            f"the index {path} names the file {outside[0]!r}; the files of an index lie beside it"
        )
    return [(path.parent / file, keys) for file, keys in sorted(by_file.items())]


def _opened(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise TaskError(f"cannot read the pretrained weights {path}: {error}") from error
