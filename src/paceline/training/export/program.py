"""A model as a program of torch.export, written to a .pt2 file and compared with the model."""

import contextlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import AdditionalInputs, Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten, tree_map

from paceline.data.fake import is_close
from paceline.distributed.rng import rng_states, seeded_rngs
from paceline.errors import RunError, TaskError
from paceline.files import replaced
from paceline.torch_compat import fused_layers_disabled
from paceline.training.export.model import ModelInputs
from paceline.user_code import UserCode, describe_exception, find_user_line

# The largest difference of outputs, relative to the largest value; other types must be equal.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
INSTEAD = "use --format safetensors, which writes the weights"


@dataclass(frozen=True)
class ModelOutput:
    """The inputs of a model, and the tensors that it returns for them."""

    inputs: ModelInputs
    tensors: list[Tensor]


def run_model(model: nn.Module, examples: Sequence[ModelInputs], draws: bool = True) -> list[ModelOutput]:
    """Return the tensors that the model returns for each of these inputs.

    draws: whether the forward pass may draw random numbers. A model may refuse a batch of one sample, which
        is left out then. Raises RunError and TaskError.
    """
    found = []
    for inputs in examples:
        with seeded_rngs(0), torch.no_grad():
            before = rng_states()
            try:
                with UserCode("the forward pass", model.forward):
                    output = model(*inputs.args, **inputs.kwargs)
            except TaskError:
                if inputs.samples > 1:
                    raise
                continue  # the model takes two samples or more
            if not draws and rng_states() != before:
                raise RunError(
                    f"{type(model).__name__} draws random numbers in evaluation, so its outputs cannot be "
                    "compared with those of ONNX; use --format torch-export"
                )
        found.append(ModelOutput(inputs, find_tensors(output)))
    return found


def find_tensors(*tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers, in the order of torch's pytree."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def export_model(model: nn.Module, examples: Sequence[ModelInputs]) -> ExportedProgram:
    """Return the model as a program for inputs like these.

    examples: inputs of several batches. The dims in which they differ can have any size in the program, if
        the model does not fix it. Batches of one sample are not compared.

    Raises RunError if torch.export cannot export the model.
    """
    first, name = examples[0], type(model).__name__
    varying = AdditionalInputs()
    for other in examples[1:]:
        if other.samples > 1:  # torch takes a size of 1 for fixed
            varying.add(other.args, other.kwargs)
    try:
        shapes = varying.dynamic_shapes(model, first.args, first.kwargs)
    except ValueError as error:
        raise RunError(
            f"the inputs of {name} differ between batches in more than the shapes of tensors "
            f"({describe_exception(error)}); {INSTEAD}"
        ) from error
    shapes = tree_map(lambda dim: Dim.AUTO if dim is Dim.DYNAMIC else dim, shapes)
    try:
        with quiet(), fused_layers_disabled():
            program = torch.export.export(model, first.args, first.kwargs, dynamic_shapes=shapes)
    except GuardOnDataDependentSymNode as error:
        line = find_user_line(error)
        raise RunError(
            f"torch.export cannot export {name}: its steps depend on the values of tensors"
            f"{f' ({line})' if line else ''}; use torch.where or torch.cond there, or --format safetensors"
        ) from error
    except Exception as error:  # of any kind: it runs the code of the model
        raise RunError(
            f"torch.export cannot export {name}: {describe_exception(error, model.forward)}; {INSTEAD}"
        ) from error
    program.example_inputs = None  # samples of the user, which the file would contain
    return program


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress what torch's exporters log, print and warn of: it is for their developers."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            open(os.devnull, "w") as sink,
            contextlib.redirect_stdout(sink),
            contextlib.redirect_stderr(sink),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def describe_taken(taken: Sequence[ModelInputs]) -> str:
    """Return a sentence about the batches that a program takes.

    taken: of the batches that it was checked with.
    """
    if len(taken) == 1:
        shapes = ", ".join(
            str(tuple(tensor.shape)) for tensor in find_tensors(taken[0].args, taken[0].kwargs)
        )
        return (
            f"it takes only inputs of the shapes {shapes}: forward() fixes sizes, for example by len(x) in "
            "place of x.shape[0]"
        )
    return f"it takes batches of {'any number of' if taken[-1].samples == 1 else '2 or more'} samples"


def write_program(program: ExportedProgram, outputs: Sequence[ModelOutput], file: Path) -> list[ModelInputs]:
    """Write a program to a .pt2 file, and return the inputs that it takes, of those of `outputs`.

    The file appears only after the program was loaded again and returned these tensors. Raises RunError.
    """
    # Loading such a file unpickles, so it is loaded from a file that no other user can open.
    with replaced(file) as temporary, tempfile.TemporaryFile(dir=temporary.absolute().parent) as stream:
        with quiet():
            torch.export.save(program, stream)
            stream.seek(0)
            loaded = torch.export.load(stream).module()
        taken = compare(
            lambda inputs: find_tensors(loaded(*inputs.args, **inputs.kwargs)), outputs, "the program"
        )
        stream.seek(0)
        with open(temporary, "wb") as target:
            shutil.copyfileobj(stream, target)
    return taken


def compare(
    run: Callable[[ModelInputs], Sequence[Tensor]],
    outputs: Sequence[ModelOutput],
    what: str,
    factor: float = 1.0,
) -> list[ModelInputs]:
    """Return the inputs that a program takes, of which the first must be one.

    run: returns the tensors that the program computes. factor: of the tolerance.
    Raises RunError if they differ from those of the model.
    """
    taken = []
    for output in outputs:
        try:
            with seeded_rngs(0), torch.no_grad():
                actual = run(output.inputs)
        except Exception as error:  # of the program, which may fix the sizes of its inputs
            if output is outputs[0]:
                raise RunError(
                    f"{what} that was written does not run: {describe_exception(error)}; {INSTEAD}"
                ) from error
            continue
        if difference := _find_difference(actual, output.tensors, factor):
            raise RunError(
                f"{what} that was written computes other values than the model, for {output.inputs.samples} "
                f"samples: {difference}; {INSTEAD}"
            )
        taken.append(output.inputs)
    return taken


def _find_difference(actual: Sequence[Tensor], expected: Sequence[Tensor], factor: float) -> str | None:
    """Return where tensors differ by more than the tolerance; None if they do not."""
    if len(actual) != len(expected):
        return f"it returns {len(actual)} tensors in place of {len(expected)}"
    for number, (found, right) in enumerate(zip(actual, expected, strict=True), 1):
        if (found.shape, found.dtype) != (right.shape, right.dtype):
            return (
                f"output {number} has shape {tuple(found.shape)} and {found.dtype} in place of "
                f"{tuple(right.shape)} and {right.dtype}"
            )
        tolerance = TOLERANCE.get(right.dtype, 0.0) * factor
        if not is_close(found, right, tolerance, equal_nan=True):
            largest = float((found.double() - right.double()).abs().nan_to_num(torch.inf).max())
            return (
                f"output {number} differs by up to {largest:.2g}, which exceeds {tolerance:g} of its largest "
                "value"
            )
    return None
