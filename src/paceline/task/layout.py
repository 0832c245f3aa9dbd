"""Layout: how a model may be divided over ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

from paceline.errors import TaskError

if TYPE_CHECKING:
    pass


@dataclasses.dataclass(frozen=True)
class BufferSum:
    """How a buffer changes: its value times `decay`, plus a sum over the samples of the batch.

        Layout(buffers={"quantizer.counts": BufferSum(decay=0.99)})

    This is for moving averages of sums, such as `counts = 0.99 * counts + 0.01 * samples_of_each_code`.
    decay: from 0 to 1; 0 for a buffer that each forward pass overwrites. Raises TaskError for other values.
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        is_number = isinstance(self.decay, (int, float)) and not isinstance(self.decay, bool)
        if not is_number or not 0 <= self.decay <= 1:
            raise TaskError(f"BufferSum: decay must be at least 0 and at most 1, got {self.decay!r}")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model may be divided over ranks. `Task.layout` returns it; the model itself stays unchanged.

        Layout(blocks=("encoder.layers", "decoder.layers"))
        Layout(tensor={"blocks.*.up": "column", "blocks.*.down": "row"})

    blocks    paths of modules whose children are the units of sharding, compilation, recomputation and
              pipeline stages; None: the longest ModuleList or Sequential of the model
    tensor    how tp splits modules, by path, where * matches any part of a path. It overrides what
              Paceline finds in the model. Values: "column", "row", "gather" (by columns, with the
              output gathered), "vocabulary" (the rows of an embedding), "whole" (not split)
    buffers   how the changes that forward passes make to buffers combine over ranks and micro-batches, by
              pattern of their names. Values: "sum" (the changes add up, as counts do), "mean" (the values
              are averaged over the samples, as running means are), a `BufferSum` (moving averages of
              sums), "none" (each rank has its own values; checkpoints have those of rank 0)

    Training raises TaskError for a path that the model does not have, for an unknown style or combination,
    and for a pattern that matches no buffer.
    """

    blocks: tuple[str, ...] | None = None
    tensor: Mapping[str, str] | None = None
    buffers: Mapping[str, str | BufferSum] | None = None
