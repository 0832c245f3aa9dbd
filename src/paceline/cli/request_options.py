"""The options of a request, which train and submit share."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from paceline.errors import SpecError
from paceline.spec import Launch, Spec, shown

Target = Annotated[
    str,
    Argument(help="A built-in task (digits, mnist, text), my.py:Class, package.module:Class, or a run.toml."),
]


class TrainingRequest(NamedTuple):
    spec: Spec
    launch: Launch


def request(
    target: Target = "digits",
    ranks: Annotated[int | None, Option(help="Processes in all. Default: one a GPU, or one.")] = None,
    nodes: Annotated[
        str | None,
        Option(
            help="Nodes of a Slurm allocation or of Ray, over which ranks are spread alike. Default: one. 2:4, in Slurm, goes on "
            "with 2 when others are lost."
        ),
    ] = None,
    ranks_per_node: Annotated[int | None, Option(help="Processes on each node, in place of --ranks.")] = None,
    launcher: Annotated[
        str | None,
        Option(
            help="What starts the ranks: local, slurm (in an allocation) or ray. Default: slurm with several --nodes."
        ),
    ] = None,
    plan: Annotated[
        str | None,
        Option(
            help="single, ddp, zero1, zero2, zero3, hsdp, local-sgd, post-local-sgd, parameter-server, or key=value: "
            "tp=2, pp=2,pp_schedule=1f1b,microbatches=8, cp=2, dp=2,tp=2,pp=2,zero=2; or auto: the fastest that fits."
        ),
    ] = None,
    batch: Annotated[int | None, Option(help="Samples of the global batch, over all ranks.")] = None,
    epochs: Annotated[float | None, Option(help="Length in epochs. Default: 20.")] = None,
    steps: Annotated[int | None, Option(help="Length in steps, instead of --epochs.")] = None,
    lr: Annotated[float | None, Option(help="Learning rate. Default: 0.001.")] = None,
    seed: Annotated[int | None, Option(help="Of weights, order of samples and dropout.")] = None,
    set: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUE",
            help="A field of the task, or a dotted key of the request: optimizer.momentum, spec.threads. --keys lists all.",
        ),
    ] = None,
    optimizer: Annotated[str | None, Option(help="adamw or sgd.")] = None,
    schedule: Annotated[str | None, Option(help="constant, cosine, linear or step.")] = None,
    clip: Annotated[float | None, Option(help="Largest norm of the whole gradient.")] = None,
    precision: Annotated[str | None, Option(help="fp64, fp32, bf16 or fp16.")] = None,
    compile: Annotated[
        bool | None, Option("--compile/--no-compile", help="Compile the model's blocks with torch.compile.")
    ] = None,
    tf32: Annotated[
        bool | None, Option("--tf32/--no-tf32", help="Let CUDA round float32 products to TF32.")
    ] = None,
    batch_norm: Annotated[
        str | None, Option(help="Statistics over the samples of all ranks, global, or of each rank, local.")
    ] = None,
    allow_local_loss: Annotated[
        bool | None,
        Option(
            "--allow-local-loss",
            help="Accept a loss that mixes samples, of each part of a divided batch alone.",
        ),
    ] = None,
    save_every: Annotated[int | None, Option(help="Steps between checkpoints.")] = None,
    keep: Annotated[int | None, Option(help="Keep the last so many checkpoints, and the best.")] = None,
    workers: Annotated[int | None, Option(help="Processes a rank that read samples.")] = None,
    profile: Annotated[
        bool | None,
        Option(
            "--profile/--no-profile",
            help="Profile some steps. Default: where it costs less than 1 %.",
        ),
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda. Default: CUDA where there is some.")] = None,
    restarts: Annotated[int | None, Option(help="Start all ranks again so often after one died.")] = None,
    timeout: Annotated[
        float | None, Option(help="Seconds that a rank waits for another before all end. Default: 60.")
    ] = None,
    run: Annotated[
        str | None, Option("--run-dir", help="New folder for the run. Default: runs/TASK-TIME.")
    ] = None,
) -> TrainingRequest:
    least, most = node_range(nodes)
    flags: dict[str, Any] = {
        "ranks": _in_all(ranks, most, ranks_per_node),
        "nodes": most,
        "least_nodes": least,
        "launcher": launcher,
        "plan": plan,
        "batch": batch,
        "epochs": epochs,
        "steps": steps,
        "seed": seed,
        "precision": precision,
        "compile": compile,
        "tf32": tf32,
        "batch_norm": batch_norm,
        "allow_local_loss": allow_local_loss,
        "profile": profile,
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
    from paceline.cli.launching import read

    return TrainingRequest(*read(target, flags, set or []))


def node_range(text: str | None) -> tuple[int | None, int | None]:
    """`2:4`: at least 2 and at most 4; `4`: so many. Raises SpecError."""
    if text is None:
        return None, None
    found = re.fullmatch(r"(?:(\d{1,9}):)?(\d{1,9})", text, re.ASCII)
    if found is None:
        raise SpecError(f"--nodes {shown(text)} is no number of nodes; write 4, or 2:4 for at least 2")
    return int(found[1]) if found[1] is not None else None, int(found[2])


def _in_all(ranks: int | None, nodes: int | None, ranks_per_node: int | None) -> int | None:
    if ranks_per_node is None:
        return ranks
    if ranks_per_node < 1:
        raise SpecError(f"--ranks-per-node must be at least 1, got {ranks_per_node}")
    in_all = (nodes or 1) * ranks_per_node
    if ranks not in (None, in_all):
        raise SpecError(
            f"--ranks {ranks} are not {nodes or 1} × {ranks_per_node} = {in_all}, nodes × ranks a node; leave --ranks out"
        )
    return in_all


def requesting(command: Callable[..., None]) -> Callable[..., None]:
    """`command(request, …)` as a command with the options of a request, and after them its own."""
    asked = inspect.signature(request).parameters
    _, *own = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def with_options(**values: Any) -> None:
        what = request(**{name: values.pop(name) for name in asked})
        command(what, **values)

    parameters = [*asked.values(), *own]
    setattr(with_options, "__signature__", inspect.Signature(parameters))  # noqa: B010 (mypy knows no such attribute; typer reads it)
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options
