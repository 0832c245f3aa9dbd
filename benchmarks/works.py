"""Support matrix: plans on the models of the zoo, verified against one process.

    python benchmarks/works.py [--ranks 2] [--models NAME ...] [--plans PLAN ... | --plans all]
                               [--resume FILE] [--write docs/works.md]

With --resume, each result is appended to FILE as soon as it is known, and results that FILE has are not
computed again. The page is written again after each model; without --write it is printed. A model takes some
seconds for each plan; all plans on eight ranks and few cores take hours.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from paceline import Spec
from paceline.errors import Error
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import Plan, parse
from paceline.plan.search.candidates import enumerate_candidates
from paceline.spec import parse_value
from paceline.verify.report import describe_difference, format_reason, max_difference
from paceline.verify.run import Verdict, Verification, choose_batch
from works_page import Cell, format_page
from zoo.catalog import ENTRIES, Entry

PLANS = ("ddp", "zero3", "tp=2", "pp=2,pp_schedule=1f1b", "cp=2")
LARGE_RANKS, FEW_STEPS = 8, 2
TIMEOUT_S = 600.0  # per plan
PACKAGES = re.compile(r"[^\s(]*/site-packages/")  # where this machine has them


def build_cell(entry: Entry, verdict: Verdict, steps: int) -> Cell:
    outcome, reason, difference = "same", "", 0.0
    if verdict.cannot_be is not None:
        outcome, reason = "refused", PACKAGES.sub("", format_reason(verdict))
    elif verdict.failed is not None:
        outcome, reason = "failed", verdict.failed
    else:
        difference = min(max_difference(verdict), sys.float_info.max)
        if not verdict.same:
            outcome, reason = "differs", describe_difference(verdict)
    return Cell(
        entry.name,
        entry.task,
        verdict.ranks,
        steps,
        str(verdict.plan),
        outcome,
        reason,
        difference,
        verdict.tolerance,
    )


def read_cells(path: Path | None) -> dict[tuple[str, int, int, str], Cell]:
    """Return the results in a file by key. Half a last line, of a script that was killed, is left out."""
    if path is None or not path.exists():
        return {}
    text = path.read_text()
    if not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    cells = [Cell(**json.loads(line)) for line in text.splitlines()]
    return {cell.key: cell for cell in cells}


def select_plans(ranks: int) -> list[Plan]:
    """Return all plans for a number of ranks.

    From LARGE_RANKS, variants with two micro-batches are left out, and so are tp and pp with zero1 and zero2.
    """
    return [
        plan
        for plan in enumerate_candidates(ranks)
        if ranks < LARGE_RANKS
        or (plan.microbatches is None and (plan.zero in (0, 3) or not plan.splits_model))
    ]


def build_spec(entry: Entry, plans: list[Plan], ranks: int, steps: int) -> Spec:
    settings = {key: parse_value(value) for key, value in entry.settings.items()}
    return Spec(task=entry.reference, set=settings, batch=choose_batch(16, plans, ranks), steps=steps)


def verify_model(entry: Entry, plans: list[Plan], ranks: Ranks, steps: int) -> Iterable[Cell]:
    """Yield the result of each plan; none if the model is not available, for which stderr has the reason."""
    try:
        with Verification(build_spec(entry, plans, ranks.size, steps), ranks, TIMEOUT_S) as verification:
            verification.reference()
            for plan in plans:
                yield build_cell(entry, verification.try_verify(plan), steps)
    except Error as error:
        print(f"{entry.name}: {error}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=list(ENTRIES), default=list(ENTRIES), metavar="NAME")
    parser.add_argument("--plans", nargs="+", default=PLANS, help="plans, or 'all'")
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="PAGE")
    options = parser.parse_args()
    known = read_cells(options.resume)
    table: list[Cell] = []
    entries = [ENTRIES[name] for name in options.models]
    for size in options.ranks:
        plans = select_plans(size) if list(options.plans) == ["all"] else [parse(p) for p in options.plans]
        steps = options.steps if size < LARGE_RANKS else min(FEW_STEPS, options.steps)
        with Ranks(size) as ranks:
            for entry in entries:
                start = time.perf_counter()
                keys = {str(plan): (entry.task, size, steps, str(plan)) for plan in plans}
                missing = [plan for plan in plans if keys[str(plan)] not in known]
                for cell in verify_model(entry, missing, ranks, steps) if missing else ():
                    known[cell.key] = cell
                    if options.resume is not None:
                        with options.resume.open("a") as file:
                            file.write(json.dumps(asdict(cell), ensure_ascii=False) + "\n")
                    if cell.is_wrong:
                        print(f"{entry.name}, {cell.plan}: {cell.outcome}: {cell.reason}", file=sys.stderr)
                if missing:
                    took = time.perf_counter() - start
                    print(f"{entry.name} on {size} ranks: {took:.0f} s", file=sys.stderr)
                table += [known[key] for key in keys.values() if key in known]
                if options.write is not None:
                    options.write.write_text(format_page(table, sys.argv[1:]))
    if options.write is None:
        print(format_page(table, sys.argv[1:]))
    if any(cell.is_wrong for cell in table):
        sys.exit(1)


if __name__ == "__main__":
    main()
