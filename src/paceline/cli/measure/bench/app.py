"""paceline bench: measure the machine."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.measure.bench.options import Option

app = typer.Typer()


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    task: Annotated[
        str | None,
        Option(
            help="Task whose step and input to measure: my.py:Class, or a built-in task [default: digits]"
        ),
    ] = None,
    directory: Annotated[
        list[Path] | None,
        Option(metavar="DIR", help="Directory to measure; may be repeated [default: ., /dev/shm]"),
    ] = None,
    ranks: Annotated[
        int | None, Option(min=2, help="Number of ranks for the collectives [default: one per GPU, or 2]")
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda [default: cuda if available]")] = None,
    seconds: Annotated[
        float, Option(min=5.0, metavar="SECONDS", help="Approximate total time of the measurements.")
    ] = 75.0,
    out: Annotated[Path, Option(metavar="DIR", help="Folder for results, pictures and cluster.json.")] = Path(
        "bench"
    ),
) -> None:
    """Measure the machine: all benches in under two minutes, or a single bench by its name."""
    if context.invoked_subcommand is None:
        from paceline.cli.measure.bench.all import run_all

        run_all(task, directory or [], ranks, device, seconds, out)
