"""paceline tune: search hyper-parameters and architectures."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.cli.train.tune.jobs import submit_array, submit_study
from paceline.cli.train.tune.options import TuningRequest, with_tuning_options
from paceline.cli.train.tune.study import check_resume, open_definition, open_folder, read_launcher
from paceline.errors import LaunchError, RunError, SpecError

if TYPE_CHECKING:
    from paceline.tuning.definition import StudyDefinition
    from paceline.tuning.executors.pool import Executor
    from paceline.tuning.folder import StudyFolder


@with_tuning_options
def tune(request: TuningRequest) -> None:
    """Search hyper-parameters and architectures.

    Each trial is a training in a run folder of its own. The study continues after any interruption with
    --resume, and paceline show prints its results.

    Exit status: 0 all trials are over, 1 all of them failed, 75 it was stopped and can continue, 2 bad
    input.
    """
    from paceline.distributed.world import read_world
    from paceline.tuning.folder import is_study

    if (launcher := read_world().launcher) is not None:
        raise LaunchError(
            f"tune starts the ranks, but {launcher} started this process as a rank; run tune without "
            f"{launcher}"
        )
    if request.is_resume:
        check_resume(request)
    elif is_study(Path(request.target)):
        raise RunError(
            f"{request.target} is a study; continue it with: paceline tune {request.target} --resume"
        )
    if request.is_array:
        submit_array(request)
        return
    launcher = read_launcher(request)
    if launcher == "slurm" and (request.job_options or "SLURM_JOB_ID" not in os.environ):
        submit_study(request)
        return
    if request.job_options:
        raise SpecError(
            f"{request.job_options[0]} is for a Slurm job; add --launcher slurm, --nodes or --array, or "
            "leave it out"
        )
    raise typer.Exit(_run_here(request) if launcher == "local" else _run_on_nodes(request, launcher))


def _run_here(request: TuningRequest) -> int:
    """Run a study on this machine and return the exit status."""
    from paceline.cluster.limits import measure_free_cores
    from paceline.launch.launchers import check_count
    from paceline.tuning.executors.local_node import LocalNode, warm_server
    from paceline.tuning.executors.pool import Executor

    cores = measure_free_cores()
    with warm_server() as server:  # imports PyTorch while this process checks the study
        definition = open_definition(request)
        ranks = definition.search.ranks
        check_count(ranks)
        executor = Executor([LocalNode(ranks, cores, server)], server)
        return _run(open_folder(request, definition), definition, executor)


def _run_on_nodes(request: TuningRequest, launcher: str) -> int:
    """Run a study on the nodes of a Slurm allocation or a Ray cluster, and return the exit status."""
    from paceline.launch.launchers import check_ray_is_installed
    from paceline.tuning.executors.nodes import open_nodes
    from paceline.tuning.executors.pool import Executor

    if launcher == "ray":
        check_ray_is_installed()
    definition = open_definition(request)
    with open_nodes(launcher, definition.search.nodes, definition.search.ranks) as nodes:
        return _run(open_folder(request, definition), definition, Executor(nodes))


def _run(folder: "StudyFolder", definition: "StudyDefinition", executor: "Executor") -> int:
    """Run a study and return the exit status."""
    from paceline.launch.signals import STOPPED
    from paceline.tuning.controller import Controller
    from paceline.tuning.journal import StudyState, Trial
    from paceline.tuning.report.results import count_states, format_trial, has_only_failures, write_best

    def report(state: StudyState, trial: Trial) -> None:
        print(format_trial(definition, trial), flush=True)

    print(f"study {folder.path}", flush=True)
    with Controller(folder, definition, report) as controller:
        try:
            is_over = controller.run(executor)
        finally:
            best = write_best(folder, controller.definition, controller.state)
            print(count_states(controller.state))
        if best is not None:
            names = [objective.name for objective in definition.objectives]
            print(f"best{f' in {names[0]}' if len(names) > 1 else ''}: {format_trial(definition, best)}")
            print(f"train it again with: paceline train {folder.best}")
            if len(names) > 1:
                print(f"all trials of the Pareto front: paceline show {folder.path}")
        elif is_over and definition.search.scheduler in ("asha", "hyperband"):
            search = definition.search
            print(
                f"no trial trained to the end, so there is no best one; {search.scheduler} with "
                f"{search.rungs} rungs wants {search.reduction ** (search.rungs - 1)} trials or more"
            )
    if not is_over:
        print(f"stopped; continue with: paceline tune {folder.path} --resume", file=sys.stderr)
        return STOPPED
    return 1 if has_only_failures(controller.state) else 0
