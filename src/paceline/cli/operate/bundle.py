"""paceline bundle: the packages of this environment in one file, for machines without a network."""

from pathlib import Path
from typing import Annotated

import typer


def bundle(
    file: Annotated[Path, typer.Argument(metavar="FILE.tar", help="Tar file to write, such as env.tar")],
    requirements: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="requirements.txt or pyproject.toml: only Paceline, its packages, and what they require "
            "[default: all packages that are installed]",
        ),
    ] = None,
) -> None:
    """Write the packages of this environment to one file, for machines without a network.

    The wheels are made of the installed files. A script in the file installs them. The other machine needs
    the same version of Python.
    """
    import signal

    from paceline.cli.options.progress import count_progress
    from paceline.launch.environment.bundle import check_bundle_name, write_bundle
    from paceline.launch.environment.installed import (
        find_needed,
        list_extras,
        list_installed,
        read_requirements,
    )
    from paceline.units import format_bytes, several

    folder = check_bundle_name(file)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no half of a bundle is left
    packages = list_installed()
    if requirements is not None:
        extras = ",".join(list_extras(packages))
        packages = find_needed(
            [f"paceline[{extras}]", *(read_requirements(requirements) or ())],
            packages,
        )
    with count_progress("packing packages") as on_package:
        size = write_bundle(file, packages, on_package)
    print(f"{file}: {several(size.num_packages, 'package')}, {format_bytes(size.bytes)}")
    print(f"on the other machine: tar -xf {file.name} && {folder}/install.sh NEW_FOLDER")
