"""Score the fit of `paceline batch-size` on published points: convergence.py FILE… [--json OUT].

A file is CSV with the columns batch and mean (epochs, samples or steps to the target), and if it has them
benchmark, version, unit, key, std and seeds. Rows with the same benchmark, version and unit are one training.
E = Emin · (1 + B / Bcrit) is fitted to the smaller half of the batches of each training, and predicts the
larger half. The error of a constant, the mean of the smaller half, is printed beside it.
"""

import argparse
import csv
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from paceline.batch_size.convergence import ConvergenceCurve, Interval, Measurement, fit_curves


@dataclass(frozen=True)
class Point:
    """A row of a file. measured: in its own unit."""

    training: str
    key: str
    batch: float
    measured: float
    error: float  # standard error, relative
    in_steps: bool

    @property
    def measurement(self) -> Measurement:
        """In a unit that is proportional to samples."""
        return Measurement(self.batch, self.measured * (self.batch if self.in_steps else 1), self.error)


@dataclass(frozen=True)
class Scored:
    """A row with its prediction. error: predicted / measured - 1; None: the row was fitted."""

    point: Point
    predicted: Interval
    constant: float
    error: float | None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    left_out: list[str] = []
    points = [point for path in options.files for point in read(path, left_out)]
    for sentence in left_out:
        print(f"left out: {sentence}", file=sys.stderr)
    if not points:
        sys.exit("no row has a batch and a mean that are positive numbers; these columns are required")
    rows = score(points)
    print_table(rows)
    if options.json:
        options.json.write_text(json.dumps([_as_json(row) for row in rows], indent=1) + "\n")


def read(path: Path, left_out: list[str]) -> Iterator[Point]:
    """Yield the usable rows of a file; append a sentence about each other row."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"{path} cannot be read: {error}")
    for number, raw in enumerate(csv.DictReader(text.splitlines()), 2):
        row = {(name or "").strip().lower(): value or "" for name, value in raw.items() if name is not None}
        batch, mean = _number(row.get("batch")), _number(row.get("mean", row.get("measured")))
        if batch is None or mean is None:
            left_out.append(
                f"{path.name} line {number}: batch {row.get('batch')!r}, mean {row.get('mean')!r}"
            )
            continue
        key = row.get("key", "").strip()
        unit = row.get("unit", "").strip()
        # Without a column for the training, the key names it; often with the batch at its end.
        name = row.get("benchmark", "").strip() or re.sub(rf"[_\-\s@=:]*{batch:.0f}$", "", key) or path.stem
        spread, seeds = _number(row.get("std")) or 0.0, _number(row.get("seeds")) or 1.0
        yield Point(
            " ".join(filter(None, (name, row.get("version", "").strip(), unit))),
            key or f"{name}_{batch:g}",
            batch,
            mean,
            spread / mean / math.sqrt(seeds),
            re.search(r"\b(steps?|iterations?|updates?)\b", unit.lower()) is not None,
        )


def _number(text: str | None) -> float | None:
    """Return a positive number; None if the text is not one."""
    try:
        value = float((text or "").replace(",", "").replace("_", "").strip())
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Return the points of the smaller half of the batches, rounded up, and the others."""
    batches = sorted({point.batch for point in points})
    last = batches[(len(batches) + 1) // 2 - 1]
    ordered = sorted(points, key=lambda point: point.batch)
    return [p for p in ordered if p.batch <= last], [p for p in ordered if p.batch > last]


def score(points: Sequence[Point]) -> list[Scored]:
    """Fit the smaller half of each training, and predict all rows."""
    trainings: Mapping[str, list[Point]] = defaultdict(list)
    for point in points:
        trainings[point.training].append(point)
    halves = {name: split(of_training) for name, of_training in trainings.items()}
    curves = fit_curves(
        {name: [point.measurement for point in fitted] for name, (fitted, _) in halves.items()}
    )
    return [
        row for name, (fitted, others) in halves.items() for row in _predict(curves[name], fitted, others)
    ]


def _predict(curve: ConvergenceCurve, fitted: Sequence[Point], others: Sequence[Point]) -> Iterator[Scored]:
    constant = math.exp(fmean(math.log(point.measurement.cost) for point in fitted))
    for point in (*fitted, *others):
        scale = point.batch if point.in_steps else 1.0
        found = curve.predict(point.batch, point.error)
        predicted = Interval(found.value / scale, found.low / scale, found.high / scale)
        error = predicted.value / point.measured - 1 if point in others else None
        yield Scored(point, predicted, constant / scale, error)


def print_table(rows: Sequence[Scored]) -> None:
    """Print the errors of each training and of all, in Markdown."""
    print("| training | fitted | predicted | mean error | constant | within the error bars |")
    print("| -- | -- | -- | -- | -- | -- |")
    trainings = dict.fromkeys(row.point.training for row in rows)
    for name in trainings:
        print_line(name, [row for row in rows if row.point.training == name])
    print_line("all", rows)


def print_line(name: str, rows: Sequence[Scored]) -> None:
    predicted = [row for row in rows if row.error is not None]
    count = f"| {name} | {len(rows) - len(predicted)} | {len(predicted)} |"
    if not predicted:
        print(f"{count} | | |")
        return
    error = fmean(abs(row.error or 0.0) for row in predicted)
    constant = fmean(abs(row.constant / row.point.measured - 1) for row in predicted)
    within = fmean(row.predicted.low <= row.point.measured <= row.predicted.high for row in predicted)
    print(f"{count} {error:.1%} | {constant:.1%} | {within:.0%} |")


def _as_json(row: Scored) -> Mapping[str, object]:
    point = row.point
    tree: dict[str, object] = {
        "key": point.key,
        "batch": int(point.batch) if point.batch.is_integer() else point.batch,
        "measured": point.measured,
        "predicted": row.predicted.value,
        "low": row.predicted.low,
        "high": row.predicted.high,
        "training": point.training,
    }
    if row.error is not None:
        tree |= {"error": row.error, "constant_error": row.constant / point.measured - 1}
    return tree


if __name__ == "__main__":
    main()
