"""Facts of runs made by hand: a healthy run, and parts of faulty runs."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.doctor.heartbeat import Heartbeat
from paceline.events import Evaluated, Profiled, Saved, Started
from paceline.inspect.facts import RunFacts, StepPoint
from paceline.inspect.finding import Missing, NotApplicable
from paceline.inspect.rules import RULES
from paceline.inspect.windows import cut_windows
from paceline.monitor.samples import read_samples
from paceline.plan.plan import parse
from paceline.spec import Launch, Spec

BY_NAME = {rule.name: rule for rule in RULES}
CORES = {"cores": 4.0, "local_ranks": 2.0, "convolutions": 0.0, "channels_last": 0.0}


def make_steps(
    count: int = 200,
    step_s: float = 0.05,
    data_s: float | Sequence[float] = 0.001,
    losses: Sequence[float] | None = None,
    norms: Sequence[float | None] | None = None,
) -> tuple[StepPoint, ...]:
    """Return steps whose loss falls with some noise, unless losses are given."""
    draw = random.Random(0)
    losses = losses or [2.0 * math.exp(-k / 80) + 0.3 + draw.gauss(0, 0.05) for k in range(count)]
    data = data_s if not isinstance(data_s, float) else [data_s] * count
    return tuple(
        StepPoint(
            step=k + 1,
            time=1000.0 + (k + 1) * step_s,
            loss=losses[k],
            grad_norm=norms[k] if norms else 1.0,
            lr=1e-3,
            step_s=step_s + (data[k] if not isinstance(data_s, float) else 0.0),
            data_s=data[k],
            samples_per_s=64 / step_s,
            num_steps=1,
            since_start=k + 1,
        )
        for k in range(count)
    )


def make_facts(plan: str = "ddp", ranks: int = 2, **values: Any) -> RunFacts:
    """Return the facts of a healthy run, with the given values in place of its own."""
    steps = values.pop("steps", make_steps())
    started = Started(
        time=1000.0,
        task="digits",
        plan=plan,
        ranks=ranks,
        batch=64,
        step=0,
        steps=values.pop("length", len(steps)),
        samples=1437,
        parameters=1000,
        device=values.pop("device", "cpu"),
        precision=values.pop("precision", "fp32"),
        threads=values.pop("threads", 2),
    )
    run_s = sum(point.step_s for point in steps)
    run_s += sum(event.seconds for event in values.get("evaluated", ()))
    run_s += sum(event.blocked_s for event in values.get("saved", ()))
    given = {
        "path": Path("runs/a"),
        "spec": Spec(),
        "launch": Launch(plan=plan, ranks=ranks),
        "started": started,
        "steps": steps,
        "run_s": run_s,
        "remaining_s": 0.0,
        "plan": parse(plan).resolve(ranks),
        "facts": CORES,
    }
    return RunFacts(**{**given, **values})


def make_beats(
    *times: dict[str, float], steps: int = 100, core_wait_s: float | None = None
) -> tuple[Heartbeat, ...]:
    """Return the last heartbeats of ranks, given the seconds per step in each phase."""
    return tuple(
        Heartbeat(
            rank=rank,
            ranks=len(times),
            host="node1",
            pid=100 + rank,
            began=990.0,
            time=1010.0,
            step=steps,
            steps=steps,
            stepped=1010.0,
            longest_s=0.1,
            phase="ended",
            since=1010.0,
            patience_s=60.0,
            spent_s={},
            total_steps=steps,
            total_s={phase: seconds * steps for phase, seconds in spent.items()},
            core_wait_s=core_wait_s,
        )
        for rank, spent in enumerate(times)
    )


def make_profiles(count: int = 4, ranks: int = 2, slowest: int = 1, **values: float) -> tuple[Profiled, ...]:
    """Return profiles of steps of 0.1 s. values: seconds of parts, slowest_s and busy_s."""
    slowest_s, busy_s = values.pop("slowest_s", 0.07), values.pop("busy_s", 0.07)
    return tuple(
        Profiled(
            step=10 * (k + 1),
            num_steps=1,
            step_s=0.1,
            seconds={"compute": 0.06, **values},
            input_s=0.0,
            slowest=slowest,
            slowest_s=slowest_s,
            busy_s=busy_s,
            fullest=0,
            memory={},
            costs_s=0.01,
        )
        for k in range(count)
    )


def make_evaluations(seconds: float, every: int = 20, losses: Sequence[float] | None = None) -> Any:
    losses = losses or [1 / (k + 1) for k in range(200 // every)]
    return tuple(
        Evaluated(step=every * (k + 1), metrics={"loss": loss}, seconds=seconds)
        for k, loss in enumerate(losses)
    )


def make_saves(blocked_s: float, every: int = 20, count: int = 9, size: int = 10**6) -> tuple[Saved, ...]:
    return tuple(
        Saved(step=every * (k + 1), path="", bytes=size, seconds=blocked_s, blocked_s=blocked_s)
        for k in range(count)
    )


def make_windows(folder: Path, rows: dict[str, Sequence[float]], **options: Any) -> Any:
    """Return the window of a file of samples, one a second, from columns with their units."""
    path = folder / f"node{len(list(folder.iterdir()))}.csv"
    count = len(next(iter(rows.values())))
    lines = ["# paceline samples 1", "# node: node1", ",".join(["time [s]", *rows])]
    lines += [
        ",".join(f"{value:g}" for value in (1000 + k, *(column[k] for column in rows.values())))
        for k in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return cut_windows([read_samples(path)], **{"begin": 0.0, "end": 1e9, **options})


def outcome_of(name: str, facts: RunFacts) -> Any:
    return BY_NAME[name].apply(facts)


def sentences(name: str, facts: RunFacts) -> list[str]:
    outcome = outcome_of(name, facts)
    assert not isinstance(outcome, (Missing, NotApplicable)), outcome
    return [evidence.sentence for evidence in outcome]
