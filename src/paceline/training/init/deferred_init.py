"""Initial weights as a pure function of seed and parameter name, computed for one tensor at a time.

The model's constructor runs on the meta device, without memory, and a tape records its operations on tensors.
Later, each parameter is computed separately: the operations that it depends on run for real, and each random
operation is seeded by the name of the parameter. So the user's initialization is applied as written, tied and
copied weights stay tied and equal, and a rank holds at most one whole tensor besides its shards. The idea is
that of torchdistx's deferred initialization.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten

from paceline.distributed.dtensor import is_dtensor, is_materialized, local_tensor, storage_id
from paceline.distributed.places import Places, find_places
from paceline.distributed.rng import derive_seed, seeded_rngs
from paceline.errors import TaskError
from paceline.training.init.construction_modes import (
    MetaConstruction,
    PoisonUninitialized,
    RecordOperations,
    record_trunc_normal,
)
from paceline.training.init.named_tensors import named_tensors
from paceline.training.init.operation_tape import (
    OperationTape,
    is_uninitialized,
    may_be_poisoned,
    replay,
    unequal,
)
from paceline.training.init.pretrained import PretrainedWeights


@dataclass
class Weights:
    """The source of the initial values of a model."""

    tape: OperationTape
    origins: dict[str, Tensor]  # name -> the tensor that the constructor made: on the meta device, or real
    unwritten: dict[
        str, int
    ]  # name -> number of uninitialized elements, as far as known before computing them

    def draw(self, name: str) -> Tensor:
        """Return the whole initial value of a parameter or buffer, on the CPU.

        Raises TaskError if some of its elements are never written.
        """
        self.check_written([name])
        origin = self.origins[name]
        if not origin.is_meta:
            return origin.detach()
        operations = self.tape.leading_to(storage_id(origin))
        drawn = replay(operations, origin, second=False)
        if any(is_uninitialized(operation.run) for operation in operations) and may_be_poisoned(drawn):
            self.unwritten[name] = int(unequal(drawn, replay(operations, origin, second=True)).sum())
            self.check_written([name])
        return drawn

    def check_written(self, names: Iterable[str]) -> None:
        """Raise TaskError if some elements of these tensors are known to be uninitialized."""
        for name in names:
            if count := self.unwritten.get(name, 0):
                elements = self.origins[name].numel()
                raise TaskError(
                    f"the model's {name} is not initialized: model() never writes {count:,} of its "
                    f"{elements:,} values; write them there, e.g. nn.init.zeros_({name.rpartition('.')[2]}), "
                    "or load them with pretrained()"
                )


def record(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, Weights, bool]:
    """Return the model that `build` makes, on the meta device, its weights, and whether it is recorded.

    A constructor cannot be recorded if it reads values of its tensors, or keeps tensors that are neither
    parameters nor buffers. It then runs for real, as a whole. `seed` determines the values that it draws
    by other libraries than torch, or on a device that it names.
    """
    start = derive_seed(seed, "model")
    tape, poison = OperationTape(start), PoisonUninitialized(second=False)
    model: nn.Module | None = None
    # Suppress all errors: the plain construction below raises them again if they are the user's.
    with (
        contextlib.suppress(Exception),
        seeded_rngs(start),
        record_trunc_normal(tape),
        poison,
        MetaConstruction(tape),
        RecordOperations(tape),
    ):
        model = build()
    is_recorded = isinstance(model, nn.Module) and tape.is_complete and _has_all_tensors(tape, model)
    if not is_recorded:
        tape, poison = OperationTape(start), PoisonUninitialized(second=False)
        with seeded_rngs(start), poison:
            model = build()
    if not isinstance(model, nn.Module):
        raise TaskError(f"model() must return a torch.nn.Module, got {type(model).__name__}")
    if lazy := [name for name, tensor in named_tensors(model).items() if is_lazy(tensor)]:
        raise TaskError(
            f"the model's {lazy[0]} has no shape yet, and Paceline cannot plan with lazy modules; "
            "give them their sizes"
        )
    # All names of a tied buffer: converting a module unties it.
    origins = {
        name: tensor.detach()
        for name, tensor in (*named_tensors(model).items(), *model.named_buffers(remove_duplicate=False))
    }
    for name, origin in origins.items():
        for place, operation in enumerate(tape.leading_to(storage_id(origin))):
            if operation.random and not operation.seed:
                operation.seed = derive_seed(seed, "weights", name, place)
    unwritten = _find_never_written(origins, tape)
    suspects = {
        name: origin for name, origin in origins.items() if not origin.is_meta and poison.may_be_in(origin)
    }
    if suspects:  # build once more, with other values in uninitialized memory
        with seeded_rngs(start), PoisonUninitialized(second=True):
            second = named_tensors(build())
        unwritten |= {
            name: int(unequal(origin, second[name].detach()).sum()) for name, origin in suspects.items()
        }
    if is_recorded:
        _move_parameters_to_meta_(model)
    else:
        model.to("meta")
    return model, Weights(tape, origins, unwritten), is_recorded


def _move_parameters_to_meta_(model: nn.Module) -> None:
    """Move real parameters to the meta device; tied ones stay tied.

    The constructor of a recorded model makes them by functions that ignore the default device, such as
    torch.FloatTensor. A rank would otherwise keep the parameters of other stages of a pipeline.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.is_meta:
                if id(parameter) not in moved:
                    empty = torch.empty_like(parameter, device="meta", requires_grad=False)
                    moved[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                setattr(module, key, moved[id(parameter)])


def _find_never_written(origins: Mapping[str, Tensor], tape: OperationTape) -> dict[str, int]:
    """Return the number of elements of each tensor on the meta device that no operation writes."""
    counts = {}
    for name, origin in origins.items():
        operations = tape.leading_to(storage_id(origin)) if origin.is_meta else []
        if origin.is_meta and all(is_uninitialized(operation.run) for operation in operations):
            counts[name] = origin.numel()
    return counts


def _has_all_tensors(tape: OperationTape, model: nn.Module) -> bool:
    """Return whether all meta tensors of the model are parameters or buffers, and on the tape."""
    registered = named_tensors(model).values()
    if any(is_lazy(tensor) for tensor in registered):
        return False
    known = {id(tensor) for tensor in registered}
    attributes = [
        leaf
        for module in model.modules()
        for leaf in tree_flatten(list(vars(module).values()))[0]
        if isinstance(leaf, Tensor)
    ]
    return all(id(tensor) in known or not tensor.is_meta for tensor in attributes) and all(
        not tensor.is_meta or storage_id(tensor) in tape.writers for tensor in registered
    )


def fill_(
    model: nn.Module,
    weights: Weights,
    device: torch.device,
    pretrained: PretrainedWeights | None = None,
    parts: Sequence[nn.Module] | None = None,
    places: Places | None = None,
) -> None:
    """Allocate a model that is on the meta device, parallelized or not, and write its initial values.

    Does not communicate. `parts`: modules of the model that this rank holds; None: the whole model.
    `places`: of each tensor, found before the model was parallelized. `pretrained`: opened before, too.
    """
    allocate_(model, device, parts, places)
    with torch.no_grad():
        for name, tensor in named_tensors(model).items():
            if not is_materialized(tensor):
                continue
            is_pretrained = pretrained is not None and name in pretrained.tensors
            if pretrained is not None and is_pretrained and is_dtensor(tensor):
                pretrained.fill_shard_(name, tensor)
                continue
            whole = pretrained.read(name) if pretrained is not None and is_pretrained else weights.draw(name)
            if is_dtensor(tensor):
                local_tensor(tensor).copy_(local_tensor(_distribute_like(tensor, whole.to(device))))
            else:
                tensor.copy_(whole)


def allocate_(
    model: nn.Module,
    device: torch.device,
    parts: Sequence[nn.Module] | None = None,
    places: Places | None = None,
) -> None:
    """Allocate a model that is on the meta device; tied tensors stay tied.

    `parts`, `places`: as for `fill_`.
    """
    places = places if places is not None else find_places(model)
    for part in parts if parts is not None else [model]:
        part.to_empty(device=device)
    for tensor_places in places:
        allocated = [getattr(*place) for place in tensor_places if is_materialized(getattr(*place))]
        for module, key in tensor_places if allocated else ():
            if getattr(module, key) is not allocated[0]:
                setattr(module, key, allocated[0])


def _distribute_like(tensor: Any, whole: Tensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
