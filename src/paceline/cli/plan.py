"""paceline plan: which plans fit, how long a step takes, and what a training costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from paceline.cluster.facts import Cluster
    from paceline.plan.facts import ModelFacts
    from paceline.plan.recipe import Recipe

Option = typer.Option


def plan(
    target: Annotated[str | None, typer.Argument(help="As for train; or say --model.")] = None,
    model: Annotated[str | None, Option(help="A known model (gpt2, llama3-70b …), or a TOML file with its few numbers.")] = None,
    cluster: Annotated[
        str | None, Option(help="A cluster.json, or DEVICE:DEVICES_OF_A_NODExNODES@GB/s; else cluster.json here, or this machine.")
    ] = None,
    ranks: Annotated[int | None, Option(min=1, help="Ranks, if not all devices.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Samples of the global batch, over all ranks.")] = None,
    seq: Annotated[int | None, Option(min=1, help="Tokens of a sample, for --model.")] = None,
    plan: Annotated[str | None, Option(help="Price this one, as for train; else all that there could be.")] = None,
    set: Annotated[list[str] | None, Option(metavar="NAME=VALUE", help="A field of the task, or a dotted key.")] = None,
    precision: Annotated[str | None, Option(help="Of a task: fp32, bf16 or fp16.")] = None,
    peak: Annotated[float | None, Option(metavar="TFLOP/S", help="Of a device, where it is not known.")] = None,
    tokens: Annotated[float | None, Option(help="Tokens of the whole training (samples, where they are no sequences).")] = None,
    price: Annotated[float | None, Option(help="Of a device for an hour.")] = None,
    top: Annotated[int, Option(min=1, help="Plans to show.")] = 10,
    explain: Annotated[bool, Option("--explain", help="Each part of time and memory of the first, and what the next lacks.")] = False,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the figures there, too.")] = None,
) -> None:
    """Predict step time, memory and cost of plans, the fastest that fits first. Nothing is run."""
    from paceline.errors import SpecError

    if (target is None) == (model is None):
        raise SpecError("plan what? Name a task, or a model with --model" if target is None else f"{target} or --model {model}? Name one")
    for name, number in (("tokens", tokens), ("price", price), ("peak", peak)):
        if number is not None and not 0 < number < float("inf"):
            raise SpecError(f"--{name} must be above 0, got {number:g}")
    if json is not None and not json.parent.is_dir():
        raise SpecError(f"cannot write {json}: there is no folder {json.parent}")
    recipe = None
    if model is not None:
        if set or precision:
            raise SpecError("--set and --precision are of a task; a --model has --seq, or a TOML file of its own")
        if batch is None:
            raise SpecError("how many samples a step? Say --batch NUMBER")
        from paceline.plan.library import model as known

        facts = known(model, **({} if seq is None else {"seq": seq}))
    else:
        assert target is not None
        if seq is not None:
            raise SpecError("--seq is for --model; the samples of a task have their own length")
        facts, recipe, batch = _counted(target, batch, precision, set or [])
    where = _with_peak(_cluster(cluster), peak)

    from rich.console import Console

    from paceline.plan.answer import answer
    from paceline.report.plan import as_json, heading, reasons, tables

    found = answer(facts, where, batch, plan, recipe, ranks, tokens, price)
    if json is not None:
        from paceline.cluster.file import write_whole

        write_whole(json, as_json(found, top))
    console = Console(highlight=False)
    console.print(heading(found), soft_wrap=True, markup=False)
    for table in tables(found, top, explain):
        console.print(table, soft_wrap=isinstance(table, str), markup=False)
    for line in reasons(found):
        console.print(line, soft_wrap=True, markup=False)


def _counted(target: str, batch: int | None, precision: str | None, set: list[str]) -> "tuple[ModelFacts, Recipe, int]":
    from paceline.cli.start import read
    from paceline.errors import PlanError
    from paceline.plan.recipe import FLOAT32, PACELINE, PACELINE_FP16
    from paceline.task import load_task

    spec, _ = read(target, {"batch": batch, "precision": precision}, set)
    recipes = {"fp32": FLOAT32, "bf16": PACELINE, "fp16": PACELINE_FP16}
    if spec.precision not in recipes:
        raise PlanError(f"what a step in {spec.precision} takes is not predicted; use --precision fp32, bf16 or fp16")
    task = load_task(spec.task, spec.set)
    from paceline.training.describe import describe

    return describe(spec, task), recipes[spec.precision], spec.batch


def _cluster(said: str | None) -> "Cluster":
    from paceline.cluster import file
    from paceline.cluster.published import find

    if said is not None:
        return find(said)
    for path in (Path("cluster.json"), Path("bench/cluster.json")):
        if path.exists():
            return file.read(path)
    from paceline.cluster import here
    from paceline.cluster.probe import probe

    return here.cluster(probe())


def _with_peak(cluster: "Cluster", peak: float | None) -> "Cluster":
    """10¹² FLOP/s, in the type that is trained in where there is a choice."""
    if peak is None:
        return cluster
    from paceline.cluster.facts import Fact

    flops = Fact(value=peak * 1e12, note="--peak")
    peaks = {"fp32": flops} if cluster.device.kind == "cpu" else {"bf16": flops, "fp16": flops, "fp32": flops}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"peaks_flops": peaks})})
