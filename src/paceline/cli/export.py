"""paceline export: write the weights of a run to one file, or to a folder of Hugging Face."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.errors import CheckpointError, RunError
from paceline.run import RunFolder, open_run


def export(
    run: Annotated[Path, typer.Argument(help="Folder of the run")],
    file: Annotated[Path | None, typer.Argument(help="File or folder to write", show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The same as FILE.", show_default=False)
    ] = None,
    format: Annotated[
        Literal["safetensors", "hf"],
        typer.Option(help="One file, or a folder that from_pretrained of transformers loads."),
    ] = "safetensors",
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint [default: the last complete checkpoint]")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the moving average of weights (Ema of after_step).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write the weights of a run to a safetensors file or a Hugging Face folder.

    In the file, parameters have the names that they have in the model.
    """
    if (file is None) == (output is None):
        given = "nothing" if file is None else f"both {file} and --output {output}"
        raise RunError(f"specify the file or folder to write once, got {given}")
    target = file or output
    assert target is not None
    folder = open_run(run)
    if format == "hf":
        _export_folder(folder, target, step, ema, force)
    else:
        _export_file(folder, target, step, ema, force)


def _find_checkpoint(folder: RunFolder, step: int | None) -> Path:
    """Return the checkpoint of a step, or the last complete one; print which ones were skipped.

    Raises CheckpointError.
    """
    run = folder.path
    if step is not None and step not in folder.checkpoints():
        raise CheckpointError(
            f"{run} has no checkpoint of step {step}; steps with a checkpoint: "
            f"{', '.join(map(str, folder.checkpoints())) or 'none'}"
        )
    from paceline.training.checkpoint.save import find_last_complete

    path, notes = folder.checkpoint(step) if step is not None else None, list[str]()
    if path is None:
        path, _, notes = find_last_complete(folder)
    for note in notes:
        print(note)
    if path is None:
        raise CheckpointError(
            f"{run} has no complete checkpoint to export; continue it with: paceline resume {run}"
        )
    return path


def _export_folder(folder: RunFolder, out: Path, step: int | None, ema: bool, force: bool) -> None:
    from paceline.hf.export import check_out, find_model, write_folder
    from paceline.training.checkpoint.stored import load_weights
    from paceline.units import format_bytes

    spec, _ = folder.request()
    if force:
        raise RunError("--force replaces files only, and --format hf writes a folder; name another folder")
    check_out(out)
    model = find_model(spec)
    path = _find_checkpoint(folder, step)
    write_folder(load_weights(path, ema), model, out)
    files = [file.stat().st_size for file in out.glob("*.safetensors")]
    print(f"{out}: a {type(model.build()).__name__} of {format_bytes(sum(files))}, of {path}; checked")


def _export_file(folder: RunFolder, file: Path, step: int | None, ema: bool, force: bool) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from paceline.files import check_target, replaced
    from paceline.training.checkpoint.stored import load_weights
    from paceline.units import format_bytes, format_count

    if os.path.lexists(file) and not force:
        raise RunError(f"{file} exists already; name another file, or add --force")
    check_target(file)
    path = _find_checkpoint(folder, step)
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
