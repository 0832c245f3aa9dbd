"""--measure of scale, plan and train: real short trainings, the choice among them, and the calibration."""

import json
from pathlib import Path

import pytest

from command import events_of_kind, paceline, succeed, write_task
from paceline.events import Started
from paceline.plan.plan import parse
from paceline.spec import load

pytestmark = pytest.mark.processes
WORDS = ("my.py:Regression", "--set", "norm=false", "--batch", "24")


@pytest.mark.slow
def test_scaling_is_measured_and_corrects_predictions(tmp_path: Path) -> None:
    write_task(tmp_path)
    done = succeed("scale", *WORDS, "--measure", "1,2", "--plan", "ddp", "--json", "a.json", at=tmp_path)
    assert "95 %" in done.out
    assert "more ranks" in done.out
    found = json.loads((tmp_path / "a.json").read_text())["measured"]
    strong, weak = ([(p["ranks"], p["batch"]) for p in found[name]["points"]] for name in ("strong", "weak"))
    assert strong == [(1, 24), (2, 24)]
    assert weak == [(1, 24), (2, 48)]
    one, two = found["strong"]["points"]
    assert one["steps"] >= 20
    assert two["speedup"] == pytest.approx(one["step_s"] / two["step_s"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)
    records = json.loads((tmp_path / "bench/cluster.json").read_text())["calibrations"]
    assert sorted(record["ranks"] for record in records) == [1, 2, 2]
    assert not (tmp_path / "runs").exists()

    succeed("plan", *WORDS, "--ranks", "1", "--plan", "ddp", "--json", "b.json", at=tmp_path)
    [after] = json.loads((tmp_path / "b.json").read_text())["plans"]
    assert abs(after["step_s"] - one["step_s"]) < abs(one["predicted_s"] - one["step_s"])


@pytest.mark.slow
def test_best_plans_are_measured(tmp_path: Path) -> None:
    write_task(tmp_path)
    words = ("--ranks", "2", "--measure", "2")
    done = succeed("plan", *WORDS, *words, "--json", "a.json", at=tmp_path)
    tree = json.loads((tmp_path / "a.json").read_text())
    measured = tree["measured"]
    assert len(measured) == 2
    assert [row["step_s"] for row in tree["plans"][:2]] == [row["step_s"] for row in measured]
    assert [row["is_measured"] for row in tree["plans"][:3]] == [True, True, False]
    assert tree["unranked"] is None
    assert measured[0]["step_s"] <= measured[1]["step_s"]
    assert f"fastest: plan {measured[0]['plan']}: " in done.out

    done = succeed("train", *WORDS, *words, "--plan", "auto", "--steps", "4", "--run-dir", "run", at=tmp_path)
    [started] = events_of_kind(tmp_path / "run", Started)
    assert f"fastest: plan {started.plan}: " in done.out
    assert any(note.startswith(f"auto chose plan {started.plan}: ") for note in started.notes)
    assert load(tmp_path / "run/spec.toml", {})[1].plan == started.plan


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("scale", *WORDS, "--measure", "1,x"), "--measure '1,x': 'x' is not a whole number"),
        (("scale", *WORDS, "--measure", "1", "--cluster", "h100:8"), "--cluster h100:8 describes another"),
        (("scale", "--model", "gpt2", "--measure", "1"), "--measure requires a task to train"),
        (("scale", *WORDS, "--measure", "1", "--price", "2"), "--price is for predictions"),
        (("scale", *WORDS, "--ranks", "1", "--plan", "ddp"), "--plan requires --measure"),
        (("plan", "--model", "gpt2", "--measure", "2"), "--measure requires a task to train"),
        (("plan", *WORDS, "--measure", "0"), "--measure must be at least 1"),
        (("plan", *WORDS, "--measure", "2", "--plan", "ddp"), "leave --plan out"),
        (("train", *WORDS, "--measure", "2"), "use --plan auto"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    write_task(tmp_path)
    done = paceline(*words, at=tmp_path)
    assert done.status == 2, done.all
    assert says in done.err
    assert "Traceback" not in done.err


def test_plans_that_train_refuses_are_not_ranked(tmp_path: Path) -> None:
    """BatchNorm forbids micro-batches, which the cost model alone would allow."""
    write_task(tmp_path)
    words = ("plan", "my.py:Regression", "--batch", "24", "--ranks", "2", "--top", "100")
    plans = {}
    for norm in ("true", "false"):
        succeed(*words, "--set", f"norm={norm}", "--json", f"{norm}.json", at=tmp_path)
        plans[norm] = [row["plan"] for row in json.loads((tmp_path / f"{norm}.json").read_text())["plans"]]
    cut = {
        name: [plan for plan in found if parse(plan).resolve(2).microbatches > 1]
        for name, found in plans.items()
    }
    assert cut["false"]  # negative control
    assert not cut["true"]
