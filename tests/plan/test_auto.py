"""--plan auto: the run reports its choice and the reason, keeps it, and chooses only plans that can train."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from command import TASK, TORCHRUN, events_of_kind, paceline, succeed, write_task
from paceline import Spec, train
from paceline.cluster.facts import Cluster, Device, Fact
from paceline.errors import PlanError
from paceline.events import Started
from paceline.plan.plan import Plan, parse
from paceline.plan.search.best_plans import BestPlans
from paceline.spec import load
from paceline.tasks.text import Text
from paceline.training.planning import auto_plan as choosing
from paceline.training.planning.auto_plan import choose_plan, shorten_plan

pytestmark = pytest.mark.processes

WORDS = ("my.py:Regression", "--plan", "auto", "--steps", "4", "--batch", "24", "--device", "cpu")
SMALL = Text(width=16, depth=2, heads=2, context=8)


def machine(memory_bytes: float = 8e9) -> Cluster:
    """A machine with few known facts."""
    return Cluster(
        name="here",
        device=Device(name="a CPU", kind="cpu", memory_bytes=Fact(value=memory_bytes)),
        cores_per_node=2,
    )


def write_machine(folder: Path, memory_bytes: float = 8e9) -> None:
    (folder / "cluster.json").write_text(machine(memory_bytes).model_dump_json())


def test_run_reports_its_choice_and_resumes_with_it(tmp_path: Path) -> None:
    write_task(tmp_path)
    write_machine(tmp_path)
    succeed("train", *WORDS, "--ranks", "2", "--run-dir", "run", at=tmp_path)
    [started] = events_of_kind(tmp_path / "run", Started)
    _, launch = load(tmp_path / "run/spec.toml", {})
    assert launch.plan == started.plan == str(parse(started.plan))
    [why] = [note for note in started.notes if note.startswith("auto chose")]
    assert f"auto chose plan {started.plan}: " in why
    assert "a step predicted (±" in why
    assert "the next best, " in why
    succeed("resume", "run", "--steps", "6", at=tmp_path)
    assert [event.plan for event in events_of_kind(tmp_path / "run", Started)] == [started.plan] * 2
    succeed("resume", "run", "--steps", "8", "--plan", "zero2", at=tmp_path)
    last = events_of_kind(tmp_path / "run", Started)[-1]
    assert last.plan == "zero2"
    assert not any(note.startswith("auto chose") for note in last.notes)


@pytest.mark.slow
def test_ranks_of_another_launcher_agree(tmp_path: Path) -> None:
    write_task(tmp_path)
    write_machine(tmp_path)
    found = paceline("train", *WORDS, at=tmp_path, program=TORCHRUN, OMP_NUM_THREADS="1")
    assert found.status == 0, found.all
    [run] = (tmp_path / "runs").glob("*/")
    [started] = events_of_kind(run, Started)
    assert load(run / "spec.toml", {})[1].plan == started.plan != "auto"
    assert any(note.startswith(f"auto chose plan {started.plan}: ") for note in started.notes)


@pytest.mark.parametrize("program", [None, pytest.param(TORCHRUN, marks=pytest.mark.slow)])
def test_training_is_refused_if_no_plan_fits(program: tuple[str, ...] | None, tmp_path: Path) -> None:
    write_task(tmp_path)
    write_machine(tmp_path, 2000.0)
    ranks = ("--ranks", "2") if program is None else ()
    found = paceline("train", *WORDS, *ranks, at=tmp_path, program=program, OMP_NUM_THREADS="1")
    assert found.status != 0
    assert found.all.count("paceline: no plan fits") == 1, found.all
    assert not (tmp_path / "runs").exists()


def test_from_python() -> None:
    events = train(Spec(task="digits", steps=1, batch=8), "auto", device="cpu")
    started = next(iter(events))
    events.close()
    assert isinstance(started, Started)
    assert parse(started.plan).resolve(1).dp == 1
    assert any(note.startswith("auto chose plan") for note in started.notes)


def test_impossible_plans_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(task="text", batch=8)
    ask = choosing.find_best_plans
    first = ask_plans(spec, machine())

    def with_one_that_cannot(*args: object, **kwargs: object) -> BestPlans:
        found = ask(*args, **kwargs)  # type: ignore[arg-type]
        found.plans.insert(
            0, (Plan(dp=1, tp=2, pp=2, microbatches=2), found.plans[0][1])
        )  # on 4 ranks, of which 2 layers make 2 stages
        found.plans.insert(0, (Plan(dp=1, tp=4), found.plans[0][1]))  # 2 heads
        return found

    monkeypatch.setattr(choosing, "find_best_plans", with_one_that_cannot)
    taken = choose_plan(spec, SMALL, 4, cluster=machine()).plan
    assert taken.resolve(4) in (first.resolve(4), Plan(dp=1, tp=2, pp=2, microbatches=2).resolve(4))
    assert taken.tp != 4


def ask_plans(spec: Spec, cluster: Cluster) -> Plan:
    return choose_plan(spec, SMALL, 4, cluster=cluster).plan


def test_micro_batches_are_not_chosen_with_batch_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    from paceline.task import load_task

    spec = Spec(task="my.py:Regression", batch=24)
    for norm in (True, False):
        task = load_task(spec.task, {"norm": norm})
        found: list[str] = []
        best = choosing.find_best_plans(choosing.describe(spec, task), machine(), 24, ranks=2)
        plans = [(plan, cost) for plan, cost in best.plans if plan.recompute == "none"]
        can = [
            plan.resolve(2).microbatches for plan, _ in choosing.find_trainable(plans, spec, task, 2, found)
        ]
        assert (max(microbatches or 1 for microbatches in can) > 1) is not norm
        assert any("BatchNorm" in why for why in found) is norm


def test_float64_is_not_predicted() -> None:
    with pytest.raises(
        PlanError, match="fp64 cannot be predicted; use --precision fp32, bf16, fp16, or name a plan"
    ):
        choose_plan(Spec(task="text", precision="fp64"), SMALL, 2, cluster=machine())


@pytest.mark.parametrize(
    ("plan", "ranks", "expected"),
    [
        ("ddp,dp=2,microbatches=1", 2, "ddp"),
        ("dp=1,microbatches=1", 1, "single"),
        ("zero3,dp=4,microbatches=2", 4, "zero3,microbatches=2"),
        ("dp=2,pp=2,microbatches=4", 4, "pp=2"),
        ("dp=1,pp=2,microbatches=4,pp_schedule=interleaved,stages=2", 2, "pp=2,pp_schedule=interleaved"),
        ("dp=1,pp=2,microbatches=2,pp_schedule=1f1b,stages=1", 2, "pp=2,microbatches=2"),
    ],
)
def test_shortened_plans(plan: str, ranks: int, expected: str) -> None:
    assert str(shorten_plan(parse(plan), ranks)) == expected
    assert shorten_plan(parse(plan), ranks).resolve(ranks) == parse(plan).resolve(ranks)


def test_cluster_of_another_device_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.cluster import local_cluster

    monkeypatch.chdir(tmp_path)
    gpu = {
        "format": "paceline.cluster",
        "version": 1,
        "device": {"name": "H100", "kind": "cuda", "memory_bytes": 8e10},
    }
    (tmp_path / "cluster.json").write_text(json.dumps(gpu))
    assert local_cluster.load_cluster().device.name == "H100"
    assert local_cluster.load_cluster("cpu").device.kind == "cpu"


@pytest.mark.parametrize(("slower_s", "chosen"), [(1.01, "ddp"), (1.03, "ddp,microbatches=2")])
def test_fewer_micro_batches_of_a_similar_plan_are_preferred(slower_s, chosen):
    plans = [("ddp,microbatches=2", 1.0), ("zero1", 1.005), ("ddp", slower_s)]
    priced = [(parse(plan), SimpleNamespace(step_s=step_s)) for plan, step_s in plans]
    assert str(choosing._find_whole_batches(priced[0], priced, 2)[0]) == chosen
