"""paceline probe: what is this machine?"""

from pathlib import Path
from typing import Annotated

import typer

Option = typer.Option


def probe(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[DIRECTORY]...", help="Look at these, in place of home, scratch, this folder and /tmp."
        ),
    ] = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write what was found there, too.")] = None,
) -> None:
    """Show what this machine is: processors, links, network, PyTorch's back ends, storage. Nothing is put to work."""
    from paceline.errors import ClusterError

    for path in directories or ():
        if not path.is_dir():
            raise ClusterError(f"there is no directory {path}")
    from paceline.files import check_target, write_whole

    if json is not None:
        check_target(json)

    from paceline.cluster.backends import begin

    torch = begin()  # takes longest, so it goes on while this process imports what it needs itself

    from rich.console import Console
    from rich.text import Text

    from paceline.cluster.file import layout
    from paceline.cluster.probe import probe as look
    from paceline.cluster.text import tables

    machine = look(directories or (), torch)
    if json is not None:
        write_whole(json, layout(machine.model_dump(mode="json")))
    console = Console(highlight=False)
    for k, table in enumerate(tables(machine)):
        if k and not isinstance(table, Text):
            console.print()
        console.print(table)
