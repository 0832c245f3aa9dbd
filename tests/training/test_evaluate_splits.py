"""Trainings that evaluate several splits.

The reference is a plain loop over single samples in float64 with the weights of the checkpoint.
"""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from command import checkpoint_weights, succeed
from harness import ranks
from paceline import DataError, Spec, TaskError, World, train
from paceline.errors import SpecError
from paceline.events import Ended, Evaluated, describe_metric
from paceline.report.progress import build_tag
from paceline.run import RunFolder, create
from paceline.spec import Launch, Save, Stop
from paceline.task import load_task

pytestmark = pytest.mark.processes

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline import Task

SIZES = {"train": 12, "validation": 7, "test": 11, "shifted": 8}


class Net(Task):
    has_validation: bool = True
    dropout: float = 0.5

    def model(self):
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(self.dropout), nn.Linear(8, 3))

    def dataset(self, split):
        if split not in SIZES or (split == "validation" and not self.has_validation):
            return None
        draw = torch.Generator().manual_seed(SIZES[split])
        return TensorDataset(*(torch.randn(SIZES[split], width, generator=draw) for width in (5, 3)))

    def loss(self, output, batch):
        return (output - batch[1]).square()

    def metrics(self, output, batch):
        return {"near": (output - batch[1]).abs().amax(1) < 1.0}
"""
SPLITS = ("test", "shifted")


def make_spec(folder: Path, **changes) -> Spec:
    file = folder / "splits_task.py"
    file.write_text(TASK)
    values = {"evaluate_splits": SPLITS, "evaluate_every": 2, "steps": 4, **changes}
    return Spec(task=f"{file}:Net", batch=6, seed=3, precision="fp64", threads=1, **values)


def run_on_this_rank(spec: Spec, plan: str, folder: Path | None, stop_at: int | None = None) -> list:
    """Train, and return the evaluations and the end. The call number `stop_at` asks to stop."""
    calls = itertools.count(1)
    world = World() if not torch.distributed.is_initialized() else None
    run = RunFolder(folder) if folder is not None else None
    if run is not None and not run.spec.exists():
        run = create(run.path, spec, Launch(plan=plan, ranks=1, device="cpu"))
    events = train(spec, plan, world, run=run, device="cpu", stop=lambda: next(calls) == stop_at)
    return [event for event in events if isinstance(event, (Evaluated, Ended))]


def expected_metrics(spec: Spec, run: Path) -> dict[str, float]:
    task = load_task(spec.task, spec.set)
    model: nn.Module = task.model().double().eval()
    weights = checkpoint_weights(run)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    found = {}
    for split, prefix in (("validation", ""), ("test", "test/"), ("shifted", "shifted/")):
        rows = [tuple(item.double() for item in row) for row in task.dataset(split)]
        with torch.no_grad():
            errors = [model(x[None])[0] - y for x, y in rows]
        found[f"{prefix}loss"] = float(torch.stack(errors).square().mean())
        found[f"{prefix}near"] = float((torch.stack(errors).abs().amax(1) < 1.0).double().mean())
    return found


def test_metrics_of_all_splits(tmp_path) -> None:
    spec = make_spec(tmp_path, save=Save(best="max shifted/near"))
    *evaluated, _ = run_on_this_rank(spec, "single", tmp_path / "run")
    expected = expected_metrics(spec, tmp_path / "run")
    assert [event.step for event in evaluated] == [2, 4]
    assert evaluated[-1].metrics == pytest.approx(expected, rel=1e-10)
    assert len({expected[f"{prefix}loss"] for prefix in ("", "test/", "shifted/")}) == 3


OTHER_PLANS = ("zero3", "pp=2,microbatches=2", "parameter-server,staleness=0")


@pytest.mark.parametrize(
    "plan", ["ddp", *(pytest.param(plan, marks=pytest.mark.slow) for plan in OTHER_PLANS)]
)
def test_ranks_evaluate_as_one_process(plan, tmp_path) -> None:
    spec = make_spec(tmp_path, set={"dropout": 0.0})
    expected = run_on_this_rank(spec, "single", None)
    found = ranks(2)(run_on_this_rank, spec, plan, None)[0]
    assert len(expected) == 3
    for mine, single in zip(found[:-1], expected[:-1], strict=True):
        assert mine.metrics == pytest.approx(single.metrics, rel=1e-10)


def test_a_metric_of_another_split_ends_the_training(tmp_path) -> None:
    stop = Stop(metric="min test/loss", target=1e9)
    without = {"has_validation": False}
    with pytest.raises(SpecError, match=r"save\.best='min loss' is a metric of the validation split"):
        run_on_this_rank(make_spec(tmp_path, stop=stop, set=without), "single", None)
    spec = make_spec(tmp_path, stop=stop, save=Save(best="min test/loss"), set=without)
    *evaluated, ended = run_on_this_rank(spec, "single", None)
    assert [event.step for event in evaluated] == [2]
    assert {*evaluated[0].metrics} == {"test/loss", "test/near", "shifted/loss", "shifted/near"}
    assert "test/loss" in (ended.why or "")


@pytest.mark.parametrize("at", [3, 4, 5])
def test_a_stop_while_any_split_is_evaluated_does_not_change_the_metrics(at, tmp_path) -> None:
    """Steps 1 and 2 ask once each, and each split asks before its second batch."""
    spec = make_spec(
        tmp_path, save=Save(best="max shifted/near"), stop=Stop(metric="min test/loss", patience=9)
    )
    *undisturbed, _ = run_on_this_rank(spec, "single", tmp_path / "undisturbed")
    [ended] = run_on_this_rank(spec, "single", tmp_path / "stopped", at)
    assert (ended.step, ended.reason) == (2, "stopped")
    *resumed, ended = run_on_this_rank(spec, "single", tmp_path / "stopped")
    assert (ended.step, ended.reason) == (4, "done")
    assert [(event.step, event.metrics) for event in resumed] == [
        (event.step, event.metrics) for event in undisturbed
    ]
    assert len(resumed) == 2


def test_a_metric_with_the_name_of_another_split(tmp_path) -> None:
    spec = make_spec(tmp_path)
    file = tmp_path / "splits_task.py"
    file.write_text(TASK.replace('"near"', '"test/loss"'))
    with pytest.raises(TaskError, match=r"returned 'test/loss', .* of the split 'test' of evaluate_splits"):
        run_on_this_rank(spec, "single", None)


def test_words_and_tags_of_metrics() -> None:
    """Tags that begin with "train/" are those of steps."""
    names = ("loss", "test/loss", "train/loss")
    assert [describe_metric(name) for name in names] == ["validation loss", "test/loss", "train/loss"]
    assert [build_tag(name) for name in names] == ["validation/loss", "test/loss", "evaluated_train/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["verify", "drill"])
def test_commands_that_evaluate_nothing_accept_the_splits(command, tmp_path) -> None:
    make_spec(tmp_path)
    splits = ("--set", 'spec.evaluate_splits=["test"]')
    options = {"verify": ("--plan", "ddp"), "drill": ("--faults", "clock")}[command]
    words = ("--ranks", "2", "--batch", "6", "--steps", "8", *options)
    succeed(command, "splits_task.py:Net", *words, *splits, at=tmp_path)


@pytest.mark.parametrize("splits", [("test", "test"), ("validation",), ("a b",), ("a/b",), ("",)])
def test_bad_names(splits, tmp_path) -> None:
    with pytest.raises(ValueError, match="evaluate_splits"):
        make_spec(tmp_path, evaluate_splits=splits)


def test_missing_splits_and_metrics(tmp_path) -> None:
    with pytest.raises(
        DataError, match=r"evaluate_splits has 'tests', but Net.dataset\('tests'\) returned None"
    ):
        run_on_this_rank(make_spec(tmp_path, evaluate_splits=("tests",)), "single", None)
    stop = Stop(metric="min tests/loss", target=0.0)
    with pytest.raises(SpecError, match="the evaluation has no tests/loss"):
        run_on_this_rank(make_spec(tmp_path, stop=stop), "single", None)
