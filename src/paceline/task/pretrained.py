"""Pretrained weights whose names in files differ from those in a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class PretrainedTensor:
    """The tensors in files from which a tensor of a model is made.

    keys: their names in the files.
    combine: returns the tensor of the model from them; None: there is one, and it is the tensor.
    """

    keys: tuple[str, ...]
    combine: Callable[[list[Tensor]], Tensor] | None = None


class PretrainedSource(Protocol):
    """Pretrained weights whose names in the files may differ from those in the model."""

    @property
    def path(self) -> Path:
        """A safetensors file, an index of several, or a folder with either."""

    def match(self, model: nn.Module, keys: Collection[str]) -> Mapping[str, PretrainedTensor]:
        """Return the tensors of the model that the files have, by name.

        model: on the meta device. keys: the names of all tensors in the files. Raises TaskError.
        """

    def find_added(self, model: nn.Module) -> Collection[str]:
        """Return the names of parameters that files of weights never have, such as those of adapters."""
