"""paceline comms: the communication volume of a training step, computed in one process."""

from typing import Annotated

import typer

from paceline.cli.options.request_options import Clip, Json, OptimizerName, Set, Target

Option = typer.Option


def comms(
    target: Target = "digits",
    ranks: Annotated[
        int | None,
        Option(
            help="Number of ranks to simulate, required unless a run.toml has it; none of them is started."
        ),
    ] = None,
    plan: Annotated[
        str | None, Option(help="Plan, as for train [default: single on one rank, else ddp]")
    ] = None,
    batch: Annotated[
        int | None, Option(help="Number of samples of the global batch, over all ranks [default: 64]")
    ] = None,
    set: Set = None,
    optimizer: OptimizerName = None,
    clip: Clip = None,
    precision: Annotated[
        str | None, Option(help="Precision of the computation: fp64, fp32, bf16 or fp16 [default: fp32]")
    ] = None,
    json: Json = None,
) -> None:
    """Show bytes and calls of a training step by collective, mesh axis and module.

    One process simulates the ranks; nothing is sent.
    """
    from paceline.cli.options.launching import read_request
    from paceline.distributed.world import World
    from paceline.errors import SpecError
    from paceline.files import check_target, write_whole
    from paceline.launch.check_launch import resolve_launch

    flags = {
        "ranks": ranks,
        "plan": plan,
        "batch": batch,
        "optimizer.name": optimizer,
        "optimizer.clip": clip,
        "precision": precision,
    }
    spec, launch = read_request(target, flags, set or [])
    if launch.ranks is None:
        raise SpecError(
            "comms requires a number of ranks; add --ranks NUMBER, which may exceed the devices here"
        )
    if json is not None:
        check_target(json)
    launch, plan_on_ranks, _ = resolve_launch(spec, launch, World())

    from rich.console import Console

    from paceline.plan.plan import parse
    from paceline.plan.report.comm_volume import as_json, build_tables, heading
    from paceline.training.dry_run.dry_run import compute_stage_volumes

    assert launch.plan is not None
    assert launch.ranks is not None
    volumes = compute_stage_volumes(spec, parse(launch.plan), launch.ranks)
    if json is not None:
        write_whole(json, as_json(spec, launch, volumes))
    console = Console(highlight=False)
    console.print(heading(spec, launch, plan_on_ranks), soft_wrap=True)
    for table in build_tables(volumes):
        console.print(table)
