"""Buffers that a model changes outside of the parts of a pipeline: which stages have them, and how a stage keeps its own."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]


@dataclass
class BufferUse:
    """What a forward pass does with a buffer, by the numbers of the calls of parts during or after which it does so."""

    touched: set[int] = field(default_factory=set)  # reads and changes
    changed: set[int] = field(default_factory=set)
    outside: bool = False  # of parts with parameters
    learned: bool = False  # some change depends on parameters

    @property
    def is_local(self) -> bool:
        """Whether only the stage that changes the buffer knows its value."""
        return self.learned and (self.outside or len(self.touched) > 1)

    @property
    def together(self) -> range:
        """The cuts that would lie between what must be in one stage. A buffer that changes by inputs alone is changed by all later
        stages too, each in a copy of its own."""
        if not self.changed:
            return range(0)
        return range(min(self.touched) + 1, max(self.touched if self.is_local else self.changed) + 1)

    def add(self, other: "BufferUse") -> None:
        self.touched |= other.touched
        self.changed |= other.changed
        self.outside |= other.outside
        self.learned |= other.learned


class StageBuffers:
    """The buffers that change outside of parts, as one stage has them while it runs.

    A stage runs the code before it again, on placeholders. So each pass gets copies: of the model's own buffer in the first stage of a
    rank that holds it, of the stage's own copy in the later ones that hold it, and of placeholders in those that do not. A pass never
    changes a tensor that an earlier one has saved for its backward pass."""

    def __init__(
        self, model: nn.Module, changed: Collection[str], held: Collection[str], earlier: Collection[str]
    ):
        """`held`: of `changed`, those that this stage holds; `earlier`: those that an earlier stage of this rank holds."""
        names = {id(buffer): name for name, buffer in model.named_buffers() if name in changed}
        self.places: dict[str, list[Place]] = {name: [] for name in names.values()}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if id(buffer) in names:
                    self.places[names[id(buffer)]].append((module, key))
        self.models = [name for name in self.places if name in held and name not in earlier]
        self.copied = [name for name in self.places if name in held and name in earlier]
        self.copies: dict[str, Tensor] = {}

    def renew(self) -> None:
        """Copy the model's own buffers, between passes: a checkpoint may have brought others."""
        self.copies = {name: _current(self.places[name]).clone() for name in self.copied}

    @contextmanager
    def installed(self, placeholders: Mapping[str, Tensor]) -> Iterator[None]:
        before = {
            name: [module._buffers[key] for module, key in places] for name, places in self.places.items()
        }
        given = {
            name: self.copies.get(name, _current(self.places[name])).clone()
            for name in (*self.models, *self.copied)
        }
        given |= {name: tensor for name, tensor in placeholders.items() if name not in given}
        for name, places in self.places.items():
            _put(places, [given[name]] * len(places))
        try:
            yield
        finally:
            for name, places in self.places.items():
                found = _current(places)
                if name in self.copied:
                    self.copies[name] = found
                elif name in self.models and found is not given[name]:
                    continue  # the model has assigned another tensor
                elif name in self.models:
                    with torch.no_grad():
                        _first(before[name]).copy_(found)
                _put(places, before[name])


def _current(places: Sequence[Place]) -> Tensor:
    return _first([module._buffers[key] for module, key in places])


def _first(buffers: Sequence[Tensor | None]) -> Tensor:
    assert buffers[0] is not None
    return buffers[0]


def _put(places: Sequence[Place], buffers: Sequence[Tensor | None]) -> None:
    for (module, key), buffer in zip(places, buffers, strict=True):
        module._buffers[key] = buffer
