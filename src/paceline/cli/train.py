"""paceline train: train a task on any number of ranks."""

from typing import Annotated, Any

import typer

from paceline.launch.world import World, world
from paceline.spec import Launch, Spec

Option = typer.Option


def train(
    target: Annotated[
        str, typer.Argument(help="A built-in task (digits, mnist, text), my.py:Class, package.module:Class, or a run.toml.")
    ] = "digits",
    ranks: Annotated[int | None, Option(help="Processes on this machine. Default: one a GPU, or one.")] = None,
    plan: Annotated[
        str | None,
        Option(
            help="single, ddp, zero1, zero2, zero3, hsdp, local-sgd, post-local-sgd, parameter-server, or key=value: "
            "tp=2, pp=2,schedule=1f1b,micro=8, cp=2, dp=2,tp=2,pp=2,zero=2; or auto: the fastest that fits."
        ),
    ] = None,
    batch: Annotated[int | None, Option(help="Samples of the global batch, over all ranks.")] = None,
    epochs: Annotated[float | None, Option(help="Length in epochs. Default: 20.")] = None,
    steps: Annotated[int | None, Option(help="Length in steps, instead of --epochs.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate. Default: 0.001.")] = None,
    seed: Annotated[int | None, Option(help="Of weights, order of samples and dropout.")] = None,
    set: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="A field of the task, or a dotted key such as optimizer.momentum.")
    ] = None,
    optimizer: Annotated[str | None, Option(help="adamw or sgd.")] = None,
    schedule: Annotated[str | None, Option(help="constant, cosine, linear or step.")] = None,
    clip: Annotated[float | None, Option(help="Largest norm of the whole gradient.")] = None,
    precision: Annotated[str | None, Option(help="fp64, fp32, bf16 or fp16.")] = None,
    compile: Annotated[bool | None, Option("--compile/--no-compile", help="Compile the model's blocks with torch.compile.")] = None,
    tf32: Annotated[bool | None, Option("--tf32/--no-tf32", help="Let CUDA round float32 products to TF32.")] = None,
    batch_norm: Annotated[str | None, Option(help="Statistics over the samples of all ranks, global, or of each rank, local.")] = None,
    save_every: Annotated[int | None, Option(help="Steps between checkpoints.")] = None,
    keep: Annotated[int | None, Option(help="Keep the last so many checkpoints, and the best.")] = None,
    workers: Annotated[int | None, Option(help="Processes a rank that read samples.")] = None,
    account: Annotated[
        bool | None, Option("--account/--no-account", help="Profile some steps for account. Default: where it costs less than 1 %.")
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda. Default: CUDA where there is some.")] = None,
    restarts: Annotated[int | None, Option(help="Start all ranks again so often after one died.")] = None,
    timeout: Annotated[float | None, Option(help="Seconds that a rank waits for another before all end. Default: 60.")] = None,
    run: Annotated[str | None, Option(help="The run's folder, a new one. Default: runs/TASK-TIME.")] = None,
) -> None:
    """Train a task. Under torchrun, mpirun or srun this process simply becomes a rank."""
    flags: dict[str, Any] = {
        "ranks": ranks,
        "plan": plan,
        "batch": batch,
        "epochs": epochs,
        "steps": steps,
        "seed": seed,
        "precision": precision,
        "compile": compile,
        "tf32": tf32,
        "batch_norm": batch_norm,
        "account": account,
        "device": device,
        "restarts": restarts,
        "timeout_s": timeout,
        "run": run,
        "optimizer.lr": lr,
        "optimizer.name": optimizer,
        "optimizer.clip": clip,
        "schedule.name": schedule,
        "save.every": save_every,
        "save.keep": keep,
        "data.workers": workers,
    }
    from paceline.cli.start import read

    spec, launch = read(target, flags, set or [])
    start_new(spec, launch, world())


def start_new(spec: Spec, launch: Launch, me: World) -> None:
    """Train in a new run folder: become a rank, or start some. Exits with the status of the training."""
    from paceline import task
    from paceline.cli.start import check, start
    from paceline.run import create, default_path

    launch = check(spec, launch, me)
    spec = spec.model_copy(update={"task": task.resolve(spec.task)})
    if me.launcher is not None or (launch.ranks == 1 and not launch.restarts):
        start(spec, launch, me, None)
        return
    start(spec, launch, me, create(default_path(launch.run, spec.task), spec, launch))
