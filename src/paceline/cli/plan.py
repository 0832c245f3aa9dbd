"""paceline plan: which plans fit, how long a step takes, and what a training costs."""

from pathlib import Path
from typing import Annotated

import typer

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
    from paceline.cli.planned import cluster_of, counted, with_peak
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
        facts, recipe, batch = counted(target, batch, precision, set or [])
    where = with_peak(cluster_of(cluster), peak)

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
