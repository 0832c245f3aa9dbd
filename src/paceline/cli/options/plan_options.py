"""The options that plan and scale share, and the model, recipe and batch that these options select."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from paceline.errors import SpecError
from paceline.plan.cost_model.cost import CURRENCY

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.cluster.facts import Cluster
    from paceline.plan.cost_model.framework_profiles import Recipe
    from paceline.plan.model.facts import ModelFacts
    from paceline.spec import Spec
    from paceline.task import Task

LONGEST_CURRENCY = 8  # characters

Target = Annotated[str | None, Argument(help="Task, as for train; or give --model")]
Model = Annotated[
    str | None,
    Option(help="Known model (gpt2, llama3-70b, ...), or a TOML file with its sizes, instead of a task."),
]
ClusterName = Annotated[
    str | None,
    Option(
        help="Machine to predict for: a cluster.json, or DEVICE:DEVICES_PER_NODExNODES@GB/s "
        "[default: cluster.json here, or this machine]"
    ),
]
Batch = Annotated[
    int | None,
    Option(help="Number of samples of the global batch, over all ranks [default: that of the task or model]"),
]
Seq = Annotated[
    int | None, Option(help="Number of tokens per sample, with --model [default: that of the model]")
]
Set = Annotated[
    list[str] | None,
    Option(metavar="NAME=VALUE", help="Set a field of the task, or a dotted key; may be repeated."),
]
Precision = Annotated[
    str | None,
    Option(
        help="Precision: fp32, bf16 or fp16; with --system also fp8, mxfp8 or fp4 [default: that of the "
        "task's request; with --model bf16 where the device has it]"
    ),
]
Lora = Annotated[
    str | None,
    Option(
        metavar="rank=NUMBER",
        help="With --model: freeze it, and train adapters of this rank on queries, keys and values.",
    ),
]
System = Annotated[
    str | None,
    Option(help="With --model: training system to predict for, such as nemo or fsdp [default: paceline]"),
]
Peak = Annotated[
    float | None,
    Option(metavar="TFLOP/S", help="Peak of a device [default: measured or published, if known]"),
]
Tokens = Annotated[
    float | None,
    Option(help="Length of the training in tokens, or in samples if they are not sequences."),
]
Price = Annotated[float | None, Option(help=f"Price of a device per hour, in {CURRENCY} or --currency.")]
Currency = Annotated[
    str | None,
    Option(
        metavar="NAME",
        help=f"Currency of --price, or of the price in cluster.json, such as EUR [default: {CURRENCY}]",
    ),
]
InstanceName = Annotated[
    str | None,
    Option(
        metavar="NAME:TERMS",
        help="Cloud instance whose price and devices are taken, such as NC24rs_v3:3y; terms are 1y, 3y, spot "
        "[default: on demand]",
    ),
]
Plot = Annotated[Path | None, Option(metavar="FILE", help="Draw the results into this SVG or PNG file.")]


Clusters = Annotated[
    list[str] | None,
    Option(
        "--cluster",
        help="Machine to predict for: a cluster.json, or DEVICE:DEVICES_PER_NODExNODES@GB/s; repeat it to "
        "compare machines [default: cluster.json here, or this machine]",
    ),
]
Instances = Annotated[
    list[str] | None,
    Option(
        "--instance",
        metavar="NAME:TERMS",
        help="Cloud instance whose price and devices are taken, such as NC24rs_v3:3y; terms are 1y, 3y, "
        "spot; repeat it to compare instances [default: on demand]",
    ),
]
InterruptedEvery = Annotated[
    float | None,
    Option(
        metavar="HOURS",
        help="Mean time between interruptions of the training, as of spot instances: recommends an interval "
        "of checkpoints, and adds what is lost to duration and price.",
    ),
]
SaveTime = Annotated[
    float | None,
    Option(
        metavar="SECONDS",
        help="Time of a checkpoint, for --interrupted-every [default: its bytes, at 1 GB/s for each node]",
    ),
]
Co2 = Annotated[
    float | None,
    Option("--co2", metavar="GRAMS", help="CO₂ of a kWh of the local grid: adds that of the training."),
]
ComputeOptimal = Annotated[
    bool,
    Option(
        "--compute-optimal",
        help="Say which model and how many tokens would give the lowest loss for the same FLOPs.",
    ),
]


class PlanQuery(NamedTuple):
    """The model to plan for. The cluster determines a `recipe` of None.

    spec, task: None for a known model.
    """

    facts: "ModelFacts"
    recipe: "Recipe | None"
    batch: int
    spec: "Spec | None" = None
    task: "Task | None" = None


def read_query(
    target: str | None,
    model: str | None,
    batch: int | None,
    seq: int | None,
    precision: str | None,
    set: list[str] | None,
    measured_on: "Cluster | None" = None,
    lora: str | None = None,
    system: str | None = None,
) -> PlanQuery:
    """Return the task or the known model that the options select.

    measured_on: if given, steps of the task are measured on this machine, which these facts describe.
    Raises SpecError.
    """
    check_positive(batch=batch, seq=seq)
    if (target is None) == (model is None):
        raise SpecError(
            "no model to plan for; name a task, or a model with --model"
            if target is None
            else f"got both the task {target} and --model {model}; give only one of them"
        )
    if target is not None:
        if seq is not None:
            raise SpecError(
                f"--seq {seq} requires --model; the task {target} defines the length of its samples"
            )
        if option := "--lora" if lora else "--system" if system else None:
            raise SpecError(
                f"{option} requires --model; the task {target} trains what it defines, with Paceline"
            )
        from paceline.cli.options.plan_inputs import read_task_facts

        facts, recipe, spec, task = read_task_facts(target, batch, precision, set or [], measured_on)
        return PlanQuery(facts, recipe, spec.batch, spec, task)
    if measured_on is not None:
        raise SpecError(
            f"--measure-compute requires a task to run, got --model {model}; name a task, or leave it out"
        )
    if set:
        raise SpecError(
            f"--set requires a task, got --model {model}; use --seq, or write a TOML file for the model"
        )
    from paceline.plan.model.library import load_model as find_model

    assert model is not None
    changes = {"seq": seq, "lora_rank": None if lora is None else _read_rank(lora)}
    facts = find_model(model, **{name: value for name, value in changes.items() if value is not None})
    samples = batch or facts.batch
    if samples is None:
        raise SpecError(
            f"--model {model} requires a batch; add --batch NUMBER"
            + (f", or batch in {model}" if model.endswith(".toml") else "")
        )
    return PlanQuery(facts, _find_recipe(system, precision), samples)


def _read_rank(lora: str) -> int:
    """Return the rank in `rank=16` or `16`. Raises SpecError."""
    number = lora.removeprefix("rank=")
    if not number.isdecimal() or int(number) < 1:
        raise SpecError(f"--lora must be rank=NUMBER with a number of at least 1, got {lora!r}")
    return int(number)


def _find_recipe(system: str | None, precision: str | None) -> "Recipe | None":
    """Return the recipe of a training system in a precision; None: that of the device. Raises SpecError."""
    from dataclasses import replace

    from paceline.plan.cost_model.framework_profiles import (
        LOW_DTYPES,
        RECIPES,
        WIDE_DTYPES,
        recipe_of_precision,
        suggest_precision,
    )
    from paceline.spec import suggest

    if system is None:
        return None if precision is None else recipe_of_precision(precision)
    if system not in RECIPES:
        raise SpecError(
            f"--system {system} is not known{suggest(system, RECIPES)}; choose one of {', '.join(RECIPES)}"
        )
    if precision is None:
        return RECIPES[system]
    if precision not in (known := (*WIDE_DTYPES, *LOW_DTYPES)):
        raise SpecError(
            f"--precision {precision} cannot be predicted with --system{suggest_precision(precision, known)}"
        )
    return replace(RECIPES[system], dtype=precision)


class Priced(NamedTuple):
    """A cluster to plan for, as the options name it, and the price of a device's hour in a currency.

    instance: its name.
    """

    cluster: str | None
    price: float | None
    currency: str
    instance: str | None = None


def read_prices(
    instances: Sequence[str],
    clusters: Sequence[str],
    price: float | None,
    ranks: int | None = None,
    currency: str | None = None,
) -> list[Priced]:
    """Return the clusters with their prices; one instance determines the price of the one cluster.

    Raises SpecError.
    """
    if len(instances) > 1 or len(clusters) > 1:
        named = [read_price(None, cluster, price, ranks, currency) for cluster in clusters]
        return named + [read_price(instance, None, price, ranks, currency) for instance in instances]
    instance, cluster = (next(iter(names), None) for names in (instances, clusters))
    return [read_price(instance, cluster, price, ranks, currency)]


def read_price(
    instance: str | None,
    cluster: str | None,
    price: float | None,
    ranks: int | None,
    currency: str | None = None,
) -> Priced:
    """Return the cluster with its price, which an instance may determine. Raises SpecError."""
    if currency is not None and not (currency.isalpha() and len(currency) <= LONGEST_CURRENCY):
        raise SpecError(f"--currency must be a name such as EUR, got {currency!r}")
    if instance is None:
        return Priced(cluster, price, currency or CURRENCY)
    if price is not None:
        raise SpecError(f"got both --price {price:g} and --instance {instance}; give only one of them")
    from paceline.plan.prices import find_instance

    found = find_instance(instance)
    if cluster is None:
        nodes = -(-(ranks or found.devices) // found.devices)
        cluster = f"{found.device}:{found.devices}x{nodes}"
    if currency not in (None, found.currency):
        raise SpecError(f"{instance} is priced in {found.currency}, not in {currency}; leave --currency out")
    return Priced(cluster, found.price_per_device_hour, found.currency, f"{found.name}:{found.terms}")


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Raise SpecError if `json` cannot be written, and BenchError if `plot` cannot be drawn."""
    from paceline.files import check_target

    if json is not None:
        check_target(json, SpecError)
    if plot is not None:
        from paceline.plotting.figure import check_picture

        check_picture(plot)


def print_parts(*parts: "RenderableType") -> None:
    """Print sentences and tables. The terminal wraps the sentences, so that they can be copied whole."""
    from rich.console import Console

    console = Console(highlight=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str), markup=False, crop=False)


def check_positive(**numbers: float | None) -> None:
    """Raise SpecError for an option whose value is not a finite number above 0."""
    for name, number in numbers.items():
        if number is not None and not 0 < number < float("inf"):
            least = "at least 1" if isinstance(number, int) else "above 0"
            raise SpecError(f"--{name} must be {least}, got {number:g}")
