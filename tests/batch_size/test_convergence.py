"""The fit of E = Emin · (1 + B / Bcrit): recovered curves, error bars, and the script that scores it."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.batch_size.convergence import Measurement, fit_curve, fit_curves
from paceline.errors import BenchError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "convergence.py"


def cost(batch: float, minimum: float = 1000.0, critical: float = 500.0) -> float:
    return minimum + minimum * batch / critical


def points(*batches: float, **curve: float) -> list[Measurement]:
    return [Measurement(batch, cost(batch, **curve)) for batch in batches]


def test_an_exact_curve_is_recovered() -> None:
    curve = fit_curve(points(16, 32, 64, 128, 256, 512, 1024, 2048, 4096))
    assert curve.critical_batch.value == pytest.approx(500, rel=0.15)
    assert curve.minimum.value == pytest.approx(1000, rel=0.08)
    assert curve.critical_batch.low < 500 < curve.critical_batch.high
    assert curve.predict(8192).value == pytest.approx(cost(8192), rel=0.05)


@pytest.mark.parametrize("unit", [1e-6, 1e9])
def test_units_and_scale_do_not_matter(unit: float) -> None:
    known = fit_curve(points(8, 32, 128))
    scaled = fit_curve([Measurement(64 * p.batch, unit * p.cost) for p in points(8, 32, 128)])
    assert scaled.critical_batch.value == pytest.approx(64 * known.critical_batch.value)
    assert scaled.predict(64 * 512).value == pytest.approx(unit * known.predict(512).value)


def test_one_point_says_little_and_two_say_more() -> None:
    one, two, many = (fit_curve(points(*batches)) for batches in ((8,), (8, 64), (8, 64, 512, 4096)))
    widths = [math.log(c.critical_batch.high / c.critical_batch.low) for c in (one, two, many)]
    assert widths[0] > widths[1] > widths[2]
    bars = [c.predict(4096) for c in (one, two, many)]
    assert bars[0].high / bars[0].low > bars[1].high / bars[1].low > bars[2].high / bars[2].low


def test_trainings_share_what_their_data_do_not_tell() -> None:
    """A training with one batch follows the others; alone it follows the prior."""
    steep = {f"t{i}": points(64, 128, 256, 512, critical=40.0) for i in range(4)}
    alone = fit_curve(points(256)).critical_batch.value
    beside = fit_curves({**steep, "poor": points(256)})["poor"].critical_batch.value
    assert beside < 0.8 * alone


@pytest.mark.parametrize("costs", [(5.0, 4.0, 3.0), (4.0, 4.0, 4.0), (3.0, 9.0, 4.0)])
def test_data_that_do_not_rise_give_finite_intervals(costs: tuple[float, ...]) -> None:
    curve = fit_curve([Measurement(b, c) for b, c in zip((8, 16, 16), costs, strict=True)])
    for found in (curve.critical_batch, curve.minimum, curve.predict(64)):
        assert 0 < found.low < found.value < found.high < math.inf


def test_error_bars_cover_about_68_percent() -> None:
    """Trainings drawn from the assumptions of the fit, written here as a walk along log B."""
    rng = np.random.default_rng(0)
    batches = 2.0 ** np.arange(5, 13)
    hits, narrow = [], []
    for _ in range(250):
        critical = 512 * math.exp(rng.normal(1.0, math.hypot(1.0, 0.7)))
        walk = [rng.normal(0, 0.1)]
        for _ in batches[1:]:
            keep = math.exp(-math.log(2))
            walk.append(keep * walk[-1] + rng.normal(0, 0.1 * math.sqrt(1 - keep**2)))
        costs = (1 + batches / critical) * np.exp(np.array(walk) + rng.normal(0, 0.02, len(batches)))
        curve = fit_curve([Measurement(b, c) for b, c in zip(batches[:5], costs[:5], strict=True)])
        found = curve.predict(float(batches[-1]))
        hits.append(found.low < costs[-1] < found.high)
        third = (found.high / found.low) ** (1 / 6)  # the control: bars of a third of the width
        narrow.append(found.value / third < costs[-1] < found.value * third)
    assert 0.60 < np.mean(hits) < 0.78
    assert np.mean(narrow) < 0.45


@pytest.mark.parametrize(("batch", "cost_", "error"), [(0, 1, 0), (8, -1, 0), (8, math.nan, 0), (8, 1, -1)])
def test_bad_measurements_are_refused(batch: float, cost_: float, error: float) -> None:
    with pytest.raises(BenchError, match="must be"):
        Measurement(batch, cost_, error)
    with pytest.raises(BenchError, match="no measurement"):
        fit_curve([])


def run(folder: Path, rows: list[dict[str, object]]) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(folder / "points.csv", "w", newline="") as lines:
        writer = csv.DictWriter(lines, columns)
        writer.writeheader()
        writer.writerows(rows)
    command = [sys.executable, str(SCRIPT), "points.csv", "--json", "out.json"]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
    out = folder / "out.json"
    return done, json.loads(out.read_text()) if out.exists() else []


def test_script_fits_the_smaller_half_and_predicts_the_larger(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "benchmark": "a",
            "key": f"a_{b}",
            "batch": b,
            "unit": "epochs",
            "mean": cost(b),
            "std": 0,
            "seeds": 9,
        }
        for b in (64, 1024, 256, 16, 16)
    ]
    rows += [
        {"benchmark": "s", "key": f"s_{b}", "batch": b, "unit": "Steps", "mean": cost(b, critical=20.0) / b}
        for b in (8, 64)
    ]
    rows += [{"benchmark": "a", "key": "bad", "batch": "many", "mean": "n/a"}]
    done, found = run(tmp_path, rows)
    assert done.returncode == 0, done.stderr
    assert "line 9" in done.stderr
    assert {row["key"]: "error" in row for row in found} == {
        "a_16": False, "a_64": False, "a_256": True, "a_1024": True, "s_8": False, "s_64": True
    }  # fmt: skip
    for row in found:
        if "error" in row:
            assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
        assert row["low"] < row["predicted"] < row["high"]
    by_key = {row["key"]: row for row in found}
    assert abs(by_key["a_256"]["error"]) < 0.2
    assert abs(by_key["a_1024"]["constant_error"]) > abs(by_key["a_1024"]["error"])
    assert by_key["s_64"]["low"] < by_key["s_64"]["measured"] < by_key["s_64"]["high"]


def test_script_does_not_see_the_larger_half(tmp_path: Path) -> None:
    """Other measurements of the larger half change no prediction: those of the smaller half do."""
    batches = (8, 16, 32, 64)
    predicted = []
    for changed in (None, 64, 8):
        rows: list[dict[str, object]] = [
            {"key": f"k_{b}", "batch": b, "mean": cost(b) * (3 if b == changed else 1)} for b in batches
        ]
        predicted.append([row["predicted"] for row in run(tmp_path, rows)[1]])
    assert predicted[0] == predicted[1] != predicted[2]


def test_script_without_usable_rows(tmp_path: Path) -> None:
    done, _ = run(tmp_path, [{"key": "a", "size": 3}])
    assert done.returncode == 1
    assert "no row has a batch" in done.stderr
    assert "Traceback" not in done.stderr
