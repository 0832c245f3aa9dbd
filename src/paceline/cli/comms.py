"""paceline comms: what a training step would send, worked out on one process."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.request_options import Target

Option = typer.Option


def comms(
    target: Target = "digits",
    ranks: Annotated[
        int | None, Option(help="Ranks to play, as many as you like; needed where a run.toml does not say.")
    ] = None,
    plan: Annotated[str | None, Option(help="As for train.")] = None,
    batch: Annotated[int | None, Option(help="Samples of the global batch, over all ranks.")] = None,
    set: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="A field of the task, or a dotted key such as optimizer.momentum."),
    ] = None,
    optimizer: Annotated[str | None, Option(help="adamw or sgd.")] = None,
    clip: Annotated[float | None, Option(help="Largest norm of the whole gradient.")] = None,
    precision: Annotated[str | None, Option(help="fp64, fp32, bf16 or fp16.")] = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the figures there, too.")] = None,
) -> None:
    """Show bytes and calls of a training step by collective, mesh axis and module. One process plays a rank of them; nothing is sent."""
    from paceline.cli.launching import read, say
    from paceline.distributed.world import World
    from paceline.errors import SpecError
    from paceline.files import check_target, write_whole

    flags = {
        "ranks": ranks,
        "plan": plan,
        "batch": batch,
        "optimizer.name": optimizer,
        "optimizer.clip": clip,
        "precision": precision,
    }
    spec, launch = read(target, flags, set or [])
    if launch.ranks is None:
        raise SpecError("for how many ranks? Say --ranks NUMBER; they need not be there")
    if json is not None:
        check_target(json)
    launch, laid_out, _ = say(spec, launch, World())

    from rich.console import Console

    from paceline.plan.plan import parse
    from paceline.plan.report.comm_volume import as_json, heading, tables
    from paceline.training.dry_run.dry_run import compute_stage_volumes

    assert launch.plan is not None
    assert launch.ranks is not None
    volumes = compute_stage_volumes(spec, parse(launch.plan), launch.ranks)
    if json is not None:
        write_whole(json, as_json(spec, launch, volumes))
    console = Console(highlight=False)
    console.print(heading(spec, launch, laid_out), soft_wrap=True)
    for table in tables(volumes):
        console.print(table)
