"""Sweeps as job arrays: the values of each training, and the script whose tasks start them."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SpecError
from paceline.launch.slurm.job_script import Job, describe_head, quote_word
from paceline.launch.slurm.site import Site
from paceline.spec import Launch, Spec, build, parse_value

MAX_TASKS = 1000  # Slurm's default MaxArraySize is 1001
MAX_NAME_BYTES = 120  # of the folder of a training
RANGE = re.compile(r"(-?\d{1,12})\.\.(-?\d{1,12})(?:\.\.(\d{1,12}))?", re.ASCII)  # FIRST..LAST..STEP
LIMIT = re.compile(r"%([1-9]\d{0,3})$", re.ASCII)
HINT = "write --array seed=1..8, --array optimizer.lr=0.1,0.01, or seed=1..8%2 for two at a time"


@dataclass(frozen=True)
class ArraySweep:
    """The values of a sweep: each training has a value of each key."""

    values: Mapping[str, tuple[Any, ...]]  # by dotted key of the request
    limit: int | None = None  # of trainings at a time

    def combinations(self) -> list[dict[str, Any]]:
        """Return the overrides of each training; the last key changes fastest."""
        return [
            dict(zip(self.values, chosen, strict=True)) for chosen in itertools.product(*self.values.values())
        ]


def parse_sweep(items: Sequence[str]) -> ArraySweep:
    """Return the sweep of options such as `["seed=1..8", "optimizer.lr=0.1,0.01%2"]`. Raises SpecError."""
    values: dict[str, tuple[Any, ...]] = {}
    limit: int | None = None
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not all(name.split(".")):
            raise SpecError(f"--array must be NAME=VALUES, got {item!r}; {HINT}")
        if (match := LIMIT.search(text)) is not None:
            limit, text = int(match[1]), text[: match.start()]
        key = _find_key(name)
        if key in values:
            raise SpecError(f"--array has {name} twice; write all of its values in one list")
        values[key] = _parse_values(name, text)
    sweep = ArraySweep(values, limit)
    count = 1
    for chosen in values.values():
        count *= len(chosen)
    if count > MAX_TASKS:
        raise SpecError(f"--array has {count:,} trainings; use at most {MAX_TASKS:,}")
    return sweep


def _find_key(name: str) -> str:
    """Return the key of the request: a key at its top level, a dotted key, or else a field of the task."""
    plain = name.removeprefix("spec.")
    if plain in Spec.model_fields and plain != "set":
        return plain
    if plain in Launch.model_fields:
        raise SpecError(f"--array cannot change {plain}, which the job has; submit each value separately")
    table = name.partition(".")[0]
    if "." in name and (table == "set" or table in Spec.model_fields):
        return name
    return f"set.{name}"


def _parse_values(name: str, text: str) -> tuple[Any, ...]:
    if (match := RANGE.fullmatch(text)) is not None:
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if step == 0 or not 0 <= (last - first) // step < MAX_TASKS:
            raise SpecError(f"--array {name}={text}: the range must have 1 to {MAX_TASKS:,} numbers; {HINT}")
        return tuple(range(first, last + 1, step))
    words = text.split(",")
    if not all(words):
        raise SpecError(f"--array {name}={text}: a value is empty; {HINT}")
    values = tuple(parse_value(word, name) for word in words)
    if len({*map(repr, values)}) < len(values):
        raise SpecError(f"--array {name}={text}: a value comes twice; leave it out")
    return values


def build_requests(sweep: ArraySweep, spec: Spec, launch: Launch) -> list[tuple[str, Spec]]:
    """Return the name of the run folder and the request of each training. Raises SpecError."""
    trees = []
    for overrides in sweep.combinations():
        tree = launch.model_dump(exclude_none=True) | spec.model_dump(exclude_none=True)
        for key, value in overrides.items():
            *tables, leaf = key.split(".")
            node = tree
            for table in tables:
                node = node.setdefault(table, {})
            node[leaf] = value
        trees.append((_name(overrides), build(tree)[0]))
    return trees


def _name(overrides: Mapping[str, Any]) -> str:
    """Return a name for a folder: "seed=1,lr=0.01", with the last part of each key."""
    words = [f"{key.rpartition('.')[2]}={value}" for key, value in overrides.items()]
    name = re.sub(r"[^\w=.,+-]", "_", ",".join(words)).encode()[:MAX_NAME_BYTES]
    return name.decode(errors="ignore")


def render_sweep(jobs: Sequence[Job], folder: Path, site: Site, limit: int | None) -> str:
    """Return the script of an array. Each task replaces itself by the job script of its run."""
    at_a_time = f"%{limit}" if limit is not None else ""
    first = jobs[0]
    lines = [
        *describe_head(
            Job(
                folder,
                first.folder,
                first.nodes,
                first.ranks_per_node,
                first.time,
                first.python,
                first.least_nodes,
                first.restarts,
            ),
            site,
        ),
        f"#SBATCH --array=0-{len(jobs) - 1}{at_a_time}",
        "# Each task trains in a run folder of its own. A task continues from its last checkpoint.",
    ]
    runs = "\n".join(f"    {quote_word(job.run)}" for job in jobs)
    return "\n".join(
        [
            "#!/bin/bash",
            *lines,
            "",
            f"runs=(\n{runs}\n)",
            'task=${SLURM_ARRAY_TASK_ID:?"submit this script with sbatch, which numbers its tasks"}',
            "run=${runs[$task]:?}",
            'exec >> "$run/slurm-$SLURM_JOB_ID.out" 2>&1',
            "# The job script refuses to run in an array, whose tasks could share a run folder.",
            'exec env -u SLURM_ARRAY_TASK_ID bash "$run/job.sh"',
            "",
        ]
    )
