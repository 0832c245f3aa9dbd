"""The study that the options of paceline tune define or continue."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.train.tune.options import TuningRequest
from paceline.errors import RunError, SpecError

if TYPE_CHECKING:
    from paceline.tuning.definition import StudyDefinition
    from paceline.tuning.folder import StudyFolder

RESUMABLE = ("trials", "ranks", "nodes", "launcher", "max_time")  # what --resume may change


def check_resume(request: TuningRequest) -> None:
    """Raise RunError for options that would change a study."""
    changed = [*request.flags, *request.ranges, *request.assignments]
    changed += [key for key in request.search if key not in RESUMABLE]
    if changed or request.run_dir is not None:
        raise RunError(
            f"--resume continues {request.target} as it was defined, got {(changed or ['--run-dir'])[0]}; "
            "leave it out, or start a new study"
        )


def read_launcher(request: TuningRequest) -> str:
    """Return what starts the trials, without importing the task. Raises RunError and SpecError."""
    search: Mapping[str, Any] = request.search
    if request.is_resume or request.target.endswith(".toml"):
        from paceline.tuning.definition import read_definition
        from paceline.tuning.folder import open_study

        file = open_study(Path(request.target)).definition if request.is_resume else Path(request.target)
        search = read_definition(file)[2] | dict(search)
    return str(search.get("launcher", "local"))


def open_definition(request: TuningRequest) -> "StudyDefinition":
    """Return the study of a command line, new or continued. Raises an Error."""
    from paceline.tuning.definition import define_study, read_definition
    from paceline.tuning.folder import open_own_study
    from paceline.tuning.measured_cost import check_measured_cost

    if not request.is_resume:
        definition = define(request)
    else:
        tree, ranges, before = read_definition(open_own_study(Path(request.target)).definition)
        definition = define_study(tree, ranges, before | dict(request.search))
    check_measured_cost(definition)
    return definition


def open_folder(request: TuningRequest, definition: "StudyDefinition") -> "StudyFolder":
    """Return the folder of a study, which is created for a new one. Raises RunError."""
    from paceline.tuning.disk_space import check_disk
    from paceline.tuning.folder import choose_study, create_study, open_study

    if request.is_resume:
        return open_study(Path(request.target))
    task = definition.request["task"]
    check_disk(definition, choose_study(request.run_dir, task).path)
    folder = create_study(request.run_dir, task)
    try:
        definition.write(folder.definition)
    except RunError:  # a full disk
        shutil.rmtree(folder.path)
        raise
    return folder


def define(request: TuningRequest) -> "StudyDefinition":
    """Return the study of a command line. Raises SpecError and TaskError."""
    from paceline import spec as specs
    from paceline import task as tasks
    from paceline.tuning.definition import define_study, override_request, read_definition

    tree: dict[str, Any] = {"task": request.target}
    ranges, before = dict(request.ranges), dict[str, Any]()
    if request.target.endswith(".toml"):
        tree, file_ranges, before = read_definition(Path(request.target))
        ranges = file_ranges | ranges
        if "task" not in tree:
            raise SpecError(
                f'{request.target} names no task; write task = "digits" there, or task = "my.py:Class"'
            )
    assignments = specs.parse_overrides(request.assignments)
    for key, value in assignments.items():
        specs.check_same_value(
            specs.set_key(key), "its own option", request.flags.get(key, value), "--set", value
        )
    given = dict(request.flags) | assignments
    tree = override_request(tree, specs.replace_length(dict(given)))
    spec, _ = specs.build(tree)
    if not isinstance(tree["task"], str):
        raise SpecError(f"task must be a name, got {tree['task']!r:.80}")
    tree["task"] = tasks.resolve_reference(spec.task)
    if spec.set:
        tree["set"] = dict(spec.set)
    definition = define_study(tree, ranges, before | dict(request.search))
    for parameter in definition.space.parameters:
        if parameter.key in given:
            raise SpecError(
                f"--space {parameter.name} is searched, and an option gives it the value "
                f"{given[parameter.key]!r:.80}; leave one out"
            )
    return definition
