"""Tensors of outputs and batches of which each rank has a part, gathered when `global_loss` reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from paceline.data.fake import is_close, is_fake
from paceline.errors import TaskError
from paceline.parallel.loss.batch_shares import BatchShares

# The first dim counts the samples; no dim does; the first dim does, but sizes of rows differ between ranks.
TensorKind = Literal["samples", "shared", "ragged"]
RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}  # of outputs that should be equal
COARSE_RTOL = 3e-2  # for other dtypes
OUTPUT, BATCH = "output of the model", "batch"


class GatheredRows:
    """The rows of the global batch of several tensors, gathered in one all-gather at the first use.

    tensors: of each, its rows on this rank by micro-batch.
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]], shares: BatchShares):
        self._tensors, self._shares = tensors, shares
        self._rows: list[Tensor] | None = None

    def __getitem__(self, index: int) -> Tensor:
        """Return the rows of a tensor. A collective, when it is called first."""
        if self._rows is None:
            self._rows = self._shares.gather(self._tensors)
        return self._rows[index]


@dataclass
class WholeTensor:
    """A tensor of an output or batch, of the whole global batch.

    parts: by micro-batch of this rank. kind: of all ranks. with_grad: whether gradients with respect to it
    are needed. what: what it belongs to. checks: whether to check it on all ranks. together: an all-gather of
    several tensors, and the index of this tensor in it; None: it is gathered alone.
    """

    parts: Sequence[Tensor]
    shares: BatchShares
    kind: TensorKind
    with_grad: bool
    what: str
    checks: bool
    together: tuple[GatheredRows, int] | None = None
    is_used: bool = field(default=False, init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `data`, without gathering it."""
        first = self.parts[0]
        return (self.shares.samples, *first.shape[1:]) if self.kind == "samples" else tuple(first.shape)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @cached_property
    def data(self) -> Tensor:
        """The whole tensor, a leaf of the autograd graph. Gathered at the first use: a collective."""
        self.is_used = True
        whole = self.parts[0]
        if self.kind == "ragged":
            self._refuse("has rows of different sizes on ranks; pad with paceline.Ragged")
        if self.shares.parts > 1:
            whole = self._gather() if self.kind == "samples" else self._same_in_all_parts()
        if self.checks and self.kind == "samples" and self._is_ambiguous(whole):
            self._refuse(
                "is the same for all parts of the batch, so that its first dim may not count the samples; "
                "use another batch size"
            )
        return whole.requires_grad_(self.with_grad and (whole.is_floating_point() or whole.is_complex()))

    def _gather(self) -> Tensor:
        rows, index = self.together or (GatheredRows([self.parts], self.shares), 0)
        return rows[index]

    def _same_in_all_parts(self) -> Tensor:
        """Return a tensor that does not depend on the samples, such as a temperature."""
        first = self.parts[0]
        why = (
            f"does not have a row for each of the {self.shares.own} samples; return a tensor with a row for "
            "each sample"
        )
        if self.what == BATCH:
            self._refuse(why)
        if self.checks and not is_fake(first):
            ranks = len(self.shares.counts)
            shares = BatchShares((1,) * ranks, len(self.parts), self.shares.rank, self.shares.group)
            [others] = shares.gather([[part[None] for part in self.parts]])
            if not all(is_equal(other, first) for other in others):
                self._refuse(why)
        return first

    def _is_ambiguous(self, whole: Tensor) -> bool:
        """Return whether rows differ within a part of the batch, but parts do not differ."""
        shares = self.shares
        if shares.parts == 1 or shares.own < 2 or len({*shares.counts}) > 1 or is_fake(whole):
            return False
        parts = whole.unflatten(0, (shares.parts, shares.own))
        return bool((parts == parts[:1]).all()) and not bool((parts[0] == parts[0, :1]).all())

    def _refuse(self, why: str) -> NoReturn:
        shape = tuple(self.parts[0].shape)
        raise TaskError(
            f"global_loss() reads a tensor of the {self.what}, of shape {shape} on this rank, which {why}"
        )

    def own_gradient(self, gradient: Tensor, microbatch: int) -> Tensor:
        """Return the part of a micro-batch of this rank in `gradient`. The parts add up to it."""
        if self.kind == "samples":
            return gradient[self.shares.own_rows(microbatch)]
        return gradient / self.shares.parts


def gather_together(tensors: Sequence[WholeTensor]) -> None:
    """Let the first use of any of these tensors gather all of them in one all-gather.

    The same tensors on all ranks, all with rows of samples.
    """
    if len(tensors) > 1:
        rows = GatheredRows([tensor.parts for tensor in tensors], tensors[0].shares)
        for index, tensor in enumerate(tensors):
            tensor.together = rows, index


def is_equal(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are equal; for floating-point numbers, up to roundoff of their dtype."""
    if not expected.is_floating_point():
        return torch.equal(actual, expected)
    return is_close(actual, expected, RTOL.get(expected.dtype, COARSE_RTOL), equal_nan=True)


METADATA: frozenset[Any] = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")
        ),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex),
    }
)


class GatheredTensor(Tensor):
    """Stands for a tensor of the global batch, which is gathered when an operation first uses it."""

    whole: WholeTensor

    @staticmethod
    def stand_for(whole: WholeTensor) -> "GatheredTensor":
        first = whole.parts[0]
        stand_in: GatheredTensor = Tensor._make_wrapper_subclass(
            GatheredTensor, whole.shape, dtype=first.dtype, device=first.device
        )
        stand_in.whole = whole
        return stand_in

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return function(*_gather_all(args), **_gather_all(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it for tensors without one
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*_gather_all(args), **_gather_all(kwargs or {}))


def _gather_all(arguments: Any) -> Any:
    return tree_map_only(GatheredTensor, lambda tensor: tensor.whole.data, arguments)


class UnreadableItem:
    """Takes the place of an item that cannot be combined over parts of a batch. Any use raises TaskError."""

    def __init__(self, item: Any, what: str):
        self._paceline = (type(item).__name__, what)

    def _refuse(self, *_: Any) -> Any:
        kind, what = object.__getattribute__(self, "_paceline")
        raise TaskError(
            f"global_loss() reads an item of the {what} of type {kind}, which has no value for the global "
            "batch; return a tensor with a row for each sample"
        )

    __getattr__ = __len__ = __iter__ = __getitem__ = __bool__ = __int__ = __float__ = __index__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
