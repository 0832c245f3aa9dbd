"""A pipeline whose micro-batches are alike, played in part: the first few run, and those behind them count what the last of these did."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.plan.plan import Plan
from paceline.training.dry_run.comm_counter import CommCounter

TO_COUNT = 2  # the first gathers what stays gathered
TO_SETTLE = 1


def are_alike(plan: Plan) -> bool:
    """Whether each micro-batch but the first sends the same. Where it gathers weights again, it does so ahead, and what is gathered
    depends on what runs next."""
    return plan.pp > 1 and not (plan.zero == 3 and plan.stages == 1)


@contextmanager
def replayed(counter: CommCounter, microbatches: int, played: int) -> Iterator[None]:
    """For a step of `microbatches` micro-batches, of which so many run, and in which `counter` counts or does not. What one stage hands on
    stands for all that it would."""
    from torch.distributed.pipelining import PipelineStage

    repeated: list[Any] = []  # calls
    outputs: dict[int, tuple[Any, Any]] = {}  # stage -> what it returns, and what it sends
    grads: dict[int, Any] = {}

    def forward(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if chunk < played:
            output = run(inner["forward_one_chunk"], stage, chunk, *args, **kwargs)
            outputs[stage.stage_index] = output, stage.fwd_cache[chunk][0]
        output, sent = outputs[stage.stage_index]
        if chunk >= played:
            stage.fwd_cache[chunk] = sent, []
        return output

    def backward(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> None:
        if chunk < played:
            run(inner["backward_one_chunk"], stage, chunk, *args, **kwargs)
            grads[stage.stage_index] = stage.bwd_cache[chunk]
        else:
            del stage.fwd_cache[chunk]
            stage.bwd_cache[chunk] = grads[stage.stage_index]

    def backward_weight(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> None:
        if chunk < played:
            run(inner["backward_weight_one_chunk"], stage, chunk, *args, **kwargs)

    def run(call: Callable[..., Any], stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
        before = len(counter.calls)
        result = call(stage, chunk, *args, **kwargs)
        if chunk == played - 1:
            repeated.extend(counter.calls[before:])
        return result

    instead = {
        "forward_one_chunk": forward,
        "backward_one_chunk": backward,
        "backward_weight_one_chunk": backward_weight,
    }
    inner = {name: getattr(PipelineStage, name) for name in instead}
    for name, function in instead.items():
        setattr(PipelineStage, name, function)
    try:
        yield
    finally:
        for name in instead:
            delattr(PipelineStage, name)  # what it inherits is there again
    counter.calls += repeated * (microbatches - played)
