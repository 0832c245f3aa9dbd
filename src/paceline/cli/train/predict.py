"""paceline predict: what a checkpoint predicts for each sample of a split or of files."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options.checkpoint_options import Checkpoint, Device, Plan, Ranks


def predict(
    run: Annotated[Path, typer.Argument(help="Folder of the run")],
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILES]...", help="Files with samples, which the task's read_files reads"),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Write JSON lines to this file")
    ] = Path("predictions.jsonl"),
    split: Annotated[
        str | None,
        typer.Option(help="Split of the task's data, in place of files [default: validation]"),
    ] = None,
    checkpoint: Checkpoint = "last",
    ranks: Ranks = None,
    plan: Plan = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples that all ranks predict at a time [default: as the run]")
    ] = None,
    device: Device = None,
) -> None:
    """Write what a checkpoint predicts for each sample, a line of JSON for each.

    The lines do not depend on ranks and plan. No file of the run changes. Under torchrun, mpirun or srun,
    this process becomes a rank.
    """
    import signal

    from paceline.cli.options.launching import announce_start
    from paceline.distributed.world import read_world
    from paceline.files import check_target
    from paceline.launch.predict_run import predict as predict_run
    from paceline.run import open_run
    from paceline.units import several

    folder, me = open_run(run), read_world()
    check_target(out)
    announce_start(me)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which deletes the incomplete file
    result = predict_run(
        folder, files or (), out, checkpoint, split=split, ranks=ranks, plan=plan, batch=batch, device=device
    )
    if me.rank:
        return
    for note in result.notes:
        print(note)
    print(
        f"{out}: {several(result.samples, 'line')} of {result.checkpoint}, plan {result.plan} on "
        f"{several(result.ranks, 'rank')}, {result.seconds:.1f} s"
    )
