"""Score predictions against published measurements: published.py FILE… [--json OUT] [--fit].

A file is scored with constants that were not fitted on any row of it. published_constants.json has the fit on
all files and, for each file, the fit on all others. --fit computes these fits again from the given files.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from paceline.errors import PlanError
from published_cells import NotPredictable
from published_fit import build_constants, load_fits, store, with_fitted_recipe
from published_forms import FORMS
from published_rows import Prediction, Row, predict_row, read, read_cells


@dataclass(frozen=True)
class File:
    """Rows with their predictions, and (row, reason) of those that cannot be predicted."""

    name: str
    predicted: tuple[tuple[Row, Prediction], ...]
    left_out: tuple[tuple[str, str], ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--fit", action="store_true", help="first fit the constants to these files")
    parser.add_argument("--rows", action="store_true", help="print each row with the parts of its prediction")
    options = parser.parse_args()
    for path in options.files:
        if not path.is_file():
            parser.error(f"no such file: {path}")
    step_files = [path for path in options.files if _has_steps(path)]
    for path in options.files:
        if path not in step_files and _find_form(path) is None:
            print(f"{path} is left out: it has neither columns of step times nor of single figures")
    if options.fit:
        rows = {_name(path): [row for row in read(path) if isinstance(row, Row)] for path in step_files}
        for excluded, values in store(rows).items():
            fitted = ", ".join(f"{name} {value:g}" for name, value in values.items())
            print(f"without {excluded or 'nothing'}: {fitted}")
    scored = [_score(path) for path in step_files]
    print_times(scored)
    print_choices(scored)
    print_memory(scored)
    print_forms(options.files)
    for file in scored:
        for row, reason in file.left_out:
            print(f"not predicted: {row}: {reason}")
        if options.rows:
            for row, prediction in file.predicted:
                print_row(row, prediction)
    if options.json:
        tree = [_as_json(row, prediction) for file in scored for row, prediction in file.predicted]
        options.json.write_text(json.dumps(tree, indent=1) + "\n")


def _name(path: Path) -> str:
    return next((row["dataset"] for row in read_cells(path) if row["dataset"]), path.stem)


def _header(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8-sig") as lines:
        return [column.strip() for column in next(csv.reader(lines), [])]


def _has_steps(path: Path) -> bool:
    header = {column.lower() for column in _header(path)}
    return "row_id" in header or {"n_gpus", "global_batch"} <= header


def _find_form(path: Path) -> str | None:
    """Return the column that shows which single figures a file has, or None for a file of step times."""
    header = _header(path)
    return next((column for column in FORMS if column in header and "row_id" not in header), None)


def _score(path: Path) -> File:
    """Predict the rows of a file, with constants that were fitted without the data set of each row."""
    fits = {name: (values, build_constants(values)) for name, values in load_fits().items()}
    predicted: list[tuple[Row, Prediction]] = []
    left_out: list[tuple[str, str]] = []
    for row in read(path):
        if not isinstance(row, Row):
            left_out.append(row)
            continue
        values, fitted = fits.get(row.file.lower()) or fits.get(path.stem.lower()) or fits[""]
        try:
            predicted.append((row, predict_row(with_fitted_recipe(row, values), fitted)))
        except PlanError as error:
            left_out.append((row.id, str(error)))
    return File(path.stem, tuple(predicted), tuple(left_out))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown, for docs/planning.md."""
    if not rows:
        return
    print("| " + " | ".join(head) + " |")
    print("|" + " -- |" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def print_times(files: Sequence[File]) -> None:
    """Print errors of step times, and of a strong baseline.

    The baseline is FLOP per step over FLOP/s of the devices, times the constant with the lowest error on
    these rows.
    """
    rows, all_deviations = [], []
    for file in files:
        if not (ratios := _ratios(file)):
            continue
        baseline = [
            prediction.time.hardware_flops / (prediction.time.peak_flops or 1) / row.step_s
            for row, prediction in file.predicted
            if row.step_s
        ]
        deviations = _deviations(file)
        all_deviations += deviations
        errors = f"{_mean_error(ratios):.1%}", f"{fmean(ratios) - 1:+.1%}", f"{_best_constant(baseline):.1%}"
        rows.append((file.name, str(len(ratios)), *errors, *_shares(deviations), str(len(file.left_out))))
    if len(rows) > 1:
        rows.append(("all", str(len(all_deviations)), "", "", "", *_shares(all_deviations), ""))
    print_table(
        (
            "seconds of a step",
            "rows",
            "mean error",
            "bias",
            "one constant",
            "within one error bar",
            "within two",
            "not predicted",
        ),
        rows,
    )


def _deviations(file: File) -> list[float]:
    """Return how many standard deviations each prediction is away from the measurement."""
    return [
        abs(prediction.time.step_s / row.step_s - 1) / prediction.time.error
        for row, prediction in file.predicted
        if row.step_s
    ]


def _shares(deviations: Sequence[float]) -> tuple[str, str]:
    """Return the shares of predictions within one and within two standard deviations."""
    one, two = (fmean(deviation <= bars for deviation in deviations) for bars in (1, 2))
    return f"{one:.0%}", f"{two:.0%}"


def _ratios(file: File) -> list[float]:
    return [prediction.time.step_s / row.step_s for row, prediction in file.predicted if row.step_s]


def _mean_error(ratios: Sequence[float]) -> float:
    return fmean(abs(ratio - 1) for ratio in ratios)


def _best_constant(ratios: Sequence[float]) -> float:
    """Return the lowest mean error for any constant factor; the best factor is the inverse of a ratio."""
    return min(
        _mean_error([ratio * factor for ratio in ratios]) for factor in (1 / ratio for ratio in ratios)
    )


def print_choices(files: Sequence[File]) -> None:
    """Print how much slower the plan predicted to be fastest is than the fastest measured plan, by group.

    The first figures count each run of a group of the file. The others count what a user chooses: plans of
    the same model, with the mean of the runs of a plan.
    """
    rows: list[tuple[str, ...]] = []
    by_run, by_plan = [], []
    for file in files:
        groups: dict[str, list[tuple[Row, Prediction]]] = defaultdict(list)
        for row, prediction in file.predicted:
            if row.group and row.step_s:
                groups[row.group].append((row, prediction))
        for name, runs in groups.items():
            if len(runs) < 2:
                continue
            one = _choice([(prediction.time.step_s, row.step_s or 0.0) for row, prediction in runs])
            by_run.append(one)
            of_models = [_choice(pairs) for pairs in _plans_by_model(runs) if len(pairs) > 1]
            by_plan += of_models
            rows.append((f"{file.name} {name}", *_list_choices([one]), *_list_choices(of_models)))
    if rows and any(each.correlation is not None for each in by_run):
        rows.append(("mean", *_mean_of_choices(by_run), *_mean_of_choices(by_plan)))
    print_table(
        (
            "choice of a plan",
            "runs",
            "slower than the best",
            "rank correlation",
            "plans of one model",
            "slower than the best",
            "rank correlation",
        ),
        rows,
    )


class Choice(NamedTuple):
    """The choice among measured plans: its step time relative to the best, minus 1."""

    plans: int
    loss: float
    correlation: float | None


def _choice(pairs: Sequence[tuple[float, float]]) -> Choice:
    """Return the choice among (predicted, measured) step times."""
    loss = min(pairs)[1] / min(measured for _, measured in pairs) - 1
    return Choice(len(pairs), loss, _spearman(pairs) if len(pairs) > 2 else None)


def _plans_by_model(runs: Sequence[tuple[Row, Prediction]]) -> list[list[tuple[float, float]]]:
    """Return (predicted, measured) step times of the plans of each model, device, number and batch."""
    groups: dict[object, dict[object, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for row, prediction in runs:
        split = prediction.split
        key = row.model, row.device, split.ranks, split.batch, row.recipe.dtype
        groups[key][split].append((prediction.time.step_s, row.step_s or 0.0))
    return [
        [(pairs[0][0], fmean(measured for _, measured in pairs)) for pairs in plans.values()]
        for plans in groups.values()
    ]


def _list_choices(choices: Sequence[Choice]) -> tuple[str, str, str]:
    return (
        ", ".join(str(each.plans) for each in choices),
        ", ".join(f"{each.loss:.1%}" for each in choices),
        ", ".join(f"{each.correlation:.2f}" for each in choices if each.correlation is not None),
    )


def _mean_of_choices(choices: Sequence[Choice]) -> tuple[str, str, str]:
    correlations = [each.correlation for each in choices if each.correlation is not None]
    return (
        "",
        f"{fmean(each.loss for each in choices):.1%}" if choices else "",
        f"{fmean(correlations):.2f}" if correlations else "",
    )


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    a, b = fmean(first), fmean(second)
    spread = (sum((x - a) ** 2 for x in first) * sum((y - b) ** 2 for y in second)) ** 0.5
    return sum((x - a) * (y - b) for x, y in zip(first, second, strict=True)) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of their ranks."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def print_memory(files: Sequence[File]) -> None:
    rows = []
    for file in files:
        ratios = [
            prediction.shown_bytes / row.memory_bytes
            for row, prediction in file.predicted
            if row.memory_bytes
        ]
        errors = (f"{_mean_error(ratios):.1%}", f"{fmean(ratios) - 1:+.1%}") if ratios else ("", "")
        wrong = [row.id for row, prediction in file.predicted if row.oom and prediction.fits]
        refused = [row.id for row, prediction in file.predicted if not row.oom and not prediction.fits]
        rows.append(
            (file.name, str(len(ratios)), *errors, ", ".join(wrong) or "none", ", ".join(refused) or "none")
        )
    print_table(
        (
            "memory of a rank",
            "rows",
            "mean error",
            "bias",
            "predicted to fit, did not",
            "predicted not to fit, did",
        ),
        rows,
    )


def print_forms(paths: Sequence[Path]) -> None:
    rows = []
    for path in paths:
        if (column := _find_form(path)) is None:
            continue
        quantity, predict = FORMS[column]
        pairs, skipped = [], 0
        with path.open(newline="") as lines:
            for row in csv.DictReader(lines):
                try:
                    pairs.append(predict(row)[1:])
                except NotPredictable:
                    skipped += 1
        errors = [abs(predicted / published - 1) for predicted, published in pairs if published]
        distances = [abs(predicted - published) for predicted, published in pairs]
        shares = f"{median(errors):.2%}", f"{fmean(errors):.2%}", f"{max(errors):.2%}"
        rows.append(
            (
                path.stem,
                quantity,
                str(len(pairs)),
                *shares,
                f"{fmean(distances):.3g}",
                f"{max(distances):.3g}",
                str(skipped),
            )
        )
    units = "median error", "mean", "largest", "mean distance", "largest", "other rows"
    print_table(("single figures", "quantity", "rows", *units), rows)


def print_row(row: Row, prediction: Prediction) -> None:
    measured = f"{row.step_s:.4g} s" if row.step_s else "?"
    memory = f"{row.memory_bytes / 1e9:.3g}" if row.memory_bytes else "?"
    parts = ", ".join(f"{part.name} {part.value:.3g}" for part in prediction.time.parts)
    ratio = f"{prediction.time.step_s / row.step_s - 1:+.0%}" if row.step_s else ""
    print(
        f"{row.id} {row.facts.name} {prediction.split}: predicted {prediction.time.step_s:.4g} s, "
        f"measured {measured} {ratio}; {parts}"
    )
    parts = ", ".join(f"{part.name} {part.value / 1e9:.3g}" for part in prediction.memory.parts)
    print(f"   {prediction.shown_bytes / 1e9:.3g} GB, measured {memory}; {parts}")


def _as_json(row: Row, prediction: Prediction) -> Mapping[str, object]:
    """Return a prediction as JSON. Memory is in the unit of the row's column: some files write GB for GiB."""
    return {
        "row_id": row.id,
        "predicted_step_time_s": prediction.time.step_s,
        "predicted_memory_GB": prediction.shown_bytes / (2**30 if row.gib else 1e9),
        "fits": prediction.fits,
        "predicted_memory_bytes": round(prediction.shown_bytes),
        "step_time_error": prediction.time.error,
        "memory_error": prediction.memory.error,
        "extrapolated": prediction.time.extrapolated,
    }


if __name__ == "__main__":
    main()
