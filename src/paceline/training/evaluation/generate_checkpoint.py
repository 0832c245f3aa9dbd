"""Write texts with the language model of a checkpoint, as one rank under any plan that has whole layers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from paceline.data.samples import Samples
from paceline.distributed.rng import derive_seed, seed_torch
from paceline.distributed.world import World
from paceline.errors import PlanError
from paceline.hf.generate import GenerationOptions, TextWriter, shorten_arguments
from paceline.hf.task import HuggingFace
from paceline.parallel.data_parallel.lockstep import in_lockstep
from paceline.parallel.loss.forward import autocast
from paceline.plan.plan import Plan
from paceline.training.checks.rank_checks import check_ranks
from paceline.training.evaluation.evaluate_checkpoint import (
    CheckpointRequest,
    agree_on_plan,
    connected,
    load_checkpoint,
)
from paceline.training.model_facts.model_analysis import ModelAnalysis
from paceline.training.prepared import PreparedTraining

Prompts = Sequence[Sequence[int]]  # tokens of each


@dataclass(frozen=True)
class GeneratedText:
    """What a model wrote.

    text: for a decoder, what follows the prompt. tokens: of the text, without the token that ends it.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """The texts of a checkpoint, in the order of the prompts.

    texts           what the model wrote for each prompt
    checkpoint      path of the checkpoint
    step            step of the checkpoint
    plan, ranks     plan and number of ranks
    seconds         duration, without the start
    notes           damaged checkpoints that were skipped, and what changed since the checkpoint was made
    """

    texts: tuple[GeneratedText, ...]
    checkpoint: str
    step: int
    plan: str
    ranks: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class GenerationRequest:
    """What to write, with which checkpoint. The same on all ranks."""

    source: CheckpointRequest
    prompts: tuple[str, ...]
    options: GenerationOptions


def check_plan(plan: Plan) -> None:
    """Raise PlanError for a plan under which no rank can call the whole model."""
    axis = "pp" if plan.pp > 1 else "cp" if plan.cp > 1 else None
    if axis is not None:
        raise PlanError(
            f"plan {plan} cannot generate: with {axis}, no rank calls the whole model; use single, ddp, "
            "zero1, zero2, zero3, hsdp or tp, such as --plan zero3, which reads the same checkpoint"
        )


def generate_from_checkpoint(request: GenerationRequest, world: World) -> Generation:
    """Complete the prompts on all ranks, and return the same texts on all ranks. A collective.

    Raises PlanError, TaskError, DataError and CheckpointError.
    """
    # Compilation would take longer than most texts: each length is a new shape.
    spec = request.source.spec.model_copy(update={"compile": False})
    source = replace(request.source, spec=spec)
    with connected(source, world) as (task, device):
        assert isinstance(task, HuggingFace)
        plan = agree_on_plan(source, task, world)
        check_plan(plan)
        writer = TextWriter(task, request.options)
        prompts = [writer.encode(prompt) for prompt in request.prompts]
        check_ranks(task, world, {"prompts": len(prompts)})
        examples = Samples(
            [writer.example_sample()] * (2 * world.size), "train", spec.seed, None, task.collate
        )
        resolved = plan.resolve(world.size)
        loaded = load_checkpoint(source, task, resolved, world, examples, _keep_sequences_whole)
        began = time.perf_counter()
        with (
            loaded.prepared.whole_model(),
            torch.no_grad(),
            autocast(spec.precision, device),
        ):
            written = _write_all(loaded.prepared, writer, prompts)
        loaded.prepared.release()
    texts = [
        GeneratedText(text, writer.decode(prompt, new), new)
        for text, prompt, new in zip(request.prompts, prompts, written, strict=True)
    ]
    seconds = time.perf_counter() - began
    return Generation(
        tuple(texts), str(loaded.path), loaded.step, str(plan), world.size, seconds, loaded.notes
    )


def _keep_sequences_whole(analysis: ModelAnalysis) -> ModelAnalysis:
    """Leave activations between split layers whole: one new token cannot be divided."""
    if analysis.splits is None:
        return analysis
    return replace(analysis, splits=replace(analysis.splits, sequence=None))


def _write_all(prepared: PreparedTraining, writer: TextWriter, prompts: Prompts) -> list[tuple[int, ...]]:
    """Return the new tokens for each prompt. A collective.

    Whole batches are divided among the data ranks, so that their content does not depend on the ranks.
    Prompts of similar length are in one batch.
    """
    step, size = prepared.step, writer.options.batch
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    batches = [order[begin : begin + size] for begin in range(0, len(order), size)]
    is_sharded = step.plan.zero >= 2 or step.plan.splits_model
    prepared.model.eval()
    results: dict[int, tuple[int, ...]] = {}
    for first in range(0, len(batches), step.data_ranks):
        number = first + step.place.dp
        # A rank without a batch takes part with that of the first rank, which does not count.
        batch = batches[number if number < len(batches) else first]
        if first == 0 and is_sharded and writer.has_encoder:
            _call_once(prepared, writer, [prompts[index] for index in batch])
        seed_torch(derive_seed(writer.options.seed, "generate", number), step.device)
        lockstep = (
            in_lockstep(prepared.model, step.device, shorten_arguments)
            if is_sharded and dist.get_world_size() > 1
            else contextlib.nullcontext()
        )
        with lockstep:
            written = writer.write(prepared.model, [prompts[index] for index in batch], step.device)
        is_counted = number < len(batches)
        _add(results, dict(zip(batch, written, strict=True)) if is_counted else {}, str(step.plan))
    return [results[index] for index in range(len(prompts))]


def _call_once(prepared: PreparedTraining, writer: TextWriter, prompts: Prompts) -> None:
    """Call the whole model once.

    torch 2.13: the first call of a model of `fully_shard` must be that of its root. `generate` would call the
    encoder first. The parameters of the root stay gathered after the call.
    """
    arguments: dict[str, Any] = writer.arguments(prompts, prepared.step.device)
    prepared.model(**arguments, decoder_input_ids=arguments["input_ids"][:, :1], use_cache=False)


def _add(results: dict[int, tuple[int, ...]], own: dict[int, tuple[int, ...]], plan: str) -> None:
    """Add the texts of all ranks, by number of the prompt. Raises PlanError if ranks of tp differ."""
    by_rank = [own] * dist.get_world_size()
    if len(by_rank) > 1:
        dist.all_gather_object(by_rank, own)
    for texts in by_rank:
        for index, tokens in texts.items():
            if results.setdefault(index, tokens) != tokens:
                raise PlanError(
                    f"plan {plan}: its ranks chose different tokens for prompt {index + 1}, because their "
                    "roundoff differs; use a plan without tp, such as zero3"
                )
