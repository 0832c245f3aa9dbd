"""paceline export: write the weights, the whole model or the adapters of a run."""

import os
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import CheckpointError, RunError
from paceline.run import RunFolder, open_run

FORMATS = ("safetensors", "hf", "torch-export", "onnx")
PROGRAM_SUFFIXES = {"torch-export": ".pt2", "onnx": ".onnx"}
OTHER_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".npz", ".gguf", *PROGRAM_SUFFIXES.values())


def export(
    run: Annotated[Path, typer.Argument(help="Folder of the run")],
    file: Annotated[Path | None, typer.Argument(help="File or folder to write", show_default=False)] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The same as FILE.", show_default=False)
    ] = None,
    format: Annotated[
        str,
        typer.Option(
            metavar=f"[{'|'.join(FORMATS)}]",
            help="Weights in one file, a folder that from_pretrained of transformers loads, or the whole"
            " model as a program of torch.export (.pt2) or ONNX (.onnx).",
        ),
    ] = "safetensors",
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Write the adapters (LoRA) alone, to a folder for peft.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint [default: the last complete checkpoint]")
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the moving average of weights (Ema of after_step).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write the weights, the whole model or the adapters of a run.

    In a safetensors file, parameters have the names that they have in the model.
    """
    if format not in FORMATS:
        from paceline.spec import suggest

        raise RunError(f"--format {format} is unknown{suggest(format, FORMATS)}")
    if (file is None) == (output is None):
        given = "nothing" if file is None else f"both {file} and --output {output}"
        raise RunError(f"specify the file or folder to write once, got {given}")
    target = file or output
    assert target is not None
    folder = open_run(run)
    if adapters:
        _export_adapters(folder, target, format, step, ema, force)
    elif format in PROGRAM_SUFFIXES:
        _export_program(folder, target, format, step, ema, force)
    elif format == "hf":
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
    from paceline.training.checkpoint.integrity import find_last_complete

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
    _refuse_force(force, "--format hf")
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

    if file.suffix in OTHER_SUFFIXES:  # programs that trust the name could not load it
        formats = [name for name, suffix in PROGRAM_SUFFIXES.items() if suffix == file.suffix]
        fix = f"add --format {formats[0]}" if formats else f"name it {file.with_suffix('.safetensors')}"
        raise RunError(f"--format safetensors writes no {file.suffix} file, got {file}; {fix}")
    _refuse_existing(file, force)
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


def _export_program(
    folder: RunFolder, file: Path, format: str, step: int | None, ema: bool, force: bool
) -> None:
    from paceline.data.open_samples import open_training_samples
    from paceline.files import check_target
    from paceline.task import load_task
    from paceline.training.export.model import choose_counts, load_model, read_inputs
    from paceline.training.export.onnx import import_runtime, write_onnx
    from paceline.training.export.program import describe_taken, export_model, run_model, write_program
    from paceline.units import format_bytes

    if file.suffix != PROGRAM_SUFFIXES[format]:
        raise RunError(f"--format {format} writes a {PROGRAM_SUFFIXES[format]} file, got {file}; rename it")
    _refuse_existing(file, force)
    check_target(file)
    if format == "onnx":
        import_runtime()
    spec, _ = folder.request()
    path = _find_checkpoint(folder, step)
    task = load_task(spec.task, spec.set)
    model = load_model(spec, task, path, ema)
    inputs = read_inputs(spec, task, open_training_samples(task, spec), choose_counts(spec.batch))
    outputs = run_model(model, inputs, draws=format != "onnx")
    program = export_model(model, inputs)
    if format == "onnx":
        taken = write_onnx(program, outputs, file, force)
    else:
        taken = write_program(program, outputs, file)
    print(f"{file}: {type(model).__name__} of {format_bytes(file.stat().st_size)}, of {path}; checked")
    print(describe_taken(taken))


def _export_adapters(
    folder: RunFolder, out: Path, format: str, step: int | None, ema: bool, force: bool
) -> None:
    from paceline.hf.export import check_out, find_model
    from paceline.training.checkpoint.stored import load_weights
    from paceline.training.export.adapters import find_base, write_adapters

    if format != "safetensors":
        raise RunError(f"--adapters writes a folder for peft, and --format {format} the model; specify one")
    _refuse_force(force, "--adapters")
    spec, _ = folder.request()
    base = find_base(spec)
    check_out(out)
    path = _find_checkpoint(folder, step)
    layers = write_adapters(load_weights(path, ema), find_model(spec), base, out)
    print(f"{out}: adapters of {layers} layers of {base.path}, of {path}; checked")


def _refuse_existing(file: Path, force: bool) -> None:
    if os.path.lexists(file) and not force:
        raise RunError(f"{file} exists already; name another file, or add --force")


def _refuse_force(force: bool, option: str) -> None:
    if force:
        raise RunError(f"--force replaces files only, and {option} writes a folder; name another folder")
