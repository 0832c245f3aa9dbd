"""Replay of identical micro-batches: run the first few, and count the last of these for the others."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.plan.plan import ResolvedPlan
from paceline.training.dry_run.comm_counter import CommCounter

RUNS_TO_COUNT = 2  # micro-batches; the first gathers what stays gathered
RUNS_TO_SETTLE = 1


def are_microbatches_identical(plan: ResolvedPlan) -> bool:
    """Return whether all micro-batches but the first send the same.

    They do not if each gathers weights again: a stage gathers ahead, and what it gathers depends on the
    micro-batch that runs next.
    """
    return plan.pp > 1 and not (plan.zero == 3 and plan.stages_per_rank == 1)


@contextmanager
def replay_microbatches(counter: CommCounter, microbatches: int, runs: int) -> Iterator[None]:
    """Run only the first `runs` micro-batches of a step inside the block, and count the others from the last.

    The output of the last run of a stage also serves as its output for the other micro-batches. `counter` may
    be active or not.
    """
    from torch.distributed.pipelining import PipelineStage

    repeated: list[Any] = []  # calls
    outputs: dict[int, tuple[Any, Any]] = {}  # stage -> what it returns, and what it sends
    grads: dict[int, Any] = {}

    def forward(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if chunk < runs:
            output = run(originals["forward_one_chunk"], stage, chunk, *args, **kwargs)
            outputs[stage.stage_index] = output, stage.fwd_cache[chunk][0]
        output, sent = outputs[stage.stage_index]
        if chunk >= runs:
            stage.fwd_cache[chunk] = sent, []
        return output

    def backward(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> None:
        if chunk < runs:
            run(originals["backward_one_chunk"], stage, chunk, *args, **kwargs)
            grads[stage.stage_index] = stage.bwd_cache[chunk]
        else:
            del stage.fwd_cache[chunk]
            stage.bwd_cache[chunk] = grads[stage.stage_index]

    def backward_weight(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> None:
        if chunk < runs:
            run(originals["backward_weight_one_chunk"], stage, chunk, *args, **kwargs)

    def run(call: Callable[..., Any], stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        before = len(counter.calls)
        result = call(stage, chunk, *args, **kwargs)
        if chunk == runs - 1:
            repeated.extend(counter.calls[before:])
        return result

    replacements = {
        "forward_one_chunk": forward,
        "backward_one_chunk": backward,
        "backward_weight_one_chunk": backward_weight,
    }
    originals = {name: getattr(PipelineStage, name) for name in replacements}
    for name, function in replacements.items():
        setattr(PipelineStage, name, function)
    try:
        yield
    finally:
        for name in replacements:
            delattr(PipelineStage, name)  # which uncovers the inherited method
    counter.calls += repeated * (microbatches - runs)
