"""paceline probe: show the hardware and software of this machine."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options.request_options import Json


def probe(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIRECTORY",
            help="Directories to inspect [default: home, scratch, this folder and /tmp]",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Show what this machine has: processors, links, network, PyTorch back ends, storage.

    Nothing is measured.
    """
    from paceline.errors import ClusterError

    for path in directories or ():
        if not path.is_dir():
            raise ClusterError(f"there is no directory {path}; name an existing one")
    from paceline.files import check_target, write_whole

    if json is not None:
        check_target(json)

    from paceline.cluster.backends import start

    torch = start()  # takes longest, so it runs while this process imports the rest

    from rich.console import Console
    from rich.text import Text

    from paceline.cluster.file import format_json
    from paceline.cluster.probe import probe as probe_machine
    from paceline.cluster.text import build_tables

    machine = probe_machine(directories or (), torch)
    if json is not None:
        write_whole(json, format_json(machine.model_dump(mode="json")))
    console = Console(highlight=False)
    for k, table in enumerate(build_tables(machine)):
        if k and not isinstance(table, Text):
            console.print()
        console.print(table)
