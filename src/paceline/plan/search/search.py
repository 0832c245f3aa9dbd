"""Search over all plans for a model on a cluster.

The result has the plans that fit, fastest first, and the reason for each other plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from time import monotonic

from paceline.cluster.facts import Cluster
from paceline.errors import PlanError
from paceline.plan.cost_model.cost import Cost
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.memory import PART_NAMES, build_memory_cost, find_peak
from paceline.plan.cost_model.predict import default_recipe
from paceline.plan.cost_model.rates import DeviceRates, device_rates
from paceline.plan.cost_model.step_time import lower_bound_s, predict_time
from paceline.plan.cost_model.work_split import WorkSplit
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import RECOMPUTE, Plan
from paceline.plan.schedules import SCHEDULES
from paceline.plan.search.constraints import Constraint, allows_all
from paceline.units import format_bytes

MARGIN = 0.1  # default share of a device's memory that a plan leaves free
MAX_MICRO_BATCH = 64  # samples
# Positions per rank, at least, of a sequence that is split in a pipeline. Shorter sequences are faster with
# smaller micro-batches.
MIN_SLICE = 4096


@dataclass(frozen=True, slots=True)
class RejectedPlan:
    """A plan that does not fit into memory, and the largest part of its memory."""

    plan: Plan
    peak_bytes: float
    limit_bytes: float
    largest: str

    @property
    def reason(self) -> str:
        needed, limit = format_bytes(self.peak_bytes), format_bytes(self.limit_bytes)
        amount = (
            f"{needed} of {limit}"
            if needed != limit
            else f"{format_bytes(self.peak_bytes - self.limit_bytes)} more than {limit}"
        )
        return f"needs {amount}, most of it {self.largest}"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`fitting`: fastest first, then leanest. `rejected`: leanest first. skipped: plans without a price, for
    which there was no time.
    """

    fitting: list[tuple[Plan, Cost]]
    rejected: list[RejectedPlan]
    skipped: int = 0


def choose_plans(
    facts: ModelFacts,
    cluster: Cluster,
    batch: int,
    margin: float = MARGIN,
    recipe: Recipe | None = None,
    ranks: int | None = None,
) -> list[tuple[Plan, Cost]]:
    """Return the plans that fit, fastest first.

    Raises PlanError if none fits: what the leanest plan needs, and how many devices would be enough.
    """
    found = search_plans(facts, cluster, batch, margin, recipe, ranks)
    if not found.fitting:
        raise no_fit_error(found, facts, cluster, batch, recipe, ranks)
    return found.fitting


def find_fastest(
    facts: ModelFacts,
    rates: DeviceRates,
    ranks: int,
    batch: int,
    margin: float = MARGIN,
    recipe: Recipe | None = None,
) -> tuple[Plan, Cost] | None:
    """Return the first plan of `search_plans` in a fraction of its time, or None if no plan fits.

    Plans are priced in the order of a lower bound of their step time, until no remaining plan can be faster.
    `rates` may be for another number of ranks that fills nodes in the same way; cached results are shared
    between such numbers.
    """
    recipe = recipe or default_recipe(rates)
    bounds = [
        (lower_bound_s(facts, split, recipe, rates), index, split)
        for index, split in enumerate(enumerate_splits(facts, ranks, rates.per_node, batch))
    ]
    best: tuple[WorkSplit, Cost] | None = None
    for seconds, _, split in sorted(bounds, key=lambda bound: bound[:2]):
        if best is not None and seconds > best[1].step_s * (1 + 1e-9):
            break
        rank, values = find_peak(facts, split, recipe)
        if sum(values) > rates.memory_bytes * (1 - margin):
            continue
        cost = Cost(
            predict_time(facts, split, recipe, rates),
            build_memory_cost(rank, values, split, recipe, rates.memory_bytes),
            split.micro_batch,
        )
        if best is None or (cost.step_s, cost.peak_bytes) < (best[1].step_s, best[1].peak_bytes):
            best = split, cost
    return (plan_of_split(best[0]), best[1]) if best else None


def find_leanest(
    facts: ModelFacts, rates: DeviceRates, ranks: int, batch: int, margin: float, recipe: Recipe
) -> RejectedPlan | None:
    """Return the plan that needs the least memory, or None if no plan can split the batch."""
    peaks = (
        (find_peak(facts, split, recipe)[1], split)
        for split in enumerate_splits(facts, ranks, rates.per_node, batch)
    )
    leanest = min(peaks, key=lambda pair: sum(pair[0]), default=None)
    return _rejected(leanest[1], leanest[0], rates.memory_bytes * (1 - margin)) if leanest else None


def no_fit_error(
    found: SearchResult,
    facts: ModelFacts,
    cluster: Cluster,
    batch: int,
    recipe: Recipe | None,
    ranks: int | None,
) -> PlanError:
    """Return the error for a search that found no plan that fits."""
    count = ranks or cluster.devices
    if not found.rejected:
        return PlanError(
            f"no plan splits a batch of {batch} over {count} ranks; use a batch that is a multiple of "
            f"{count}, or --ranks {batch}"
        )
    leanest = found.rejected[0]
    limit = leanest.limit_bytes
    enough = _find_enough_ranks(facts, cluster, batch, limit, recipe, count)
    hint = (
        _hint_of_ranks(*enough, cluster, batch)
        if enough
        else "use a smaller model, or devices with more memory"
    )
    return PlanError(
        f"no plan fits {format_bytes(limit)} per device; the leanest, {leanest.plan}, needs "
        f"{format_bytes(leanest.peak_bytes)}: {hint}"
    )


def _hint_of_ranks(ranks: int, samples: int, cluster: Cluster, batch: int) -> str:
    larger = f" and a batch of {samples:,}" if samples != batch else ""
    if cluster.device.kind != "cpu" and ranks <= cluster.devices:
        return f"use --ranks {ranks}{larger}"
    return f"use {ranks} ranks on {-(-ranks // cluster.ranks_per_node)} nodes of this kind{larger}"


def search_plans(
    facts: ModelFacts,
    cluster: Cluster,
    batch: int,
    margin: float = MARGIN,
    recipe: Recipe | None = None,
    ranks: int | None = None,
    where: Sequence[Constraint] = (),
    seconds: float | None = None,
) -> SearchResult:
    """Return every legal plan on `ranks` ranks, or on all devices, that the constraints allow.

    Those that fit with the share `margin` of memory free are priced. seconds: after them the search ends with
    what it has, but not before a plan fits; it then prices plans in the order of a lower bound of their time.
    """
    deadline = math.inf if seconds is None else monotonic() + seconds
    rates = device_rates(cluster, ranks=ranks)
    recipe = recipe or default_recipe(rates)
    limit = rates.memory_bytes * (1 - margin)
    fitting: list[tuple[Plan, Cost]] = []
    rejected: list[RejectedPlan] = []
    splits: Iterator[WorkSplit] = (
        split
        for split in enumerate_splits(facts, rates.ranks, rates.per_node, batch)
        if not where or allows_all(where, split)
    )
    if seconds is not None:
        splits = _fastest_first(splits, facts, recipe, rates, deadline - seconds / 2)
    skipped = 0
    for split in splits:
        if fitting and seconds is not None and monotonic() > deadline:
            skipped = 1 + sum(1 for _ in splits)
            break
        rank, values = find_peak(facts, split, recipe)
        if sum(values) > limit:
            rejected.append(_rejected(split, values, limit))
            continue
        needed = build_memory_cost(rank, values, split, recipe, rates.memory_bytes)
        fitting.append(
            (plan_of_split(split), Cost(predict_time(facts, split, recipe, rates), needed, split.micro_batch))
        )
    fitting.sort(key=lambda pair: (pair[1].step_s, pair[1].peak_bytes))
    rejected.sort(key=lambda plan: plan.peak_bytes)
    return SearchResult(fitting, rejected, skipped)


def _fastest_first(
    splits: Iterator[WorkSplit], facts: ModelFacts, recipe: Recipe, rates: DeviceRates, until: float
) -> Iterator[WorkSplit]:
    """Yield splits in the order of a lower bound of their time, then those whose bound was not known in time.

    until: the time at which no more bounds are computed.
    """
    bounds = []
    for index, split in enumerate(splits):
        bounds.append((lower_bound_s(facts, split, recipe, rates), index, split))
        if monotonic() > until:
            break
    yield from (split for _, _, split in sorted(bounds, key=lambda bound: bound[:2]))
    yield from splits


def _rejected(split: WorkSplit, values: tuple[float, ...], limit_bytes: float) -> RejectedPlan:
    return RejectedPlan(plan_of_split(split), sum(values), limit_bytes, PART_NAMES[values.index(max(values))])


def enumerate_splits(facts: ModelFacts, ranks: int, per_node: int, batch: int) -> Iterator[WorkSplit]:
    """Yield every split. tp stays in a node, where its all-reduces are fast.

    The ranks of cp, dp and pp follow at growing distances (`ResolvedPlan.place`).
    """
    for tp in facts.tp_degrees:
        if ranks % tp or tp > per_node:
            continue
        for pp in _divisors(ranks // tp):
            if facts.is_data_parallel_only and pp > 1:
                continue
            for cp in _divisors(ranks // (tp * pp)):
                dp = ranks // (tp * pp * cp)
                if (
                    batch % dp
                    or (cp > 1 and facts.is_data_parallel_only)
                    or (cp > 1 and (facts.sequence is None or facts.sequence < 2 * cp))
                    or pp > facts.blocks
                ):
                    continue
                if cp > 1 and pp > 1 and facts.sequence is not None and facts.sequence < MIN_SLICE * cp:
                    continue
                yield from _with_degrees(facts, per_node, batch // dp, dp, tp, pp, cp)


def _with_degrees(
    facts: ModelFacts, per_node: int, samples: int, dp: int, tp: int, pp: int, cp: int
) -> Iterator[WorkSplit]:
    pipelines = (
        [
            (name, stages)
            for name, schedule in SCHEDULES.items()
            for stages in schedule.searched_stages
            if pp * stages <= facts.blocks
        ]
        if pp > 1
        else [("1f1b", 1)]
    )
    data = _zero_stages(dp * cp, dp, tp, per_node)
    experts = _expert_degrees(facts.experts, dp, max(1, per_node // (tp * cp)))
    for micro_batch in _divisors(samples):
        microbatches = samples // micro_batch
        if micro_batch > MAX_MICRO_BATCH and microbatches > 1:
            continue
        for schedule_name, stages in pipelines:
            if pp > 1 and not SCHEDULES[schedule_name].allows(microbatches, pp):
                continue
            for recompute, ep in product(RECOMPUTE, experts):
                for zero, replicate in data:
                    yield WorkSplit(
                        dp,
                        tp,
                        pp,
                        cp,
                        ep,
                        zero,
                        replicate,
                        micro_batch,
                        microbatches,
                        schedule_name,
                        stages,
                        recompute,
                    )


def _zero_stages(ranks: int, dp: int, tp: int, per_node: int) -> list[tuple[int, int]]:
    """Return ZeRO stages with numbers of copies: 1, and as many as keep each copy in one node."""
    if ranks == 1:
        return [(0, 1)]
    stages = [(0, 1), (1, 1), (2, 1), (3, 1)]
    in_node = max(1, per_node // tp)
    copies = ranks // in_node
    if in_node > 1 and copies > 1 and copies * in_node == ranks and dp % copies == 0:
        stages.append((3, copies))
    return stages


@lru_cache(1024)
def _expert_degrees(experts: int, dp: int, in_node: int) -> tuple[int, ...]:
    """Return degrees of expert parallelism: 1, the largest inside a node, and the largest of all.

    Larger degrees need less memory, and send more tokens between nodes; those between are seldom better than
    both.
    """
    degrees = _divisors(math.gcd(experts, dp))
    return tuple(sorted({1, max(degree for degree in degrees if degree <= in_node), degrees[-1]}))


def plan_of_split(split: WorkSplit) -> Plan:
    """Return the plan of a split that `enumerate_splits` yields."""
    pipeline = split.pp > 1
    return Plan(
        zero=split.zero,
        dp=split.dp,
        replicate=split.replicate,
        tp=split.tp,
        pp=split.pp,
        cp=split.cp,
        ep=split.ep,
        microbatches=split.microbatches,
        pp_schedule=split.schedule if pipeline else None,
        stages=split.stages if pipeline else None,
        recompute=split.recompute,
    )


@lru_cache(1024)
def _divisors(n: int) -> tuple[int, ...]:
    below = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*below, *(n // d for d in below)}))


def _find_enough_ranks(
    facts: ModelFacts, cluster: Cluster, batch: int, limit_bytes: float, recipe: Recipe | None, ranks: int
) -> tuple[int, int] | None:
    """Return a sufficient number of ranks, and a batch for them.

    The batch is `batch`, or one sample per rank if that is larger.

    Tries 2, 4, 8 … 64 times the ranks and nodes. None: not even those are enough.
    """
    for factor in (2, 4, 8, 16, 32, 64):
        larger = cluster.model_copy(update={"nodes": cluster.nodes * factor})
        rates = device_rates(larger, ranks=ranks * factor)
        larger_recipe = recipe or default_recipe(rates)
        for samples in (batch, max(batch, rates.ranks)):
            if any(
                sum(find_peak(facts, split, larger_recipe)[1]) <= limit_bytes
                for split in enumerate_splits(facts, rates.ranks, rates.per_node, samples)
            ):
                return rates.ranks, samples
    return None
