"""paceline unpack: restore the files that were packed."""

from pathlib import Path
from typing import Annotated

import typer


def unpack(
    packed: Annotated[Path, typer.Argument(help="Folder of shards")],
    out: Annotated[Path, typer.Argument(help="New folder for the files")],
) -> None:
    """Restore the files of shards: names, contents and permissions, bit for bit."""
    from paceline.cli.options.progress import count_progress
    from paceline.data.shards.unpack import unpack as unpack_files
    from paceline.units import format_bytes, format_seconds, several

    with count_progress("unpacking files") as on_progress:
        result = unpack_files(packed, out, on_progress)
    print(
        f"{out}: {several(result.files, 'file')} ({format_bytes(result.bytes)}),"
        f" {format_seconds(result.seconds)}"
    )
