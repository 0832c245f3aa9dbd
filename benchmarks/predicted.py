"""Predictions beside measurements on this machine: each plan that a task can be trained with, on real ranks.

Without a cluster.json the machine is measured first (paceline bench, a minute or two for each number of ranks). Then every plan is
trained for some steps, the plans in turns, its tensors are counted at the peak on each rank, and what auto takes is held against the best.
With --json FILE what was measured is kept there, and not measured again; predictions are always new.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import machine
from paceline.cluster import file
from paceline.cluster.facts import Cluster
from paceline.errors import PlanError
from paceline.launch.rank_pool import Ranks
from paceline.plan.cost_model.defaults import add_assumptions
from paceline.plan.cost_model.framework_profiles import FLOAT32
from paceline.plan.cost_model.predict import predict
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import find_best_plans
from paceline.spec import Spec, parse_overrides
from paceline.task import load_task
from paceline.training.auto_plan import choose_plan, shorten_plan
from paceline.training.model_facts.describe import describe
from predicted_measured import peak_bytes, possible, step_s

NOT_COUNTED = ("allocator", "process")  # parts of memory that are no tensors
MORE = 4  # plans that are predicted to be the fastest are measured too, where they are none of those that verify knows


@dataclass(frozen=True)
class Case:
    spec: Spec
    ranks: int

    def key(self, plan: Plan) -> str:
        fields = "".join(f" {name}={value}" for name, value in self.spec.set.items())
        return f"{self.spec.task}{fields}, batch {self.spec.batch}, {self.ranks} ranks, {plan}"

    @property
    def name(self) -> str:
        return " ".join([self.spec.task, *(f"{name}={value}" for name, value in self.spec.set.items())])


@dataclass(frozen=True)
class Row:
    """Predicted and measured; bytes of the fullest rank."""

    case: Case
    plan: str
    predicted_s: float
    step_s: float
    predicted_bytes: float
    peak_bytes: float
    is_auto: bool
    parts_s: dict[str, float]

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.step_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.peak_bytes - 1


class Kept:
    """What was measured: seconds of rounds and bytes, by case and plan; in a file, if there is one."""

    def __init__(self, path: Path | None):
        self.path = path
        self.found: dict[str, Any] = (
            json.loads(path.read_text()) if path is not None and path.exists() else {}
        )

    def put(self, what: str, key: str, value: Any) -> None:
        self.found.setdefault(what, {})[key] = value
        if self.path is not None:
            self.path.write_text(json.dumps(self.found, indent=1) + "\n")

    def of(self, what: str, key: str) -> Any:
        return self.found.get(what, {}).get(key)


def known(path: Path, ranks: list[int]) -> Cluster:
    if not path.exists():
        for count in (count for count in ranks if count > 1):
            print(
                f"there is no {path}: measuring this machine with {count} ranks", file=sys.stderr, flush=True
            )
            subprocess.run(
                [sys.executable, "-m", "paceline", "bench", "--ranks", str(count), "--out", str(path.parent)],
                check=True,
            )
    return add_assumptions(file.read(path))[0]


def plans_of(case: Case, cluster: Cluster) -> list[Plan]:
    """Those that can be, and what auto may take. On one rank ZeRO has nothing to cut."""
    task = load_task(case.spec.task, case.spec.set)
    plans = [plan for plan in possible(case.spec, task, case.ranks) if case.ranks > 1 or not plan.zero]
    fastest = find_best_plans(
        describe(case.spec, task), cluster, case.spec.batch, recipe=FLOAT32, ranks=case.ranks
    ).plans[:MORE]
    wanted = [
        choose_plan(case.spec, task, case.ranks, cluster=cluster).plan,
        *(shorten_plan(plan, case.ranks) for plan, _ in fastest),
    ]
    seen = {plan.resolve(case.ranks) for plan in plans}
    for plan in wanted:
        if plan.resolve(case.ranks) not in seen:
            plans.append(plan)
            seen.add(plan.resolve(case.ranks))
    return plans


def measure(case: Case, plans: list[Plan], kept: Kept, rounds: int, seconds: float) -> None:
    with Ranks(case.ranks) as started:
        for turn in range(rounds):
            for plan in plans:
                times = kept.of("step_s", case.key(plan)) or []
                if len(times) <= turn:
                    kept.put("step_s", case.key(plan), [*times, step_s(started, case.spec, plan, seconds)])
        for plan in plans:
            if kept.of("bytes", case.key(plan)) is None:
                kept.put("bytes", case.key(plan), peak_bytes(started, case.spec, plan))


def rows(case: Case, cluster: Cluster, plans: list[Plan], kept: Kept) -> Iterator[Row]:
    task = load_task(case.spec.task, case.spec.set)
    facts, auto = (
        describe(case.spec, task),
        choose_plan(case.spec, task, case.ranks, cluster=cluster).plan.resolve(case.ranks),
    )
    for plan in plans:
        times, peaks = kept.of("step_s", case.key(plan)), kept.of("bytes", case.key(plan))
        if times and peaks:
            try:
                cost = predict(facts, plan, cluster, case.spec.batch, FLOAT32, case.ranks)
            except PlanError as error:
                print(f"left out: {plan}: {error}\n")
                continue
            of_tensors = sum(part.value for part in cost.memory.parts if part.name not in NOT_COUNTED)
            parts = {part.name: part.value for part in cost.time.parts}
            is_auto = plan.resolve(case.ranks) == auto
            yield Row(
                case, str(plan), cost.step_s, statistics.median(times), of_tensors, max(peaks), is_auto, parts
            )


def table(found: list[Row], explain: bool) -> None:
    print("| plan | predicted ms | measured ms | error | predicted MiB | counted MiB | error |")
    print("|" + " -- |" * 7)
    for row in sorted(found, key=lambda row: row.step_s):
        cells = [f"**{row.plan}**" if row.is_auto else row.plan]
        cells += [f"{row.predicted_s * 1e3:.2f}", f"{row.step_s * 1e3:.2f}", f"{row.time_error:+.0%}"]
        cells += [
            f"{row.predicted_bytes / 2**20:.1f}",
            f"{row.peak_bytes / 2**20:.1f}",
            f"{row.memory_error:+.1%}",
        ]
        cells += (
            [", ".join(f"{name} {value * 1e3:.2f}" for name, value in row.parts_s.items())] if explain else []
        )
        print("| " + " | ".join(cells) + " |")
    print(flush=True)


def summary(groups: list[list[Row]]) -> str:
    lines = [
        "| task | ranks | plans | step time, mean error | memory, mean error | auto chose | slower than the best |",
        "|" + " -- |" * 7,
    ]
    for found in groups:
        auto = next((row for row in found if row.is_auto), None)
        best = min(row.step_s for row in found)
        lost = (
            f"{auto.plan} | {auto.step_s / best - 1:.1%}"
            if auto is not None
            else "a plan that was not measured | "
        )
        lines.append(
            f"| {found[0].case.name} | {found[0].case.ranks} | {len(found)} | {_means(found)} | {lost} |"
        )
    every = [row for found in groups for row in found]
    lines.append(f"| all | | {len(every)} | {_means(every)} | | |")
    return "\n".join(lines)


def _means(found: list[Row]) -> str:
    means = [
        statistics.mean(abs(getattr(row, name)) for row in found) for name in ("time_error", "memory_error")
    ]
    return " | ".join(f"{mean:.1%}" for mean in means)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tasks", nargs="*", default=["digits", "text"], metavar="TASK")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a field of the task"
    )
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--cluster", type=Path, default=Path("bench/cluster.json"))
    parser.add_argument("--rounds", type=int, default=2, help="0: only what was kept is shown")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="of the timed steps of a plan in a round, at least"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="what was measured")
    parser.add_argument("--explain", action="store_true", help="parts of the predicted time")
    options = parser.parse_args()
    ranks = [int(word) for word in options.ranks.split(",")]
    fields = {key.removeprefix("set."): value for key, value in parse_overrides(options.set).items()}
    cluster, kept = known(options.cluster, ranks), Kept(options.json)
    print(f"{machine.description()}, torch {torch.__version__}, gloo; batch {options.batch}\n")
    groups = []
    for task in options.tasks:
        for count in ranks:
            case = Case(Spec(task=task, set=fields, batch=options.batch, steps=10**6), count)
            plans = plans_of(case, cluster)
            if options.rounds:
                measure(case, plans, kept, options.rounds, options.seconds)
            if found := list(rows(case, cluster, plans, kept)):
                print(f"{case.name} on {count} rank{'s' * (count > 1)}; in bold what auto takes\n")
                table(found, options.explain)
                groups.append(found)
    print(summary(groups) if groups else "nothing was kept of these")


if __name__ == "__main__":
    main()
