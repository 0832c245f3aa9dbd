"""StudyDefinition: what a study searches, as the file study.toml; the same format as a sweep file."""

import contextlib
import copy
import dataclasses
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from paceline.errors import Error, SpecError, TaskError
from paceline.files import write_whole
from paceline.spec import (
    DEFAULT_EPOCHS,
    KEYS,
    TABLES,
    Launch,
    Spec,
    Value,
    abbreviate,
    apply_overrides,
    build,
    describe_error,
    keys,
    read_toml,
    suggest,
)
from paceline.task import Task, build_task, load_task_class
from paceline.tuning.objectives import StudyObjective, parse_objectives
from paceline.tuning.optuna_needs import NEEDS, check_sampler
from paceline.tuning.parameter import Parameter, parse_parameter
from paceline.tuning.prediction.quantities import PREFIX, QUANTITIES, Bound, parse_bound
from paceline.tuning.space import Space, build_space
from paceline.units import parse_duration_s
from paceline.user_code import UserCode

# Options of `paceline train` by which a key of the request is known.
SHORT_NAMES = {
    "lr": "optimizer.lr",
    "optimizer": "optimizer.name",
    "clip": "optimizer.clip",
    "schedule": "schedule.name",
}
# Keys that the study itself decides.
LAUNCH_KEYS = {"run", "ranks", "nodes", "least_nodes", "launcher", "chosen", "asked", "asked_ranks"}
OWN_KEYS = LAUNCH_KEYS | {"task", "set"}
DEFAULT_TRIALS = 20


class Search(Value):
    """The table [tune]: how the space is searched."""

    metrics: tuple[str, ...] = Field(
        default=("min loss",), strict=False, description="objectives: min NAME or max NAME"
    )
    trials: int = Field(default=DEFAULT_TRIALS, ge=1, le=10**6, description="number of trials")
    sampler: Literal["random", "grid", "quasi-random", "tpe", "gp", "cma-es", "nsga2"] = Field(
        default="random", description="how values are chosen"
    )
    scheduler: Literal["none", "median", "asha", "hyperband", "pbt"] = Field(
        default="none", description="which trials are trained to the whole length"
    )
    reduction: int = Field(
        default=3, ge=2, le=100, description="of asha and hyperband: one of this many trials is promoted"
    )
    rungs: int = Field(
        default=3,
        ge=2,
        le=20,
        description="lengths of asha and hyperband, each reduction times longer; generations of pbt",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="seed of the sampler")
    ranks: int = Field(default=1, ge=1, le=10**6, description="ranks that the trials share")
    nodes: int = Field(default=1, ge=1, le=10**5, description="nodes over which the ranks are spread evenly")
    launcher: Literal["local", "slurm", "ray"] = Field(
        default="local", description="what starts trials: this machine, a Slurm allocation, or Ray"
    )
    ranks_per_trial: int | Literal["auto"] = Field(
        default=1, description="ranks of each trial; auto: the least number on which it is predicted to fit"
    )
    threads: int | None = Field(
        default=None, ge=1, le=1024, description="threads of each rank, chosen when the study starts"
    )
    max_time: str | None = Field(
        default=None, description="wall time after which trials save and the study stops, such as 90m"
    )
    where: tuple[str, ...] = Field(
        default=(), strict=False, description="conditions on predictions, such as memory<16GiB"
    )

    @field_validator("max_time")
    @classmethod
    def _max_time_is_a_duration(cls, text: str | None) -> str | None:
        try:
            if text is not None:
                parse_duration_s(text)
        except ValueError:
            raise ValueError(
                f"max_time must be a duration such as '90m' or '4h', got {abbreviate(text)}"
            ) from None
        return text

    @field_validator("metrics")
    @classmethod
    def _metrics_have_directions(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        if not metrics:
            raise ValueError("metrics must name at least one objective, such as 'max accuracy'")
        for number, metric in enumerate(metrics):
            direction, _, name = metric.partition(" ")
            if direction not in ("min", "max") or not name or name != name.strip():
                raise ValueError(f"metrics must be 'min NAME' or 'max NAME', got {abbreviate(metric)}")
            if name in [other.partition(" ")[2] for other in metrics[:number]]:
                raise ValueError(f"metrics has {name!r} twice; leave one out")
        return metrics

    @model_validator(mode="after")
    def _schedulers_need_one_objective(self) -> Self:
        if self.scheduler != "none" and len(self.metrics) > 1:
            raise ValueError(
                f"scheduler {self.scheduler} ranks trials by one objective, got {len(self.metrics)}; leave "
                "one, or use --scheduler none"
            )
        return self

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks of each node."""
        return self.ranks // self.nodes

    def count_nodes(self, ranks: int) -> int | None:
        """Return on how many nodes a trial with that many ranks trains; None if that is impossible.

        It trains on one node, or with Slurm on all ranks of several.
        """
        if 1 <= ranks <= self.ranks_per_node:
            return 1
        nodes, rest = divmod(ranks, self.ranks_per_node)
        return nodes if self.launcher == "slurm" and not rest and 1 <= nodes <= self.nodes else None

    @model_validator(mode="after")
    def _trials_fit(self) -> Self:
        if self.nodes > 1 and self.launcher == "local":
            raise ValueError(
                f"nodes={self.nodes} requires launcher slurm or ray, got local; use --launcher slurm"
            )
        if self.ranks % self.nodes:
            more = self.ranks + self.nodes - self.ranks % self.nodes
            raise ValueError(
                f"ranks={self.ranks} cannot be spread evenly over {self.nodes} nodes; use --ranks {more}"
            )
        if isinstance(self.ranks_per_trial, int) and self.count_nodes(self.ranks_per_trial) is None:
            where = f"ranks={self.ranks}" if self.nodes == 1 else f"the {self.ranks_per_node} ranks of a node"
            if self.nodes > 1 and self.launcher == "slurm":
                where += f" or a multiple of them up to {self.ranks}"
            raise ValueError(
                f"ranks_per_trial must be from 1 to {where}, got {self.ranks_per_trial}; "
                f"use --ranks {max(1, self.ranks_per_trial) * self.nodes}"
            )
        return self


@dataclass(frozen=True)
class StudyDefinition:
    """A study: the request that all trials share, the space and how it is searched.

    request: nested tables with the keys that were given, not their defaults.
    ranges: the range of each parameter by name, as the user wrote it.
    """

    request: Mapping[str, Any]
    ranges: Mapping[str, Any]
    search: Search
    space: Space

    @property
    def bounds(self) -> list[Bound]:
        return [parse_bound(text) for text in self.search.where]

    @property
    def needs_prediction(self) -> bool:
        """Whether trials are predicted before they start."""
        is_objective = any(goal.name.startswith(PREFIX) for goal in self.objectives)
        return bool(self.search.where) or is_objective or self.search.ranks_per_trial == "auto"

    @property
    def objectives(self) -> list[StudyObjective]:
        return parse_objectives(self.search.metrics)

    def choose_threads(self, cores_per_rank: float) -> Self:
        """Return the study with a number of threads for each rank, such that all ranks share the free cores.

        More threads than free cores wait for each other in every operation. The number is stored, so that
        a study that continues computes the same bits.
        """
        if self.search.threads is not None or "threads" in self.request:
            return self
        threads = max(1, math.floor(cores_per_rank + 0.5))
        return dataclasses.replace(self, search=self.search.model_copy(update={"threads": threads}))

    def build_request(
        self, values: Mapping[str, Any], overrides: Mapping[str, Any] = {}
    ) -> tuple[Spec, Launch]:
        """Return the request of a trial with these values of its parameters. Raises SpecError."""
        tree = copy.deepcopy(dict(self.request))
        apply_overrides(tree, self.space.to_overrides(values) | dict(overrides))
        return build(tree)

    def limit_length(self, values: Mapping[str, Any], share: float) -> dict[str, Any]:
        """Return the overrides with which a trial trains only a share of its length.

        Lengths are epochs, or samples if the request has steps, so that trials with different batches see
        equally many samples. A schedule of the learning rate keeps the whole length.
        """
        from paceline.training.optimization.schedule import depends_on_length

        spec, _ = self.build_request(values)
        if spec.steps is None:
            epochs = spec.epochs or DEFAULT_EPOCHS
            length = {"epochs": epochs * share}
            whole = f"{epochs:.6f} epochs"
        else:
            base, _ = build(self.request)
            samples = base.batches.samples_before(spec.steps)
            steps = [spec.batches.steps_for(math.ceil(samples * part)) for part in (share, 1.0)]
            length, whole = {"steps": max(1, steps[0])}, f"{steps[1]} steps"
        return length | ({"schedule.length": whole} if depends_on_length(spec.schedule) else {})

    def check(self, kind: type[Task]) -> None:
        """Build the request and the task at both ends of each parameter. Raises SpecError and TaskError."""
        spec, _ = self.build_request({})
        if not spec.set.keys() <= {field.name for field in dataclasses.fields(kind)}:
            build_task(kind, spec.task, spec.set)  # raises, so that no parameter is blamed
        for parameter in self.space.parameters:
            others = self.space.find_condition_values(parameter)
            for value in parameter.extremes():
                try:
                    spec, _ = self.build_request({**others, parameter.name: value})
                    build_task(kind, spec.task, spec.set)
                except Error as error:
                    raise SpecError(
                        f"--space {parameter.name}={parameter.describe_range()}: the value {value!r} is "
                        f"impossible: {error}{self._suggest_condition(kind, parameter, value)}"
                    ) from error

    def _suggest_condition(self, kind: type[Task], parameter: Parameter, value: Any) -> str:
        """Return a condition with which a value is possible, as the end of a sentence, or an empty text."""
        for other in self.space.parameters:
            if other.name == parameter.name or other.kind != "choice":
                continue
            if parameter.condition is not None or other.condition is not None:
                continue
            for choice in other.choices:
                with contextlib.suppress(Error):
                    spec, _ = self.build_request({parameter.name: value, other.name: choice})
                    build_task(kind, spec.task, spec.set)
                    return f"; or add a condition: '{parameter.name}=… if {other.name}=={choice}'"
        return ""

    def write(self, path: Path) -> None:
        """Write the definition as study.toml. Raises RunError."""
        search = self.search.model_dump(exclude_none=True)
        tree = {**self.request, "space": dict(self.ranges), "tune": search}
        write_whole(path, tomli_w.dumps(tree))


def define_study(
    request: Mapping[str, Any], ranges: Mapping[str, Any], search: Mapping[str, Any]
) -> StudyDefinition:
    """Return the study of a request, the ranges of its parameters and the keys of [tune].

    Imports the task. Raises SpecError and TaskError.
    """
    spec, _ = build(request)
    kind = load_task_class(spec.task)
    ranges = ranges or _read_own_space(kind, spec)
    if not ranges:
        raise SpecError(
            "tune requires a parameter to search; add one, such as --space lr=log:1e-4:1e-1, or define "
            "space() in the task"
        )
    space = build_space([_read_parameter(name, text, spec.task, kind) for name, text in ranges.items()])
    given = dict(search)
    if given.get("sampler") == "grid":
        count = space.count_grid()
        if given.setdefault("trials", count) > count:
            raise SpecError(f"the grid has {count} combinations, got --trials {given['trials']}; use fewer")
    try:
        checked = Search.model_validate(given)
    except ValidationError as error:
        raise SpecError(describe_error(error, list(Search.model_fields), "key of [tune]")) from error
    for text in checked.where:
        parse_bound(text)
    for goal in checked.metrics:
        name = goal.partition(" ")[2]
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in QUANTITIES:
            raise SpecError(
                f"--metric {goal!r}: nothing predicts it{suggest(name, [PREFIX + key for key in QUANTITIES])}"
            )
    if checked.sampler in NEEDS:
        check_sampler(checked.sampler, len(checked.metrics))
    definition = StudyDefinition(request, ranges, checked, space)
    definition.check(kind)
    return definition


def _read_own_space(kind: type[Task], spec: Spec) -> dict[str, Any]:
    """Return the ranges of `Task.space`. Raises TaskError."""
    task = build_task(kind, spec.task, spec.set)
    with UserCode("space()", task.space):
        ranges = task.space()
    if not isinstance(ranges, Mapping) or not all(isinstance(name, str) for name in ranges):
        raise TaskError(f"space() must return a dict of ranges by name, got {abbreviate(ranges)}")
    return dict(ranges)


def read_definition(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the request, the ranges and the keys of [tune] of a study.toml or sweep file.

    Raises SpecError.
    """
    tree = read_toml(path)
    tables = []
    for name in ("space", "tune"):
        table = tree.pop(name, {})
        if not isinstance(table, dict):
            raise SpecError(f"{path}: {name} must be a table, got {abbreviate(table)}; write [{name}]")
        tables.append(table)
    ranges = dict(_flatten(tables[0]))
    return tree, ranges, tables[1]


def _flatten(table: Mapping[str, Any], prefix: str = "") -> typing.Iterator[tuple[str, Any]]:
    """Yield the entries of nested tables by dotted name, since TOML reads optimizer.lr as a table."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read_parameter(name: str, text: Any, task: str, kind: type[Task]) -> Parameter:
    key, annotation = _find_key(name, task, kind)
    return parse_parameter(name, key, annotation, text)


def _find_key(name: str, task: str, kind: type[Task]) -> tuple[str, Any]:
    """Return the key of a request that a name stands for, and its type. Raises SpecError."""
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    request = {key.removeprefix("spec."): field.annotation for key, field in keys()}
    if name in fields:
        return f"set.{name}", _resolve_annotation(kind, name, fields[name])
    plain = SHORT_NAMES.get(name, name.removeprefix("spec."))
    if plain in OWN_KEYS:
        raise SpecError(f"--space {name}: the study decides this key; leave it out")
    if plain in request:
        return plain, request[plain]
    table, dot, _ = name.partition(".")
    if dot and table in fields and table not in TABLES:  # a field of a table of the task
        return f"set.{name}", None
    known = [*fields, *SHORT_NAMES, *(key for key in KEYS if key in request)]
    raise SpecError(
        f"--space {name}: {task} has no such field, and a request no such key{suggest(name, known)}"
    )


def _resolve_annotation(kind: type[Task], name: str, annotation: Any) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return typing.get_type_hints(kind)[name]
    except Exception:  # of the user's file: a name that exists only for type checkers
        return {"int": int, "float": float}.get(annotation)


def override_request(request: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request with other values of some keys."""
    tree = copy.deepcopy(dict(request))
    apply_overrides(tree, overrides)
    return tree
