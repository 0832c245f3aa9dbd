"""What plan and scale are asked: the options that both have, and the model, recipe and batch that these say."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from paceline.errors import SpecError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.cluster.facts import Cluster
    from paceline.plan.cost_model.framework_profiles import Recipe
    from paceline.plan.model.facts import ModelFacts

Target = Annotated[str | None, Argument(help="As for train; or say --model.")]
Model = Annotated[
    str | None, Option(help="A known model (gpt2, llama3-70b …), or a TOML file with its few numbers.")
]
Where = Annotated[
    str | None,
    Option(
        help="A cluster.json, or DEVICE:DEVICES_OF_A_NODExNODES@GB/s; else cluster.json here, or this machine."
    ),
]
Batch = Annotated[int | None, Option(help="Samples of the global batch, over all ranks.")]
Seq = Annotated[int | None, Option(help="Tokens of a sample, for --model.")]
Set = Annotated[list[str] | None, Option(metavar="NAME=VALUE", help="A field of the task, or a dotted key.")]
Precision = Annotated[str | None, Option(help="Of a task: fp32, bf16 or fp16.")]
Peak = Annotated[float | None, Option(metavar="TFLOP/S", help="Of a device, where it is not known.")]
Tokens = Annotated[
    float | None, Option(help="Tokens of the whole training (samples, where they are no sequences).")
]
Price = Annotated[float | None, Option(help="Of a device for an hour.")]
Json = Annotated[Path | None, Option(metavar="FILE", help="Write the figures there, too.")]
Plot = Annotated[Path | None, Option(metavar="FILE", help="Draw a picture: SVG or PNG.")]


class PlanQuery(NamedTuple):
    """`recipe`: None is for the cluster to say."""

    facts: "ModelFacts"
    recipe: "Recipe | None"
    batch: int


def asked(
    target: str | None,
    model: str | None,
    batch: int | None,
    seq: int | None,
    precision: str | None,
    set: list[str] | None,
    measured_on: "Cluster | None" = None,
) -> PlanQuery:
    """The task or the known model that was said. `measured_on`: a task is run, and this is what is known of here. Raises SpecError."""
    check_above_zero(batch=batch, seq=seq)
    if (target is None) == (model is None):
        raise SpecError(
            "plan what? Name a task, or a model with --model"
            if target is None
            else f"{target} or --model {model}? Name one"
        )
    if target is not None:
        if seq is not None:
            raise SpecError("--seq is for --model; the samples of a task have their own length")
        from paceline.cli.plan_inputs import counted

        return PlanQuery(*counted(target, batch, precision, set or [], measured_on))
    if measured_on is not None:
        raise SpecError(f"--measure runs a task; of --model {model} only numbers are known")
    if set or precision:
        raise SpecError("--set and --precision are of a task; a --model has --seq, or a TOML file of its own")
    from paceline.plan.model.library import model as known

    assert model is not None
    facts = known(model, **({} if seq is None else {"seq": seq}))
    samples = batch or facts.batch
    if samples is None:
        raise SpecError(
            "how many samples a step? Say --batch NUMBER"
            + (f", or batch in {model}" if model.endswith(".toml") else "")
        )
    return PlanQuery(facts, None, samples)


def check_outputs(json: Path | None, plot: Path | None) -> None:
    """Raises SpecError where the figures could not be written, BenchError where the picture could not be drawn."""
    from paceline.files import check_target

    if json is not None:
        check_target(json, SpecError)
    if plot is not None:
        from paceline.plotting.figure import check_picture

        check_picture(plot)


def show(*shown: "RenderableType") -> None:
    """Sentences are folded by the terminal, so that they can be copied whole."""
    from rich.console import Console

    console = Console(highlight=False)
    for one in shown:
        console.print(one, soft_wrap=isinstance(one, str), markup=False, crop=False)


def check_above_zero(**numbers: float | None) -> None:
    """Raises SpecError for an option that is said and is no number above 0."""
    for name, number in numbers.items():
        if number is not None and not 0 < number < float("inf"):
            least = "at least 1" if isinstance(number, int) else "above 0"
            raise SpecError(f"--{name} must be {least}, got {number:g}")
