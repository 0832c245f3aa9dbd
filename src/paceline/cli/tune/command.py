"""paceline tune: search hyper-parameters and architectures."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.cli.tune.options import TuningRequest, with_tuning_options
from paceline.errors import LaunchError, RunError, SpecError

if TYPE_CHECKING:
    from paceline.launch.fork_server import ForkServer
    from paceline.tuning.definition import StudyDefinition
    from paceline.tuning.folder import StudyFolder

RESUMABLE = ("trials", "ranks", "max_time")  # what --resume may change


@with_tuning_options
def tune(request: TuningRequest) -> None:
    """Search hyper-parameters and architectures.

    Each trial is a training in a run folder of its own. The study continues after any interruption with
    --resume, and paceline show prints its results.

    Exit status: 0 all trials are over, 75 it was stopped and can continue, 2 bad input.
    """
    from paceline.cluster.limits import measure_free_cores
    from paceline.distributed.world import read_world
    from paceline.tuning.executors.local_pool import warm_server
    from paceline.tuning.folder import is_study

    if (launcher := read_world().launcher) is not None:
        raise LaunchError(
            f"tune starts the ranks, but {launcher} started this process as a rank; run tune without "
            f"{launcher}"
        )
    if request.is_resume:
        _check_resume(request)
    elif is_study(Path(request.target)):
        raise RunError(
            f"{request.target} is a study; continue it with: paceline tune {request.target} --resume"
        )
    if request.is_array:
        _submit_array(request)
        return
    free_cores = measure_free_cores()
    with warm_server() as server:  # imports PyTorch while this process checks the study
        folder, definition = _open(request) if request.is_resume else _create(request)
        raise typer.Exit(_run(folder, definition.choose_threads(free_cores), server))


def _check_resume(request: TuningRequest) -> None:
    """Raise RunError for options that would change a study."""
    changed = [*request.flags, *request.ranges, *request.assignments]
    changed += [key for key in request.search if key not in RESUMABLE]
    if changed or request.run_dir is not None:
        raise RunError(
            f"--resume continues {request.target} as it was defined, got {(changed or ['--run-dir'])[0]}; "
            "leave it out, or start a new study"
        )


def _open(request: TuningRequest) -> "tuple[StudyFolder, StudyDefinition]":
    """Return the study that is continued. Raises an Error."""
    from paceline.launch.launchers import check_count
    from paceline.tuning.definition import define_study, read_definition
    from paceline.tuning.folder import open_study

    folder = open_study(Path(request.target))
    tree, ranges, before = read_definition(folder.definition)
    definition = define_study(tree, ranges, before | dict(request.search))
    check_count(definition.search.ranks)
    return folder, definition


def _create(request: TuningRequest) -> "tuple[StudyFolder, StudyDefinition]":
    """Create the folder of a new study and return its definition. Raises an Error."""
    from paceline.launch.launchers import check_count
    from paceline.tuning.disk_space import check_disk
    from paceline.tuning.folder import choose_study, create_study

    definition = _define(request)
    check_count(definition.search.ranks)
    task = definition.request["task"]
    check_disk(definition, choose_study(request.run_dir, task).path)
    folder = create_study(request.run_dir, task)
    definition.write(folder.definition)
    return folder, definition


def _define(request: TuningRequest) -> "StudyDefinition":
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
    tree = override_request(tree, specs.replace_length(dict(request.flags) | assignments))
    spec, _ = specs.build(tree)
    if not isinstance(tree["task"], str):
        raise SpecError(f"task must be a name, got {tree['task']!r:.80}")
    tree["task"] = tasks.resolve_reference(spec.task)
    if spec.set:
        tree["set"] = dict(spec.set)
    return define_study(tree, ranges, before | dict(request.search))


def _submit_array(request: TuningRequest) -> None:
    """Queue the trials as a job array, and print its number; or only print its script."""
    import shutil

    from paceline.errors import Error
    from paceline.tuning.executors.array import plan_array, render_array, submit_array
    from paceline.tuning.folder import choose_study, create_study

    definition = _define(request)
    job, settings = plan_array(definition, request.time, request.site)
    task = definition.request["task"]
    if request.is_dry_run:
        print(render_array(job, settings, choose_study(request.run_dir, task)), end="")
        return
    folder = create_study(request.run_dir, task)
    try:
        definition.write(folder.definition)
        number = submit_array(folder, definition, job, settings)
    except (Error, OSError, KeyboardInterrupt):
        shutil.rmtree(folder.path)
        raise
    print(f"{folder.path}: job array {number}, {definition.search.trials} tasks")


def _run(folder: "StudyFolder", definition: "StudyDefinition", server: "ForkServer | None") -> int:
    """Run a study and return the exit status."""
    from paceline.launch.signals import STOPPED
    from paceline.tuning.controller import Controller
    from paceline.tuning.executors.local_pool import Executor
    from paceline.tuning.journal import StudyState, Trial
    from paceline.tuning.report.results import count_states, format_trial, write_best

    def report(state: StudyState, trial: Trial) -> None:
        print(format_trial(definition, trial), flush=True)

    print(f"study {folder.path}", flush=True)
    with Controller(folder, definition, report) as controller:
        definition.write(folder.definition)  # --resume may have changed it, and threads were chosen
        try:
            is_over = controller.run(Executor(definition.search.ranks, server))
        finally:
            best = write_best(folder, definition, controller.state)
            print(count_states(controller.state))
        if best is not None:
            print(f"best: {format_trial(definition, best)}")
            print(f"train it again with: paceline train {folder.best}")
    if not is_over:
        print(f"stopped; continue with: paceline tune {folder.path} --resume", file=sys.stderr)
    return 0 if is_over else STOPPED
