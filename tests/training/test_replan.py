"""Replanning: on another number of ranks, a run trains the same, under its plan or the most similar plan."""

import itertools
import shutil
from pathlib import Path

import pytest

from command import events_of_kind, paceline, succeed, write_task
from harness import differences_from_single
from models import NormedImages, Points
from paceline import Spec
from paceline import spec as specs
from paceline.data.batch_slices import RankBatchSlice
from paceline.errors import PlanError
from paceline.events import Started, Step
from paceline.plan.plan import micro_batch_size, parse
from paceline.plan.search.nearest import find_nearest_plans
from paceline.run import RunFolder
from paceline.spec import Optimizer

# Uneven plans: ranks have batch shares that differ by one sample


@pytest.mark.parametrize(
    "plan",
    [
        "ddp,uneven=1",
        "zero3,microbatches=2,uneven=1",
        *[
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ("zero1,uneven=1", "zero2,uneven=1", "ddp,microbatches=2,uneven=1")
        ],
    ],
)
def test_uneven_shares_equal_one_process(plan):
    spec = Spec(task="-", batch=16, steps=6, precision="fp64", optimizer=Optimizer(lr=0.05, clip=0.5))
    assert not differences_from_single(3, plan, Points(), spec)


def test_batch_norm_with_uneven_shares_equals_one_process():
    spec = Spec(task="-", batch=16, steps=4, precision="fp64")
    assert not differences_from_single(3, "ddp,uneven=1", NormedImages(), spec)


class _EqualShares:
    """Negative control: each rank assumes that all ranks have equal shares."""

    def __enter__(self):
        self.share, RankBatchSlice.share = (
            RankBatchSlice.share,
            property(lambda part: part.batch // part.microbatches // part.ranks),
        )

    def __exit__(self, *error):
        RankBatchSlice.share = self.share


def test_uneven_shares_treated_as_equal_are_detected():
    spec = Spec(task="-", batch=16, steps=6, precision="fp64")
    with pytest.raises(AssertionError, match=r"items over all ranks|differs"):
        assert not differences_from_single(3, "ddp,uneven=1", Points(), spec, _EqualShares)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ddp,uneven=2", "uneven must be 0 or 1, got uneven=2"),
        (
            "tp=2,uneven=1",
            "uneven=1 requires ddp, zero1, zero2, zero3 or hsdp, got plan tp=2,uneven=1; leave it out",
        ),
        (
            "local-sgd,uneven=1",
            "uneven=1 requires ddp, zero1, zero2, zero3 or hsdp, got plan local-sgd,uneven=1; leave it out",
        ),
    ],
)
def test_plans_without_uneven_shares_are_refused(text, message):
    with pytest.raises(PlanError) as caught:
        parse(text)
    assert str(caught.value) == message


def test_each_rank_of_an_uneven_plan_needs_samples():
    with pytest.raises(PlanError, match="batch 2 is not divisible"):
        micro_batch_size(2, parse("ddp,uneven=1").resolve(3))


# The most similar plan


@pytest.mark.parametrize(
    ("plan", "before", "now", "batch", "nearest"),
    [
        ("ddp", 4, 2, 64, "ddp,microbatches=2"),
        ("ddp", 4, 3, 64, "ddp,microbatches=2,uneven=1"),
        ("ddp", 4, 8, 64, "ddp"),
        ("zero3,microbatches=2", 4, 2, 64, "zero3,microbatches=4"),
        ("hsdp", 4, 3, 60, "zero3,microbatches=2"),
        ("dp=4,zero=2", 4, 2, 64, "zero2,microbatches=2"),
        ("tp=4", 4, 2, 64, "tp=2"),
        ("tp=2,pp=2", 4, 1, 64, "single,microbatches=4"),
        ("dp=2,tp=2", 4, 2, 64, "tp=2,microbatches=2"),
        ("dp=2,tp=2", 4, 8, 64, "tp=2"),
        ("pp=4,microbatches=8", 4, 2, 64, "pp=2,microbatches=8"),
        ("single", 1, 4, 64, "ddp"),
        ("local-sgd", 4, 2, 64, "local-sgd"),
        ("zero3,recompute=full", 4, 2, 64, "zero3,microbatches=2,recompute=full"),
    ],
)
def test_most_similar_plan(plan, before, now, batch, nearest):
    assert str(next(find_nearest_plans(parse(plan), before, now, batch))) == nearest


def test_further_plans_follow_the_most_similar_one():
    names = [str(plan) for plan in itertools.islice(find_nearest_plans(parse("tp=4"), 4, 3, 64), 5)]
    assert names[:2] == ["tp=3", "zero3,uneven=1"]


@pytest.mark.parametrize(
    ("plan", "before"),
    [
        ("ddp", 4),
        ("zero1,microbatches=2", 4),
        ("dp=2,tp=2,zero=2", 4),
        ("pp=2,microbatches=4", 2),
        ("hsdp", 8),
    ],
)
def test_similar_plans_divide_the_batch_without_larger_micro_batches(plan, before):
    max_size = micro_batch_size(64, parse(plan).resolve(before))
    for now in range(1, 9):
        plans = list(find_nearest_plans(parse(plan), before, now, 64))
        assert plans
        for other in plans:
            resolved = other.resolve(now)
            assert (
                micro_batch_size(64, resolved)
                + (resolved.uneven and 64 % (resolved.dp * resolved.microbatches) > 0)
                <= max_size
            ), other


def test_batch_norm_keeps_the_number_of_micro_batches():
    assert str(next(find_nearest_plans(parse("ddp"), 4, 2, 64, may_cut=False))) == "ddp"
    assert str(next(find_nearest_plans(parse("ddp"), 4, 3, 64, may_cut=False))) == "ddp,uneven=1"


# On the command line

TRAIN_OPTIONS = (
    "--batch",
    "64",
    "--set",
    "dropout=0.0",
    "--set",
    "norm=false",
    "--precision",
    "fp64",
    "--device",
    "cpu",
    "--no-profile",
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """Return a folder with two runs of one process: `undisturbed`, and `r`, which has half of the steps."""
    at = tmp_path_factory.mktemp("replan")
    write_task(at)
    for name, steps in (("undisturbed", "12"), ("r", "6")):
        succeed(
            "train",
            "my.py:Regression",
            *TRAIN_OPTIONS,
            "--steps",
            steps,
            "--ranks",
            "1",
            "--run-dir",
            name,
            at=at,
        )
    return at


def rewrite_launch(run: RunFolder, **launch: object) -> None:
    """Rewrite the request as if the run had been started with another plan and number of ranks."""
    spec, old_launch = run.request()
    run.write_request(spec, old_launch.model_copy(update=launch))


@pytest.mark.parametrize(
    ("plan", "size", "new_plan", "reason"),
    [
        ("tp=4", "3", "zero3,uneven=1", "plan tp=4 requires a multiple of tp=4 = 4 ranks, got 3"),
        pytest.param(
            "ddp", "2", "ddp,microbatches=2", "no rank holds more than 16 samples", marks=pytest.mark.slow
        ),
    ],
)
def test_run_resumes_on_fewer_ranks(plan, size, new_plan, reason, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    run = RunFolder(tmp_path / "r")
    rewrite_launch(run, plan=plan, ranks=4)
    result = succeed("resume", "r", "--ranks", size, "--steps", "12", at=tmp_path)
    started = events_of_kind(run.path, Started)[-1]
    assert (started.plan, started.ranks, started.batch) == (new_plan, int(size), 64)
    assert f"note: plan {new_plan} on {size} ranks, in place of {plan} on 4: {reason}" in result.out, (
        result.all
    )
    assert started.notes[0].startswith(f"plan {new_plan} on {size} ranks, in place of {plan} on 4: {reason}")
    losses = [
        [step.loss for step in events_of_kind(path, Step)] for path in (run.path, tmp_path / "undisturbed")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    launch = run.request()[1]
    assert (launch.plan, launch.ranks, launch.asked, launch.asked_ranks) == (new_plan, int(size), plan, 4)


def test_requested_plan_returns_with_its_number_of_ranks(stopped, tmp_path):
    """The test computes the requests of launches and starts no process."""
    from paceline.training.planning.replan import replan

    spec, launch = specs.load(stopped / "r/spec.toml", {"task": f"{stopped}/my.py:Regression"})
    first = launch.model_copy(update={"plan": "zero3", "ranks": 4})
    fewer = replan(spec, first, first.model_copy(update={"ranks": 2}))
    assert (fewer.plan, fewer.asked, fewer.asked_ranks) == ("zero3,microbatches=2", "zero3", 4)
    single = replan(spec, fewer, fewer.model_copy(update={"ranks": 1}))
    assert (single.plan, single.asked, single.asked_ranks) == ("single,microbatches=4", "zero3", 4)
    restored = replan(spec, single, single.model_copy(update={"ranks": 4}))
    assert (restored.plan, restored.asked, restored.chosen) == ("zero3", None, None)
    auto = launch.model_copy(update={"plan": "zero3", "ranks": 4, "asked": "auto"})
    assert replan(spec, auto, auto.model_copy(update={"ranks": 2})).plan == "auto"
    assert replan(spec, auto, auto.model_copy(update={"ranks": 3})).plan == "zero3,microbatches=2,uneven=1", (
        "auto finds no plan for batch 64 on 3 ranks"
    )


def test_explicit_plan_is_not_replaced(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    result = paceline("resume", "r", "--ranks", "3", "--plan", "tp=2", "--steps", "12", at=tmp_path)
    assert result.status == 2
    assert (
        result.err == "paceline: plan tp=2 requires a multiple of tp=2 = 2 ranks, got 3: use --ranks 2 or 4\n"
    )
