"""`paceline.generate`: texts that the language model of a run writes, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.distributed.world import read_world
from paceline.errors import DataError, RunError
from paceline.launch.evaluate_run import MAX_S, read_request
from paceline.plan.plan import AUTO, parse
from paceline.run import RunFolder
from paceline.spec import HF_TASK, abbreviate

if TYPE_CHECKING:
    from paceline.training.evaluation.generate_checkpoint import Generation, GenerationRequest


def generate(
    run: RunFolder | Path | str,
    prompts: str | Sequence[str],
    checkpoint: str | int = "last",
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    beams: int | None = None,
    seed: int = 0,
    ranks: int | None = None,
    plan: str | None = None,
    batch: int = 1,
    device: str | None = None,
) -> Generation:
    """Return the texts that the language model of a run of hf:FOLDER writes for prompts.

        paceline.generate("runs/a", ["12 and 30 are"], ranks=1).texts[0].text

    The model's own `generate` of transformers writes them. They do not depend on the number of ranks, and
    equal those of one process. No file of the run changes. Under torchrun, mpirun or srun this process
    becomes a rank, and all ranks return the same texts. Otherwise ranks are started on this machine.

    run: the folder of the run.
    prompts: a text or several; for a sequence-to-sequence model, its sources.
    checkpoint: "last" (the last complete one), "best" (by `save.best` of the run) or a step.
    max_new_tokens: maximum number of new tokens [default: that of generation_config.json, or 64, or all that
    fit].
    temperature: 0 chooses the most likely token each time; above 0, tokens are drawn, with the logits divided
    by it [default: as generation_config.json says, or 0].
    top_k, top_p: draw from the k most likely tokens, or from those whose probabilities add up to p.
    beams: number of beams of beam search.
    seed: of the draws.
    ranks: number of processes [default: as the run].
    plan: text of the plan, without pp and cp [default: as for `evaluate`].
    batch: prompts that a rank completes at a time. Shorter prompts are padded, which changes roundoff, and
    another batch draws other tokens.
    device: "cpu" or "cuda" [default: as the run].

    Returns a `Generation`: texts (each with prompt, text, tokens), checkpoint, step, plan, ranks, seconds,
    notes. Raises RunError if `run` is no run of hf:FOLDER, CheckpointError if there is no such checkpoint,
    DataError for a prompt without tokens or longer than the model has room for, SpecError, PlanError and
    TaskError for other unsuitable values, and RankError if a process fails.
    """
    from paceline.hf.generate import GenerationOptions

    options = GenerationOptions(max_new_tokens, temperature, top_k, top_p, beams, batch, seed)
    world = read_world()
    source, num_ranks = read_request(
        run, str(checkpoint), {"ranks": ranks, "plan": plan, "device": device}, world
    )
    if source.spec.task != HF_TASK:
        raise RunError(
            f"generate requires a run of hf:FOLDER, got task {source.spec.task}; paceline evaluate computes "
            "the metrics of any run"
        )
    prompts = (prompts,) if isinstance(prompts, str) else tuple(prompts)
    _check_prompts(prompts)
    from paceline.training.evaluation.generate_checkpoint import (
        GenerationRequest,
        check_plan,
        generate_from_checkpoint,
    )

    if source.plan != AUTO:
        check_plan(parse(source.plan))
    request = GenerationRequest(source, prompts, options)
    if world.launcher is not None or num_ranks == 1:
        return generate_from_checkpoint(request, world)
    from paceline.launch.rank_pool import Ranks

    with Ranks(num_ranks) as pool:
        result: Generation = pool(_generate_on_rank, request, timeout_s=MAX_S)[0]
        return result


def _check_prompts(prompts: Sequence[object]) -> None:
    if not prompts:
        raise DataError("there are no prompts; specify at least one")
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise DataError(f"each prompt must be a text, got {type(prompt).__name__}")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"the prompt {abbreviate(prompt)} is not UTF-8 text ({error.reason}); correct it"
            ) from error


def _generate_on_rank(request: GenerationRequest) -> Generation:
    from paceline.training.evaluation.generate_checkpoint import generate_from_checkpoint

    return generate_from_checkpoint(request, read_world())
