"""paceline import-config: the configuration of DeepSpeed as a request."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def import_config(
    config: Annotated[Path, typer.Argument(metavar="FILE", help="JSON file of DeepSpeed")],
    task: Annotated[
        str | None, typer.Option(help="Task to train, such as my.py:Net [default: a line to complete]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write this TOML file [default: print it]"),
    ] = None,
) -> None:
    """Translate the configuration of DeepSpeed to a request of Paceline.

    Prints a TOML file for paceline train. What has no counterpart is reported, or refused by name if it
    changes what is computed.
    """
    import tomli_w

    from paceline.errors import SpecError
    from paceline.files import check_target, write_whole
    from paceline.spec.deepspeed import translate

    if out is not None:
        check_target(out, SpecError)
    translation = translate(config)
    first = tomli_w.dumps({"task": task}) if task is not None else '# task = "my.py:Net"  # your task\n'
    text = first + tomli_w.dumps(translation.tree)
    for note in translation.notes:
        print(f"note: {note}", file=sys.stderr)
    if out is None:
        print(text, end="")
        return
    write_whole(out, text, SpecError)
    print(f"{out}: train with: paceline train {out}")
