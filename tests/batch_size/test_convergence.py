"""The fit of E = Emin · (1 + B / Bcrit): recovered curves, error bars, and the script that scores it."""

import csv
import importlib.util
import io
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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


# The forms in which a training may rise, with their probabilities.
FORMS: dict[str, tuple[float, Callable[[Any], Any]]] = {
    "line": (0.35, lambda ratio: 1 + ratio),
    "root": (0.1, lambda ratio: 1 + ratio**0.5),
    "slow": (0.15, lambda ratio: 1 + ratio**0.7),
    "steep": (0.15, lambda ratio: 1 + ratio**1.4),
    "square": (0.1, lambda ratio: 1 + ratio**2),
    "plateau": (0.15, lambda ratio: (1 + 3 * ratio**2) ** 0.5),
}


@pytest.mark.parametrize(
    ("law", "limit"),
    [
        (lambda ratio: 1 + ratio, 0.05),  # with the first form alone 0.03
        (lambda ratio: 1 + ratio**0.5, 0.3),  # 0.96
        (lambda ratio: (1 + ratio) ** 0.7, 0.2),  # 0.28, and not one of the forms
        (lambda ratio: (1 + ratio**2) ** 0.5, 0.2),  # 0.31
        (lambda ratio: 1 + ratio**1.5, 0.4),  # 0.57, and not one of the forms
    ],
    ids=["line", "root", "power", "plateau", "steep"],
)
def test_trainings_that_rise_in_other_forms(law: Callable[[float], float], limit: float) -> None:
    """Eight batches up to twice Bcrit, and predictions up to 16 times the largest of them."""
    curve = fit_curve([Measurement(2.0**k, law(2.0**k / 64), 0.01) for k in range(8)])
    errors = [abs(curve.predict(2.0**k).value / law(2.0**k / 64) - 1) for k in range(8, 12)]
    assert np.mean(errors) < limit


def test_error_bars_cover_about_68_percent() -> None:
    """Trainings drawn from the assumptions of the fit, written here as a walk along log B.

    The bars are those of a normal distribution, and Bcrit has longer tails, so that they may cover more.
    """
    rng = np.random.default_rng(0)
    batches = 2.0 ** np.arange(5, 13)
    hits, narrow = [], []
    for _ in range(250):
        critical = 512 * math.exp(rng.normal(1.0, math.hypot(1.5, 0.7)))
        form = rng.choice([*FORMS], p=[probability for probability, _ in FORMS.values()])
        walk = [rng.normal(0, 0.1)]
        for _ in batches[1:]:
            keep = math.exp(-math.log(2))
            walk.append(keep * walk[-1] + rng.normal(0, 0.1 * math.sqrt(1 - keep**2)))
        costs = FORMS[form][1](batches / critical) * np.exp(
            np.array(walk) + rng.normal(0, 0.02, len(batches))
        )
        curve = fit_curve([Measurement(b, c) for b, c in zip(batches[:5], costs[:5], strict=True)])
        found = curve.predict(float(batches[-1]))
        hits.append(found.low < costs[-1] < found.high)
        third = (found.high / found.low) ** (1 / 6)  # the control: bars of a third of the width
        narrow.append(found.value / third < costs[-1] < found.value * third)
    assert 0.60 < np.mean(hits) < 0.78
    assert np.mean(narrow) < 0.45


def test_bars_of_measurements_without_a_standard_error() -> None:
    """Single trainings with a noise of 10 %, which the fit is not told.

    The next batch is predicted, where the noise matters more than the form.
    """
    rng = np.random.default_rng(1)
    batches = 2.0 ** np.arange(5, 13)
    errors = (None, 0.0)  # unknown, and the control: exact
    scores: dict[float | None, list[float]] = {error: [] for error in errors}
    for _ in range(300):
        critical = 512 * math.exp(rng.normal(1.0, 1.0))
        costs = (1 + batches / critical) * np.exp(rng.normal(0, 0.1, len(batches)))
        for error in errors:
            curve = fit_curve([Measurement(b, c, error) for b, c in zip(batches[:5], costs[:5], strict=True)])
            bars = curve.predict(float(batches[5]), error)
            half_width = math.log(bars.high / bars.low) / 2
            scores[error].append(abs(math.log(costs[5] / bars.value)) / half_width)
    within = {error: np.mean(np.array(found) < 1) for error, found in scores.items()}
    assert within[None] > 0.68 > 0.64 > within[0.0]
    assert np.mean(np.array(scores[None]) < 2) > 0.95


@pytest.mark.parametrize(("batch", "cost_", "error"), [(0, 1, 0), (8, -1, 0), (8, math.nan, 0), (8, 1, -1)])
def test_bad_measurements_are_refused(batch: float, cost_: float, error: float) -> None:
    with pytest.raises(BenchError, match="must be"):
        Measurement(batch, cost_, error)
    with pytest.raises(BenchError, match="no measurement"):
        fit_curve([])


Row = dict[str, object]
# Runs the script with the text of a file: exit status, standard error, and rows of its result.
Script = Callable[[str], tuple[int, str, list[dict[str, Any]]]]


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Script:
    description = importlib.util.spec_from_file_location("convergence_script", SCRIPT)
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)

    def run(content: str | bytes) -> tuple[int, str, list[dict[str, Any]]]:
        points, out = tmp_path / "points.csv", tmp_path / "out.json"
        points.write_bytes(content.encode() if isinstance(content, str) else content)
        out.unlink(missing_ok=True)
        try:
            module.main([str(points), "--json", str(out)])
            status = 0
        except SystemExit as end:
            status = end.code
        return status, capsys.readouterr().err, json.loads(out.read_text()) if out.exists() else []

    return run


def write_csv(rows: list[Row], columns: Iterable[str] = (), delimiter: str = ",") -> str:
    columns = list(columns) or list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def test_script_fits_the_smaller_half_and_predicts_the_larger(script: Script) -> None:
    rows: list[Row] = [
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
    status, printed, found = script(write_csv(rows))
    assert status == 0
    assert "line 9" in printed
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


def test_script_does_not_see_the_larger_half(script: Script) -> None:
    """Other measurements of the larger half change no prediction: those of the smaller half do."""
    batches = (8, 16, 32, 64)
    predicted = []
    for changed in (None, 64, 8):
        rows: list[Row] = [
            {"key": f"k_{b}", "batch": b, "mean": cost(b) * (3 if b == changed else 1)} for b in batches
        ]
        predicted.append([row["predicted"] for row in script(write_csv(rows))[2]])
    assert predicted[0] == predicted[1] != predicted[2]


BATCHES = {"one": (64,), "two": (64, 256), "three": (64, 256, 512), "five": (2, 4, 8, 16, 32)}
COMMON: Row = {"version": "1.0", "unit": "epochs"}
FULL: list[Row] = [
    {"benchmark": name, **COMMON, "key": f"{name}_ref_{b}", "batch": b, "mean": cost(b)}
    for name, batches in BATCHES.items()
    for b in batches
]


def by_key(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of each row, to compare them except for rounding."""
    return {
        f"{row['key']} {name}": pytest.approx(row[name])
        for row in found
        for name in ("batch", "measured", "predicted", "error")
        if name in row
    }


def numbers(found: list[dict[str, Any]]) -> dict[str, float]:
    return {name: value.expected for name, value in by_key(found).items()}


def test_trainings_with_few_rows(script: Script) -> None:
    status, _, found = script(write_csv(FULL))
    assert status == 0
    assert [row["key"] for row in found if "error" in row] == [
        "two_ref_256", "three_ref_512", "five_ref_16", "five_ref_32"
    ]  # fmt: skip
    assert len(found) == len(FULL)


def test_form_of_the_file_does_not_matter(script: Script) -> None:
    expected = by_key(script(write_csv(FULL))[2])
    columns, rows = [*FULL[0]], [dict(row) for row in FULL]
    random.Random(1).shuffle(rows)
    for text in (
        write_csv(rows, reversed(columns)),
        write_csv(rows, columns, ";"),
        write_csv(rows, columns, "\t"),
        "\ufeff\n" + write_csv(rows).replace("benchmark,", " Benchmark ,") + "\n\n",
        write_csv([row | {"source": "a,\n\u2028b"} for row in rows]),
    ):
        assert numbers(script(text)[2]) == expected


def test_missing_cells(script: Script) -> None:
    """Cells that other rows of the training know, and rows without a measurement."""
    expected = by_key(script(write_csv(FULL))[2])
    rows = [dict(row) for row in FULL]
    for at, column in ((1, "benchmark"), (4, "version"), (5, "unit"), (6, "benchmark")):
        rows[at][column] = ""
    rows += [dict(FULL[3]) | {"mean": ""}, dict(FULL[3]) | {"batch": "-"}]
    status, printed, found = script(write_csv(rows))
    assert status == 0
    assert numbers(found) == expected
    assert printed.count("left out: points.csv line") == 2
    assert "line 13: batch '64', mean ''" in printed


@pytest.mark.parametrize("unit", ["steps to converge", "global_steps", "Iterations", "optimizer updates"])
def test_steps_are_counted_in_samples(script: Script, unit: str) -> None:
    expected = [row["predicted"] for row in script(write_csv(FULL))[2]]
    rows = [row | {"unit": unit, "mean": row["mean"] / row["batch"]} for row in FULL]
    found = script(write_csv(rows))[2]
    assert [row["predicted"] * row["batch"] for row in found] == pytest.approx(expected)


def test_standard_errors_that_are_missing_or_zero(script: Script) -> None:
    """Without `std` the noise is unknown; with 0 it is known to be small."""
    bars = {}
    for std in ("", "0", "0.0"):
        rows = [row | {"std": std, "mean": row["mean"] * (1.2 if row["batch"] == 4 else 1)} for row in FULL]
        bars[std] = {row["key"]: row["high"] / row["low"] for row in script(write_csv(rows))[2]}
    assert bars["0"] == bars["0.0"]
    assert bars[""]["five_ref_32"] > 1.1 * bars["0"]["five_ref_32"]


def test_commas_in_numbers(script: Script) -> None:
    """They separate thousands. "3,5" could be 3.5 or 35, so it is reported."""
    text = 'batch,mean\n1,"1,024"\n"1,000","2,048.5"\n8,"3,5"\n'
    status, printed, found = script(text)
    assert status == 0
    assert [(row["batch"], row["measured"]) for row in found] == [(1, 1024), (1000, 2048.5)]
    assert "left out: points.csv line 4: batch '8', mean '3,5'" in printed


def test_unknown_unit_is_reported(script: Script) -> None:
    status, printed, found = script(write_csv([row | {"unit": "minutes"} for row in FULL]))
    assert status == 0
    assert len(found) == len(FULL)
    assert printed == (
        "points.csv: unit 'minutes' is neither samples nor steps; its rows are fitted as samples are\n"
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "no row has a batch and a mean that are positive numbers"),
        ("batch,mean\n-1,2\n0,3\n", "no row has a batch and a mean that are positive numbers"),
        ("key,size\na,3\n", "has the columns key, size; the columns batch and mean are required"),
        (b"batch,mean\n\xe91,2\n", "cannot be read: 'utf-8' codec can't decode"),
        ("batch,mean\n1," + "2" * 200_000, "is not CSV: line 2: field larger than"),
    ],
    ids=["empty", "negative", "columns", "encoding", "field"],
)
def test_bad_files_are_refused(script: Script, content: str | bytes, sentence: str) -> None:
    status, printed, found = script(content)
    assert status == 2
    assert sentence in printed
    assert printed.count("\n") == 1 + printed.count("left out: ")
    assert not found


def test_numbers_beyond_the_range_are_left_out(script: Script) -> None:
    text = "batch,mean,unit\n1e300,1e300,steps\n1,2,steps\n2,3,steps\n1e400,1,steps\n"
    status, printed, found = script(text)
    assert status == 0
    assert [row["batch"] for row in found] == [1, 2]
    assert printed.count("left out") == 2
