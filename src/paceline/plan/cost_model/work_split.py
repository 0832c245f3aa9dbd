"""WorkSplit: how the work of a step is divided over ranks, whether or not Paceline can run it."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from paceline.errors import PlanError
from paceline.plan.model.facts import BlockFacts, ModelFacts
from paceline.plan.plan import Plan, micro_batch_size


class MicrobatchKey(NamedTuple):
    """The values that a rank's work on one micro-batch of a block depends on."""

    tp: int
    cp: int
    ep: int
    micro_batch: int
    recompute: str


@dataclass(frozen=True, slots=True)
class WorkSplit:
    """Degrees of the axes, samples of a micro-batch on one data rank, and micro-batches of a step.

    replicate: copies of the shards. Differs from `ResolvedPlan`, which Paceline runs: a split belongs to a
    batch, and describes what other frameworks run too (expert parallelism, published schedules). The search
    makes thousands.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    replicate: int = 1
    micro_batch: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    stages: int = 1
    recompute: str = "none"

    @property
    def microbatch_key(self) -> MicrobatchKey:
        return MicrobatchKey(self.tp, self.cp, self.ep, self.micro_batch, self.recompute)

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def batch(self) -> int:
        return self.dp * self.micro_batch * self.microbatches

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards."""
        return self.dp * self.cp // self.replicate if self.zero else 1


def split_work(plan: Plan, ranks: int, batch: int) -> WorkSplit:
    """Return the split of a plan on `ranks` ranks.

    Raises PlanError if the plan does not fit them, or is asynchronous.
    """
    if plan.is_asynchronous:
        raise PlanError(
            f"plan {plan} cannot be predicted: its ranks do not wait for each other; use ddp, or measure it"
        )
    resolved = plan.resolve(ranks)
    samples = micro_batch_size(batch, resolved)
    return WorkSplit(
        dp=resolved.dp,
        tp=resolved.tp,
        pp=resolved.pp,
        cp=resolved.cp,
        ep=resolved.ep,
        zero=resolved.zero,
        replicate=resolved.replicate,
        micro_batch=samples
        + (
            resolved.uneven and batch > samples * resolved.dp * resolved.microbatches
        ),  # the other ranks wait for the largest share
        microbatches=resolved.microbatches,
        schedule=resolved.pp_schedule or "1f1b",
        stages=resolved.stages_per_rank,
        recompute=resolved.recompute,
    )


@dataclass(frozen=True, eq=False)
class StageAssignment:
    """Blocks of `count` identical consecutive ranks of a pipeline, from rank `index` on.

    parts: blocks with their number. crossing: elements of a sample that the stages get from others:
    activations and their gradients. Compared by identity, so that caches look it up fast.
    """

    index: int
    count: int
    parts: tuple[tuple[BlockFacts, int], ...]
    is_last: bool
    crossing: float = 0.0


@lru_cache(4096)
def assign_stages(
    facts: ModelFacts, pp: int, stages: int, even: bool, folded: bool
) -> tuple[StageAssignment, ...]:
    """Return which ranks have which blocks.

    The pp × stages stages go to the ranks round robin, or forth and back if `folded` (ZB-V). even: each stage
    has equally many blocks; else stages are balanced by FLOPs. Raises PlanError if there are too few blocks.
    """
    pieces = [block for block, count in facts.runs for _ in range(count)]
    if pp * stages > len(pieces) + 2 * even:
        raise PlanError(
            f"{pp} × {stages} stages require as many blocks, and {facts.name} has "
            f"{len(pieces)}; use a smaller pp"
        )
    if folded and stages != 2:
        raise PlanError(
            f"a folded pipeline schedule takes two stages per rank, got stages={stages}; leave stages out"
        )
    starts = (
        _even_starts(len(pieces), pp * stages)
        if even
        else _balanced_starts([b.flops for b in pieces], facts.last.flops, pp * stages)
    )
    per_stage = [pieces[a:b] for a, b in zip(starts, [*starts[1:], len(pieces)], strict=True)]
    boundaries = [
        facts.first.boundary,
        *(stage[-1].boundary if stage else facts.first.boundary for stage in per_stage),
    ]  # input of each stage, and output of the last
    ranks: list[tuple[tuple[tuple[BlockFacts, int], ...], bool, float]] = []
    for rank in range(pp):
        own_stages = {2 * pp - 1 - rank, rank} if folded else set(range(rank, pp * stages, pp))
        blocks: list[BlockFacts] = []
        for stage in sorted(own_stages):
            blocks += (
                [facts.first] * (stage == 0) + per_stage[stage] + [facts.last] * (stage == pp * stages - 1)
            )
        counted = {id(block): (block, 0) for block in blocks}
        for block in blocks:
            counted[id(block)] = (block, counted[id(block)][1] + 1)
        crossing = sum(
            boundaries[stage] * (stage > 0) + boundaries[stage + 1] * (stage < pp * stages - 1)
            for stage in own_stages
        )
        ranks.append((tuple(counted.values()), pp * stages - 1 in own_stages, crossing))
    assignments, index = [], 0
    for (parts, is_last, crossing), group in groupby(ranks):
        count = len(list(group))
        assignments.append(StageAssignment(index, count, parts, is_last, crossing))
        index += count
    return tuple(assignments)


def _even_starts(blocks: int, stages: int) -> list[int]:
    """Return the starts of stages with equally many blocks.

    The first and last stage, with embedding and head, get fewer.
    """
    each, over = divmod(blocks, stages)
    order = sorted(
        range(stages), key=lambda stage: (min(stage, stages - 1 - stage) == 0, stage == stages - 1, stage)
    )
    larger = set(order[:over])
    starts, at = [], 0
    for stage in range(stages):
        starts.append(at)
        at += each + (stage in larger)
    return starts


def _balanced_starts(costs: list[float], last: float, stages: int) -> list[int]:
    """Return starts of contiguous stages with the smallest maximum cost, head included.

    By bisection, O(blocks) per step.
    """
    low, high = max(*costs, last + costs[-1]) if len(costs) > 1 else costs[0] + last, sum(costs) + last
    if stages == 1:
        return [0]
    best = _starts_within([*costs[:-1], costs[-1] + last], stages, high) or []
    for _ in range(24):
        middle = (low + high) / 2
        if (starts := _starts_within([*costs[:-1], costs[-1] + last], stages, middle)) is not None:
            best, high = starts, middle
        else:
            low = middle
    return best


def _starts_within(costs: list[float], stages: int, most: float) -> list[int] | None:
    """Return starts of stages that cost at most `most` each, or None.

    Stages fill from the end, so that the first are lighter.
    """
    starts: list[int] = []
    total, end = 0.0, len(costs)
    for at in range(len(costs) - 1, -1, -1):
        left = stages - len(starts) - 1  # stages that remain after this one
        if at < end - 1 and (total + costs[at] > most or at + 1 <= left):
            starts.append(at + 1)
            total, end = 0.0, at + 1
            if len(starts) == stages:
                return None
        total += costs[at]
        if total > most * (1 + 1e-12):
            return None
    starts.append(0)
    return starts[::-1] if len(starts) == stages else None
