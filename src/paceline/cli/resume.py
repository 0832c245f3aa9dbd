"""paceline resume: go on with a run, on other ranks or under another plan if need be."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import spec as specs
from paceline.distributed.world import World, read_world
from paceline.errors import RunError
from paceline.run import RunFolder
from paceline.spec import Spec


def resume(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    ranks: Annotated[int | None, typer.Option(help="Processes in all. Default: as before.")] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Nodes of a Slurm allocation, as of train. Default: as before.")
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help="What starts the ranks: local, slurm or ray. Default: as before.")
    ] = None,
    plan: Annotated[str | None, typer.Option(help="Default: as before.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Train until so many epochs in all.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train until so many steps in all.")] = None,
    lr: Annotated[float | None, typer.Option(help="Another learning rate from here on.")] = None,
    profile: Annotated[
        bool | None, typer.Option("--profile/--no-profile", help="Profile some steps. Default: as before.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: as before.")] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Start all ranks again so often after one died.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for a rank. Default: as before.")
    ] = None,
    edited: Annotated[
        bool, typer.Option("--edited", help="Accept a spec.toml that was changed by hand.")
    ] = False,
) -> None:
    """Go on with a run from its last whole checkpoint, to the end that was asked for."""
    from paceline.cli.request_options import node_range
    from paceline.run import open_run

    least, most = node_range(nodes)
    flags = {
        "ranks": ranks,
        "nodes": most,
        "launcher": launcher,
        "plan": plan,
        "epochs": epochs,
        "steps": steps,
        "optimizer.lr": lr,
    }
    flags |= {"profile": profile, "device": device, "restarts": restarts, "timeout_s": timeout}
    said: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    if most is not None:
        said["least_nodes"] = least
    resume_run(open_run(run), specs.replace_length(said), read_world(), edited=edited)


def resume_run(
    folder: RunFolder, overrides: dict[str, Any], me: World, again: bool = False, edited: bool = False
) -> None:
    """Train what a run asks for, with these keys over it, from its last checkpoint. Exits with the status of the training.

    again: a scheduler has started the same once more, so that there may be nothing left to do.
    edited: the request of the run was changed by hand, and is accepted.
    """
    from paceline.cli.launching import announce, check, start
    from paceline.report.run_view import glance

    if me.launcher is not None:
        overrides = {"ranks": me.size} | overrides
    file = folder.next_spec if again and folder.next_spec.exists() else folder.spec
    before = specs.load_own(file, {}, edited)[1]
    spec, launch = specs.load_own(file, overrides, edited)
    if me.rank == 0 and (skipped := glance(folder).skipped):
        print(f"{folder.path}: {skipped}", file=sys.stderr)
    if "plan" in overrides:
        launch = launch.model_copy(update={"chosen": None, "asked": None, "asked_ranks": None})
    elif launch.ranks != before.ranks and launch.ranks is not None:
        from paceline.training.replan import refit

        launch = refit(spec, before, launch)
    announce(me)
    launch = check(spec, launch, me)
    if (step := done(folder, spec)) is not None:
        said = f"{folder.path} is done: it was trained to step {step}"
        if not again:
            raise RunError(f"{said}; go further with --epochs or --steps")
        if me.rank == 0:
            print(said)
        return
    if me.rank == 0:
        folder.lock().close()  # nobody else is at it
        folder.write_next_request(spec, launch)
    try:
        start(spec, launch, me, folder)
    finally:
        if me.rank == 0:  # refused: the run keeps the request that it has
            folder.next_spec.unlink(missing_ok=True)


def done(folder: RunFolder, spec: Spec) -> int | None:
    """The last step of a run that has come to its end, and whose last checkpoint is whole."""
    from paceline.report.run_view import glance

    summary = glance(folder).summary
    started, ended = summary.started, summary.ended
    done = max(folder.checkpoints(), default=0)
    if (
        started is None
        or done < spec.total_steps(started.samples)
        or (ended is not None and ended.reason == "stopped")
    ):
        return None
    from paceline.training.checkpoint.save import last_good

    path, _, _ = last_good(folder)
    return done if path == folder.checkpoint(done) else None
