"""paceline diff: name the first step and tensor in which two runs differ."""

import json as json_file
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options.request_options import Json


def diff(
    run_a: Annotated[Path, typer.Argument(help="Folder of a run")],
    run_b: Annotated[Path, typer.Argument(help="Folder of the run to compare it with")],
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest relative difference that counts as equal [default: 0 if both runs have the same "
            "plan, ranks, threads, device and PyTorch, else what rounding explains in their precision]",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Name the first step and tensor in which two runs differ.

    Compares settings, then each step, then the checkpoints of equal steps, under any plans and ranks.

    Exit status: 0 equal, 1 different, 2 bad input.
    """
    from paceline.cli.options.plan_options import check_outputs, print_parts
    from paceline.debug.diff import diff_runs
    from paceline.debug.text import format_diff
    from paceline.errors import SpecError
    from paceline.events import nan_to_null
    from paceline.files import write_whole
    from paceline.run import open_run

    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise SpecError(f"--tolerance must be a number of at least 0, got {tolerance}")
    folders = open_run(run_a), open_run(run_b)
    check_outputs(json, None)
    found = diff_runs(*folders, tolerance)
    if json is not None:
        write_whole(json, json_file.dumps(nan_to_null(asdict(found)), indent=1) + "\n")
    print_parts(*format_diff(found))
    if not found.is_equal:
        raise typer.Exit(1)
