"""Score the fit of `paceline batch-size` on published points: convergence.py FILE… [--json OUT].

A file is CSV with the columns batch and mean (epochs, samples or steps to the target), and if it has them
benchmark, version, unit, key, std and seeds. Columns may be in any order. Rows with the same benchmark,
version and unit are one training; a row without version or unit has those of its benchmark, if these are
unique. Without benchmarks, the key names the training. Rows that cannot be used are reported.
E = Emin · (1 + B / Bcrit) is fitted to the smaller half of the batches of each training, and predicts the
larger half. The error of a constant, the mean of the smaller half, is printed beside it.
"""

import argparse
import csv
import io
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NoReturn

from paceline.batch_size.convergence import ConvergenceCurve, Interval, Measurement, fit_curves
from paceline.errors import Error

# Units of results; a file may add words, such as "Epochs to converge".
STEPS = ("step", "iteration", "iter", "update")
SAMPLES = ("epoch", "sample", "sequence", "image", "example", "token")


@dataclass(frozen=True)
class Point:
    """A row of a file. measured: in its own unit."""

    training: str
    key: str
    batch: float
    measured: float
    error: float | None  # standard error, relative; None: not known
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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(words)
    notes: list[str] = []
    points = [point for path in options.files for point in read(path, notes)]
    for sentence in dict.fromkeys(notes):
        print(sentence, file=sys.stderr)
    if not points:
        fail("no row has a batch and a mean that are positive numbers; give a file with such rows")
    rows = score(points)
    print_table(rows)
    if options.json:
        try:
            options.json.write_text(json.dumps([_as_json(row) for row in rows], indent=1) + "\n")
        except OSError as error:
            fail(f"--json {options.json} cannot be written: {error.strerror}")


def fail(sentence: str) -> NoReturn:
    """Print a sentence about bad input, and exit."""
    print(sentence, file=sys.stderr)
    sys.exit(2)


def read(path: Path, notes: list[str]) -> list[Point]:
    """Return the usable rows of a file; append sentences about other rows, and about unknown units."""
    rows = list(read_rows(path))
    cells = [row for _, row in rows]
    for row in cells:
        row["stem"] = find_stem(row.get("key", ""), row.get("batch", ""))
    for column, by in (("benchmark", "stem"), ("version", "benchmark"), ("unit", "benchmark")):
        fill_cells(cells, column, by)
    points = []
    for number, row in rows:
        try:
            points.append(read_point(row, path.stem))
        except (ValueError, Error) as error:
            notes.append(f"left out: {path.name} line {number}: {error}")
            continue
        unit = row.get("unit", "")
        if unit and _words(unit).isdisjoint((*SAMPLES, *STEPS)):
            notes.append(
                f"{path.name}: unit {unit!r} is neither samples nor steps; its rows are fitted as samples are"
            )
    return points


def find_stem(key: str, batch: str) -> str:
    """Return a key without the batch at its end: bert_ref of bert_ref_256."""
    return re.sub(rf"[_\-\s@=:]*(?<!\d){re.escape(batch)}$", "", key) if batch else key


def fill_cells(rows: Sequence[dict[str, str]], column: str, by: str) -> None:
    """Fill empty cells of a column, if all rows with the same cell `by` agree on it."""
    known: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        if row.get(column):
            known[row.get(by, "").casefold()].add(row[column])
    for row in rows:
        found = known[row.get(by, "").casefold()]
        if row.get(by) and not row.get(column) and len({text.casefold() for text in found}) == 1:
            row[column] = min(found)


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows of a file by the names of their columns, with the number of their last line."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path} cannot be read: {error}")
    header = text.lstrip().partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=header.count))
    names: list[str] = []
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if names:
                yield reader.line_num, dict(zip(names, (cell.strip() for cell in cells), strict=False))
                continue
            names = [cell.strip().lower() for cell in cells]
            if "batch" not in names or not {"mean", "measured"} & set(names):
                found = ", ".join(names)[:200]
                fail(f"{path} has the columns {found}; the columns batch and mean are required")
    except csv.Error as error:
        fail(f"{path} is not CSV: line {reader.line_num}: {error}")


def read_point(row: Mapping[str, str], default: str) -> Point:
    """Return the measurement of a row. default: the training, if the row does not name it.

    Raises ValueError and BenchError with a sentence if the row cannot be used.
    """
    batch = _number(row.get("batch"))
    mean = _number(row.get("mean") or row.get("measured"))
    if batch is None or mean is None:
        raise ValueError(f"batch {row.get('batch', '')!r}, mean {row.get('mean', '')!r}")
    key, unit = row.get("key", ""), row.get("unit", "")
    # Without a column for the training, the key names it; often with the batch at its end.
    name = row.get("benchmark") or row.get("stem") or default
    spread, seeds = _number(row.get("std"), zero=True), max(1.0, _number(row.get("seeds")) or 1.0)
    point = Point(
        " ".join(filter(None, (name, row.get("version"), unit))).casefold(),
        key or f"{name}_{batch:.15g}",
        batch,
        mean,
        spread / mean / math.sqrt(seeds) if spread is not None else None,
        not _words(unit).isdisjoint(STEPS),
    )
    _ = point.measurement  # checks it
    return point


def _words(unit: str) -> set[str]:
    """Return the words of a unit in the singular."""
    return {word.removesuffix("s") for word in re.split(r"[\W_\d]+", unit.lower())}


def _number(text: str | None, zero: bool = False) -> float | None:
    """Return a positive number, or with `zero` also 0; None if the text is not one."""
    text = (text or "").strip()
    if "," in text:  # separates thousands; "3,5" could be 3.5 or 35
        if not re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text):
            return None
        text = text.replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and (value > 0 or (zero and value == 0)) else None


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
