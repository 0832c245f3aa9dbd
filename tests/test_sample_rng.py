"""SampleRng: its numbers, their distribution, their independence of the batch, and invalid arguments."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from drawing import Oracle
from paceline import SampleRng, Task, TaskError
from paceline.sample_rng import SampleNumbers, number_samples

NUMBERS = [0, 7, 10**12]


def draw_all(rng: SampleRng) -> list[torch.Tensor]:
    """Return a tensor of each method; 37 is no multiple of a vector register."""
    return [
        *(rng.rand(37), rng.randn(37), rng.randn(2, 3), rng.rand(), rng.randn_like(torch.zeros(len(rng), 5))),
        *(rng.randint(-3, 10**9, 37), rng.bernoulli(0.3, 37), rng.permutation(37)),
        rng.stream("a").randn(37),
    ]


def test_numbers_equal_those_of_python_integers() -> None:
    rng = SampleRng(NUMBERS, 5, dtype=torch.float64, name="loss")
    oracles = [Oracle(number, 5, "loss") for number in NUMBERS]
    np.testing.assert_array_equal(rng.rand(5), np.stack([oracle.rand(5) for oracle in oracles]))
    expected = np.stack([oracle.randn(6).reshape(2, 3) for oracle in oracles])
    np.testing.assert_allclose(rng.randn(2, 3), expected, rtol=1e-12)
    words = [next(oracle.words()) for oracle in oracles]
    assert rng.randint(-3, 10**9).tolist() == [word % 2**63 % (10**9 + 3) - 3 for word in words]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_numbers_of_a_sample_do_not_depend_on_its_batch(size: int, dtype: torch.dtype) -> None:
    whole = draw_all(SampleRng(range(40), 1, dtype=dtype))
    parts = [draw_all(SampleRng(range(40)[at : at + size], 1, dtype=dtype)) for at in range(0, 40, size)]
    for expected, found in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(found), expected)


def test_shapes_and_types() -> None:
    shapes = [tuple(tensor.shape[1:]) for tensor in draw_all(SampleRng(NUMBERS))]
    assert shapes == [(37,), (37,), (2, 3), (), (5,), (37,), (37,), (37,), (37,)]
    rng = SampleRng(NUMBERS)
    assert rng.randn((2, 3)).shape == rng.randn(torch.Size([2, 3])).shape == (3, 2, 3)  # type: ignore[arg-type]
    assert rng.randn_like(torch.zeros(3, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert (rng.randn(0).shape, rng.randint(0, 5, 2, 0).shape) == ((3, 0), (3, 2, 0))
    assert (rng.rand().dtype, rng.randint(0, 2).dtype) == (torch.float32, torch.int64)
    assert rng.bernoulli(0.5).dtype == torch.bool


def test_both_dtypes_have_the_same_numbers() -> None:
    single, double = (SampleRng(NUMBERS, dtype=dtype) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(single.rand(99).double(), double.rand(99), atol=2**-24, rtol=0)
    torch.testing.assert_close(single.randn(99).double(), double.randn(99), atol=1e-5, rtol=0)


def test_distributions() -> None:
    """Moments and correlations within 5 standard errors of 2**18 numbers."""
    rng, count = SampleRng(range(512), 3), 512 * 512
    normal = rng.randn(512).double()
    for power, (moment, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], 1):
        assert abs(float(normal.pow(power).mean()) - moment) < 5 * math.sqrt(variance / count), power
    uniform = rng.rand(512).double()
    counts = torch.histc(uniform, 64, 0, 1)
    assert float(uniform.max()) < 1
    assert float(((counts - count / 64) ** 2 / (count / 64)).sum()) < 63 + 5 * math.sqrt(2 * 63)
    for shifted in (normal.roll(1, 0), normal.roll(1, 1), normal.roll(256, 1), rng.randn(512).double()):
        assert abs(float((normal * shifted).mean())) < 5 / math.sqrt(count)
    dice = torch.bincount(rng.randint(0, 6, 512).ravel())
    assert float(((dice - count / 6) ** 2 / (count / 6)).sum()) < 5 + 5 * math.sqrt(10)
    assert abs(float(rng.bernoulli(0.3, 512).double().mean()) - 0.3) < 5 * math.sqrt(0.21 / count)
    orders = rng.permutation(4)
    assert torch.equal(orders.sort(1).values, torch.arange(4).expand(512, 4))
    assert len({tuple(row) for row in orders.tolist()}) == 24


def test_streams_seeds_samples_and_calls_differ() -> None:
    draws = [
        *(SampleRng([0], 0).randn(8), SampleRng([0], 1).randn(8), SampleRng([1], 0).randn(8)),
        *(SampleRng([0], name="loss").randn(8), SampleRng([0]).stream("a").randn(8)),
        SampleRng([0]).stream("b").randn(8),
    ]
    rng = SampleRng([0], 0)
    draws += [rng.randn(8), rng.randn(8)]
    assert len({tuple(draw[0].tolist()) for draw in draws}) == len(draws) - 1  # the first call repeats
    assert torch.equal(rng.stream("a").randn(8), draws[4])


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda rng: rng.rand(2.5), "rng.rand: expected the sizes of one sample"),
        (lambda rng: rng.randn(-1), "got (-1,)"),
        (lambda rng: rng.randn(2**20, 2**12), "rng.randn: expected"),
        (
            lambda rng: rng.randn_like(torch.zeros(4, 2)),
            "must be the 3 samples of the batch, got shape (4, 2)",
        ),
        (lambda rng: rng.randint(5, 5), "no integer from low=5 to below high=5"),
        (lambda rng: rng.randint(0, 2.5), "low and high must be integers, got 0 and 2.5"),
        (lambda rng: rng.bernoulli(1.5), "p must be a probability from 0 to 1, got 1.5"),
        (lambda rng: rng.permutation(-2), "rng.permutation: expected"),
    ],
)
def test_invalid_arguments(draw: Any, words: str) -> None:
    with pytest.raises(TaskError) as raised:
        draw(SampleRng(NUMBERS))
    assert words in str(raised.value)


class Parent(Task):
    def inputs(self, batch: Any, rng: SampleRng) -> Any:
        return rng.rand()

    def loss(self, output: Any, batch: Any, *, rng: SampleRng) -> Any:
        return rng.rand()


class Child(Parent):
    def inputs(self, batch: Any, rng: SampleRng) -> Any:
        return super().inputs([batch], rng)

    def metrics(self, output: Any, batch: Any) -> Any:
        return super().loss(output, [batch])  # without its rng


def test_methods_receive_the_rng_of_their_batch() -> None:
    task, batch, other = Child(), torch.zeros(2, 3), torch.zeros(3, 3)
    numbers = [SampleNumbers([4, 9], 1, torch.float64), SampleNumbers([5, 6, 7], 1, torch.float32)]
    with number_samples([batch, other], numbers):
        expected = SampleRng([4, 9], 1, dtype=torch.float64, name="inputs").rand()
        assert torch.equal(task.inputs(batch), expected)
        assert torch.equal(task.inputs(other), SampleRng([5, 6, 7], 1, name="inputs").rand())
        assert not torch.equal(task.loss(None, batch), expected)
        assert torch.equal(task.loss(None, batch=batch, rng=SampleRng([4], 1)), SampleRng([4], 1).rand())
        with pytest.raises(TaskError, match=r"as in super\(\).loss\(output, batch, rng\)"):
            task.metrics(None, batch)
    assert torch.equal(task.inputs(batch), SampleRng([0, 1], name="inputs").rand())
