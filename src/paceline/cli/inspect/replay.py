"""paceline replay: repeat one step of a run on one process."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def replay(
    run: Annotated[Path, typer.Argument(help="Folder of the run")],
    step: Annotated[int, typer.Option(help="Step to repeat, counted from 1")],
    anomaly: Annotated[
        bool, typer.Option("--anomaly", help="Name the module or the line of code that gives NaN first.")
    ] = False,
    debugger: Annotated[
        bool, typer.Option("--debugger", help="Start pdb when the step calls loss().")
    ] = False,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Device [default: cuda if available, else cpu]"),
    ] = None,
) -> None:
    """Repeat one step of a run on one process.

    Starts from the nearest checkpoint before the step. Prints the indices of its samples, the loss, and the
    gradient norm of each module. The run folder is not changed.
    """
    from paceline.cli.options.plan_options import print_parts
    from paceline.debug.replay import DebuggerLeft
    from paceline.debug.replay import replay as replay_step
    from paceline.debug.replay_text import format_step
    from paceline.run import open_run

    folder = open_run(run)
    try:
        found = replay_step(folder, step, device, anomaly, debugger)
    except DebuggerLeft:
        raise typer.Exit(0) from None
    print_parts(*format_step(found))
