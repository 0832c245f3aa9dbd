"""All plans for a model on a cluster: those that fit, the fastest first, and the others with the reason."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

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
from paceline.units import format_bytes

MARGIN = 0.1  # of a device's memory that a plan leaves free, unless asked otherwise
MAX_MICRO_BATCH = 64  # of a micro-batch, at most
MIN_SLICE = 4096  # positions, at least, of a sequence that is split in a pipeline: shorter ones are quicker with smaller micro-batches


@dataclass(frozen=True, slots=True)
class RejectedPlan:
    """A plan that does not fit, and the part that takes most."""

    plan: Plan
    peak_bytes: float
    limit_bytes: float
    largest: str

    @property
    def reason(self) -> str:
        needed, limit = format_bytes(self.peak_bytes), format_bytes(self.limit_bytes)
        of = (
            f"{needed} of {limit}"
            if needed != limit
            else f"{format_bytes(self.peak_bytes - self.limit_bytes)} more than {limit}"
        )
        return f"needs {of}, most of it {self.largest}"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`fitting`: fastest first, then leanest. `rejected`: leanest first."""

    fitting: list[tuple[Plan, Cost]]
    rejected: list[RejectedPlan]


def choose_plans(
    facts: ModelFacts,
    cluster: Cluster,
    batch: int,
    margin: float = MARGIN,
    recipe: Recipe | None = None,
    ranks: int | None = None,
) -> list[tuple[Plan, Cost]]:
    """Plans that fit, the fastest first. Raises PlanError where none does: what the leanest one needs, and how many devices do."""
    found = search_plans(facts, cluster, batch, margin, recipe, ranks)
    if not found.fitting:
        raise no_fit_error(found, facts, cluster, batch, recipe, ranks)
    return found.fitting


def find_fastest(
    facts: ModelFacts,
    on: DeviceRates,
    ranks: int,
    batch: int,
    margin: float = MARGIN,
    recipe: Recipe | None = None,
) -> tuple[Plan, Cost] | None:
    """The first of `search`, several times as soon: plans are looked at in the order of what they take at least, until no other can be
    faster. `on` may be of other numbers of ranks that fill nodes as these do, and what was worked out for those is not worked out again."""
    recipe = recipe or default_recipe(on)
    least = [
        (lower_bound_s(facts, cut, recipe, on), at, cut)
        for at, cut in enumerate(enumerate_splits(facts, ranks, on.per_node, batch))
    ]
    best: tuple[WorkSplit, Cost] | None = None
    for seconds, _, cut in sorted(least, key=lambda one: one[:2]):
        if best is not None and seconds > best[1].step_s * (1 + 1e-9):
            break
        rank, values = find_peak(facts, cut, recipe)
        if sum(values) > on.memory_bytes * (1 - margin):
            continue
        cost = Cost(
            predict_time(facts, cut, recipe, on),
            build_memory_cost(rank, values, cut, recipe, on.memory_bytes),
            cut.micro_batch,
        )
        if best is None or (cost.step_s, cost.peak_bytes) < (best[1].step_s, best[1].peak_bytes):
            best = cut, cost
    return (plan_of_split(best[0]), best[1]) if best else None


def find_leanest(
    facts: ModelFacts, on: DeviceRates, ranks: int, batch: int, margin: float, recipe: Recipe
) -> RejectedPlan | None:
    """Where none fits, the one that needs least; None where the batch cannot be split."""
    looked = (
        (find_peak(facts, cut, recipe)[1], cut) for cut in enumerate_splits(facts, ranks, on.per_node, batch)
    )
    found = min(looked, key=lambda pair: sum(pair[0]), default=None)
    return _rejected(found[1], found[0], on.memory_bytes * (1 - margin)) if found else None


def no_fit_error(
    found: SearchResult,
    facts: ModelFacts,
    cluster: Cluster,
    batch: int,
    recipe: Recipe | None,
    ranks: int | None,
) -> PlanError:
    """What to say of a search that found no plan that fits."""
    count = ranks or cluster.devices
    if not found.rejected:
        return PlanError(
            f"no plan splits a batch of {batch} over {count} ranks; use a batch that {count} divides, or --ranks {batch}"
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
        f"no plan fits {format_bytes(limit)} a device; the leanest, {leanest.plan}, needs {format_bytes(leanest.peak_bytes)}: {hint}"
    )


def _hint_of_ranks(ranks: int, samples: int, cluster: Cluster, batch: int) -> str:
    larger = f" and a batch of {samples:,}" if samples != batch else ""
    if cluster.device.kind != "cpu" and ranks <= cluster.devices:
        return f"use --ranks {ranks}{larger}"
    return f"use {ranks} ranks on {-(-ranks // cluster.ranks_per_node)} such nodes{larger}"


def search_plans(
    facts: ModelFacts,
    cluster: Cluster,
    batch: int,
    margin: float = MARGIN,
    recipe: Recipe | None = None,
    ranks: int | None = None,
) -> SearchResult:
    """Every legal plan on so many ranks, or on all devices, priced if it fits with a share of the memory to spare."""
    on = device_rates(cluster, ranks=ranks)
    recipe = recipe or default_recipe(on)
    limit = on.memory_bytes * (1 - margin)
    fitting: list[tuple[Plan, Cost]] = []
    rejected: list[RejectedPlan] = []
    for cut in enumerate_splits(facts, on.ranks, on.per_node, batch):
        rank, values = find_peak(facts, cut, recipe)
        if sum(values) > limit:
            rejected.append(_rejected(cut, values, limit))
            continue
        needed = build_memory_cost(rank, values, cut, recipe, on.memory_bytes)
        fitting.append(
            (plan_of_split(cut), Cost(predict_time(facts, cut, recipe, on), needed, cut.micro_batch))
        )
    fitting.sort(key=lambda pair: (pair[1].step_s, pair[1].peak_bytes))
    rejected.sort(key=lambda one: one.peak_bytes)
    return SearchResult(fitting, rejected)


def _rejected(cut: WorkSplit, values: tuple[float, ...], limit_bytes: float) -> RejectedPlan:
    return RejectedPlan(plan_of_split(cut), sum(values), limit_bytes, PART_NAMES[values.index(max(values))])


def enumerate_splits(facts: ModelFacts, ranks: int, per_node: int, batch: int) -> Iterator[WorkSplit]:
    """tp stays in a node, where its sums are quick; then cp, data and pipeline ranks are ever further apart (Plan.place)."""
    for tp in facts.tp_degrees:
        if ranks % tp or tp > per_node:
            continue
        for pp in _divisors(ranks // tp):
            for cp in _divisors(ranks // (tp * pp)):
                dp = ranks // (tp * pp * cp)
                if (
                    batch % dp
                    or (cp > 1 and (facts.sequence is None or facts.sequence % (2 * cp)))
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
    for micro_batch in _divisors(samples):
        microbatches = samples // micro_batch
        if micro_batch > MAX_MICRO_BATCH and microbatches > 1:
            continue
        for kind, stages in pipelines:
            if pp > 1 and not SCHEDULES[kind].allows(microbatches, pp):
                continue
            for recompute in RECOMPUTE:
                for zero, replicate in data:
                    yield WorkSplit(
                        dp, tp, pp, cp, 1, zero, replicate, micro_batch, microbatches, kind, stages, recompute
                    )


def _zero_stages(ranks: int, dp: int, tp: int, per_node: int) -> list[tuple[int, int]]:
    """ZeRO stages and copies of the shards, of so many data ranks: one, or so many that each one's shards are in a node."""
    if ranks == 1:
        return [(0, 1)]
    found = [(0, 1), (1, 1), (2, 1), (3, 1)]
    inside = max(1, per_node // tp)
    copies = ranks // inside
    if inside > 1 and copies > 1 and copies * inside == ranks and dp % copies == 0:
        found.append((3, copies))
    return found


def plan_of_split(cut: WorkSplit) -> Plan:
    """The plan that a split of `splits` is."""
    pipeline = cut.pp > 1
    return Plan(
        zero=cut.zero,
        dp=cut.dp,
        replicate=cut.replicate,
        tp=cut.tp,
        pp=cut.pp,
        cp=cut.cp,
        microbatches=cut.microbatches,
        pp_schedule=cut.schedule if pipeline else None,
        stages=cut.stages if pipeline else None,
        recompute=cut.recompute,
    )


@lru_cache(1024)
def _divisors(n: int) -> tuple[int, ...]:
    below = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*below, *(n // d for d in below)}))


def _find_enough_ranks(
    facts: ModelFacts, cluster: Cluster, batch: int, limit_bytes: float, recipe: Recipe | None, ranks: int
) -> tuple[int, int] | None:
    """How many ranks do, and which batch: this one, or a sample on each; if twice, four or more times as many on as many more nodes do."""
    for factor in (2, 4, 8, 16, 32, 64):
        larger = cluster.model_copy(update={"nodes": cluster.nodes * factor})
        on = device_rates(larger, ranks=ranks * factor)
        of = recipe or default_recipe(on)
        for samples in (batch, max(batch, on.ranks)):
            if any(
                sum(find_peak(facts, cut, of)[1]) <= limit_bytes
                for cut in enumerate_splits(facts, on.ranks, on.per_node, samples)
            ):
                return on.ranks, samples
    return None
