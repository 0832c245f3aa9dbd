"""The options of a training request, shared by train, preflight and submit."""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from paceline.errors import SpecError
from paceline.optimizer_options import OPTIMIZERS
from paceline.spec import Launch, Spec, abbreviate

Target = Annotated[
    str,
    Argument(help="Built-in task (digits, lm, mnist, …), my.py:Class, package.module:Class, or a run.toml"),
]

# Options of comms, drill and verify, which set few keys of a request and have no panels.
LearningRate = Annotated[float | None, Option(help="Learning rate [default: 0.001]")]
OPTIMIZER_HELP = f"Optimizer: {', '.join(OPTIMIZERS)} [default: adamw]"
OptimizerName = Annotated[str | None, Option(help=OPTIMIZER_HELP)]
Clip = Annotated[
    float | None, Option(help="Maximum norm of the gradient of all parameters [default: no clipping]")
]
Set = Annotated[
    list[str] | None,
    Option(
        metavar="NAME=VALUE",
        help="Set a field of the task, or a dotted key such as optimizer.momentum; may be repeated.",
    ),
]
Json = Annotated[Path | None, Option(metavar="FILE", help="Write the results to this JSON file.")]

# panels of the help page
RANKS, TRAINING, NUMERICS, RUN = "Ranks", "Training", "Numerics", "Run"


class TrainingRequest(NamedTuple):
    """What to train, and how to start it."""

    spec: Spec
    launch: Launch


def build_request(
    target: Target = "digits",
    ranks: Annotated[
        int | None, Option(help="Number of processes [default: one per GPU, or 1]", rich_help_panel=RANKS)
    ] = None,
    nodes: Annotated[
        str | None,
        Option(
            help="Number of nodes of the Slurm allocation or Ray cluster; ranks are spread evenly over them. "
            "2:4 (Slurm) starts on 4 nodes and continues on as few as 2 when nodes are lost [default: 1]",
            rich_help_panel=RANKS,
        ),
    ] = None,
    ranks_per_node: Annotated[
        int | None, Option(help="Number of processes per node, instead of --ranks.", rich_help_panel=RANKS)
    ] = None,
    launcher: Annotated[
        str | None,
        Option(
            help="Launcher of the ranks: local, slurm (inside an allocation) or ray "
            "[default: slurm with several --nodes, else local]",
            rich_help_panel=RANKS,
        ),
    ] = None,
    plan: Annotated[
        str | None,
        Option(
            help="Plan by name: single, ddp, zero1, zero2, zero3, hsdp, local-sgd, post-local-sgd, "
            "parameter-server; by keys: "
            "tp=2 or pp=2,microbatches=8 or dp=2,tp=2,pp=2,zero=2; or auto, the fastest "
            "plan that fits "
            "[default: single on one rank, else ddp]",
            rich_help_panel=RANKS,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        Option(
            help="Number of samples of the global batch, over all ranks [default: 64]",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    epochs: Annotated[
        float | None, Option(help="Length of the training in epochs [default: 20]", rich_help_panel=TRAINING)
    ] = None,
    steps: Annotated[
        int | None,
        Option(help="Length of the training in steps, instead of --epochs.", rich_help_panel=TRAINING),
    ] = None,
    patience: Annotated[
        int | None,
        Option(
            help="End after this many evaluations in a row without a better metric; the metric is that of "
            "stop.metric, or of save.best [default: train to the length]",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    lr: Annotated[
        float | None, Option(help="Learning rate [default: 0.001]", rich_help_panel=TRAINING)
    ] = None,
    seed: Annotated[
        int | None,
        Option(help="Seed of weights, sample order and dropout [default: 0]", rich_help_panel=TRAINING),
    ] = None,
    set: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUE",
            help="Set a field of the task, or a dotted key of the request such as optimizer.momentum; may "
            "be repeated. "
            "--keys lists all names.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    optimizer: Annotated[str | None, Option(help=OPTIMIZER_HELP, rich_help_panel=TRAINING)] = None,
    schedule: Annotated[
        str | None,
        Option(
            help="Learning rate schedule: constant, cosine, cosine-restarts, linear, polynomial, step, "
            "milestones, one-cycle, wsd, inverse-sqrt, plateau or task [default: constant]",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    clip: Annotated[
        float | None,
        Option(
            help="Maximum norm of the gradient of all parameters [default: no clipping]",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    precision: Annotated[
        str | None,
        Option(
            help="Precision of the computation: fp64, fp32, tf32, bf16, fp16, or auto, what this machine "
            "does well [default: fp32]",
            rich_help_panel=NUMERICS,
        ),
    ] = None,
    compile: Annotated[
        bool | None,
        Option(
            "--compile/--no-compile",
            help="Compile the model's blocks with torch.compile.",
            rich_help_panel=NUMERICS,
        ),
    ] = None,
    tf32: Annotated[
        bool | None,
        Option(
            "--tf32/--no-tf32",
            help="Allow CUDA to round the inputs of float32 matrix products to TF32.",
            rich_help_panel=NUMERICS,
        ),
    ] = None,
    batch_norm: Annotated[
        str | None,
        Option(
            help="BatchNorm statistics: over the samples of all ranks (global) or of each rank (local) "
            "[default: global]",
            rich_help_panel=NUMERICS,
        ),
    ] = None,
    allow_local_loss: Annotated[
        bool | None,
        Option(
            "--allow-local-loss",
            help="Accept a loss that mixes samples; each part of a divided batch then has a separate loss.",
            rich_help_panel=NUMERICS,
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        Option(
            help="Number of steps between checkpoints [default: by time, every 10 minutes]",
            rich_help_panel=RUN,
        ),
    ] = None,
    keep: Annotated[
        int | None,
        Option(
            help="Number of recent checkpoints to keep, besides the best [default: 2]", rich_help_panel=RUN
        ),
    ] = None,
    max_time: Annotated[
        str | None,
        Option(
            help="Wall time after which the training saves and stops, such as 90m or 1h30m; paceline resume "
            "continues [default: no limit]",
            rich_help_panel=RUN,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        Option(
            help="Number of data loading processes per rank [default: spare cores on a machine with GPUs, "
            "else 0]",
            rich_help_panel=RUN,
        ),
    ] = None,
    profile: Annotated[
        bool | None,
        Option(
            "--profile/--no-profile",
            help="Profile some steps [default: if it takes less than 1 % of the time]",
            rich_help_panel=RUN,
        ),
    ] = None,
    report: Annotated[
        bool | None,
        Option(
            "--report/--no-report",
            help="Write report.html into the run folder at the end [default: --report]",
            rich_help_panel=RUN,
        ),
    ] = None,
    monitor: Annotated[
        str | None,
        Option(
            "--monitor",
            "--monitor-every",
            metavar="SECONDS|off",
            help="Seconds between samples of the processors, memory, disks, network and GPUs of each node, "
            "or off; torchrun accepts only the longer name [default: 1]",
            rich_help_panel=RUN,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        Option(
            metavar="FIRST:LAST",
            help="Trace these steps, such as 20:25: what each rank does when, for Perfetto [default: none]",
            rich_help_panel=RUN,
        ),
    ] = None,
    histograms: Annotated[
        int | None,
        Option(
            help="Number of steps between histograms of weights, gradients and activations for TensorBoard "
            "[default: none]",
            rich_help_panel=RUN,
        ),
    ] = None,
    noise_scale: Annotated[
        int | None,
        Option(
            help="Number of steps between measurements of the gradient noise scale, the batch up to which "
            "larger batches save steps [default: none]",
            rich_help_panel=RUN,
        ),
    ] = None,
    graph: Annotated[
        bool | None,
        Option(
            "--graph/--no-graph",
            help="Write the graph of the model for TensorBoard [default: --no-graph]",
            rich_help_panel=RUN,
        ),
    ] = None,
    mlflow: Annotated[
        str | None,
        Option(
            metavar="URI",
            help="Send the run to MLflow: http://HOST:5000, or sqlite:////PATH.db [default: none]",
            rich_help_panel=RUN,
        ),
    ] = None,
    nvtx: Annotated[
        bool | None,
        Option(
            "--nvtx/--no-nvtx",
            help="Mark steps, phases, micro-batches and blocks with NVTX ranges, for Nsight Systems "
            "[default: --no-nvtx]",
            rich_help_panel=RUN,
        ),
    ] = None,
    nsys: Annotated[
        bool | None,
        Option(
            "--nsys/--no-nsys",
            help="Start each rank under Nsight Systems, with --nvtx; reports: RUN/nsys [default: --no-nsys]",
            rich_help_panel=RUN,
        ),
    ] = None,
    device: Annotated[
        str | None, Option(help="Device: cpu or cuda [default: cuda if available]", rich_help_panel=RANKS)
    ] = None,
    restarts: Annotated[
        int | None,
        Option(help="Maximum number of restarts after a rank fails [default: 0]", rich_help_panel=RANKS),
    ] = None,
    timeout: Annotated[
        float | None,
        Option(
            help="Seconds that a rank waits for another before the training ends [default: 60]",
            rich_help_panel=RANKS,
        ),
    ] = None,
    run: Annotated[
        str | None,
        Option("--run-dir", help="New folder for the run [default: runs/TASK-TIME]", rich_help_panel=RUN),
    ] = None,
) -> TrainingRequest:
    """Return the request of these options. Raises SpecError."""
    least, most = parse_nodes(nodes)
    flags: dict[str, Any] = {
        "ranks": _total_ranks(ranks, most, ranks_per_node),
        "nodes": most,
        "least_nodes": least,
        "launcher": launcher,
        "plan": plan,
        "batch": batch,
        "epochs": epochs,
        "steps": steps,
        "max_time": max_time,
        "stop.patience": patience,
        "seed": seed,
        "precision": precision,
        "compile": compile,
        "tf32": tf32,
        "batch_norm": batch_norm,
        "allow_local_loss": allow_local_loss,
        "profile": profile,
        "report": report,
        "monitor": monitor,
        "trace": trace,
        "mlflow": mlflow,
        "nvtx": nvtx if nvtx is not None or not nsys else True,
        "nsys": nsys,
        "graph": graph,
        "histograms": histograms,
        "noise_scale": noise_scale,
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
    from paceline.cli.options.launching import read_request

    return TrainingRequest(*read_request(target, flags, set or [], resolves=False))


def parse_nodes(text: str | None) -> tuple[int | None, int | None]:
    """Return the least and the largest number of nodes: (2, 4) of `2:4`, (None, 4) of `4`.

    Raises SpecError.
    """
    if text is None:
        return None, None
    match = re.fullmatch(r"(?:(\d{1,9}):)?(\d{1,9})", text, re.ASCII)
    if match is None:
        raise SpecError(
            f"--nodes must be a number of nodes, got {abbreviate(text)}; write 4, or 2:4 for 2 to 4 nodes"
        )
    return int(match[1]) if match[1] is not None else None, int(match[2])


def _total_ranks(ranks: int | None, nodes: int | None, ranks_per_node: int | None) -> int | None:
    if ranks_per_node is None:
        return ranks
    if ranks_per_node < 1:
        raise SpecError(f"--ranks-per-node must be at least 1, got {ranks_per_node}")
    total = (nodes or 1) * ranks_per_node
    if ranks not in (None, total):
        raise SpecError(
            f"--ranks must be nodes × ranks per node = {nodes or 1} × {ranks_per_node} = {total}, got "
            f"{ranks}; leave --ranks out"
        )
    return total


def with_request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate `command(request, …)`, so that typer sees the options of a request and then its others."""
    shared = inspect.signature(build_request).parameters
    _, *others = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        request = build_request(**{name: values.pop(name) for name in shared})
        if command.__name__ != "submit":  # whose ranks run on other machines
            from paceline.cli.options.launching import resolve_precision

            request = request._replace(spec=resolve_precision(request.spec, request.launch))
        command(request, **values)

    parameters = [*shared.values(), *others]
    setattr(wrapper, "__signature__", inspect.Signature(parameters))  # noqa: B010 (typer reads it; mypy does not know it)
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper
