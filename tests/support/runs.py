"""Trainings that stop at a known step, for the tests of resuming."""

import itertools
import os
from pathlib import Path

from harness import ranks
from paceline import Spec, train
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save, Schedule
from paceline.training.step import step_metrics

NEVER = float("inf")


STEPS = 24


def make_spec(task: Path, steps: int = STEPS, save: Save | None = None, **fields) -> Spec:
    """Return a request of the class Regression in the file `task`. `fields`: of the task."""
    return Spec(
        task=f"{task}:Regression",
        set=fields,
        steps=steps,
        batch=24,
        seed=5,
        threads=1,  # the default depends on the free cores, and adds a note
        optimizer=Optimizer(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), clip=2.0),
        schedule=Schedule(name="cosine", warmup=48, floor=0.1),
        save=save or Save(minutes=NEVER),
    )


def train_run_on_this_rank(spec: Spec, plan: str, run: Path, stop_at: int | None, every_s: float) -> list:
    """Train and return the events except steps. From step `stop_at` on, the last rank asks all to stop."""
    calls = itertools.count(1)
    last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    events = train(
        spec,
        parse(plan),
        run=RunFolder(run),
        stop=lambda: next(calls) >= stop_at if stop_at and last else False,
    )
    before, step_metrics.REDUCE_EVERY_S = step_metrics.REDUCE_EVERY_S, every_s
    try:
        return [event for event in events if not hasattr(event, "grad_norm")]
    finally:
        step_metrics.REDUCE_EVERY_S = before


def train_run(
    size: int, spec: Spec, plan: str, run: Path, stop_at: int | None = None, every_s: float = 0.0
) -> list:
    """Train on `size` ranks and return the events of rank 0.

    With `every_s` 0, each step is reported separately, so that the training stops at a known step.
    """
    run.mkdir(exist_ok=True)
    return ranks(size)(train_run_on_this_rank, spec, plan, run, stop_at, every_s)[0]
