"""paceline resume: continue a run, also on another number of ranks or under another plan."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline import spec as specs
from paceline.distributed.world import World, read_world
from paceline.errors import RunError
from paceline.run import RunFolder
from paceline.spec import Spec


def resume(
    run: Annotated[Path, typer.Argument(help="Folder of the run")],
    ranks: Annotated[int | None, typer.Option(help="Number of processes [default: as before]")] = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="Number of nodes of the Slurm allocation, as for train [default: as before]"),
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help="Launcher of the ranks: local, slurm or ray [default: as before]")
    ] = None,
    plan: Annotated[str | None, typer.Option(help="Plan, as for train [default: as before]")] = None,
    epochs: Annotated[
        float | None,
        typer.Option(help="Total length in epochs, with those already done [default: as before]"),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Total length in steps, with those already done [default: as before]")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(metavar="W,W,…", help="Weights of a Mixture from the next step on [default: as before]"),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate for the remaining steps [default: as before]")
    ] = None,
    max_time: Annotated[
        str | None,
        typer.Option(
            help="Wall time after which the run saves and stops again, such as 90m [default: as before]"
        ),
    ] = None,
    patience: Annotated[
        int | None,
        typer.Option(
            help="End after this many evaluations in a row without a better metric [default: as before]"
        ),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="End when the metric reaches this value [default: as before]")
    ] = None,
    profile: Annotated[
        bool | None, typer.Option("--profile/--no-profile", help="Profile some steps [default: as before]")
    ] = None,
    report: Annotated[
        bool | None,
        typer.Option(
            "--report/--no-report",
            help="Write report.html into the run folder at the end [default: as before]",
        ),
    ] = None,
    mlflow: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Send the run to MLflow at this address [default: as before]"),
    ] = None,
    monitor: Annotated[
        str | None,
        typer.Option(
            "--monitor",
            "--monitor-every",
            metavar="SECONDS|off",
            help="Seconds between samples of each node, or off [default: as before]",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FIRST:LAST", help="Trace these steps, such as 20:25 [default: as before]"),
    ] = None,
    histograms: Annotated[
        int | None, typer.Option(help="Number of steps between histograms [default: as before]")
    ] = None,
    nvtx: Annotated[
        bool | None,
        typer.Option("--nvtx/--no-nvtx", help="Mark steps and their parts with NVTX [default: as before]"),
    ] = None,
    nsys: Annotated[
        bool | None,
        typer.Option("--nsys/--no-nsys", help="Start ranks under Nsight Systems [default: as before]"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Device: cpu or cuda [default: as before]")] = None,
    restarts: Annotated[
        int | None,
        typer.Option(help="Maximum number of restarts after a rank fails [default: as before]"),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that a rank waits for another before the training ends [default: as before]"
        ),
    ] = None,
    edited: Annotated[
        bool, typer.Option("--edited", help="Accept a spec.toml that was edited by hand.")
    ] = False,
) -> None:
    """Continue a run from its last complete checkpoint.

    It ends at the requested length, or at that of --epochs or --steps. A run that a metric ended continues
    with a larger --patience or another --target.
    """
    from paceline.cli.options.request_options import parse_nodes
    from paceline.run import open_run

    least, most = parse_nodes(nodes)
    flags = {
        "ranks": ranks,
        "nodes": most,
        "launcher": launcher,
        "plan": plan,
        "epochs": epochs,
        "steps": steps,
        "optimizer.lr": lr,
        "max_time": max_time,
        "stop.patience": patience,
        "stop.target": target,
        "profile": profile,
        "report": report,
        "mlflow": mlflow,
        "monitor": monitor,
        "trace": trace,
        "nvtx": nvtx if nvtx is not None or not nsys else True,
        "nsys": nsys,
        "histograms": histograms,
        "device": device,
        "restarts": restarts,
        "timeout_s": timeout,
    }
    overrides: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    if most is not None:
        overrides["least_nodes"] = least
    folder = open_run(run)
    if weights is not None:
        overrides["data.weights"] = _add_weights(folder, weights, edited)
    resume_run(folder, specs.replace_length(overrides), read_world(), edited=edited)


def _add_weights(folder: RunFolder, text: str, edited: bool) -> list[dict[str, Any]]:
    """Return the changes of weights of a run, and another from the sample after its last checkpoint on."""
    spec, _ = specs.load_own(folder.spec, {}, edited)
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError:
        raise RunError(f"--weights must be numbers such as 0.7,0.3, got {text!r}") from None
    first = spec.batches.samples_before(max(folder.checkpoints(), default=0))
    if not first:
        raise RunError(f"{folder.path} has no checkpoint, so --weights has no first sample; start a new run")
    earlier = [change for change in spec.data.weights if change.first < first]
    return [change.model_dump() for change in (*earlier, specs.MixtureWeights(first=first, weights=weights))]


def resume_run(
    folder: RunFolder, overrides: dict[str, Any], me: World, is_restart: bool = False, edited: bool = False
) -> None:
    """Train the request of a run from its last checkpoint. Exits with the status of the training.

    overrides: keys of the request that change.
    is_restart: a scheduler started the same command again, so that the run may be complete already.
    edited: accept a request that was edited by hand.
    """
    from paceline.cli.options.launching import announce_start, start
    from paceline.launch.check_launch import check_launch
    from paceline.report.run_view import glance

    if me.launcher is not None:
        overrides = {"ranks": me.size} | overrides
    file = folder.next_spec if is_restart and folder.next_spec.exists() else folder.spec
    before = specs.load_own(file, {}, edited)[1]
    spec, launch = specs.load_own(file, overrides, edited)
    if "trace" in overrides:
        _check_traced_steps(folder, spec)
    if me.rank == 0 and (skipped := glance(folder).skipped):
        print(f"{folder.path}: {skipped}", file=sys.stderr)
    if "plan" in overrides:
        launch = launch.model_copy(update={"chosen": None, "asked": None, "asked_ranks": None})
    elif launch.ranks != before.ranks and launch.ranks is not None:
        from paceline.training.planning.replan import replan

        launch = replan(spec, before, launch)
    announce_start(me)
    launch = check_launch(spec, launch, me)
    if (final := find_final_step(folder, spec)) is not None:
        message = f"{folder.path} is done: {final}"
        if not is_restart:
            raise RunError(f"{message}; train longer with {final.options}")
        if me.rank == 0:
            print(message)
        return
    if me.rank == 0:
        folder.lock().close()  # raises if another process trains this run
        folder.write_next_request(spec, launch)
    try:
        start(spec, launch, me, folder)
    finally:
        if me.rank == 0:  # if the start was refused, the run keeps its request
            folder.next_spec.unlink(missing_ok=True)


def _check_traced_steps(folder: RunFolder, spec: Spec) -> None:
    """Raise RunError if the run has already done the first step to trace."""
    done = max(folder.checkpoints(), default=0)
    if spec.trace_steps and spec.trace_steps[0] <= done:
        raise RunError(
            f"--trace {spec.trace} begins at step {spec.trace_steps[0]}, and {folder.path} continues with "
            f"step {done + 1}; use later steps"
        )


@dataclass(frozen=True)
class FinalStep:
    """The last step of a run that is complete."""

    step: int
    why: str  # if a metric ended the run before its length

    def __str__(self) -> str:
        return f"it was trained to step {self.step}" + (f" ({self.why})" if self.why else "")

    @property
    def options(self) -> str:
        """The options with which `paceline resume` trains longer."""
        return "--patience or --target" if self.why else "--epochs or --steps"


def find_final_step(folder: RunFolder, spec: Spec) -> FinalStep | None:
    """Return the last step of a run that is complete and whose last checkpoint is intact, else None.

    spec: the request to continue with. It may need more steps than the run was trained for.
    """
    from paceline.report.run_view import glance

    summary = glance(folder).summary
    started, ended = summary.started, summary.ended
    last_step = max(folder.checkpoints(), default=0)
    if started is None or (ended is not None and ended.reason == "stopped"):
        return None
    is_short = last_step < spec.total_steps(started.samples)
    if is_short and (ended is None or not ended.why):
        return None
    from paceline.training.checkpoint.integrity import find_last_complete
    from paceline.training.stop_policy import explain_stop

    path, index, _ = find_last_complete(folder)
    if path != folder.checkpoint(last_step) or index is None:
        return None
    if not is_short:
        return FinalStep(last_step, "")
    why = explain_stop(spec, index.stop, index.metrics)
    return FinalStep(last_step, why) if why is not None else None
