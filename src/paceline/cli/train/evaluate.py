"""paceline evaluate: the metrics of a checkpoint on a split."""

import json as json_file
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options.checkpoint_options import Device, Plan, Ranks
from paceline.cli.options.request_options import Json


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of the run")],
    split: Annotated[
        str, typer.Option(help="Split of the task's data, such as train, validation or test")
    ] = "validation",
    checkpoint: Annotated[
        str, typer.Option(help="Checkpoint to evaluate: last (the last complete one), best or a step")
    ] = "last",
    ranks: Ranks = None,
    plan: Plan = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples that all ranks evaluate at a time [default: as the run]")
    ] = None,
    device: Device = None,
    json: Json = None,
) -> None:
    """Compute loss and metrics of a checkpoint on a split, as the training does.

    No file of the run changes. Under torchrun, mpirun or srun, this process becomes a rank.
    """
    from paceline.cli.options.launching import announce_start
    from paceline.distributed.world import read_world
    from paceline.events import nan_to_null
    from paceline.files import check_target, write_whole
    from paceline.launch.evaluate_run import evaluate as evaluate_run
    from paceline.run import open_run
    from paceline.units import several

    folder, me = open_run(run), read_world()
    if json is not None:
        check_target(json)
    announce_start(me)
    result = evaluate_run(folder, split, checkpoint, ranks=ranks, plan=plan, batch=batch, device=device)
    if me.rank:
        return
    for note in result.notes:
        print(note)
    if json is not None:
        content = nan_to_null(vars(result) | {"run": str(folder.path)})
        write_whole(json, json_file.dumps(content, indent=1) + "\n")
    print(
        f"{result.checkpoint} on {split}: {several(result.samples, 'sample')}, plan {result.plan} on "
        f"{several(result.ranks, 'rank')}, {result.seconds:.1f} s"
    )
    width = max(map(len, result.metrics))
    for name, value in result.metrics.items():
        print(f"  {name:{width}}  {value:.6g}")
