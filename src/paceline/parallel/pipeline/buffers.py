"""Buffers that a model changes outside of the parts of a pipeline: the stages and copies that hold them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]  # a module and the key of a buffer in it


@dataclass
class BufferUse:
    """How a forward pass uses a buffer.

    Uses are numbered by the call of a part during which, or after which, they happen.
    """

    touched: set[int] = field(default_factory=set)  # reads and changes
    changed: set[int] = field(default_factory=set)
    outside: bool = False  # used outside of parts with parameters
    learned: bool = False  # some change depends on parameters

    @property
    def is_local(self) -> bool:
        """Whether only the stage that changes the buffer knows its value."""
        return self.learned and (self.outside or len(self.touched) > 1)

    @property
    def together(self) -> range:
        """The cuts that would separate uses that must be in the same stage.

        If changes depend on inputs alone, every later stage changes a copy of the buffer too.
        """
        if not self.changed:
            return range(0)
        return range(min(self.touched) + 1, max(self.touched if self.is_local else self.changed) + 1)

    def add(self, other: "BufferUse") -> None:
        self.touched |= other.touched
        self.changed |= other.changed
        self.outside |= other.outside
        self.learned |= other.learned


class StageBuffers:
    """The buffers that change outside of parts, as one stage sees them while it runs.

    A stage repeats the code before it, on placeholders. So each pass gets copies of the buffers:

    * the first stage of a rank that holds the buffer copies the model's buffer;
    * later stages of the rank that hold it copy the copy of this stage;
    * stages that do not hold it copy a placeholder.

    A pass therefore never changes a tensor that an earlier pass saved for its backward pass.
    """

    def __init__(
        self, model: nn.Module, changed: Collection[str], held: Collection[str], earlier: Collection[str]
    ):
        """`held`: those of `changed` that this stage holds.

        `earlier`: those that an earlier stage of this rank holds.
        """
        names = {id(buffer): name for name, buffer in model.named_buffers() if name in changed}
        self.places: dict[str, list[Place]] = {name: [] for name in names.values()}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if id(buffer) in names:
                    self.places[names[id(buffer)]].append((module, key))
        self.from_model = [name for name in self.places if name in held and name not in earlier]
        self.copied = [name for name in self.places if name in held and name in earlier]
        self.copies: dict[str, Tensor] = {}

    def renew_copies(self) -> None:
        """Copy the model's buffers. Call it between passes: loading a checkpoint may have changed them."""
        self.copies = {name: _current(self.places[name]).clone() for name in self.copied}

    @contextmanager
    def installed(self, placeholders: Mapping[str, Tensor]) -> Iterator[None]:
        """Put this stage's buffers into the model inside the block, and keep their changes after it."""
        before = {
            name: [module._buffers[key] for module, key in places] for name, places in self.places.items()
        }
        installed = {
            name: self.copies.get(name, _current(self.places[name])).clone()
            for name in (*self.from_model, *self.copied)
        }
        installed |= {name: tensor for name, tensor in placeholders.items() if name not in installed}
        for name, places in self.places.items():
            _put(places, [installed[name]] * len(places))
        try:
            yield
        finally:
            for name, places in self.places.items():
                after = _current(places)
                if name in self.copied:
                    self.copies[name] = after
                elif name in self.from_model and after is not installed[name]:
                    continue  # the model has assigned another tensor
                elif name in self.from_model:
                    with torch.no_grad():
                        _first(before[name]).copy_(after)
                _put(places, before[name])


def _current(places: Sequence[Place]) -> Tensor:
    return _first([module._buffers[key] for module, key in places])


def _first(buffers: Sequence[Tensor | None]) -> Tensor:
    assert buffers[0] is not None
    return buffers[0]


def _put(places: Sequence[Place], buffers: Sequence[Tensor | None]) -> None:
    for (module, key), buffer in zip(places, buffers, strict=True):
        module._buffers[key] = buffer
