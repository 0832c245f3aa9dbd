"""The options of a training request, shared by train, preflight and submit."""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from typer import Argument, Option

from paceline.cli.options import option_types as types
from paceline.errors import SpecError
from paceline.spec import Launch, Spec, abbreviate

Target = Annotated[
    str,
    Argument(help="Built-in task (digits, lm, mnist, …), my.py:Class, package.module:Class, or a run.toml"),
]

# Options of comms, drill and verify, which set few keys of a request and have no panels.
LearningRate = Annotated[float | None, Option(help="Learning rate [default: 0.001]")]
OptimizerName = Annotated[str | None, Option(help=types.OPTIMIZER_HELP)]
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


class TrainingRequest(NamedTuple):
    """What to train, and how to start it."""

    spec: Spec
    launch: Launch


class RequestOptions(NamedTuple):
    """The options of a request, in the order of the help page."""

    target: Target = "digits"
    ranks: types.Ranks = None
    nodes: types.Nodes = None
    ranks_per_node: types.RanksPerNode = None
    launcher: types.Launcher = None
    plan: types.PlanText = None
    batch: types.Batch = None
    epochs: types.Epochs = None
    steps: types.Steps = None
    patience: types.Patience = None
    lr: types.LearningRate = None
    seed: types.Seed = None
    set: types.Set = None
    optimizer: types.OptimizerName = None
    schedule: types.ScheduleName = None
    clip: types.Clip = None
    precision: types.Precision = None
    compile: types.Compile = None
    tf32: types.Tf32 = None
    batch_norm: types.BatchNorm = None
    allow_local_loss: types.AllowLocalLoss = None
    save_every: types.SaveEvery = None
    keep: types.Keep = None
    max_time: types.MaxTime = None
    workers: types.Workers = None
    profile: types.Profile = None
    report: types.Report = None
    monitor: types.Monitor = None
    trace: types.Trace = None
    histograms: types.Histograms = None
    noise_scale: types.NoiseScale = None
    graph: types.Graph = None
    mlflow: types.MlflowUri = None
    nvtx: types.Nvtx = None
    nsys: types.Nsys = None
    device: types.Device = None
    restarts: types.Restarts = None
    timeout: types.Timeout = None
    run: types.RunDir = None


# keys of the request, where they differ from the names of options
KEYS = {
    "clip": "optimizer.clip",
    "keep": "save.keep",
    "lr": "optimizer.lr",
    "optimizer": "optimizer.name",
    "patience": "stop.patience",
    "save_every": "save.every",
    "schedule": "schedule.name",
    "timeout": "timeout_s",
    "workers": "data.workers",
}


def build_request(options: RequestOptions) -> TrainingRequest:
    """Return the request of these options. Raises SpecError."""
    from paceline.cli.options.launching import read_request

    least, most = parse_nodes(options.nodes)
    flags = {KEYS.get(name, name): value for name, value in options._asdict().items()}
    target, set, ranks_per_node = (flags.pop(name) for name in ("target", "set", "ranks_per_node"))
    flags |= {
        "ranks": _total_ranks(options.ranks, most, ranks_per_node),
        "nodes": most,
        "least_nodes": least,
        "nvtx": options.nvtx if options.nvtx is not None or not options.nsys else True,
    }
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
    shared = inspect.signature(RequestOptions).parameters
    _, *others = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        request = build_request(RequestOptions(**{name: values.pop(name) for name in shared}))
        if command.__name__ != "submit":  # whose ranks run on other machines
            from paceline.cli.options.launching import resolve_precision

            request = request._replace(spec=resolve_precision(request.spec, request.launch))
        command(request, **values)

    parameters = [*shared.values(), *others]
    setattr(wrapper, "__signature__", inspect.Signature(parameters))  # noqa: B010 (typer reads it; mypy does not know it)
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper
