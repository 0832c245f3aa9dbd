"""Predictions compared with measurements on this machine, for each plan with which a task can be trained.

Without a cluster.json the machine is measured first (paceline bench, one or two minutes for each number of
ranks). Then each plan is trained for some steps, in turns, and the peak bytes of its tensors are counted on
each rank. The fastest of its rounds counts, since other programs only add time. Finally the choice of auto is
compared with the best plan. With --json FILE measurements are stored there and not repeated; predictions are
always computed again.
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
from paceline.training.model_facts.describe import describe
from paceline.training.planning.auto_plan import choose_plan, shorten_plan
from paceline.units import several
from predicted_measured import measure_peak_bytes, measure_step_s, possible_plans

NOT_TENSORS = ("allocator", "process")  # parts of the predicted memory
NUM_FASTEST = 4  # plans predicted to be fastest, which are measured in addition to those of verify


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
    """Prediction and measurement of a plan; bytes of the rank with peak memory."""

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


class Measurements:
    """Seconds of rounds and peak bytes, by case and plan; stored in a file if a path is given."""

    def __init__(self, path: Path | None):
        self.path = path
        self.values: dict[str, Any] = (
            json.loads(path.read_text()) if path is not None and path.exists() else {}
        )

    def put(self, quantity: str, key: str, value: Any) -> None:
        self.values.setdefault(quantity, {})[key] = value
        if self.path is not None:
            self.path.write_text(json.dumps(self.values, indent=1) + "\n")

    def look_up(self, quantity: str, key: str) -> Any:
        return self.values.get(quantity, {}).get(key)


def load_cluster(path: Path, ranks: list[int]) -> Cluster:
    """Return the cluster in a file; without the file, measure this machine first."""
    if not path.exists():
        for count in [count for count in ranks if count > 1] or [2]:
            print(
                f"no such file: {path}; measuring this machine with {count} ranks",
                file=sys.stderr,
                flush=True,
            )
            subprocess.run(
                [sys.executable, "-m", "paceline", "bench", "--ranks", str(count), "--out", str(path.parent)],
                check=True,
            )
    return add_assumptions(file.read(path))[0]


def select_plans(case: Case, cluster: Cluster) -> list[Plan]:
    """Return all possible plans, the choice of auto, and the plans predicted to be fastest.

    On one rank, plans with ZeRO are left out: there is nothing to shard.
    """
    task = load_task(case.spec.task, case.spec.set)
    plans = [plan for plan in possible_plans(case.spec, task, case.ranks) if case.ranks > 1 or not plan.zero]
    fastest = find_best_plans(
        describe(case.spec, task), cluster, case.spec.batch, recipe=FLOAT32, ranks=case.ranks
    ).plans[:NUM_FASTEST]
    additional = [
        choose_plan(case.spec, task, case.ranks, cluster=cluster).plan,
        *(shorten_plan(plan, case.ranks) for plan, _ in fastest),
    ]
    seen = {plan.resolve(case.ranks) for plan in plans}
    for plan in additional:
        if plan.resolve(case.ranks) not in seen:
            plans.append(plan)
            seen.add(plan.resolve(case.ranks))
    return plans


def measure(case: Case, plans: list[Plan], measurements: Measurements, rounds: int, seconds: float) -> None:
    """Add the missing measurements: step times round by round, then peak bytes."""
    with Ranks(case.ranks) as started:
        for round_index in range(rounds):
            for plan in plans:
                times = measurements.look_up("step_s", case.key(plan)) or []
                if len(times) <= round_index:
                    step_s = measure_step_s(started, case.spec, plan, seconds)
                    measurements.put("step_s", case.key(plan), [*times, step_s])
        for plan in plans:
            if measurements.look_up("bytes", case.key(plan)) is None:
                measurements.put("bytes", case.key(plan), measure_peak_bytes(started, case.spec, plan))


def build_rows(case: Case, cluster: Cluster, plans: list[Plan], measurements: Measurements) -> Iterator[Row]:
    """Yield a row for each plan that was measured."""
    task = load_task(case.spec.task, case.spec.set)
    facts, auto = (
        describe(case.spec, task),
        choose_plan(case.spec, task, case.ranks, cluster=cluster).plan.resolve(case.ranks),
    )
    for plan in plans:
        times = measurements.look_up("step_s", case.key(plan))
        peaks = measurements.look_up("bytes", case.key(plan))
        if times and peaks:
            try:
                cost = predict(facts, plan, cluster, case.spec.batch, FLOAT32, case.ranks)
            except PlanError as error:
                print(f"{plan} is left out: {error}\n")
                continue
            tensor_bytes = sum(part.value for part in cost.memory.parts if part.name not in NOT_TENSORS)
            parts = {part.name: part.value for part in cost.time.parts}
            is_auto = plan.resolve(case.ranks) == auto
            yield Row(
                case,
                str(plan),
                cost.step_s,
                min(times),
                tensor_bytes,
                max(peaks),
                is_auto,
                parts,
            )


def print_table(rows: list[Row], explain: bool) -> None:
    print("| plan | predicted ms | measured ms | error | predicted MiB | counted MiB | error |")
    print("|" + " -- |" * 7)
    for row in sorted(rows, key=lambda row: row.step_s):
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


def format_summary(groups: list[list[Row]]) -> str:
    lines = [
        "| task | ranks | plans | step time, mean error | memory, mean error "
        "| auto chose | slower than the best |",
        "|" + " -- |" * 7,
    ]
    for rows in groups:
        auto = next((row for row in rows if row.is_auto), None)
        best = min(row.step_s for row in rows)
        loss = (
            f"{auto.plan} | {auto.step_s / best - 1:.1%}"
            if auto is not None
            else "a plan that was not measured | "
        )
        lines.append(
            f"| {rows[0].case.name} | {rows[0].case.ranks} | {len(rows)} | {_mean_errors(rows)} | {loss} |"
        )
    all_rows = [row for rows in groups for row in rows]
    lines.append(f"| all | | {len(all_rows)} | {_mean_errors(all_rows)} | | |")
    return "\n".join(lines)


def _mean_errors(rows: list[Row]) -> str:
    means = [
        statistics.mean(abs(getattr(row, name)) for row in rows) for name in ("time_error", "memory_error")
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
    parser.add_argument("--rounds", type=int, default=2, help="0: only show the stored measurements")
    parser.add_argument(
        "--seconds", type=float, default=0.5, help="minimum time of the steps of a plan in a round"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file with the measurements")
    parser.add_argument("--explain", action="store_true", help="show the parts of the predicted time")
    options = parser.parse_args()
    ranks = [int(word) for word in options.ranks.split(",")]
    fields = {key.removeprefix("set."): value for key, value in parse_overrides(options.set).items()}
    cluster, measurements = load_cluster(options.cluster, ranks), Measurements(options.json)
    print(f"{machine.description()}, torch {torch.__version__}, gloo; batch {options.batch}\n")
    groups = []
    for task in options.tasks:
        for count in ranks:
            case = Case(Spec(task=task, set=fields, batch=options.batch, steps=10**6), count)
            plans = select_plans(case, cluster)
            if options.rounds:
                measure(case, plans, measurements, options.rounds, options.seconds)
            if rows := list(build_rows(case, cluster, plans, measurements)):
                print(f"{case.name} on {several(count, 'rank')}; the choice of auto is bold\n")
                print_table(rows, options.explain)
                groups.append(rows)
    print(format_summary(groups) if groups else "no measurements of these tasks are stored")


if __name__ == "__main__":
    main()
