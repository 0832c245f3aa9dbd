"""Cross entropy in chunks: values, gradients, memory, and trainings that equal those with whole logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness import train_on_ranks
from paceline import Spec
from paceline.chunked_loss import CrossEntropyHead, chunked_cross_entropy
from paceline.errors import TaskError
from paceline.spec import Optimizer
from paceline.tasks.lm import Lm

ROWS, CLASSES, WIDTH = 37, 19, 8


def draw(dtype: torch.dtype, bias: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    tensors = [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]
    return [*tensors[:2], tensors[2] if bias else None]


def targets() -> Tensor:
    found = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))
    found[5] = found[20] = -100
    return found


def differentiate(losses: Tensor, tensors: list[Any]) -> list[Tensor]:
    weights = torch.linspace(-1, 2, ROWS, dtype=losses.dtype)
    return [losses, *torch.autograd.grad((losses * weights).sum(), [t for t in tensors if t is not None])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, ROWS, None])
def test_losses_and_gradients_are_those_of_torch(rows: int | None, bias: bool) -> None:
    hidden, weight, own = tensors = draw(torch.float64, bias)
    found = differentiate(chunked_cross_entropy(hidden, weight, targets(), own, rows), tensors)
    expected = differentiate(
        F.cross_entropy(F.linear(hidden, weight, own), targets(), reduction="none"), tensors
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_wrong_target_is_caught() -> None:
    hidden, weight, own = tensors = draw(torch.float64, False)
    found = differentiate(chunked_cross_entropy(hidden, weight, targets().roll(1), own, 5), tensors)
    expected = differentiate(F.cross_entropy(F.linear(hidden, weight), targets(), reduction="none"), tensors)
    assert not torch.allclose(found[1], expected[1])


def test_autocast() -> None:
    hidden, weight, _ = tensors = draw(torch.float32, False)
    with torch.autocast("cpu", torch.bfloat16):
        found = differentiate(chunked_cross_entropy(hidden, weight, targets(), None, 5), tensors)
        expected = differentiate(
            F.cross_entropy(F.linear(hidden, weight).float(), targets(), reduction="none"), tensors
        )
    assert found[0].dtype == torch.float32
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.numel())
        return result


@pytest.mark.parametrize("is_chunked", [True, False])
def test_no_tensor_has_all_logits(is_chunked: bool) -> None:
    hidden, weight, _ = draw(torch.float32, False)
    with Largest() as largest:
        if is_chunked:
            losses = chunked_cross_entropy(hidden, weight, targets(), None, 4)
        else:
            losses = F.cross_entropy(F.linear(hidden, weight), targets(), reduction="none")
        losses.sum().backward()
    assert (largest.elements >= ROWS * CLASSES) != is_chunked


def test_head_without_targets_returns_logits() -> None:
    head = CrossEntropyHead(WIDTH, CLASSES)
    hidden = torch.randn(2, 3, WIDTH)
    assert torch.equal(head(hidden), F.linear(hidden, head.weight, head.bias))
    assert head(hidden, torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3)
    assert isinstance(head, nn.Linear)
    with pytest.raises(TaskError, match="one target per row"):
        head(hidden, torch.zeros(2, 4, dtype=torch.int64))


SPEC = Spec(batch=8, steps=3, optimizer=Optimizer(lr=0.01), precision="fp64", profile=False)
SIZES = {"width": 16, "depth": 2, "heads": 2, "context": 16, "vocabulary": 300}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a text of 60 short documents."""
    path = tmp_path_factory.mktemp("text") / "documents.txt"
    path.write_text("".join(f"document {number} has {'words ' * (number % 7)}\n" for number in range(60)))
    return str(path)


def train(text: str, is_chunked: bool, size: int, plan: str) -> Any:
    return train_on_ranks(size, Lm(file=text, **SIZES, chunked_loss=is_chunked), SPEC, plan)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "plan"),
    [
        (1, "single"),
        (2, "ddp,microbatches=2"),
        (2, "zero1"),
        (2, "zero3"),
        (2, "pp=2,microbatches=2"),
        (2, "cp=2"),
    ],
)
def test_trainings_equal_those_with_whole_logits(size: int, plan: str, text: str) -> None:
    whole, chunked = train(text, False, 1, "single"), train(text, True, size, plan)
    assert chunked.losses == pytest.approx(whole.losses, rel=1e-10)
    assert chunked.grad_norms == pytest.approx(whole.grad_norms, rel=1e-10)
    for name, weights in whole.weights.items():
        assert chunked.weights[name] == pytest.approx(weights, rel=1e-8, abs=1e-10), name
    assert chunked.metrics == [pytest.approx(found, rel=1e-8) for found in whole.metrics]
