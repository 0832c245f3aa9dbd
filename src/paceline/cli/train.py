"""paceline train: train a task on any number of ranks."""

from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli.request_options import TrainingRequest, requesting
from paceline.distributed.world import World, read_world
from paceline.errors import Error, LaunchError
from paceline.spec import Launch, Spec


@requesting
def train(
    request: TrainingRequest,
    keys: Annotated[
        bool,
        Option(
            "--keys", help="List every NAME of --set with type, default and meaning, and leave it at that."
        ),
    ] = False,
) -> None:
    """Train a task. Under torchrun, mpirun or srun this process simply becomes a rank."""
    if keys:
        from paceline import task
        from paceline.cli.keys import lines

        print("\n".join(lines(request.spec.task, task.load_task_class(request.spec.task))))
        return
    start_new(*request, read_world())


def start_new(spec: Spec, launch: Launch, me: World) -> None:
    """Train in a new run folder: become a rank, or start some. Exits with the status of the training."""
    if me.launcher is not None and launch.launcher is not None:
        raise LaunchError(
            f"--launcher {launch.launcher}, but {me.launcher} has started this process as a rank; leave --launcher out"
        )
    from paceline import task
    from paceline.cli.launching import announce, check, has_started, start
    from paceline.launch.launchers import is_rank
    from paceline.run import create, reserve

    if me.restart and (launch.run is None or Path(launch.run).exists()):
        _go_on_with(launch, me)
        return
    announce(me)
    launch = check(spec, launch, me)
    spec = spec.model_copy(update={"task": task.resolve_reference(spec.task)})
    if is_rank(launch, me):
        start(spec, launch, me, None)
        return
    run = create(reserve(launch.run, spec.task), spec, launch)
    try:
        start(spec, launch, me, run)
    except Error:
        if not has_started(run):
            run.delete()  # nothing half done
        raise


def _go_on_with(launch: Launch, me: World) -> None:
    """The launcher has started these ranks again."""
    from paceline.cli.resume import resume_run
    from paceline.run import open_run

    if launch.run is None:
        raise LaunchError(
            f"{me.launcher} has started the ranks again, and nothing says which run to go on with: say --run-dir FOLDER"
        )
    resume_run(open_run(Path(launch.run)), {}, me, again=True)
