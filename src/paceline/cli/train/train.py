"""paceline train: train a task on any number of ranks."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli.options.option_types import RANKS
from paceline.cli.options.request_options import TrainingRequest, with_request_options
from paceline.distributed.world import World, read_world
from paceline.errors import Error, LaunchError, SpecError
from paceline.spec import Launch, Spec


@with_request_options
def train(
    request: TrainingRequest,
    keys: Annotated[
        bool,
        Option("--keys", help="List the names for --set with type, default and meaning, and exit."),
    ] = False,
    measure: Annotated[
        int | None,
        Option(
            metavar="PLANS",
            min=1,
            help="With --plan auto: train shortly under this many of the best predicted plans first, and "
            "choose the fastest.",
            rich_help_panel=RANKS,
        ),
    ] = None,
) -> None:
    """Train a task on any number of ranks. Under torchrun, mpirun or srun, this process becomes a rank."""
    if keys:
        from paceline import task
        from paceline.cli.options.keys import format_keys

        print("\n".join(format_keys(request.spec.task, task.load_task_class(request.spec.task))))
        return
    if measure is not None:
        request = _choose_measured_plan(request, measure)
    start_run(*request, read_world())


def _choose_measured_plan(request: TrainingRequest, count: int) -> TrainingRequest:
    """Return the request with the fastest of the best plans, which short trainings measure."""
    from paceline.cli.options.short_runs import build_short_request, measure_best_plans
    from paceline.launch.check_launch import count_devices
    from paceline.launch.launchers import find_launcher
    from paceline.plan.plan import AUTO

    spec, launch = request
    if launch.plan != AUTO:
        given = f"got --plan {launch.plan}" if launch.plan is not None else "but --plan is not given"
        raise SpecError(f"--measure chooses among plans, {given}; use --plan auto")
    ranks = launch.ranks or launch.nodes * count_devices(launch.device)
    launch = launch.model_copy(update={"ranks": ranks})
    find_launcher(launch).check(launch)
    found = measure_best_plans(build_short_request(spec, launch), ranks, count)
    why = f"auto chose {found.describe_choice()}"
    chosen = {"plan": str(found.best.plan), "chosen": why, "asked": AUTO}
    return TrainingRequest(spec, launch.model_copy(update=chosen))


def start_run(spec: Spec, launch: Launch, me: World) -> None:
    """Train in a new run folder, as a rank or by starting ranks. Exits with the status of the training."""
    if me.launcher is not None and launch.launcher is not None:
        raise LaunchError(
            f"--launcher {launch.launcher}, but {me.launcher} started this process as a rank; leave "
            "--launcher out"
        )
    from paceline import task
    from paceline.cli.options.launching import announce_start, has_started, start
    from paceline.launch.check_launch import check_launch
    from paceline.launch.fork_server import early_fork_server
    from paceline.launch.launchers import is_rank
    from paceline.run import create, release, reserve

    if me.restart and (launch.run is None or Path(launch.run).exists()):
        _resume_restarted(launch, me)
        return
    announce_start(me)
    if me.launcher is None and launch.launcher in (None, "local") and launch.nodes == 1:
        warn_of_login_node()
    with contextlib.ExitStack() as stack:
        path = early = None
        if me.launcher is None and (launch.ranks or 1) > 1:
            path = reserve(launch.run, task.resolve_reference(spec.task))
            stack.callback(release, path)
            early = stack.enter_context(early_fork_server(spec, launch, path))
        launch = check_launch(spec, launch, me)
        spec = spec.model_copy(update={"task": task.resolve_reference(spec.task)})
        if is_rank(launch, me):
            start(spec, launch, me, None)
            return
        run = create(path or reserve(launch.run, spec.task), spec, launch)
        try:
            start(spec, launch, me, run, early)
        except Error:
            if not has_started(run):
                run.delete()
            raise


def warn_of_login_node() -> None:
    """Print a warning if this machine is a login node of Slurm."""
    from paceline.launch.slurm.login_node import describe_login_node, find_login_node

    if (name := find_login_node(os.environ)) is not None:
        print(f"paceline: warning: {describe_login_node(name)}", file=sys.stderr)


def _resume_restarted(launch: Launch, me: World) -> None:
    """Continue the run after the launcher restarted its ranks."""
    from paceline.cli.train.resume import resume_run
    from paceline.run import open_run

    if launch.run is None:
        raise LaunchError(
            f"{me.launcher} restarted the ranks of a run without --run-dir, so they cannot find it; add "
            "--run-dir FOLDER"
        )
    resume_run(open_run(Path(launch.run)), {}, me, is_restart=True)
