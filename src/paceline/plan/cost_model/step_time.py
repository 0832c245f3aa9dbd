"""Predicted seconds of a step, part by part, of the busiest rank of a pipeline."""

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from math import hypot
from typing import NamedTuple

from paceline.plan.cost_model.block_communication import (
    context_parallel_s,
    expert_parallel_s,
    rank_group,
    tensor_parallel_s,
)
from paceline.plan.cost_model.calibration import Calibration
from paceline.plan.cost_model.compare import TIME_PARTS
from paceline.plan.cost_model.compute_time import compute_block_time
from paceline.plan.cost_model.constants import MAX_FITTED_RANKS
from paceline.plan.cost_model.cost import CostPart, TimeCost
from paceline.plan.cost_model.engine_overhead import engines_s
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.memory import memory_breakdown
from paceline.plan.cost_model.rates import SUBSTITUTE_DTYPES, DeviceRates
from paceline.plan.cost_model.update_time import data_parallel_parts, optimizer_s
from paceline.plan.cost_model.work_split import MicrobatchKey, StageAssignment, WorkSplit, assign_stages
from paceline.plan.model.facts import ModelFacts
from paceline.plan.schedules import SCHEDULES, StageTimes
from paceline.units import several

# By part: relative standard deviation, calibrated on published measurements (docs/planning.md); its basis.
PARTS = {
    "products": (0.053, "tiles and waves of each product's shape on a rank, forward and backward"),
    "attention": (0.15, "FlashAttention-2, arXiv 2307.08691; or products and scores in memory"),
    "other operations": (0.19, "bytes read and written over memory bandwidth; start of kernels"),
    "computed again": (0.075, "forward pass repeated by recompute; arXiv 2205.05198"),
    "tensor parallel": (
        0.22,
        "all-reduces of a block's outputs and of gradients of its inputs; arXiv 1909.08053",
    ),
    "expert parallel": (0.38, "tokens sent to experts and back; arXiv 2101.03961"),
    "context parallel": (0.38, "keys and values round the ring, and merging (arXiv 2310.01889), or gathered"),
    "pipeline bubble": (0.2, "filling and draining; arXiv 2104.04473, 2401.10241"),
    "pipeline sends": (0.38, "activations that the schedule waits for; plan/schedules.py"),
    "data parallel": (0.3, "averaging of gradients, minus what overlaps with the backward pass"),
    "gathered weights": (0.3, "gathers of ZeRO, minus what overlaps with computing; arXiv 1910.02054"),
    "optimizer": (0.22, "bytes of weights and moments over memory bandwidth"),
    "engines": (0.2, "hooks, copies and calls of torch's engines, and of the loop, as measured"),
    "jitter": (0.75, "ranks wait for the slowest"),
}
EXACT: Mapping[str, float] = {}
# Of published runs: experts get unequal numbers of tokens, and kernels for them and for few bits are new.
EXPERT_ERRORS: Mapping[str, float] = {"products": 0.155, "other operations": 0.25, "expert parallel": 0.37}
LOW_ERRORS: Mapping[str, float] = {"products": 0.09}
GUESSED_ERROR = 0.7  # of each part, if nothing was measured of a CPU
# Of a whole step, on devices whose share of the peak is from single measurements of others or guessed, by
# systems whose values are, and on more ranks than any fitted training. The shares of the known architectures
# differ by a quarter.
UNFITTED_ERRORS: Mapping[str, float] = {"published": 0.12, "guessed": 0.25}
BEYOND_RANKS_ERROR = 0.1
# Of models with state-space layers: the one in the fitted trainings is 8 to 13 % too fast on three devices.
STATE_SPACE_ERROR = 0.15


class StageLoad(NamedTuple):
    """Seconds of one rank for one micro-batch, over all its blocks."""

    products_s: float
    attention_s: float
    traffic_s: float
    recompute_s: float
    tensor_s: float
    context_s: float
    expert_s: float
    stage: StageTimes
    flops: float
    recompute_flops: float

    @property
    def total_s(self) -> float:
        return (
            self.products_s
            + self.attention_s
            + self.traffic_s
            + self.recompute_s
            + self.tensor_s
            + self.context_s
            + self.expert_s
        )


def predict_time(facts: ModelFacts, split: WorkSplit, recipe: Recipe, rates: DeviceRates) -> TimeCost:
    """Return the time of a step. Raises PlanError if the bandwidth of the cluster is unknown."""
    stages = stage_loads(
        facts, split.pp, split.stages, SCHEDULES[split.schedule].folded, split.microbatch_key, recipe, rates
    )
    assignment, busiest = stages[0]
    m = split.microbatches
    parts = _parts_of_load(m, busiest)
    if split.pp > 1:
        bubble, sends = _pipeline_idle_s(facts, split, recipe, rates, stages)
        if rates.crowd > 1:
            busy_share, bubble = share_cores(m, busiest.total_s, _mean_load_s(stages), bubble, rates.crowd)
            parts = {name: busy_share * seconds for name, seconds in parts.items()}
        parts |= {"pipeline bubble": bubble, "pipeline sends": sends}
    own = max(
        [memory_breakdown(facts, assigned, recipe, split.microbatch_key) for assigned, _ in stages],
        key=lambda breakdown: breakdown.trained,
    )
    data = data_parallel_parts(assignment, split, recipe, rates, busiest.stage, own)
    if split.zero >= 2:  # each pass gathers and scatters all weights
        parts |= {name: seconds * facts.passes for name, seconds in data.items()}
    else:
        parts |= {name: seconds * facts.updates for name, seconds in data.items()}
    parts["engines"] = engines_s(assignment, split, rates) * facts.passes
    parts["optimizer"] = optimizer_s(assignment, split, recipe, rates, own) * facts.updates
    parts["jitter"] = rates.constants.jitter * sum(parts.values())
    peak = next(
        (
            rates.peaks[dtype]
            for dtype in (*SUBSTITUTE_DTYPES.get(recipe.dtype, (recipe.dtype,)), "bf16", "fp16", "fp32")
            if dtype in rates.peaks
        ),
        None,
    )
    min_error = GUESSED_ERROR if rates.op_times is not None and not rates.op_times.measured else 0.0
    ranks = split.ranks
    beyond = _extrapolations(facts, split, recipe)
    guesses = _guesses(split, parts, rates, tuple(beyond))
    flops = facts.training_flops * split.batch / ranks
    return TimeCost(
        parts=_calibrated_parts(
            parts,
            rates.calibration,
            min_error,
            TIME_PARTS["compute"] if facts.source == "measured" else (),
            _larger_errors(facts, recipe),
        ),
        flops=flops,
        hardware_flops=flops
        + sum(load.recompute_flops * assigned.count for assigned, load in stages) * m / split.pp,
        tokens=float(facts.tokens * split.batch),
        samples=float(split.batch),
        peak_flops=peak,
        guesses=guesses,
        extrapolation_error=_extrapolation_error(rates, beyond) if guesses else 0.0,
    )


def _calibrated_parts(
    parts: dict[str, float],
    calibration: Calibration | None,
    min_error: float = 0.0,
    measured: Collection[str] = (),
    errors: Mapping[str, float] = EXACT,
) -> tuple[CostPart, ...]:
    """Return the parts, corrected by the calibration.

    min_error: of parts that are only guessed; measured: parts that were measured with the task. errors: least
    error of some parts.
    """
    calibrated = []
    for name, seconds in parts.items():
        guessed = min_error if name not in measured else 0.0
        error, note = max(PARTS[name][0], guessed, errors.get(name, 0.0)), PARTS[name][1]
        if calibration is not None and (factor := calibration.factors.get(name)) is not None:
            runs = several(factor.runs, "run")
            seconds, error, note = (
                seconds * factor.value,
                factor.error(error),
                f"{note}; × {factor.value:.2f} from {runs}",
            )
        if seconds:
            calibrated.append(CostPart(name, seconds, error, note))
    return tuple(calibrated)


def _larger_errors(facts: ModelFacts, recipe: Recipe) -> Mapping[str, float]:
    """Return the least errors of parts that differ more between systems: of experts, and of few bits."""
    if any(block.expert_params for block, _ in facts.runs):
        return EXPERT_ERRORS
    return LOW_ERRORS if recipe.is_low else EXACT


def _guesses(
    split: WorkSplit, parts: dict[str, float], rates: DeviceRates, extrapolations: tuple[str, ...]
) -> tuple[str, ...]:
    """Return sentences about guesses; with runs like this step in the calibration, nothing is a guess."""
    if rates.calibration is None:
        return rates.guesses + extrapolations
    beyond = rates.calibration.beyond(
        [name for name, seconds in parts.items() if seconds and name != "jitter"], split.ranks
    )
    return beyond and (*rates.guesses, *extrapolations, *beyond)


def _extrapolation_error(rates: DeviceRates, extrapolations: Mapping[str, float]) -> float:
    """Return the relative error of a device, and of whatever else nothing was fitted to.

    The operations of CPUs have errors of their own.
    """
    of_device = UNFITTED_ERRORS.get(rates.device.basis, 0.0) if rates.op_times is None else 0.0
    return hypot(of_device, *extrapolations.values())


def lower_bound_s(facts: ModelFacts, split: WorkSplit, recipe: Recipe, rates: DeviceRates) -> float:
    """Return a lower bound of the step time: only the micro-batches of the busiest rank."""
    stages = stage_loads(
        facts, split.pp, split.stages, SCHEDULES[split.schedule].folded, split.microbatch_key, recipe, rates
    )
    busiest, busy_share = stages[0][1], 1.0
    if rates.crowd > 1 and split.pp > 1:
        busy_share, _ = share_cores(
            split.microbatches, busiest.total_s, _mean_load_s(stages), 0.0, rates.crowd
        )
    if rates.calibration is None:
        return split.microbatches * busiest.total_s * busy_share * (1 + rates.constants.jitter)
    parts = _parts_of_load(split.microbatches, busiest)
    parts = {name: busy_share * seconds for name, seconds in parts.items()}
    parts["jitter"] = rates.constants.jitter * sum(parts.values())
    return sum(part.value for part in _calibrated_parts(parts, rates.calibration))


def _parts_of_load(microbatches: int, busiest: StageLoad) -> dict[str, float]:
    return {
        "products": microbatches * busiest.products_s,
        "attention": microbatches * busiest.attention_s,
        "other operations": microbatches * busiest.traffic_s,
        "computed again": microbatches * busiest.recompute_s,
        "tensor parallel": microbatches * busiest.tensor_s,
        "context parallel": microbatches * busiest.context_s,
        "expert parallel": microbatches * busiest.expert_s,
    }


@lru_cache(65536)
def stage_loads(
    facts: ModelFacts,
    pp: int,
    stages: int,
    folded: bool,
    key: MicrobatchKey,
    recipe: Recipe,
    rates: DeviceRates,
) -> tuple[tuple[StageAssignment, StageLoad], ...]:
    """Return the load of each kind of rank of a pipeline, busiest first."""
    loads = [
        (assignment, stage_load(assignment, recipe, rates, key, facts.slower))
        for assignment in assign_stages(facts, pp, stages, recipe.even, folded)
    ]
    return tuple(sorted(loads, key=lambda pair: -pair[1].total_s))


def _extrapolations(facts: ModelFacts, split: WorkSplit, recipe: Recipe) -> dict[str, float]:
    """Return sentences about what no fitted training had, each with its relative error of a step."""
    found = {}
    if split.ranks > MAX_FITTED_RANKS:
        sentence = f"{split.ranks} ranks are more than the {MAX_FITTED_RANKS} of any fitted training"
        found[sentence] = BEYOND_RANKS_ERROR
    if facts.has_state_space:
        found[f"the kernels of the state-space layers of {facts.name} are not fitted"] = STATE_SPACE_ERROR
    if not recipe.is_fitted:
        found[f"no training by {recipe.name} is fitted"] = UNFITTED_ERRORS["published"]
    return found


@lru_cache(65536)
def stage_load(
    assignment: StageAssignment, recipe: Recipe, rates: DeviceRates, key: MicrobatchKey, slower: float = 1.0
) -> StageLoad:
    """Return the seconds of one micro-batch on the ranks of `assignment`."""
    products = attention = traffic = recompute = tensor = context = expert = 0.0
    flops = recompute_flops = 0.0
    forward = inputs = weights = 0.0
    for block, count in assignment.parts:
        block_time = compute_block_time(rates, recipe, block, key)
        if slower != 1.0:
            block_time = block_time.scaled(slower)
        sums, ring = (
            tensor_parallel_s(block, key, recipe, rates),
            context_parallel_s(block, key, recipe, rates, block_time),
        )
        sent = expert_parallel_s(block, key, recipe, rates)
        products += count * (block_time.products_s + block_time.inputs_s + block_time.weights_s)
        attention += count * (block_time.attention_s + block_time.attention_backward_s)
        traffic += count * (block_time.traffic_s + block_time.traffic_backward_s)
        recompute += count * block_time.recompute_s
        tensor += count * (sums.forward_s + sums.backward_s + sums.recompute_s)
        context += count * ring
        expert += count * (sent.forward_s + sent.backward_s + sent.recompute_s)
        forward += count * (block_time.forward_s + sums.forward_s + ring / 3 + sent.forward_s)
        inputs += count * (
            block_time.backward_inputs_s
            + block_time.recompute_s
            + sums.backward_s
            + sums.recompute_s
            + ring * 2 / 3
            + sent.backward_s
            + sent.recompute_s
        )
        weights += count * block_time.weights_s
        flops += count * block_time.flops
        recompute_flops += count * block_time.recompute_flops
    return StageLoad(
        products,
        attention,
        traffic,
        recompute,
        tensor,
        context,
        expert,
        StageTimes(forward, inputs, weights),
        flops,
        recompute_flops,
    )


def _pipeline_idle_s(
    facts: ModelFacts,
    split: WorkSplit,
    recipe: Recipe,
    rates: DeviceRates,
    stages: Sequence[tuple[StageAssignment, StageLoad]],
) -> tuple[float, float]:
    """Return the bubble and the exposed sends of the schedule.

    Ranks may differ in the time they take to fill and drain.
    """
    schedule, busiest = SCHEDULES[split.schedule], stages[0][1]
    others = _mean_load_s(stages) * split.pp - busiest.total_s
    uniform = schedule.idle_s(split.pp, split.microbatches, split.stages, busiest.stage) / (
        busiest.total_s or 1.0
    )
    size = facts.first.boundary * recipe.element * split.micro_batch / split.cp
    size /= split.tp if recipe.scatter or recipe.splits_sequence(split.cp) else 1
    group = rank_group(2, split.dp * split.cp * split.tp, rates.per_node)
    send = rates.collective_s("send", size, 2, group.together)
    sends = schedule.exposed_sends(split.pp, split.microbatches, split.stages) * send
    return uniform * others / (split.pp - 1), sends


def _mean_load_s(stages: Sequence[tuple[StageAssignment, StageLoad]]) -> float:
    """Return the seconds of a micro-batch, as the mean over the ranks of a pipeline."""
    ranks = sum(assigned.count for assigned, _ in stages)
    return sum(assigned.count * load.total_s for assigned, load in stages) / ranks


def share_cores(
    microbatches: int, busiest_s: float, mean_s: float, bubble_s: float, crowd: float
) -> tuple[float, float]:
    """Return the share of the busiest rank's seconds that remains, and the bubble, if ranks share cores.

    A rank that waits leaves its core to others. So a step takes as long as the work of all ranks on all
    cores, or as the critical path if each of its ranks had a core.

    busiest_s, mean_s: seconds of a micro-batch on the busiest and the mean rank; these and bubble_s are of
    ranks that always share. crowd: ranks per core.
    """
    busy_s = microbatches * busiest_s
    step_s = max(microbatches * mean_s, (busy_s + bubble_s) / crowd)
    return min(1.0, step_s / (busy_s or 1.0)), max(0.0, step_s - busy_s)
