"""Rules about ranks: stragglers, communication, pipelines, and whether more ranks pay."""

import math
import statistics

from paceline.inspect.contention import (
    CONTENTION_SHARE,
    find_contention,
    measure_contention,
    measure_explained_wait,
)
from paceline.inspect.facts import RunFacts, Sibling
from paceline.inspect.finding import NOT_APPLICABLE, Evidence, Missing, Outcome
from paceline.inspect.straggler import MIN_PROFILES, MIN_STEPS, Straggler, find_straggler
from paceline.plan.plan import ResolvedPlan
from paceline.plan.schedules import StageTimes
from paceline.units import format_seconds, several

MAX_PROFILE_RATIO = 1.5  # of the time of fewer profiled steps to that of the median step
COMMUNICATION_SHARE, COMMUNICATION_S = 0.4, 5e-3
CLEAR_COMMUNICATION_SHARE = 0.2  # beyond what waiting for cores explains
FASTER = 0.9  # of the predicted time of a step, below which another plan is worth trying
BUBBLE_SHARE = 0.35  # the default of 2·pp micro-batches idles at most a third
IMBALANCE = 1.4  # busy time of the slowest rank of a pipeline, relative to the mean
BUSY_IMBALANCE = 1.6  # if ranks waited for cores, which makes profiles uneven
EXTRA_BUBBLE = 0.2  # of a step, beyond that of the schedule, with which IMBALANCE suffices nevertheless
CLEAR_IMBALANCE = 1.2  # if ranks hardly waited for cores, and one was slower by more than a time slice
CLEAR_CONTENTION, TIME_SLICE_S = 0.1, 3e-3
MIN_GAIN = 0.5  # efficiency below which more ranks do not pay
MIN_FACTOR = 2.0  # of the cores or devices between the two runs


def check_straggler(facts: RunFacts) -> Outcome:
    """A rank that is busy longer than the others, which wait for it in their collectives."""
    if facts.plan is not None and facts.plan.pp > 1:
        return NOT_APPLICABLE  # the stages of a pipeline differ by design: see check_pipeline
    found = find_straggler(facts)
    if isinstance(found, Missing):
        return found
    if found is None:
        return []
    where = f", mostly in {found.where}" if found.where else ""
    beat = facts.beats[found.rank] if found.rank < len(facts.beats) else None
    host = f" on {beat.host}" if beat is not None else ""
    fix = (
        f"find out what rank {found.rank} reads: {facts.again} --workers 2 lets it read ahead"
        if found.where == "input"
        else f"look for other processes on its machine{host}: paceline probe"
    )
    return [
        Evidence(
            f"rank {found.rank}{host} is busy for {format_seconds(found.busy_s)} a step{where}, the others "
            f"for {format_seconds(found.others_s)}: they wait for it",
            {"rank": found.rank, "busy_s": found.busy_s, "others_s": found.others_s, "step_s": found.step_s},
            found.share,
            fix,
        )
    ]


def check_communication(facts: RunFacts) -> Outcome:
    """A step that consists of communication to a large part, without the waiting for a straggler."""
    plan = facts.plan
    if plan is not None and plan.pp > 1:
        return NOT_APPLICABLE
    share_step = _measure_communication(facts)
    if share_step is None:
        return Missing("it needs a profiled step (--profile), or the end of a run of 50 steps under ddp")
    share, step_s = share_step
    straggler = find_straggler(facts)
    if isinstance(straggler, Straggler):
        share -= straggler.share
    if share < COMMUNICATION_SHARE or share * step_s < COMMUNICATION_S:
        return []
    # Ranks also wait for cores because the threads that communicate use them.
    clear_share = share - measure_explained_wait(facts) if facts.beats else 0.0
    reason = find_contention(facts) if facts.is_cpu else None
    if reason is not None and clear_share < CLEAR_COMMUNICATION_SHARE:
        return Missing(reason)
    return [
        Evidence(
            f"ranks communicate for {share:.0%} of a step, {format_seconds(share * step_s)} of "
            f"{format_seconds(step_s)}",
            {"communication_s": share * step_s, "step_s": step_s, "ranks": facts.start.ranks},
            share,
            _choose_plan(facts, plan),
        )
    ]


def _measure_communication(facts: RunFacts) -> tuple[float, float] | None:
    """Return communication as a share of the step, and the step's seconds; None if unknown."""
    profiled_s = statistics.median(event.step_s for event in facts.profiled) if facts.profiled else 0.0
    # The only profile of a short run is that of an early step, which may wait for much else.
    is_typical = facts.step_s is None or profiled_s < MAX_PROFILE_RATIO * facts.step_s
    if facts.profiled and (is_typical or len(facts.profiled) >= MIN_PROFILES):
        share = statistics.median(
            event.seconds.get("communication", 0.0) / event.step_s for event in facts.profiled
        )
        return share, profiled_s
    if facts.ended is not None and facts.ended.communication is not None and facts.num_warm >= 50:
        # It is a share of forward and backward, and input comes besides.
        computed = statistics.median(1 - point.data_s / max(point.step_s, 1e-9) for point in facts.warm)
        return facts.ended.communication * max(0.0, computed), facts.step_s or 0.0
    return None


def _choose_plan(facts: RunFacts, plan: ResolvedPlan | None) -> str:
    """Return the change of the plan that sends less: by the planner, or else by a rule of thumb."""
    started, prediction = facts.start, facts.prediction
    if prediction is not None and prediction.cost is not None and prediction.best is not None:
        name, best_s = prediction.best
        own_s = prediction.cost.step_s
        if best_s > FASTER * own_s:
            return "a larger --batch, or fewer ranks: no other plan is predicted to be clearly faster"
        return (
            f"{facts.again} --plan {name}, whose steps are predicted to take {format_seconds(best_s)} on "
            f"{prediction.cluster}, and those of {started.plan} {format_seconds(own_s)}"
        )
    compare = (
        f"compare the plans: paceline plan {started.task} --ranks {started.ranks} --batch {started.batch}"
    )
    if plan is None:
        return compare
    if plan.tp > 1 or plan.cp > 1:
        axis = "tp" if plan.tp > 1 else "cp"
        return f"a lower degree of {axis} with more data ranks sends less; {compare}"
    if plan.zero == 3:
        return f"zero2 sends a third less than zero3 if the weights fit: {facts.again} --plan zero2"
    return f"a larger --batch, or fewer ranks, sends less often; {compare}"


def check_pipeline(facts: RunFacts) -> Outcome:
    """A pipeline whose stages take unequal time, or that has too few micro-batches."""
    plan = facts.plan
    if plan is None or plan.pp < 2:
        return NOT_APPLICABLE
    if not facts.profiled:
        return Missing("it needs a profiled step (--profile)")
    idle = plan.schedule.idle_s(plan.pp, plan.microbatches, plan.stages_per_rank, StageTimes(1.0, 1.0, 1.0))
    expected = idle / (idle + 3.0 * plan.microbatches)
    bubble = statistics.median(event.seconds.get("bubble", 0.0) / event.step_s for event in facts.profiled)
    ratio = statistics.median(event.slowest_s / max(event.busy_s, 1e-9) for event in facts.profiled)
    values = {"busy_ratio": ratio, "bubble": bubble, "expected_bubble": expected}
    found = []
    if ratio > _limit_imbalance(facts, has_idle_stages=bubble > expected + EXTRA_BUBBLE):
        rank = statistics.mode(event.slowest for event in facts.profiled)
        found.append(
            Evidence(
                f"the stages of the pipeline are unequal: rank {rank} (stage {plan.place(rank).pp}) is busy "
                f"for {ratio:.2f} times the mean",
                values,
                max(0.0, 1 - 1 / ratio),
                "let Task.layout name smaller blocks, which become the units of stages, or use more stages: "
                f"{facts.again} --plan pp={plan.pp},pp_schedule=interleaved",
            )
        )
    if expected > BUBBLE_SHARE:
        found.append(
            Evidence(
                f"with microbatches={plan.microbatches}, the {plan.pp} stages of the pipeline are idle for "
                f"{expected:.0%} of a step",
                values,
                expected,
                f"{facts.again} --plan pp={plan.pp},microbatches={4 * plan.pp}",
            )
        )
    return found


def _limit_imbalance(facts: RunFacts, has_idle_stages: bool) -> float:
    """Return the ratio of busy times above which stages are unequal.

    A rank that lost its core in the profiled step seems busy; unequal stages make others wait in each step.
    """
    contention = measure_contention(facts) or 0.0
    slower_s = statistics.median(event.slowest_s - event.busy_s for event in facts.profiled)
    if contention <= CLEAR_CONTENTION and slower_s > TIME_SLICE_S:
        return CLEAR_IMBALANCE
    return IMBALANCE if contention <= CONTENTION_SHARE or has_idle_stages else BUSY_IMBALANCE


def check_scaling(facts: RunFacts) -> Outcome:
    """A run that is hardly faster than a comparable run on fewer cores or devices."""
    started = facts.start
    if facts.num_warm < MIN_STEPS:
        return Missing(f"it needs {MIN_STEPS} steps after the first, got {facts.num_warm}")
    mine = Sibling(
        facts.path.name,
        started.plan,
        started.ranks,
        started.threads,
        statistics.median(point.samples_per_s for point in facts.warm),
    )
    smaller = [
        other
        for other in facts.siblings
        if other.ranks < mine.ranks
        and _count_devices(mine, facts) >= MIN_FACTOR * _count_devices(other, facts)
    ]
    if not smaller:
        return Missing("it needs a run of the same task and batch beside it on half as many cores or devices")
    other = max(smaller, key=lambda run: (run.samples_per_s / _count_devices(run, facts), run.ranks))
    factor = _count_devices(mine, facts) / _count_devices(other, facts)
    gain = mine.samples_per_s / other.samples_per_s
    if gain / factor >= MIN_GAIN:
        return []
    if facts.is_cpu and (reason := find_contention(facts)) is not None:
        # All waits in turn are an upper bound, which a run that is slower than the smaller bound needs not.
        explained = measure_explained_wait(facts) if gain >= 1 else measure_contention(facts) or 0.0
        own_share = 1 - explained
        if not facts.beats or own_share <= 0 or gain / factor >= MIN_GAIN * own_share:
            return Missing(reason)
    return [
        Evidence(
            f"{several(mine.ranks, 'rank')} train {gain:.2f} times as fast as "
            f"{several(other.ranks, 'rank')} of {other.name} ({other.plan}) with {factor:.3g} times the "
            f"{'cores' if facts.is_cpu else 'devices'}: an efficiency of {gain / factor:.0%}",
            {"ranks": mine.ranks, "other_ranks": other.ranks, "gain": gain, "efficiency": gain / factor},
            1 - gain / factor,
            f"{facts.again} --ranks {other.ranks}, or a larger --batch",
        )
    ]


def _count_devices(run: Sibling, facts: RunFacts) -> float:
    """Return the devices, or the cores that the threads of the ranks can use."""
    if not facts.is_cpu:
        return float(run.ranks)
    cores, local_ranks = facts.facts.get("cores", math.inf), facts.facts.get("local_ranks", 1.0)
    nodes = max(1.0, facts.start.ranks / max(1.0, local_ranks))
    return float(min(run.ranks * run.threads, cores * nodes))
