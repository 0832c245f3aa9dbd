"""Tensors of the global batch are gathered together, bit by bit as one process has them."""

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness
from faults import replaced
from paceline import Task
from paceline.parallel.loss import batch_shares
from paceline.parallel.loss.batch_shares import BatchShares
from paceline.parallel.loss.global_loss import GlobalLoss, find_gradients

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
DTYPES = (
    torch.bool,
    torch.float64,
    torch.uint8,
    torch.bfloat16,
    torch.complex128,
    torch.int64,
    torch.float32,
    torch.int16,
)
WIDTHS = ((), (3,), (5,), (0,), (2, 1), (1,), (3, 2), (7,))  # shapes of a row, by dtype


def draw(samples: int, seed: int) -> list[Tensor]:
    """Return a tensor of each dtype for the samples of a global batch."""
    generator = torch.Generator().manual_seed(seed)
    bits = [
        torch.randint(2, (samples, *width), generator=generator)
        if dtype is torch.bool
        else torch.randint(-999, 999, (samples, *width), generator=generator)
        for dtype, width in zip(DTYPES, WIDTHS, strict=True)
    ]
    return [tensor.to(dtype) for tensor, dtype in zip(bits, DTYPES, strict=True)]


def count_gathers(counts: list[int]) -> Any:
    """Count the all-gathers in `counts[0]`."""

    def patch(gather: Any) -> Any:
        def counted(*args: Any) -> None:
            counts[0] += 1
            gather(*args)

        return counted

    return replaced(BatchShares, "_gather_bytes", patch)


def from_another_rank() -> Any:
    """Exchange the bytes that the first two ranks sent."""

    def patch(gather: Any) -> Any:
        def exchanged(shares: BatchShares, by_rank: Tensor, sent: Tensor) -> None:
            gather(shares, by_rank, sent)
            by_rank[:2] = by_rank[:2].flip(0)

        return exchanged

    return replaced(BatchShares, "_gather_bytes", patch)


def without_shared_memory() -> Any:
    return replaced(batch_shares, "find_exchange", lambda find: lambda: None)


def find_gather_differences(
    counts: tuple[int, ...], microbatches: int, fault: Any = contextlib.nullcontext
) -> list[str]:
    """Return tensors that differ from those of one process, and the number of all-gathers if it is not 1."""
    rank = torch.distributed.get_rank()
    whole = draw(sum(counts) * microbatches, seed=3)
    begins = [sum(counts) * part + sum(counts[:rank]) for part in range(microbatches)]
    own = [[tensor[begin : begin + counts[rank]] for begin in begins] for tensor in whole]
    own[1] = [part.T.contiguous().T for part in own[1]]  # with other strides
    own[4] = [part.conj() for part in own[4]]  # whose conjugation is not computed yet
    whole[4] = whole[4].conj()
    calls = [0]
    with count_gathers(calls), fault():
        found = BatchShares(counts, microbatches, rank, None).gather(own)
    assert all(tensor.is_contiguous() for tensor in found)
    return [f"{calls[0]} all-gathers"] * (calls[0] != 1) + [
        str(expected.dtype)
        for tensor, expected in zip(found, whole, strict=True)
        if tensor.dtype != expected.dtype or not torch.equal(tensor, expected)
    ]


@pytest.mark.parametrize(
    ("counts", "microbatches"),
    [
        ((3, 3), 1),
        ((2, 2), 3),
        ((3, 2), 1),
        ((2, 1), 2),
        ((3, 0), 1),
        pytest.param((2, 2, 2, 2), 2, marks=pytest.mark.slow),
        pytest.param((3, 2, 2, 0), 1, marks=pytest.mark.slow),
        pytest.param((2, 2, 1, 1), 3, marks=pytest.mark.slow),
    ],
)
def test_one_all_gather_has_all_tensors(counts: tuple[int, ...], microbatches: int) -> None:
    call = harness.ranks(len(counts))
    assert call(find_gather_differences, counts, microbatches) == [[]] * len(counts)


def test_one_all_gather_without_shared_memory() -> None:
    call = harness.ranks(2)
    assert call(find_gather_differences, (3, 2), 2, without_shared_memory) == [[]] * 2


def test_rows_of_another_rank_are_found() -> None:
    for found in harness.ranks(2)(find_gather_differences, (3, 3), 1, from_another_rank):
        assert found == [str(dtype) for dtype in DTYPES if dtype is not torch.bfloat16]  # its rows are empty


class Reader(Task):
    """A task whose loss reads some tensors of the output and of the batch: those of `reads`."""

    reads: tuple[str, ...] = ()

    def model(self) -> nn.Module:
        return nn.Identity()

    def dataset(self, split: str) -> Any:
        return None

    def global_loss(self, output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        loss = (output["image"] @ output["text"].T).logsumexp(1).mean() * output["scale"]
        if "number" in self.reads:
            loss = loss + (output["number"] * output["image"].sum(1)).sum()
        if "frozen" in self.reads:
            loss = loss * (1 + output["frozen"].square().mean())
        if "class" in self.reads:
            loss = loss + F.cross_entropy(output["image"], batch["class"])
        if "weight" in self.reads:
            loss = loss * batch["weight"].mean()
        return loss


TRAINED = ("image", "text", "scale")


def make_output(samples: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    output = {
        "image": torch.randn(samples, 4, generator=generator, dtype=torch.float64),
        "number": torch.randint(5, (samples,), generator=generator),  # without a gradient
        "text": torch.randn(samples, 4, generator=generator, dtype=torch.float64),
        "scale": torch.tensor(1.5, dtype=torch.float64),
        "frozen": torch.randn(samples, 2, generator=generator, dtype=torch.float32),  # without a gradient
        "unused": torch.randn(samples, 9, generator=generator),
    }
    batch = {
        "class": torch.randint(4, (samples,), generator=generator),
        "weight": torch.rand(samples, generator=generator, dtype=torch.float64),
        "unused": torch.randn(samples, 9, generator=generator),
    }
    return output, batch


STEPS: tuple[tuple[tuple[str, ...], int], ...] = (
    # what the loss reads besides image, text and scale, and the number of all-gathers
    ((), 2),  # unknown before the first step
    ((), 1),
    (("number", "frozen", "class", "weight"), 1 + 2 + 2),
    (("number", "frozen", "class", "weight"), 1 + 1),
    (("class",), 1 + 1),
    (("class", "number"), 1 + 1 + 1),
    (("class", "number"), 1 + 1),
)


def find_loss_differences(counts: tuple[int, ...], fault: Any = contextlib.nullcontext) -> list[str]:
    """Return steps whose loss, gradients or number of all-gathers are not the expected ones."""
    rank = torch.distributed.get_rank()
    rows = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    whole, whole_batch = make_output(sum(counts))
    differences = []
    shares = BatchShares(counts, 1, rank, None)
    global_loss = GlobalLoss(Reader(), shares, "fp64", CPU)
    for step, (reads, expected_calls) in enumerate(STEPS):
        global_loss.task = Reader(reads=reads)
        leaves = {name: tensor.clone().requires_grad_(name in TRAINED) for name, tensor in whole.items()}
        expected_loss = Reader(reads=reads).global_loss(leaves, whole_batch)
        expected_loss.backward()
        own = {
            name: (tensor[rows] if tensor.dim() else tensor).clone().requires_grad_(name in TRAINED)
            for name, tensor in whole.items()
        }
        batch = {name: tensor[rows] for name, tensor in whole_batch.items()}
        calls = [0]
        with count_gathers(calls), fault():
            loss, gradients = global_loss.differentiate([own], [batch], torch.ones_like, 0, checks=False)
        tensors, found = find_gradients(own, gradients[0])
        assert [id(tensor) for tensor in tensors] == [id(own[name]) for name in TRAINED]
        expected = [leaves[name].grad[rows] for name in ("image", "text")]  # type: ignore[index]
        expected.append(leaves["scale"].grad / len(counts))  # type: ignore[operator]
        if not torch.equal(loss, expected_loss):
            differences.append(f"step {step}: the loss")
        if not all(torch.equal(*pair) for pair in zip(found, expected, strict=True)):
            differences.append(f"step {step}: the gradients")
        if calls[0] != expected_calls:
            differences.append(f"step {step}: {calls[0]} all-gathers, expected {expected_calls}")
    return differences


@pytest.mark.parametrize(
    "counts", [(3, 3), (4, 2), pytest.param((2, 2, 2, 2), marks=pytest.mark.slow), (3, 3, 2, 2)]
)
def test_a_loss_equals_that_of_one_process_to_the_last_bit(counts: tuple[int, ...]) -> None:
    """Also where a step reads other tensors than the step before."""
    assert harness.ranks(len(counts))(find_loss_differences, counts) == [[]] * len(counts)


def test_a_loss_of_other_rows_is_found() -> None:
    for found in harness.ranks(2)(find_loss_differences, (3, 3), from_another_rank):
        assert {f"step {step}: the gradients" for step in range(len(STEPS))} <= {*found}
