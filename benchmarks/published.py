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
        for left, values in store({_name(path): [row for row in read(path) if isinstance(row, Row)] for path in steps}).items():
            print(f"without {left or 'nothing'}: " + ", ".join(f"{name} {value:g}" for name, value in values.items()))
    scored = [_scored(path) for path in steps]
    print_times(scored)
    print_choices(scored)
    print_memory(scored)
    for path in asked.files:
        print_form(path)
    for file in scored:
        for row, why in file.left_out:
            print(f"not priced: {row}: {why}")
        if asked.rows:
            for row, found in file.priced:
                print_row(row, found)
    if asked.json:
        asked.json.write_text(json.dumps([_as_json(row, found) for file in scored for row, found in file.priced], indent=1) + "\n")


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


def _ratios(file: File) -> list[float]:
    return [found.time.step_s / row.step_s for row, found in file.priced if row.step_s]


def print_times(files: Sequence[File]) -> None:
    """The baseline: one constant that fits the file best, times the FLOPs of a step over all devices; fitted on the very rows scored."""
    print(f"{'seconds of a step':34} rows  mean error  bias  within bar  one constant fitted  left out")
    for file in files:
        ratios = _ratios(file)
        if not ratios:
            continue
        base = [found.time.hardware_flops / found.time.peak_flops / row.step_s for row, found in file.priced if row.step_s]
        inside = fmean(abs(found.time.step_s / row.step_s - 1) <= 2 * found.time.error for row, found in file.priced if row.step_s)
        print(
            f"{file.name:34} {len(ratios):4}  {_mean_error(ratios):9.1%} {fmean(ratios) - 1:+6.1%}  {inside:9.0%}"
            f"  {_best_constant(base):18.1%}  {len(file.left_out):8}"
        )


def _mean_error(ratios: Sequence[float]) -> float:
    return fmean(abs(ratio - 1) for ratio in ratios)


def _best_constant(ratios: Sequence[float]) -> float:
    """The mean error with the one factor for which it is least, which is one of their inverses."""
    return min(_mean_error([ratio * factor for ratio in ratios]) for factor in (1 / ratio for ratio in ratios))


def print_choices(files: Sequence[File]) -> None:
    """What the plan that is predicted to be the fastest of its group loses against the fastest measured one."""
    lost, ranks = [], []
    for file in files:
        groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for row, found in file.priced:
            if row.group and row.step_s:
                groups[row.group].append((found.time.step_s, row.step_s))
        for name, pairs in groups.items():
            if len(pairs) < 2:
                continue
            loss = min(pairs)[1] / min(measured for _, measured in pairs) - 1
            correlation = _spearman(pairs) if len(pairs) > 2 else float("nan")
            print(f"choice in {file.name} {name}: {len(pairs)} plans, loses {loss:.1%}, rank correlation {correlation:.2f}")
            lost.append(loss)
            ranks += [correlation] if len(pairs) > 2 else []
    if lost and ranks:
        print(f"choice: mean loss {fmean(lost):.1%}, mean rank correlation {fmean(ranks):.2f}")


def _spearman(pairs: Sequence[tuple[float, float]]) -> float:
    first, second = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    a, b = fmean(first), fmean(second)
    spread = (sum((x - a) ** 2 for x in first) * sum((y - b) ** 2 for y in second)) ** 0.5
    return sum((x - a) * (y - b) for x, y in zip(first, second, strict=True)) / spread if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    """Alike values share the mean of their ranks."""
    return [sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2 for value in values]


def print_memory(files: Sequence[File]) -> None:
    for file in files:
        ratios = [found.memory.peak_bytes / row.memory_bytes for row, found in file.priced if row.memory_bytes]
        if ratios:
            print(f"memory in {file.name}: {len(ratios)} rows, mean error {_mean_error(ratios):.1%}, bias {fmean(ratios) - 1:+.1%}")
        wrong = [row.id for row, found in file.priced if row.oom and found.fits]
        refused = [row.id for row, found in file.priced if not row.oom and not found.fits]
        if wrong:
            print(f"memory in {file.name}: said to fit and did not: {', '.join(wrong)}")
        if refused:
            print(f"memory in {file.name}: said not to fit and did: {', '.join(refused)}")


def print_form(path: Path) -> None:
    column = _form_of(path)
    if column is None:
        return
    what, predict = FORMS[column]
    pairs, skipped = [], 0
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            try:
                pairs.append(predict(row)[1:])
            except (Unpriced, KeyError, ValueError):
                skipped += 1
    if not pairs:
        return
    errors = [abs(found - wanted) / wanted for found, wanted in pairs if wanted]
    apart = [abs(found - wanted) for found, wanted in pairs]
    print(
        f"{path.stem}: {what}: {len(pairs)} rows, mean error {fmean(errors):.2%}, median {median(errors):.2%}, largest {max(errors):.2%};"
        f" apart by {fmean(apart):.3g} in the mean, {max(apart):.3g} at most; {skipped} rows are of something else"
    )


def print_row(row: Row, found: Answer) -> None:
    measured = f"{row.step_s:.4g} s" if row.step_s else "?"
    memory = f"{row.memory_bytes / 1e9:.3g}" if row.memory_bytes else "?"
    parts = ", ".join(f"{part.name} {part.value:.3g}" for part in found.time.parts)
    ratio = f"{found.time.step_s / row.step_s - 1:+.0%}" if row.step_s else ""
    print(f"{row.id} {row.facts.name} {found.split}: {found.time.step_s:.4g} s for {measured} {ratio}; {parts}")
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
