"""Split: how the work of a step is cut, whether or not Paceline itself can run it so."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from paceline.errors import PlanError
from paceline.plan.model.facts import BlockFacts, ModelFacts
from paceline.plan.plan import Plan, micro_batch_size


class MicrobatchKey(NamedTuple):
    """What a rank's work on one micro-batch of a block depends on."""

    tp: int
    cp: int
    ep: int
    micro_batch: int
    recompute: str


@dataclass(frozen=True, slots=True)
class WorkSplit:
    """Degrees of the axes, samples of a micro-batch on one data rank, and micro-batches of a step. `replicate`: copies of the shards."""

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
    def cut(self) -> MicrobatchKey:
        return MicrobatchKey(self.tp, self.cp, self.ep, self.micro_batch, self.recompute)

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def batch(self) -> int:
        return self.dp * self.micro_batch * self.microbatches

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO cuts what it cuts."""
        return self.dp * self.cp // self.replicate if self.zero else 1


def split_work(plan: Plan, ranks: int, batch: int) -> WorkSplit:
    """A plan on so many ranks. Raises PlanError where it cannot be."""
    if plan.is_asynchronous:
        raise PlanError(
            f"what plan {plan} costs is not predicted: its ranks do not wait for each other; ask for ddp, or measure it"
        )
    on = plan.resolve(ranks)
    samples = micro_batch_size(batch, on)
    return WorkSplit(
        dp=on.dp,
        tp=on.tp,
        pp=on.pp,
        cp=on.cp,
        zero=on.zero,
        replicate=on.replicate,
        micro_batch=samples
        + (
            on.uneven and batch > samples * on.dp * on.microbatches
        ),  # the rank that has most keeps the others waiting
        microbatches=on.microbatches,
        schedule=on.pp_schedule or "1f1b",
        stages=on.stages_per_rank,
        recompute=on.recompute,
    )


@dataclass(frozen=True, eq=False)
class StageAssignment:
    """What ranks of a pipeline that are alike have: `count` of them, the earliest being `index`; blocks with how often they occur.
    Compared by identity, so that what follows from one is quick to look up."""

    index: int
    count: int
    parts: tuple[tuple[BlockFacts, int], ...]
    is_last: bool
    crossing: float = (
        0.0  # elements of a sample that its stages get from others, activations and their gradients
    )


@lru_cache(4096)
def assign_stages(
    facts: ModelFacts, pp: int, stages: int, even: bool, folded: bool
) -> tuple[StageAssignment, ...]:
    """Who has which blocks, of pp × stages stages dealt out in turns, or there and back where `folded` (ZB-V)."""
    pieces = [block for block, count in facts.runs for _ in range(count)]
    if pp * stages > len(pieces) + 2 * even:
        raise PlanError(f"{pp} × {stages} stages need as many blocks, and {facts.name} has {len(pieces)}")
    if folded and stages != 2:
        raise PlanError(
            f"a schedule that goes there and back has two stages on each rank, got stages={stages}"
        )
    starts = (
        _even_starts(len(pieces), pp * stages)
        if even
        else _balanced_starts([b.flops for b in pieces], facts.last.flops, pp * stages)
    )
    per_stage = [pieces[a:b] for a, b in zip(starts, [*starts[1:], len(pieces)], strict=True)]
    given = [
        facts.first.boundary,
        *(stage[-1].boundary if stage else facts.first.boundary for stage in per_stage),
    ]  # to each stage, and behind the last
    ranks: list[tuple[tuple[tuple[BlockFacts, int], ...], bool, float]] = []
    for rank in range(pp):
        mine = {2 * pp - 1 - rank, rank} if folded else set(range(rank, pp * stages, pp))
        blocks: list[BlockFacts] = []
        for stage in sorted(mine):
            blocks += (
                [facts.first] * (stage == 0) + per_stage[stage] + [facts.last] * (stage == pp * stages - 1)
            )
        counted = {id(block): (block, 0) for block in blocks}
        for block in blocks:
            counted[id(block)] = (block, counted[id(block)][1] + 1)
        crossing = sum(
            given[stage] * (stage > 0) + given[stage + 1] * (stage < pp * stages - 1) for stage in mine
        )
        ranks.append((tuple(counted.values()), pp * stages - 1 in mine, crossing))
    found, index = [], 0
    for (parts, is_last, crossing), group in groupby(ranks):
        count = len(list(group))
        found.append(StageAssignment(index, count, parts, is_last, crossing))
        index += count
    return tuple(found)


def _even_starts(blocks: int, stages: int) -> list[int]:
    """Equally many blocks; what does not divide is left out at the ends, where embedding and head are."""
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
    """Contiguous stages whose dearest one costs as little as can be, the head included; by bisection, O(blocks) a step."""
    low, high = max(*costs, last + costs[-1]) if len(costs) > 1 else costs[0] + last, sum(costs) + last
    if stages == 1:
        return [0]
    best = _starts_within([*costs[:-1], costs[-1] + last], stages, high) or []
    for _ in range(24):
        middle = (low + high) / 2
        if (found := _starts_within([*costs[:-1], costs[-1] + last], stages, middle)) is not None:
            best, high = found, middle
        else:
            low = middle
    return best


def _starts_within(costs: list[float], stages: int, most: float) -> list[int] | None:
    """Starts of stages that cost at most so much, filled from the end so that the first ones are the lighter; None if there are none."""
    starts: list[int] = []
    total, end = 0.0, len(costs)
    for at in range(len(costs) - 1, -1, -1):
        left = stages - len(starts) - 1  # stages still to be filled after this one
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
