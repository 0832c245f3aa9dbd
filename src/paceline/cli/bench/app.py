"""paceline bench: measure the machine."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench.options import Option

app = typer.Typer()


@app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    task: Annotated[
        str | None,
        Option(help="Measure its step and its input: my.py:Class, or a built-in one. Default: digits."),
    ] = None,
    directory: Annotated[
        list[Path] | None,
        Option(metavar="DIR", help="Measure it, too; may be repeated. Default: here, /dev/shm."),
    ] = None,
    ranks: Annotated[
        int | None, Option(min=2, help="For the collectives. Default: one for each GPU, or 2.")
    ] = None,
    device: Annotated[str | None, Option(help="cpu or cuda; CUDA where there is some.")] = None,
    seconds: Annotated[
        float, Option(min=5.0, metavar="SECONDS", help="About how long to measure, all in all.")
    ] = 75.0,
    out: Annotated[Path, Option(metavar="DIR", help="For results, pictures and cluster.json.")] = Path(
        "bench"
    ),
) -> None:
    """Measure the machine: all that fits into two minutes, or one bench by its name."""
    if context.invoked_subcommand is None:
        from paceline.cli.bench.all import whole

        whole(task, directory or [], ranks, device, seconds, out)
