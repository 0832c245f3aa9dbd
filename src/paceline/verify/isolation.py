"""Check that packed documents are isolated: a change of one leaves the outputs of the others bit-equal."""

import torch
from torch import Tensor, nn

from paceline.batch import find_tensors, map_tensors
from paceline.data.fake import example_batch
from paceline.data.open_samples import open_dataset
from paceline.data.samples import Batch
from paceline.distributed.rng import seeded_rngs
from paceline.errors import TaskError
from paceline.parallel.loss.forward import forward
from paceline.plan.plan import Plan
from paceline.sample_rng import SampleNumbers, number_samples
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.init.deferred_init import Weights, fill_

CPU = torch.device("cpu")
SAMPLES = 4
ISOLATED = "documents are isolated: a change of the first of each sample left the outputs of others bit-equal"
UNCHECKED = "the isolation of documents was not checked"


def check_isolation(spec: Spec, task: Task, model: nn.Module, weights: Weights) -> str | None:
    """Return a sentence on the isolation of packed documents; None if samples are not packed.

    model, weights: as recorded; the model gets its weights here. Raises TaskError if a change of the first
    document of a sample changes the output of another document.
    """
    dataset = open_dataset(task, "train")
    if not getattr(dataset, "packs_documents", False):
        return None
    fill_(model, weights, CPU)
    model.to(torch.float64 if spec.precision == "fp64" else torch.float32).eval()
    batch = example_batch(spec.model_copy(update={"batch": SAMPLES}), task, Plan().resolve(1))
    columns = batch if isinstance(batch, dict) else {}
    tokens, documents = columns.get("tokens"), columns.get("documents")
    if not isinstance(tokens, Tensor) or not isinstance(documents, Tensor):
        return f"{UNCHECKED}: the batch has no tensors 'tokens' and 'documents' like those of PackedDocuments"
    first, others = documents == 0, documents > 0
    if not others.any():
        return f"{UNCHECKED}: the first {SAMPLES} samples have only one document each"
    before, after = (
        _compute_output(spec, task, model, changed)
        for changed in (batch, batch | {"tokens": torch.where(first, _replace_tokens(tokens), tokens)})
    )
    if before is None or after is None:
        return f"{UNCHECKED}: the output has no tensor of shape (batch, length, …)"
    differs = (before != after).flatten(2).any(-1)
    if (differs & others).any():
        sample, position = (differs & others).nonzero()[0].tolist()
        raise TaskError(
            f"a change of document 0 changes the output of document {int(documents[sample, position])} in"
            f" sample {sample} at position {position}; restrict attention by"
            " paceline.data.packing.isolate_documents(documents)"
        )
    if not (differs & first).any():
        return f"{UNCHECKED}: the outputs do not depend on the tokens"
    return ISOLATED


def _replace_tokens(tokens: Tensor) -> Tensor:
    """Return other tokens in place of each: the next of those that the batch has."""
    known, place = tokens.unique(return_inverse=True)
    return known[(place + 1) % len(known)]


def _compute_output(spec: Spec, task: Task, model: nn.Module, batch: Batch) -> Tensor | None:
    """Return the first floating-point output with a value for each position."""
    shape = batch["documents"].shape
    batch = map_tensors(torch.clone, batch)
    numbers = SampleNumbers(range(len(batch["documents"])), 0, torch.float64)
    with torch.no_grad(), seeded_rngs(spec.seed), number_samples([batch], [numbers]):
        tensors = find_tensors(forward(task, model, batch))
    return next(
        (
            tensor.reshape(*shape, -1)
            for tensor in tensors
            if tensor.is_floating_point() and tensor.dim() >= 2 and tensor.shape[:2] == shape
        ),
        None,
    )
