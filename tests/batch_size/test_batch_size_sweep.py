"""paceline batch-size: targets, results of runs, branches of a checkpoint, and the command."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from command import paceline, succeed
from paceline.batch_size.choose import find_candidates, list_choices, pick_best
from paceline.batch_size.convergence import Measurement, fit_curve
from paceline.batch_size.published import find_published
from paceline.batch_size.report import build_table, list_findings
from paceline.batch_size.result import BatchResult, read_result
from paceline.batch_size.target import parse_target
from paceline.cluster.published import find
from paceline.errors import SpecError
from paceline.events import Ended, Evaluated, Event, NoiseMeasured, Started, Step
from paceline.plan.model.library import load_model
from paceline.plan.search.rank_counts import parse_counts
from paceline.spec import Optimizer
from paceline.training.optimization.batch_scaling import multiply_rates

ACCURACY = parse_target("accuracy >= 0.9")


def test_targets() -> None:
    assert (ACCURACY.metric, ACCURACY.value) == ("max accuracy", 0.9)
    assert parse_target("test/loss<0.1").metric == "min test/loss"
    for text in ("accuracy", "accuracy=0.9", "accuracy>=high", "loss<=nan", ">=0.9", ""):
        with pytest.raises(SpecError, match="--until must be a metric and its value"):
            parse_target(text)


def test_crossing_between_evaluations() -> None:
    assert ACCURACY.find_crossing([(10, 0.5), (20, 0.8), (30, 1.0)]) == pytest.approx(25)
    assert ACCURACY.find_crossing([(10, 0.95), (20, 0.5)]) == 10
    assert ACCURACY.find_crossing([(10, math.nan), (20, 0.95)]) == 20
    assert ACCURACY.find_crossing([(10, 0.5)]) is None
    assert parse_target("loss<=1").find_crossing([(0, 3.0), (4, 1.0)]) == 4
    assert parse_target("loss<=1").find_crossing([(2, math.inf), (4, 0.5)]) == 4
    assert parse_target("psnr>=9").find_crossing([(2, -math.inf), (4, math.inf)]) == 4
    assert str(parse_target("loss<=0.12345678")) == "loss <= 0.12345678"


def test_batches() -> None:
    assert parse_counts("64:512", "--batches") == (64, 128, 256, 512)
    with pytest.raises(SpecError, match="--batches '64:100' does not reach 100"):
        parse_counts("64:100", "--batches")


def started(step: int) -> Started:
    return Started(
        task="t", plan="ddp", ranks=1, batch=8, step=step, steps=99, samples=99, parameters=1, device="cpu",
        precision="fp32", threads=1,
    )  # fmt: skip


def step(number: int, seconds: float) -> Step:
    return Step(
        step=number, samples=8 * number, loss=1.0, grad_norm=1.0, lr=0.1, step_s=seconds, data_s=0.0,
        samples_per_s=1.0,
    )  # fmt: skip


def evaluated(number: int, accuracy: float) -> Evaluated:
    return Evaluated(step=number, metrics={"accuracy": accuracy}, seconds=1.0)


def test_result_of_a_resumed_branch() -> None:
    """The branch begins after 100 steps. Its second start repeats what came after step 104."""
    events: list[Event] = [started(100), *(step(n, 9.0) for n in range(101, 104)), step(104, 0.5)]
    events += [evaluated(104, 0.7), step(105, 0.5), evaluated(106, 0.99), started(104), step(105, 7.0)]
    events += [evaluated(106, 0.8), step(107, 7.0), step(108, 0.5), evaluated(108, 1.0)]
    result = read_result(events, 8, 0.1, ACCURACY)
    assert result.steps == pytest.approx(7)
    assert result.samples == pytest.approx(56)
    assert (result.first, result.done, result.best, result.best_step) == (100, 108, 1.0, 108)
    assert result.step_s == 0.5


def test_a_target_that_the_first_evaluation_reaches() -> None:
    early = read_result([started(0), evaluated(2, 0.95), evaluated(4, 0.99)], 8, 0.1, ACCURACY)
    later = read_result([started(0), evaluated(2, 0.5), evaluated(4, 0.99)], 8, 0.1, ACCURACY)
    assert (early.is_early, later.is_early) == (True, False)
    lines = list_findings([early, later], ACCURACY, None)
    assert lines[0].startswith("the first evaluation of batch 8 already reached accuracy >= 0.9, so")


def test_result_without_the_target() -> None:
    events = [started(0), evaluated(2, 0.5), evaluated(4, 0.4), Ended(step=4, reason="done", why="over")]
    result = read_result(events, 8, 0.1, ACCURACY)
    assert (result.steps, result.samples, result.best, result.best_step) == (None, None, 0.5, 2)
    assert result.why == "over"


def test_planner_and_curve_together() -> None:
    """A small Bcrit wants a small batch for price, and a large one for time on many ranks."""
    curve = fit_curve([Measurement(b, 1e6 * (1 + b / 256)) for b in (16, 32, 64, 128, 256, 512)])
    facts, cluster = load_model("gpt2"), find("h100:8@50")
    choices = list_choices(curve, facts, None, cluster, (16, 64, 256, 1024), (1, 8), None, 2.0, "EUR")
    best = pick_best(choices)
    assert {choice.bill.currency for choice in choices} == {"EUR"}
    assert best["price"].bill.price == min(choice.bill.price for choice in choices)
    assert best["time"].ranks == 8
    assert best["price"].batch <= best["time"].batch
    for choice in choices:
        expected = 1e6 * (1 + choice.batch / 256) / choice.batch
        assert choice.steps.value == pytest.approx(expected, rel=0.3)
        assert choice.bill.seconds == pytest.approx(choice.steps.value * choice.step_s, rel=1e-6)
        assert choice.seconds.low < choice.seconds.value < choice.seconds.high


def test_batches_that_missed_the_target_are_not_recommended() -> None:
    reached = read_result([started(0), evaluated(2, 0.95)], 8, 0.1, ACCURACY)
    missed = read_result([started(0), evaluated(2, 0.5)], 16, 0.1, ACCURACY)
    assert find_candidates([reached, replace(reached, batch=16)]) == [8, 16, 32]
    assert find_candidates([reached, missed]) == [8]
    assert find_candidates([replace(missed, batch=4), reached]) == [8, 16]
    assert find_candidates([missed]) == []


def test_published_trainings_are_of_the_same_data() -> None:
    resnet = load_model("resnet50")
    assert len(find_published(resnet, 1_281_167)) == 8
    assert not find_published(resnet, 50_000)
    assert not find_published(load_model("gpt2"), 1_281_167)


COMMON = ("--lr", "0.003", "--batch", "64", "--plan", "ddp", "--ranks", "2", "--run-dir", "cmp")
SWEEP = ("batch-size", "digits", "--batches", "64,256", "--until", "accuracy>=0.9", "--epochs", "6", *COMMON)


@pytest.mark.processes
@pytest.mark.slow
def test_command_is_resumed(tmp_path: Path) -> None:
    options = ("--json", "a.json", "--plot", "a.svg", "--noise-scale", "5")
    done = succeed(*SWEEP, *options, at=tmp_path)
    found = json.loads((tmp_path / "a.json").read_text())
    assert [row["batch"] for row in found["rows"]] == [64, 256]
    assert all(row["reached"] and row["samples"] > 0 and row["noise_scale"] for row in found["rows"])
    small, large = found["rows"]
    assert large["lr"] == pytest.approx(2 * small["lr"])
    assert large["steps"] < small["steps"]
    fit = found["fit"]["critical_batch"]
    assert fit["low"] < fit["value"] < fit["high"]
    assert set(found["choices"]) >= {"time", "device hours"}
    assert "knee" in done.out
    assert (tmp_path / "a.svg").stat().st_size > 1000
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cmp/*/events.jsonl")}
    succeed(*SWEEP, "--noise-scale", "5", "--json", "b.json", at=tmp_path)
    assert json.loads((tmp_path / "b.json").read_text())["rows"] == found["rows"]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("cmp/*/events.jsonl")} == before
    refused = paceline(*SWEEP, at=tmp_path)
    assert refused.status == 2
    assert "noise_scale=None instead of 5" in refused.err


@pytest.mark.processes
@pytest.mark.slow
def test_branches_of_a_run_have_its_state_and_its_next_samples(tmp_path: Path) -> None:
    """The branch with the batch of the run equals the run that continues; other batches start as it does."""
    words = (
        "--lr",
        "0.003",
        "--batch",
        "64",
        "--ranks",
        "1",
        "--set",
        "schedule.base_batch=64",
        "--set",
        "spec.threads=1",
    )
    rule = ("--set", "schedule.lr_scale=sqrt", "--set", "spec.evaluate_every=2")
    succeed("train", "digits", "--steps", "8", *words, *rule, "--run-dir", "base", at=tmp_path)
    sweep = (
        "batch-size",
        "digits",
        "--batches",
        "64,128,256",
        "--until",
        "accuracy>=0.999",
        "--from",
        "base",
    )
    length = ("--steps", "12", "--evaluate-samples", "256")
    done = paceline(*sweep, *words, *length, "--run-dir", "cmp", "--json", "a.json", at=tmp_path)
    assert done.status == 1, done.err
    assert "did not reach" in done.out
    assert "the best was" in done.out
    succeed("resume", "base", "--steps", "12", at=tmp_path)

    def losses(run: str) -> dict[int, float]:
        lines = (tmp_path / run / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return {event["step"]: event["loss"] for event in events if event["event"] == "step"}

    base = losses("base")
    same = losses("cmp/batch-64")
    assert same == {number: base[number] for number in range(9, 13)}
    assert min(losses("cmp/batch-128")) == 5
    assert min(losses("cmp/batch-256")) == 3
    refused = paceline(
        "batch-size", "digits", "--batches", "100", "--until", "accuracy>=1", "--from", "base", at=tmp_path
    )
    assert refused.status == 2
    assert "not a multiple of batch 100" in refused.err


@pytest.mark.processes
@pytest.mark.slow
def test_an_unknown_metric_can_be_corrected(tmp_path: Path) -> None:
    words = ("batch-size", "digits", "--batches", "256", "--epochs", "1", "--ranks", "1")
    refused = paceline(*words, "--until", "acuracy>=0.1", at=tmp_path)
    assert refused.status == 2
    assert "the evaluation has no acuracy" in refused.err
    succeed(*words, "--until", "accuracy>=0.1", at=tmp_path)
    other = paceline(*words, "--until", "accuracy>=0.2", at=tmp_path)
    assert other.status == 2
    assert "until='accuracy >= 0.2' instead of 'accuracy >= 0.1'" in other.err


@pytest.mark.processes
@pytest.mark.slow
def test_tune_takes_the_rate_that_reaches_the_target_first(tmp_path: Path) -> None:
    words = ("--lr", "0.001", "--batch", "64", "--ranks", "1", "--epochs", "3", "--run-dir", "cmp")
    target = ("--batches", "128", "--until", "accuracy>=0.9", "--tune", "--json", "a.json")
    done = succeed("batch-size", "digits", *target, *words, at=tmp_path)
    [row] = json.loads((tmp_path / "a.json").read_text())["rows"]
    first: dict[float, float] = {}  # factor -> step of the first evaluation that reaches the target
    for run in tmp_path.glob("cmp/batch-128*"):
        lines = (run / "events.jsonl").read_text().splitlines()
        reached = [
            event["step"]
            for event in map(json.loads, lines)
            if event["event"] == "evaluated" and event["metrics"]["accuracy"] >= 0.9
        ]
        first[float(run.name.partition("-lr-")[2] or 1)] = min(reached, default=math.inf)
    assert first.keys() >= {0.5, 1.0, 2.0, 4.0}
    assert first[row["lr_factor"]] == min(first.values())
    assert row["lr_factor"] not in (min(first), max(first)), "it continues at the ends"
    assert row["lr"] == pytest.approx(0.001 * math.sqrt(2) * row["lr_factor"])
    assert f", learning rate × {row['lr_factor']:g}" in done.out


def test_tune_multiplies_all_learning_rates() -> None:
    groups = {"head.*": {"lr": 0.2}, "bias": {"lr_scale": 3.0}}
    found = multiply_rates(Optimizer(name="muon", lr=0.1, adamw_lr=0.01, groups=groups), 2.0)
    assert (found.lr, found.adamw_lr, found.groups["head.*"].lr) == (0.2, 0.02, 0.4)
    assert found.groups["bias"].lr_scale == 3.0  # relative to lr
    assert multiply_rates(Optimizer(lr=0.1), 2.0) == Optimizer(lr=0.2)


def test_a_rate_at_the_end_of_tune_is_reported() -> None:
    result = read_result([started(0), evaluated(2, 0.95), Ended(step=2, reason="done")], 8, 0.1, ACCURACY)
    inside, outside = (replace(result, lr_factor=factor) for factor in (8.0, 16.0))
    sentence = "batch 8: the best learning rate is 16 times the scaled one, and --tune tries no further"
    assert not [line for line in list_findings([inside], ACCURACY, None) if "--tune" in line]
    assert [line for line in list_findings([outside], ACCURACY, None) if line.startswith(sentence)]


@pytest.mark.parametrize("has_noise", [False, True])
def test_numbers_of_the_table_are_whole_in_80_columns(has_noise: bool) -> None:
    noise = NoiseMeasured(step=9, noise_scale=312.4, error=0.1, variance=1.0, squared_gradient=1.0)
    reached = BatchResult(8192, 0.0123, 0, 9375, 9374.8, 0.97123, 9375, 1.5, noise if has_noise else None)
    missed = replace(reached, steps=None, lr=None, noise=None)
    curve = fit_curve([Measurement(8192, 9374.8 * 8192)])
    file = io.StringIO()
    Console(width=80, file=file).print(build_table([reached, missed], curve))
    assert "…" not in file.getvalue()
    for number in ("8,192", "0.0123", "9,375", "76,798,362", "3:54:22", "0.9712", "not in 9,375"):
        assert number in file.getvalue(), number
    assert ("312 ± 31.2" in file.getvalue()) == has_noise


def test_tune_of_an_optimizer_of_the_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(
        "import torch\nfrom paceline.tasks.digits import Digits\nclass Own(Digits):\n"
        "    def optimizer(self, params):\n        return torch.optim.SGD([p for _, p in params], lr=0.1)\n"
    )
    done = paceline("batch-size", "my.py:Own", "--until", "accuracy>=0.5", "--tune", at=tmp_path)
    assert done.status == 2
    assert "--tune changes the learning rate of --lr, which the task's optimizer() does not read" in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batches", "64"), "add --until METRIC"),
        (("--until", "accuracy"), "--until must be a metric and its value"),
        (("--until", "accuracy>=0.9", "--batches", "64:9999"), "--batches '64:9999' does not reach"),
        (("--until", "accuracy>=0.9", "--batches", "64,4096"), "larger than the"),
        (("--until", "accuracy>=0.9", "--batches", "x"), "'x' is not a whole number"),
        (("--until", "accuracy>=0.9", "--nodes", "2"), "trains on one machine"),
        (("--until", "accuracy>=0.9", "--patience", "2"), "but the request has [stop]; leave stop.* and"),
        (("--until", "accuracy>=0.9", "--set", "spec.evaluate_every=3"), "got evaluate_every=3 steps; leave"),
        (("--until", "accuracy>=0.9", "--plot", "a.pdf"), "its name must end in .svg or .png"),
    ],
)
def test_bad_input(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = paceline("batch-size", "digits", *words, at=tmp_path)
    assert done.status == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())
