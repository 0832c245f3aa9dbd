"""Histograms of whole tensors: exact counts under every plan, found by TensorBoard's own reader."""

import shlex
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from command import paceline, succeed
from harness import ranks, to_whole_array
from paceline import Spec, train
from paceline.distributed.dtensor import is_materialized, local_tensor
from paceline.errors import SpecError
from paceline.events import Step
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Save
from paceline.training.histograms import counts as counts_module
from paceline.training.histograms import recorder
from paceline.training.histograms.counts import TensorCounts
from paceline.training.init.named_tensors import named_tensors
from pages import read_blocks

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytestmark = pytest.mark.processes

SPEC = Spec(
    batch=12,
    steps=4,
    evaluate_every=100,
    save=Save(minutes=float("inf")),
    profile=False,
    precision="fp64",
    histograms=2,
)
PLANS = {
    "ddp,microbatches=2": 2,
    "zero1": 2,
    "zero3": 2,
    "hsdp,replicate=2": 4,
    "tp=2": 2,
    "tp=2,zero=2": 4,
    "cp=2": 2,
    "pp=2,microbatches=3": 2,
    "pp=2,pp_schedule=zbv,microbatches=2": 2,
    "pp=2,tp=2,dp=2,zero=2,microbatches=2": 8,
    "zero3,recompute=full": 2,
}
DIVIDED = ("tp=2,zero=2", "cp=2")
QUICK = ("ddp,microbatches=2", "zero3", "tp=2", "pp=2,microbatches=3")


def read(folder: Path) -> dict[str, dict[int, Any]]:
    """Return the histograms by name and step, as TensorBoard reads them."""
    board = accumulators.EventAccumulator(
        str(folder / "tensorboard/histograms"), size_guidance={accumulators.HISTOGRAMS: 0}
    )
    board.Reload()
    return {
        name: {event.step: event.histogram_value for event in board.Histograms(name)}
        for name in board.Tags()["histograms"]
    }


def check_counts(found: Any, values: np.ndarray) -> None:
    """Compare a histogram with the values, by the definition of its bins."""
    values = np.sort(values.astype(np.float64).ravel())
    limits = np.array(found.bucket_limit)
    below = np.searchsorted(values, limits, side="right")
    assert np.array_equal(np.diff(below, prepend=0), found.bucket)
    assert found.num == values.size == sum(found.bucket)
    assert (found.min, found.max) == (values[0], values[-1])
    assert found.sum == pytest.approx(values.sum(), rel=1e-9, abs=1e-9)
    assert found.sum_squares == pytest.approx(np.square(values).sum(), rel=1e-9)


def train_and_collect(
    task: Any, spec: Spec, plan: str, folder: str
) -> tuple[list[Any], dict[tuple[str, int, str], np.ndarray]]:
    """Return losses and digests of this rank, and its whole weights and gradients by kind, step and name."""
    digests: list[Any] = []
    whole: dict[tuple[str, int, str], np.ndarray] = {}

    def observe(model: nn.Module, what: str, step: int) -> None:
        for name, tensor in named_tensors(model).items():
            value = tensor.grad if what == "gradients" else tensor
            if not is_materialized(tensor) or value is None:
                continue
            digests.append((what, step, name, zlib.crc32(local_tensor(value.detach()).numpy().tobytes())))
            if isinstance(tensor, nn.Parameter):
                whole[what, step + 1, name] = to_whole_array(value).copy()

    events = list(
        train(spec, parse(plan), task=task, run=RunFolder(Path(folder)), device="cpu", observe=observe)
    )
    return [*((e.loss, e.grad_norm) for e in events if isinstance(e, Step)), *digests], whole


@pytest.mark.parametrize(
    "plan", [plan if plan in QUICK else pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS]
)
def test_counts_of_whole_tensors(plan: str, tmp_path: Path) -> None:
    task, size = models.ShortText(depth=4), PLANS[plan]
    for name in ("counted", "plain"):
        (tmp_path / name).mkdir()
    counted = ranks(size)(train_and_collect, task, SPEC, plan, str(tmp_path / "counted"))
    without = SPEC.model_copy(update={"histograms": None})
    plain = ranks(size)(train_and_collect, task, without, plan, str(tmp_path / "plain"))
    assert [result for result, _ in counted] == [result for result, _ in plain], "histograms change a result"
    assert not (tmp_path / "plain/tensorboard").exists()
    found = read(tmp_path / "counted")
    tensors: dict[tuple[str, int, str], np.ndarray] = {}
    for _, whole in counted:
        tensors |= whole
    parameters = dict(task.model().named_parameters())
    for kind in ("weights", "gradients"):
        assert {name for name in found if name.startswith(kind)} == {f"{kind}/{name}" for name in parameters}
        for name in parameters:
            assert set(found[f"{kind}/{name}"]) == {2, 4}
            for step in (2, 4):
                check_counts(found[f"{kind}/{name}"][step], tensors[kind, step, name])
    activations = {name for name in found if name.startswith("activations")}
    if "pp" in plan and "tp" in plan:
        assert not activations
        return
    for name in (f"activations/blocks.{at}" for at in range(4)):
        assert name in activations
        for step in (2, 4):
            assert found[name][step].num == SPEC.batch * task.context * task.width, "of the global batch"


@pytest.mark.parametrize("plan", ["tp=2", *(pytest.param(p, marks=pytest.mark.slow) for p in DIVIDED)])
def test_divided_activations_are_those_of_one_process(plan: str, tmp_path: Path) -> None:
    """tp divides features or positions of some outputs, cp the positions of blocks; others are whole."""
    task = models.ShortText(depth=4)
    spec = SPEC.model_copy(update={"steps": 2})
    found: dict[str, dict[str, dict[int, Any]]] = {}
    for name in ("single", plan):
        (tmp_path / name).mkdir()
        ranks(PLANS.get(name, 1))(train_and_collect, task, spec, name, str(tmp_path / name))
        found[name] = {key: of for key, of in read(tmp_path / name).items() if key.startswith("activations")}
    one, several = found["single"], found[plan]
    assert one.keys() == several.keys()
    assert len(one) > 5
    for name, of_one in one.items():
        if name == "activations/position" and "zero" in plan:
            continue  # its output is for no sample, so that each data rank adds it
        first, second = of_one[2], several[name][2]
        assert first.num == second.num, name
        for attribute in ("min", "max", "sum", "sum_squares"):
            expected = pytest.approx(getattr(first, attribute), rel=1e-7, abs=1e-7)
            assert getattr(second, attribute) == expected, (name, attribute)
    parts, whole = several["activations/blocks.0"][2], one["activations/blocks.1"][2]
    assert parts.sum_squares != pytest.approx(whole.sum_squares, rel=1e-3), "another block differs"


class KnownActivations(models.Points):
    """The first layer's output is known: it has fixed weights."""

    def model(self) -> nn.Module:
        return Frozen(super().model())


class Frozen(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.inner = inner
        self.first.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.first(x))


def outputs_of_batches(task: Any, spec: Spec, folder: str) -> list[np.ndarray]:
    """Train on one process, and return the outputs of the first layer in each step."""
    outputs: list[np.ndarray] = []

    def observe(model: nn.Module, what: str, step: int) -> None:
        if not outputs:
            model.get_submodule("first").register_forward_hook(
                lambda module, args, output: outputs.append(output.detach().numpy().copy())
            )
            outputs.append(np.zeros(0))

    list(train(spec, parse("single"), task=task, run=RunFolder(Path(folder)), device="cpu", observe=observe))
    return outputs


@pytest.mark.parametrize("plan", ["ddp,microbatches=2", "zero3"])
def test_activations_are_those_of_one_process(plan: str, tmp_path: Path) -> None:
    task = KnownActivations()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    [outputs] = ranks(1)(outputs_of_batches, task, SPEC, str(tmp_path / "one"))
    ranks(2)(train_and_collect, task, SPEC, plan, str(tmp_path / "two"))
    two = read(tmp_path / "two")
    assert "weights/first.weight" not in two, "it is not trained"
    found = two["activations/first"][2]
    check_counts(found, outputs[1])  # the hook sees the steps from the second on
    with pytest.raises(AssertionError):
        check_counts(found, outputs[2])


def test_counts_add_up_over_parts() -> None:
    values = torch.cat([torch.randn(1000), torch.tensor([0.0, 1e-9, -1e-9, 1e9, -1e9, 1.0, -1.0])]).double()
    whole, parts = (TensorCounts(["x"], torch.device("cpu")) for _ in range(2))
    whole.add("x", values)
    for part in values.split(13):
        parts.add("x", part)
    assert whole.reduce()["x"].counts == parts.reduce()["x"].counts
    assert sum(whole.reduce()["x"].counts) == 1007
    nothing = TensorCounts(["x"], torch.device("cpu"))
    nothing.add("x", torch.tensor([torch.nan, torch.inf]))
    assert nothing.reduce() == {}
    scaled, twice = (TensorCounts(["x"], torch.device("cpu")) for _ in range(2))
    scaled.add_all([("x", values * 4)], 4.0)
    twice.add("x", values)
    assert scaled.reduce()["x"].counts == twice.reduce()["x"].counts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_next_to_limits_are_in_their_bins(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers next to each limit, and of all magnitudes, compared with numpy's search."""
    limits = np.array([sign * 10 ** (exponent / 10) for sign in (-1, 1) for exponent in range(-80, 81)])
    near = torch.tensor(np.sort(limits)).to(dtype)
    up, down = (near.nextafter(torch.tensor(end, dtype=dtype)) for end in (torch.inf, -torch.inf))
    draws = torch.randn(5000, dtype=torch.float64) * 10 ** torch.empty(5000, dtype=torch.float64).uniform_(
        -12, 12
    )
    values = torch.cat([near, up, down, draws.to(dtype), torch.tensor([0.0, -0.0, 1e-40, -1e-40]).to(dtype)])
    values = values[values.isfinite()]
    monkeypatch.setattr(counts_module, "CHUNK", 999)
    counts = TensorCounts(["empty", "x", "y"], torch.device("cpu"))
    counts.add_all([("x", values), ("empty", values[:0]), ("y", values[:7])])
    found = counts.reduce()
    assert found.keys() == {"x", "y"}
    for name, own in (("x", values), ("y", values[:7])):
        numbers = own.double().numpy()
        expected = np.bincount(np.searchsorted(np.sort(limits), numbers), minlength=323)
        assert np.array_equal(found[name].counts, expected)
        assert (found[name].min, found[name].max) == (numbers.min(), numbers.max())
        assert found[name].sum == pytest.approx(numbers.sum(), rel=1e-9)
        assert found[name].sum_squares == pytest.approx(np.square(numbers).sum(), rel=1e-9)


def test_a_tensor_that_is_counted_twice_is_found() -> None:
    counts = TensorCounts(["x"], torch.device("cpu"))
    values = torch.randn(50)
    for _ in range(2):
        counts.add("x", values)
    assert sum(counts.reduce()["x"].counts) == 100


def test_asynchronous_plans_are_refused(tmp_path: Path) -> None:
    result = paceline(
        *("train", "digits", "--ranks", "2", "--plan", "local-sgd,period=2", "--steps", "4"),
        *("--histograms", "2"),
        at=tmp_path,
    )
    assert (result.status, result.err.count("\n")) == (2, 1), result.all
    assert "has other weights on each rank; leave histograms=2 out" in result.err


def test_without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"requires TensorBoard, .*: pip install \"paceline\[tensorboard\]\""):
        recorder.check_histograms(SPEC, parse("ddp").resolve(2))


def test_commands_of_the_page(tmp_path: Path) -> None:
    for line in read_blocks("docs/tensorboard.md")["histograms"].splitlines():
        succeed(*shlex.split(line)[1:], at=tmp_path)
    found = read(tmp_path / "runs/a")
    assert {name.partition("/")[0] for name in found} == {"weights", "gradients", "activations"}
    assert set(found["weights/0.weight"]) == {100, 200, 300}
