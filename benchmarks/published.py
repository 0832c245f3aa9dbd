"""Score predictions against measurements that others published: published.py FILE… [--json OUT] [--fit].

A file is scored with constants that were not fitted on any row of it: published_constants.json has the fit on all files and, for each of
them, the fit on all others. --fit makes it anew from the files given.
"""

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from paceline.errors import PlanError
from published_fit import constants, store, stored
from published_forms import FORMS
from published_rows import Answer, Row, Unpriced, answer, read


@dataclass(frozen=True)
class File:
    """Priced rows with their answers, and those that could not be priced with why."""

    name: str
    priced: tuple[tuple[Row, Answer], ...]
    left_out: tuple[tuple[str, str], ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew on these files first")
    parser.add_argument("--rows", action="store_true", help="print each row with the parts of its prediction")
    asked = parser.parse_args()
    steps = [path for path in asked.files if "row_id" in _header(path)]
    if asked.fit:
        for left, values in store(
            {_name(path): [row for row in read(path) if isinstance(row, Row)] for path in steps}
        ).items():
            print(
                f"without {left or 'nothing'}: "
                + ", ".join(f"{name} {value:g}" for name, value in values.items())
            )
    scored = [_scored(path) for path in steps]
    print_times(scored)
    print_choices(scored)
    print_memory(scored)
    print_forms(asked.files)
    for file in scored:
        for row, why in file.left_out:
            print(f"not priced: {row}: {why}")
        if asked.rows:
            for row, found in file.priced:
                print_row(row, found)
    if asked.json:
        asked.json.write_text(
            json.dumps([_as_json(row, found) for file in scored for row, found in file.priced], indent=1)
            + "\n"
        )


def _name(path: Path) -> str:
    with path.open(newline="") as lines:
        return next((row.get("dataset") or path.stem for row in csv.DictReader(lines)), path.stem)


def _header(path: Path) -> list[str]:
    with path.open(newline="") as lines:
        return next(csv.reader(lines), [])


def _form_of(path: Path) -> str | None:
    header = _header(path)
    return next((column for column in FORMS if column in header and "row_id" not in header), None)


def _scored(path: Path) -> File:
    fits = stored()
    on = constants(fits.get(_name(path), fits[""]))
    rows = list(read(path))
    priced, left_out = [], [row for row in rows if not isinstance(row, Row)]
    for row in rows:
        if isinstance(row, Row):
            try:
                priced.append((row, answer(row, on)))
            except PlanError as error:
                left_out.append((row.id, str(error)))
    return File(path.stem, tuple(priced), tuple(left_out))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """In Markdown, for docs/planning.md."""
    if not rows:
        return
    print("| " + " | ".join(head) + " |")
    print("|" + " -- |" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def print_times(files: Sequence[File]) -> None:
    """Beside a strong baseline: FLOPs of a step over those of the devices, times the constant for which the error is least on the rows."""
    rows = []
    for file in files:
        if not (ratios := _ratios(file)):
            continue
        base = [
            found.time.hardware_flops / (found.time.peak_flops or 1) / row.step_s
            for row, found in file.priced
            if row.step_s
        ]
        inside = [
            abs(found.time.step_s / row.step_s - 1) <= 2 * found.time.error
            for row, found in file.priced
            if row.step_s
        ]
        errors = f"{_mean_error(ratios):.1%}", f"{fmean(ratios) - 1:+.1%}", f"{_best_constant(base):.1%}"
        rows.append((file.name, str(len(ratios)), *errors, f"{fmean(inside):.0%}", str(len(file.left_out))))
    print_table(
        (
            "seconds of a step",
            "rows",
            "mean error",
            "bias",
            "one constant",
            "within two error bars",
            "not priced",
        ),
        rows,
    )


def _ratios(file: File) -> list[float]:
    return [found.time.step_s / row.step_s for row, found in file.priced if row.step_s]


def _mean_error(ratios: Sequence[float]) -> float:
    return fmean(abs(ratio - 1) for ratio in ratios)


def _best_constant(ratios: Sequence[float]) -> float:
    """The mean error with the one factor for which it is least, which is one of their inverses."""
    return min(
        _mean_error([ratio * factor for ratio in ratios]) for factor in (1 / ratio for ratio in ratios)
    )


def print_choices(files: Sequence[File]) -> None:
    """What the plan that is predicted to be the fastest of its group loses against the fastest measured one."""
    rows, lost, ranks = [], [], []
    for file in files:
        groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row, found in file.priced:
            if row.group and row.step_s:
                groups[row.group].append((found.time.step_s, row.step_s))
        for name, pairs in groups.items():
            if len(pairs) < 2:
                continue
            lost.append(min(pairs)[1] / min(measured for _, measured in pairs) - 1)
            correlation = _spearman(pairs) if len(pairs) > 2 else None
            ranks += [correlation] if correlation is not None else []
            rows.append(
                (
                    f"{file.name} {name}",
                    str(len(pairs)),
                    f"{lost[-1]:.1%}",
                    "" if correlation is None else f"{correlation:.2f}",
                )
            )
    if rows and ranks:
        rows.append(("mean", "", f"{fmean(lost):.1%}", f"{fmean(ranks):.2f}"))
    print_table(("choice of a plan", "plans", "slower than the best", "rank correlation"), rows)


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    a, b = fmean(first), fmean(second)
    spread = (sum((x - a) ** 2 for x in first) * sum((y - b) ** 2 for y in second)) ** 0.5
    return sum((x - a) * (y - b) for x, y in zip(first, second, strict=True)) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Alike values share the mean of their ranks."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]


def print_memory(files: Sequence[File]) -> None:
    rows = []
    for file in files:
        ratios = [
            found.memory.peak_bytes / row.memory_bytes for row, found in file.priced if row.memory_bytes
        ]
        errors = (f"{_mean_error(ratios):.1%}", f"{fmean(ratios) - 1:+.1%}") if ratios else ("", "")
        wrong = [row.id for row, found in file.priced if row.oom and found.fits]
        refused = [row.id for row, found in file.priced if not row.oom and not found.fits]
        rows.append(
            (file.name, str(len(ratios)), *errors, ", ".join(wrong) or "none", ", ".join(refused) or "none")
        )
    print_table(
        (
            "memory of a rank",
            "rows",
            "mean error",
            "bias",
            "said to fit, and did not",
            "said not to fit, and did",
        ),
        rows,
    )


def print_forms(paths: Sequence[Path]) -> None:
    rows = []
    for path in paths:
        if (column := _form_of(path)) is None:
            continue
        what, predict = FORMS[column]
        pairs, skipped = [], 0
        with path.open(newline="") as lines:
            for row in csv.DictReader(lines):
                try:
                    pairs.append(predict(row)[1:])
                except Unpriced:
                    skipped += 1
        errors = [abs(found / wanted - 1) for found, wanted in pairs if wanted]
        apart = [abs(found - wanted) for found, wanted in pairs]
        shares = f"{median(errors):.2%}", f"{fmean(errors):.2%}", f"{max(errors):.2%}"
        rows.append(
            (
                path.stem,
                what,
                str(len(pairs)),
                *shares,
                f"{fmean(apart):.3g}",
                f"{max(apart):.3g}",
                str(skipped),
            )
        )
    units = "median error", "mean", "largest", "mean distance", "largest", "rows of something else"
    print_table(("single figures", "of what", "rows", *units), rows)


def print_row(row: Row, found: Answer) -> None:
    measured = f"{row.step_s:.4g} s" if row.step_s else "?"
    memory = f"{row.memory_bytes / 1e9:.3g}" if row.memory_bytes else "?"
    parts = ", ".join(f"{part.name} {part.value:.3g}" for part in found.time.parts)
    ratio = f"{found.time.step_s / row.step_s - 1:+.0%}" if row.step_s else ""
    print(
        f"{row.id} {row.facts.name} {found.split}: {found.time.step_s:.4g} s for {measured} {ratio}; {parts}"
    )
    parts = ", ".join(f"{part.name} {part.value / 1e9:.3g}" for part in found.memory.parts)
    print(f"   {found.memory.peak_bytes / 1e9:.3g} GB for {memory}; {parts}")


def _as_json(row: Row, found: Answer) -> Mapping[str, object]:
    """Memory in the unit of the row's own column: some files say GB and mean GiB."""
    return {
        "row_id": row.id,
        "predicted_step_time_s": found.time.step_s,
        "predicted_memory_GB": found.memory.peak_bytes / (2**30 if row.gib else 1e9),
        "fits": found.fits,
        "predicted_memory_bytes": round(found.memory.peak_bytes),
        "step_time_error": found.time.error,
        "memory_error": found.memory.error,
        "extrapolated": found.time.extrapolated,
    }


if __name__ == "__main__":
    main()
