"""A model as a graph in a .onnx file, compared with the model by running it in ONNX Runtime."""

import importlib
import os
import secrets
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from paceline.errors import RunError
from paceline.files import check_target, reason
from paceline.training.export.model import ModelInputs
from paceline.training.export.program import INSTEAD, ModelOutput, compare, find_tensors, quiet
from paceline.user_code import describe_exception

FACTOR = 10.0  # of the tolerance: ONNX Runtime has other kernels than torch
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def import_runtime() -> Any:
    """Return the module onnxruntime. Raises RunError if a package that the export needs is missing."""
    module = None
    for name in PACKAGES:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise RunError(
                f"--format onnx requires {name}, which cannot be imported ({error}); "
                "run: pip install 'paceline[onnx]'"
            ) from error
    return module


def write_onnx(
    program: ExportedProgram, outputs: Sequence[ModelOutput], file: Path, force: bool
) -> list[ModelInputs]:
    """Write a program to a .onnx file, and return the inputs that it takes, of those of `outputs`.

    torch writes weights of more than 1.5 GiB to a second file, whose name ends with .onnx.data. The files
    appear only after ONNX Runtime returned these tensors. force: replace existing files. Raises RunError.
    """
    runtime = import_runtime()
    check_target(file)
    folder = file.absolute().with_name(f".{secrets.token_hex(8)}")
    try:
        folder.mkdir(mode=0o700)
        _write_graph(program, folder / file.name)
        session = _open_session(runtime, folder / file.name)
        taken = compare(partial(_run, session), outputs, "the ONNX graph", FACTOR)
        targets = {part: file.with_name(part.name) for part in folder.iterdir()}
        for target in targets.values():
            check_target(target)
            if os.path.lexists(target) and not force:
                raise RunError(f"{target} exists already; name another file, or add --force")
        for part in sorted(targets, key=lambda part: part.name == file.name):  # the graph last
            part.replace(targets[part])
    except OSError as error:
        raise RunError(f"cannot write {file}: {reason(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return taken


def _write_graph(program: ExportedProgram, file: Path) -> None:
    try:
        with quiet():
            graph = torch.onnx.export(program, dynamo=True, verbose=False)
            assert graph is not None
            graph.save(file)
    except OSError:
        raise
    except Exception as error:  # of any kind: torch.onnx runs the operations of the model
        cause = error.__cause__ if error.__cause__ is not None else error
        raise RunError(
            f"torch.onnx cannot export the model: {describe_exception(cause)}; {INSTEAD}"
        ) from error


def _open_session(runtime: Any, file: Path) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # only fatal messages
    try:
        return runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of its C++ code, of many kinds without a common base
        raise RunError(
            f"ONNX Runtime cannot load the graph of the model: {describe_exception(error)}; {INSTEAD}"
        ) from error


def _run(session: Any, inputs: ModelInputs) -> list[Tensor]:
    tensors = find_tensors(inputs.args, inputs.kwargs)
    names = [entry.name for entry in session.get_inputs()]
    fed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, fed)]
