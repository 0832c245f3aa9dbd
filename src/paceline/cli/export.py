"""paceline export: write the weights of a run to one file."""

import os
from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Folder of the run")],
    file: Annotated[Path, typer.Argument(help="Safetensors file to write")],
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint [default: the last complete checkpoint]")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the moving average of weights (Ema of after_step).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write the weights of a run to a safetensors file.

    Parameters have the names that they have in the model.
    """
    from paceline.errors import CheckpointError, RunError
    from paceline.files import check_target, replaced
    from paceline.run import open_run
    from paceline.units import format_bytes, format_count

    folder = open_run(run)
    if os.path.lexists(file) and not force:
        raise RunError(f"{file} exists already; name another file, or add --force")
    check_target(file)
    if step is not None and step not in folder.checkpoints():
        raise CheckpointError(
            f"{run} has no checkpoint of step {step}; steps with a checkpoint: "
            f"{', '.join(map(str, folder.checkpoints())) or 'none'}"
        )
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from paceline.training.checkpoint.save import find_last_complete
    from paceline.training.checkpoint.stored import load_weights

    path, notes = folder.checkpoint(step) if step is not None else None, list[str]()
    if path is None:
        path, _, notes = find_last_complete(folder)
    for note in notes:
        print(note)
    if path is None:
        raise CheckpointError(
            f"{run} has no complete checkpoint to export; continue it with: paceline resume {run}"
        )
    weights = load_weights(path, ema)
    with replaced(file) as temporary:
        try:
            save_file(weights, temporary, metadata={"format": "pt", "step": path.name.removeprefix("step_")})
        except SafetensorError as error:
            raise RunError(f"cannot write {file}: {error}") from error
    elements = sum(tensor.numel() for tensor in weights.values())
    print(
        f"{file}: {len(weights)} tensors, {format_count(elements)} elements, "
        f"{format_bytes(file.stat().st_size)}, of {path}"
    )
