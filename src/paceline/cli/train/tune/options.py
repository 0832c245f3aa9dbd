"""The options of paceline tune, and the request that they define."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.options.request_options import Set
from paceline.cli.train.tune import option_types
from paceline.errors import SpecError


@dataclass(frozen=True)
class TuningRequest:
    """What the options of a command line ask for. Options that were not given are left out.

    search: keys of the table [tune].
    flags: keys of the request of all trials.
    ranges: the range of each parameter by name.
    assignments: NAME=VALUE of --set.
    """

    target: str
    search: Mapping[str, Any]
    flags: Mapping[str, Any]
    ranges: Mapping[str, Any]
    assignments: list[str]
    run_dir: str | None
    is_resume: bool
    is_array: bool
    time: str | None
    site: Path | None
    is_dry_run: bool

    @property
    def job_options(self) -> list[str]:
        """The given options that apply only to a Slurm job."""
        given = {"--time": self.time, "--site": self.site, "--dry-run": self.is_dry_run}
        return [name for name, value in given.items() if value]


def read_options(
    target: option_types.Target,
    space: option_types.Space = None,
    grid: option_types.Grid = None,
    metric: option_types.Metric = None,
    trials: option_types.Trials = None,
    sampler: option_types.Sampler = None,
    scheduler: option_types.Scheduler = None,
    reduction: option_types.Reduction = None,
    rungs: option_types.Rungs = None,
    search_seed: option_types.SearchSeed = None,
    ranks: option_types.Ranks = None,
    nodes: option_types.Nodes = None,
    launcher: option_types.Launcher = None,
    ranks_per_trial: option_types.RanksPerTrial = None,
    where: option_types.Where = None,
    max_time: option_types.MaxTime = None,
    run_dir: option_types.RunDir = None,
    resume: option_types.Resume = False,
    array: option_types.Array = False,
    time: option_types.Time = None,
    site: option_types.Site = None,
    dry_run: option_types.DryRun = False,
    plan: option_types.Plan = None,
    batch: option_types.Batch = None,
    epochs: option_types.Epochs = None,
    steps: option_types.Steps = None,
    lr: option_types.Lr = None,
    optimizer: option_types.Optimizer = None,
    seed: option_types.Seed = None,
    set: Set = None,
    device: option_types.Device = None,
) -> TuningRequest:
    """Return the request of these options. Raises SpecError."""
    if space and grid and sampler != "grid":
        raise SpecError("--grid and --space contradict each other; use --space only, or --sampler grid")
    search = {
        "metrics": metric or None,
        "trials": trials,
        "sampler": sampler or ("grid" if grid else None),
        "scheduler": scheduler,
        "reduction": reduction,
        "rungs": rungs,
        "seed": search_seed,
        "ranks": ranks,
        "nodes": nodes,
        "launcher": launcher or ("slurm" if (nodes or 1) > 1 else None),
        "ranks_per_trial": _read_ranks_per_trial(ranks_per_trial),
        "where": where or None,
        "max_time": max_time,
    }
    flags = {
        "plan": plan,
        "batch": batch,
        "epochs": epochs,
        "steps": steps,
        "optimizer.lr": lr,
        "optimizer.name": optimizer,
        "seed": seed,
        "device": device,
    }
    return TuningRequest(
        target,
        _select_given(search),
        _select_given(flags),
        _read_ranges(space or [], grid or []),
        set or [],
        run_dir,
        resume,
        array,
        time,
        site,
        dry_run,
    )


def with_tuning_options(command: Callable[[TuningRequest], None]) -> Callable[..., None]:
    """Decorate `command(request)`, so that typer sees the options of a study."""

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        command(read_options(**values))

    setattr(wrapper, "__signature__", inspect.signature(read_options))  # noqa: B010 (typer reads it)
    return wrapper


def _select_given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _read_ranks_per_trial(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal():
        raise SpecError(f"--ranks-per-trial must be a number or auto, got {text!r:.40}")
    return int(text)


def _read_ranges(space: list[str], grid: list[str]) -> dict[str, Any]:
    """Return the ranges of --space and --grid by name. Raises SpecError."""
    ranges: dict[str, Any] = {}
    for option, items in (("--space", space), ("--grid", grid)):
        for item in items:
            name, equals, text = item.partition("=")
            if not equals or not name.strip() or not text.strip():
                raise SpecError(f"{option} must be NAME=RANGE, such as lr=log:1e-4:1e-1, got {item!r:.80}")
            if name in ranges:
                raise SpecError(f"{option} {name} is given twice; leave one out")
            steps = re.fullmatch(r"(-?\d+)\.\.(-?\d+)", text)
            ranges[name] = f"int:{steps[1]}:{steps[2]}" if steps is not None else text
    return ranges
