"""plan: interruptions, CO₂, compute-optimal trainings, and several machines."""

import json
import random
from math import exp
from pathlib import Path

import pytest

from command import paceline, succeed
from paceline.plan.compute_optimal import allocate, predict_loss
from paceline.plan.cost_model.interruptions import Interruptions

pytestmark = pytest.mark.processes

LLAMA = ("plan", "--model", "llama3-8b", "--batch", "64", "--tokens", "1e9")


def simulate(found: Interruptions, interval_s: float, segments: int) -> float:
    """Return seconds per computed second, with interruptions at random moments, restarts included."""
    draw, clock = random.Random(0), 0.0
    until = draw.expovariate(1 / found.mean_s)
    for _ in range(segments):
        needed = interval_s + found.save_s
        while until < needed:  # the segment is lost, and so is each restart that is interrupted
            clock += until
            until = draw.expovariate(1 / found.mean_s)
            needed = found.restart_s + interval_s + found.save_s
        clock += needed
        until -= needed
    return clock / (segments * interval_s)


@pytest.mark.parametrize(("mean_s", "save_s"), [(3600.0, 30.0), (20000.0, 200.0), (900.0, 60.0)])
def test_interval_and_slowdown_of_interruptions(mean_s: float, save_s: float) -> None:
    found = Interruptions(mean_s, save_s, 120.0)
    chosen = simulate(found, found.interval_s, 40_000)
    assert found.slowdown == pytest.approx(chosen, rel=0.02)
    for factor in (0.4, 2.5):
        assert simulate(found, factor * found.interval_s, 40_000) > chosen


def test_interruptions_before_a_save_ends() -> None:
    assert Interruptions(10.0, 100.0).interval_s == 10.0
    assert Interruptions(1.0, 1e-9, 0.0).slowdown == pytest.approx(1.0, abs=1e-4)
    assert Interruptions(1.0, 1000.0).slowdown == float("inf")
    assert Interruptions(1e9, 1.0, 1e8).slowdown == pytest.approx(exp(0.1), rel=1e-3)


def test_compute_optimal_is_the_lowest_loss() -> None:
    flops = 5.76e23  # of Chinchilla: 70e9 parameters and 1.4e12 tokens
    best = allocate(flops)
    assert best.params == pytest.approx(70e9, rel=0.1)
    assert best.tokens == pytest.approx(1.4e12, rel=0.1)
    for factor in (0.5, 0.9, 1.1, 2.0):
        params = factor * best.params
        assert predict_loss(params, flops / 6 / params) > best.loss


def test_bill_includes_interruptions_and_co2(tmp_path: Path) -> None:
    cluster = (*LLAMA, "--cluster", "h100:8x1", "--price", "2", "--top", "1")
    succeed(*cluster, "--json", "plain.json", at=tmp_path)
    words = ("--interrupted-every", "2", "--save-time", "60", "--co2", "400", "--json", "spot.json")
    shown = succeed(*cluster, *words, at=tmp_path).out
    plain, spot = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "spot"))
    bills = [found["plans"][0]["bill"] for found in (plain, spot)]
    slowdown = spot["interruptions"]["slowdown"]
    assert slowdown == pytest.approx(Interruptions(7200.0, 60.0).slowdown)
    for key in ("seconds", "price", "kWh"):
        assert bills[1][key] == pytest.approx(slowdown * bills[0][key])
    assert bills[1]["co2_kg"] == pytest.approx(0.4 * bills[1]["kWh"])
    assert bills[0]["co2_kg"] is None
    assert "with a checkpoint every" in shown
    assert "kg CO₂" in shown


def test_machines_are_compared_in_one_table(tmp_path: Path) -> None:
    machines = ("--cluster", "h100:8x1", "--cluster", "a100-80g:8x2@25", "--instance", "NC24s_v3:spot")
    model = ("plan", "--model", "gpt2", "--batch", "64", "--tokens", "1e9")
    shown = succeed(*model, *machines, "--json", "all.json", at=tmp_path).out
    for name in ("8 ranks on h100:8x1", "16 ranks on a100-80g:8x2@25", "4 ranks on NC24s_v3:spot"):
        assert name in shown
    found = json.loads((tmp_path / "all.json").read_text())["clusters"]
    assert [tree["ranks"] for tree in found] == [8, 16, 4]
    bill = found[2]["plans"][0]["bill"]
    assert bill["price"] == pytest.approx(bill["device_hours"] * 1.224 / 4)


def test_frozen_and_inactive_parameters_in_the_estimate(tmp_path: Path) -> None:
    words = ("--achieved", "400", "--tokens", "1e9")
    adapters = succeed("plan", "--model", "llama3-70b", "--lora", "rank=16", *words, at=tmp_path).out
    assert "4 × 7.055e+10 frozen" in adapters
    assert "active parameters" in succeed("plan", "--model", "mixtral-8x7b", *words, at=tmp_path).out


def test_constraints_restrict_the_search(tmp_path: Path) -> None:
    words = ("plan", "--model", "llama3-8b", "--cluster", "h100:8x2@50", "--batch", "64", "--top", "100000")
    rule = "pp<=2, tp>1,recompute!=full,pp_schedule=1f1b,zero<3"
    for name, more in (("all", ()), ("some", ("--where", rule))):
        succeed(*words, *more, "--json", f"{name}.json", at=tmp_path)
    every, some = (json.loads((tmp_path / f"{name}.json").read_text())["plans"] for name in ("all", "some"))
    wanted = []
    for found in every:
        keys = dict(part.split("=") for part in found["plan"].split(",") if "=" in part)
        is_pipeline = int(keys.get("pp", 1)) > 1
        if (
            int(keys.get("pp", 1)) <= 2
            and int(keys.get("tp", 1)) > 1
            and keys.get("recompute", "none") != "full"
            and (not is_pipeline or keys["pp_schedule"] == "1f1b")
            and not found["plan"].startswith(("zero3", "hsdp"))
        ):
            wanted.append(found)
    assert 0 < len(some) < len(every)
    assert some == wanted


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--where", "pp<4,memory<3"),
            "plans have no memory; available: dp, tp, pp, cp, ep, zero, replicate, micro_batch, "
            "microbatches, stages, recompute, pp_schedule\n",
        ),
        (("--where", "pp"), "--where must be comparisons such as"),
        (("--where", "tp<x"), "tp is a number, got 'x'"),
        (("--where", "recompute<full"), "recompute is = or != one of none, full, selective"),
        (("--where", "tp=3"), "satisfies --where tp=3"),
        (("--interrupted-every", "2"), "--interrupted-every requires the length of the training"),
        (("--co2", "0", "--tokens", "1e9"), "--co2 must be above 0, got 0"),
        (("--save-time", "2", "--tokens", "1e9"), "--save-time requires --interrupted-every"),
        (("--achieved", "30", "--system", "nemo", "--tokens", "1e9"), "leave --system out"),
        (("--cluster", "h100:8x1", "--plot", "a.svg"), "2 machines are compared; leave --plot out"),
        (("--compute-optimal", "--lora", "rank=8", "--tokens", "1e9"), "knows language models"),
    ],
    ids=[
        "name",
        "form",
        "number",
        "word",
        "none",
        "interrupted",
        "co2",
        "save",
        "achieved",
        "machines",
        "frozen",
    ],
)
def test_bad_options_are_one_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    done = paceline("plan", "--model", "gpt2", "--batch", "8", "--cluster", "h100:1x1", *words, at=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
    assert len(done.err.splitlines()) == 1
