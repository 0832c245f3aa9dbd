"""The schedule of a pipeline in a trace: what a rank computes on each stage, and what it waits for."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from paceline.parallel.pipeline.actions import BACKWARD, FORWARD, StageAction
from paceline.plan.plan import ResolvedPlan
from paceline.training.tracing.chrome_events import Event, TraceClock, make_flow, make_name, make_range
from paceline.training.tracing.profiled_ops import ProfiledOp
from paceline.training.tracing.ranges import ACTION, STEP, parse_action

FIRST_TRACK = 1000  # the track of stage 0


def make_pipeline_events(
    ops: Sequence[ProfiledOp], plan: ResolvedPlan, rank: int, clock: TraceClock
) -> Iterator[Event]:
    """Yield a track for each stage of this rank, and this rank's ends of the arrows between stages.

    An arrow leads from the forward pass of a micro-batch to that on the next stage, and from its backward
    pass to that on the stage before. ops: of the rank, in order of time.
    """
    steps = [op for op in ops if op.kind == STEP]
    begins = [op.begin_ns for op in steps]
    place = plan.place(rank)
    num_stages = plan.pp * plan.stages_per_rank
    stages = set()
    for op in ops:
        if op.kind != ACTION:
            continue
        action = parse_action(op.name)
        tid = FIRST_TRACK + action.stage
        stages.add(action.stage)
        title = f"{action.what} {action.microbatch}"
        args = {"stage": action.stage, "micro_batch": action.microbatch}
        yield make_range(op._replace(name=title), rank, tid, clock) | {"cat": "schedule", "args": args}
        at = bisect_right(begins, op.begin_ns) - 1
        if at < 0:
            continue
        key = f"{place.dp}/{place.cp}/{place.tp}/{steps[at].name}"
        last_ns = max(op.begin_ns, op.end_ns - 1)
        if _leads_to(action, num_stages):
            yield make_flow(
                f"{key}/{_name_arrow(action)}", "s", action.what, rank, tid, clock.microseconds(last_ns)
            )
        if (before := _find_source(action, num_stages)) is not None:
            yield make_flow(
                f"{key}/{_name_arrow(before)}", "f", action.what, rank, tid, clock.microseconds(op.begin_ns)
            )
    for stage in sorted(stages):
        yield make_name("thread_name", rank, FIRST_TRACK + stage, {"name": f"stage {stage}"})
        yield make_name("thread_sort_index", rank, FIRST_TRACK + stage, {"sort_index": stage - FIRST_TRACK})


def _name_arrow(source: StageAction) -> str:
    return f"{source.what}/{source.microbatch}/{source.stage}"


def _leads_to(action: StageAction, num_stages: int) -> bool:
    """Return whether another stage needs the result of an action."""
    return (action.what == FORWARD and action.stage < num_stages - 1) or (
        action.what == BACKWARD and action.stage > 0
    )


def _find_source(action: StageAction, num_stages: int) -> StageAction | None:
    """Return the action on another stage whose result this action needs."""
    offset = {FORWARD: -1, BACKWARD: 1}.get(action.what, num_stages)
    stage = action.stage + offset
    return action._replace(stage=stage) if 0 <= stage < num_stages else None
