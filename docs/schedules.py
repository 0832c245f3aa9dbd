"""The order and times in which torch's pipeline schedules compute, if ranks wait only for dependencies."""

from dataclasses import dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed import pipelining

from paceline.parallel.pipeline.stage import stage_ranks
from paceline.plan.plan import ResolvedPlan

# In units of the forward pass of all layers of a rank. A backward pass takes twice as long; half of it is for
# the gradients of the weights.
TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True)
class Slot:
    rank: int
    stage: int
    kind: str  # F forward, B backward; of a split backward pass: I for the input, W for the weights
    microbatch: int
    start: Fraction
    end: Fraction


@dataclass(frozen=True)
class Chart:
    plan: ResolvedPlan
    slots: tuple[Slot, ...]

    @property
    def length(self) -> Fraction:
        return max(slot.end for slot in self.slots)

    @property
    def ideal(self) -> Fraction:
        """The time of a step if ranks never waited."""
        return sum((slot.end - slot.start for slot in self.slots if slot.rank == 0), Fraction(0))

    @property
    def bubble(self) -> Fraction:
        """The share of the whole time that a rank waits."""
        return 1 - self.ideal / self.length

    def kept(self, rank: int) -> Fraction:
        """Return the peak number of activations that a rank keeps for its backward passes.

        The unit is the activations of one micro-batch in all layers of a rank.
        """
        ends = [(slot.end, -1) for slot in self.slots if slot.rank == rank and slot.kind in "BW"]
        starts = [(slot.start, 1) for slot in self.slots if slot.rank == rank and slot.kind == "F"]
        now = most = 0
        for _, change in sorted(ends + starts):
            now += change
            most = max(most, now)
        return Fraction(most, self.plan.stages_per_rank)


class Recorder:
    """A stand-in for a stage that records the calls of a schedule with one stage per rank."""

    has_backward = True

    def __init__(self, stage: int, stages: int):
        self.stage_index, self.num_stages = stage, stages
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.order: list[tuple[int, str, int]] = []

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.order.append((self.stage_index, "F", microbatch))

    def backward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.order.append((self.stage_index, "B", microbatch))

    def sends(self, microbatch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = sends

    def perform_reduce_grad(self, factor: int) -> None:
        pass


def order(plan: ResolvedPlan) -> dict[int, list[tuple[int, str, int]]]:
    """Return for each pp rank the stages, kinds and micro-batches in the order of torch's schedule.

    `plan` has no open keys. Schedules with several stages per rank keep a list of their order. The others run
    on stages that only record, because the list that some releases keep for them is not what they do.
    """
    kind = getattr(pipelining, plan.schedule.torch_class)
    ranks = stage_ranks(plan)
    if plan.stages_per_rank == 1:
        recorders = [Recorder(stage, plan.pp) for stage in range(plan.pp)]
        for recorder in recorders:
            schedule = kind(recorder, plan.microbatches)
            schedule._initialize_stage = lambda *args, **kwargs: None
            schedule._step_microbatches()
        return {rank: recorder.order for rank, recorder in enumerate(recorders)}
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(ranks),
            group_size=plan.pp,
            group_rank=0,
            has_backward=True,
            submod=nn.Identity(),
        )
        for stage, rank in enumerate(ranks)
        if rank == 0
    ]
    actions = kind(stages, plan.microbatches, loss_fn=lambda output, target: output).pipeline_order
    return {
        rank: [
            (action.stage_index, action.computation_type.value, action.microbatch_index)
            for action in actions_of_rank
            if action is not None
        ]
        for rank, actions_of_rank in actions.items()
    }


def chart(plan: ResolvedPlan) -> Chart:
    """Return when each rank computes, in its order, as early as dependencies allow. Sending takes no time."""
    waiting = {rank: list(actions) for rank, actions in order(plan).items()}
    last = len(stage_ranks(plan)) - 1
    done: dict[tuple[int, str, int], Fraction] = {}
    free = dict.fromkeys(waiting, Fraction(0))
    slots = []
    while any(waiting.values()):
        before = len(done)
        for rank, actions in waiting.items():
            while actions and all(need in done for need in _needs(*actions[0], last)):
                stage, kind, microbatch = actions.pop(0)
                start = max([free[rank], *(done[need] for need in _needs(stage, kind, microbatch, last))])
                free[rank] = start + Fraction(TIMES[kind], plan.stages_per_rank)
                slots.append(Slot(rank, stage, kind, microbatch, start, free[rank]))
                done[stage, "B" if kind == "I" else kind, microbatch] = free[rank]
        if len(done) == before:
            raise RuntimeError(f"{plan}: all ranks wait for one another")
    return Chart(plan, tuple(slots))


def _needs(stage: int, kind: str, microbatch: int, last: int) -> list[tuple[int, str, int]]:
    if kind == "F":
        return [(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [(stage, "B", microbatch)]
    return [(stage, "F", microbatch), *([(stage + 1, "B", microbatch)] if stage < last else [])]
