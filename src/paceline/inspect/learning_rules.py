"""Rules about the course of the loss: spikes, plateaus, updates that overflowed."""

import itertools
import math
import statistics
from collections.abc import Sequence

from paceline.inspect.facts import RunFacts, StepPoint
from paceline.inspect.finding import NOT_APPLICABLE, Evidence, Missing, Outcome
from paceline.units import several

WINDOW = 100  # steps before a step, with which its loss is compared
MIN_BEFORE = 40  # of them
SPIKE_RISE = 1.5  # above the largest loss of the window, in units of its distance from the median
SPIKE_FLOOR = 0.25  # and as a share of the range of all losses
SPIKE_FACTOR, SPIKE_LOW_FLOOR = 2.0, 0.1  # or of the loss before, and as a smaller share of that range
MIN_SPIKE_STEPS = 3  # in a row; a single hard batch is no spike
SHIFT_STEPS = 10  # after a jump, whose median is compared with the MIN_BEFORE steps before it
JUMP_FACTOR = 2.0  # of the distance between the largest of these losses and their median
BACK_STEPS = 5  # whose median is back after a jump
SHIFT_SHARE = 0.02  # of the range of all losses, which a jump exceeds besides that of the steps around it
EARLY_STEPS = 10  # after the first, in which a learning rate that is much too large shows
EARLY_FACTOR = 10.0  # of the first loss
EARLY_DEVIATIONS = 6.0  # of the logarithm of the loss of a step
EARLY_SHARE = 0.01  # of the steps, until the loss is back
SPIKE_NORM = 5.0  # a single step counts if its gradient exceeds the largest of the window by this factor
MIN_PLATEAU_STEPS = 200
MIN_PLATEAU_SHARE = 0.2  # of the training; it may begin slowly
PLATEAU_CHANGE = 0.005  # of the loss, by which its median changes at most
RISE_SHARE = 0.1  # of the loss, by which it is higher in the last third than ever before
RISE_DEVIATIONS = 1.0  # of a step
BEGIN_DEVIATIONS = 1.2  # of a step; 3 of the median of the first 10 steps
NEAR_ZERO = 0.05  # a loss below this share of the first loss has been learned
STALE_GAIN = 0.02  # of the whole improvement of the evaluations, that counts as none
STALE_NOISE = 0.1  # likewise of the noisy loss of steps, whose course is tested besides
STALE_SHARE = 0.6  # of the run, during which neither loss nor evaluation improve
MIN_STALE_STEPS, MIN_STALE_EVALUATIONS = 800, 12  # a short run that has converged is no fault
OVERFLOW_SHARE = 0.1
MIN_OVERFLOW_STEPS = 50


def check_spike(facts: RunFacts) -> Outcome:
    """A loss that jumps far above everything in the steps before."""
    points = facts.steps
    if len(points) < MIN_BEFORE + 10:
        return Missing(f"it needs {MIN_BEFORE + 10} steps, got {facts.num_steps}")
    losses = [point.loss for point in points]
    scale = _range(losses)
    if not scale:
        return []
    if early := _find_early_jump(facts, losses):
        return early
    worst: tuple[float, int, int, float] | None = None  # rise, first, last, median before
    at = MIN_BEFORE
    while at < len(points):
        before = losses[max(0, at - WINDOW) : at]
        middle, highest = statistics.median(before), max(before)
        floor = min(SPIKE_FLOOR * scale, max(SPIKE_LOW_FLOOR * scale, SPIKE_FACTOR * abs(middle)))
        limit = highest + max(SPIKE_RISE * (highest - middle), floor)
        until = at
        while until < len(points) and losses[until] > limit:
            until += 1
        count = until - at
        if count < MIN_SPIKE_STEPS and _is_shifted(losses, at):
            until, count = at + SHIFT_STEPS, SHIFT_STEPS
        if count >= MIN_SPIKE_STEPS or (count and _has_large_gradient(points, at)):
            rise = max(losses[at:until]) - middle
            if worst is None or rise > worst[0]:
                worst = rise, at, until - 1, middle
        at = until + 1 if count else at + 1
    if worst is None:
        return []
    rise, first, last, middle = worst
    # Noise that grew with the loss may reach the old level in a single step.
    level = middle + 0.1 * rise
    is_back = lambda k: max(losses[k], statistics.median(losses[k : k + BACK_STEPS])) <= level  # noqa: E731
    back = next(filter(is_back, range(last, len(points))), None)
    lost = sum(point.num_steps for point in points[first : back if back is not None else len(points)])
    peak = max(losses[first : last + 1])
    step = points[first].step
    end = f"and was back after {several(lost, 'step')}" if back is not None else "and did not come back since"
    return [
        Evidence(
            f"the loss jumped from {middle:.4g} to {peak:.4g} at step {step} {end}",
            {"step": step, "loss_before": middle, "loss": peak, "steps_lost": lost},
            lost / max(1, facts.num_steps),
            f"{facts.again} --clip 1.0 limits the gradient; a lower --lr and schedule.warmup help too",
        )
    ]


def _is_shifted(losses: Sequence[float], at: int) -> bool:
    """Return whether the loss jumps at a step and stays far above the steps before.

    Noise that grows with the loss hides this from the comparison of single steps. A loss that rises steadily
    does not jump."""
    before, after = losses[at - MIN_BEFORE : at], losses[at : at + SHIFT_STEPS]
    middle, highest = statistics.median(before), max(before)
    if losses[at] <= highest or len(after) < SHIFT_STEPS:
        return False
    level = statistics.median(after)
    if level <= max(losses[max(0, at - WINDOW) : at]):
        return False
    rise = level - middle
    floor = max(SPIKE_FLOOR * _range(losses[max(0, at - WINDOW) : at + WINDOW]), SHIFT_SHARE * _range(losses))
    return rise > max(floor, JUMP_FACTOR * (highest - middle))


def _find_early_jump(facts: RunFacts, losses: Sequence[float]) -> list[Evidence]:
    """Return a finding if the first updates made the loss many times larger, which has no window before."""
    first, early = losses[0], statistics.median(losses[1 : 1 + EARLY_STEPS])
    if facts.steps[0].step != 1 or min(losses) <= 0 or early < EARLY_FACTOR * first:
        return []
    # The first loss may be small by chance, if the losses of single steps differ by orders of magnitude.
    logs = [math.log(loss) for loss in losses[1 : len(losses) // 3]]
    # The mean of |a - b| of normal values is 1.128 standard deviations; that of rare low values is larger.
    noise = statistics.fmean(abs(b - a) for a, b in itertools.pairwise(logs)) / 1.128
    if math.log(early / first) < EARLY_DEVIATIONS * noise:
        return []
    back = next((k for k in range(EARLY_STEPS, len(losses)) if losses[k] <= first), len(losses))
    lost = sum(point.num_steps for point in facts.steps[:back])
    if lost < EARLY_SHARE * facts.num_steps:
        return []
    return [
        Evidence(
            f"the loss jumped from {first:.4g} to {early:.4g} in the first {EARLY_STEPS} steps and "
            + (f"was back after {several(lost, 'step')}" if back < len(losses) else "never came back"),
            {"step": 1, "loss_before": first, "loss": early, "steps_lost": lost},
            lost / max(1, facts.num_steps),
            f"{facts.again} with a lower --lr, and schedule.warmup",
        )
    ]


def check_finite(facts: RunFacts) -> Outcome:
    """A training that ended because its loss was not finite."""
    ends = [event for event in facts.failures if event.error == "DivergedError"]
    if not ends or ends[-1].time < facts.start.time:
        return []
    step = ends[-1].step
    return [
        Evidence(
            f"the loss was not finite after step {step}, which ended the training",
            {"step": step},
            None,
            f"paceline resume {facts.path} --lr SMALLER; --clip 1.0 limits the gradient",
        )
    ]


def _has_large_gradient(points: Sequence[StepPoint], at: int) -> bool:
    norms = [point.grad_norm for point in points[max(0, at - WINDOW) : at] if point.grad_norm is not None]
    # The gradient of the step after the jump may show it, too.
    near = [point.grad_norm for point in points[at : at + 2] if point.grad_norm is not None]
    return bool(norms and near) and max(near) > SPIKE_NORM * max(norms) > 0


def _range(values: Sequence[float]) -> float:
    """Return the distance between the 5th and the 95th percentile."""
    ordered = sorted(values)
    return ordered[int(0.95 * (len(ordered) - 1))] - ordered[int(0.05 * (len(ordered) - 1))]


def check_plateau(facts: RunFacts) -> Outcome:
    """A loss that has not moved since the beginning, or that stopped improving long ago."""
    points = facts.steps
    if facts.num_steps < MIN_PLATEAU_STEPS or len(points) < MIN_PLATEAU_STEPS // 2:
        return Missing(f"it needs {MIN_PLATEAU_STEPS} steps, got {facts.num_steps}")
    if points[-1].step < MIN_PLATEAU_SHARE * facts.start.steps:
        return Missing(f"it needs {MIN_PLATEAU_SHARE:.0%} of the training, which may begin slowly")
    losses = [point.loss for point in points]
    if not any(losses):
        return []  # a task without a loss
    return _find_rise(facts, losses) or _find_never_moved(facts, losses) or _find_stale(facts, losses)


def _find_rise(facts: RunFacts, losses: Sequence[float]) -> list[Evidence]:
    """Return a finding if the loss is clearly higher at the end than at the beginning, without a jump."""
    third = len(losses) // 3
    begin, first = statistics.median(losses[:10]), statistics.median(losses[:third])
    last = statistics.median(losses[-third:])
    highest = max(begin, first)
    if last - highest < max(RISE_SHARE * abs(highest), RISE_DEVIATIONS * _noise(losses)):
        return []
    if not _falls([*reversed(losses)]) or _improves_late(facts) or check_spike(facts):
        return []
    return [
        Evidence(
            f"the loss rose: {begin:.4g} in the first 10 steps, {last:.4g} in the last third",
            {"loss_first": begin, "loss_last": last},
            1.0,
            f"try a lower learning rate: {facts.again} --lr SMALLER; and check the sign of the loss",
        )
    ]


def _improves_late(facts: RunFacts) -> bool:
    """Return whether the best evaluation is in the second half of at least four."""
    return len(facts.evaluated) >= 4 and _improve_evaluations(facts, 0.5) > 0.0


def _find_never_moved(facts: RunFacts, losses: Sequence[float]) -> list[Evidence]:
    third = len(losses) // 3
    first, last = statistics.median(losses[:third]), statistics.median(losses[-third:])
    begin = statistics.median(losses[:10])
    scale = max(abs(first), abs(begin))
    limit = PLATEAU_CHANGE * scale
    # A loss that fell in the first steps and then stayed has learned what there was to learn.
    if abs(last - first) > limit or abs(last - begin) > max(limit, BEGIN_DEVIATIONS * _noise(losses)):
        return []
    if abs(last) < NEAR_ZERO * scale or _improve_evaluations(facts, 1.0) > PLATEAU_CHANGE:
        return []
    # A noisy loss may fall by less than its noise: compare the halves by rank, which needs no distribution.
    if _falls(losses):
        return []
    lr = max(point.lr for point in facts.steps)
    return [
        Evidence(
            f"the loss has not moved in {facts.num_steps:,} steps: {first:.4g} in the first third, "
            f"{last:.4g} in the last (learning rate {lr:.3g})",
            {"steps": facts.num_steps, "loss_first": first, "loss_last": last, "lr": lr},
            1.0,
            f"try another --lr, or see a step: paceline replay {facts.path} --step {facts.steps[-1].step}",
        )
    ]


def _find_stale(facts: RunFacts, losses: Sequence[float]) -> list[Evidence]:
    """Return a finding if neither loss nor evaluations improved in the last part of the run."""
    evaluations = len(facts.evaluated)
    if facts.num_steps < MIN_STALE_STEPS or evaluations < MIN_STALE_EVALUATIONS:
        return []
    begin = round((1 - STALE_SHARE) * len(losses))
    tail = losses[begin:]
    head = statistics.median(losses[:10])
    early, late = statistics.median(tail[: len(tail) // 3]), statistics.median(tail[-(len(tail) // 3) :])
    drop = head - early
    has_learned = abs(late) < NEAR_ZERO * abs(head)
    if drop <= 0 or early - late > STALE_NOISE * drop or has_learned:
        return []
    if _improve_evaluations(facts, STALE_SHARE) > STALE_GAIN * _improve_evaluations(facts, 1.0):
        return []
    if _falls(tail):
        return []
    step = facts.steps[begin].step
    share = STALE_SHARE
    return [
        Evidence(
            f"the loss and the evaluations have hardly improved since step {step}: {early:.4g} then, "
            f"{late:.4g} at the end",
            {"step": step, "loss_then": early, "loss": late},
            share,
            f"stop earlier: {facts.again} --patience 3; or decay the learning rate: --schedule cosine",
        )
    ]


def _noise(losses: Sequence[float]) -> float:
    """Return the standard deviation of a loss around its course, from the differences of neighbours."""
    # The median of |a - b| of normal values is 0.954 standard deviations.
    return statistics.median(abs(b - a) for a, b in itertools.pairwise(losses)) / 0.954


def _falls(losses: Sequence[float]) -> bool:
    """Return whether the later losses are lower, by a Mann-Whitney test of the first and the last third.

    Steps that share samples are not independent, so the limit is 4 standard deviations."""
    third = len(losses) // 3
    first, last = losses[:third], losses[-third:]
    ordered = sorted([(value, 0) for value in first] + [(value, 1) for value in last])
    ranks_last, at = 0.0, 0
    while at < len(ordered):
        until = at
        while until < len(ordered) and ordered[until][0] == ordered[at][0]:
            until += 1
        mean_rank = (at + until + 1) / 2
        ranks_last += mean_rank * sum(group for _, group in ordered[at:until])
        at = until
    n = float(third)
    statistic = ranks_last - n * (n + 1) / 2
    deviation = (n * n * (2 * n + 1) / 12) ** 0.5
    return statistic < n * n / 2 - 4 * deviation


def _improve_evaluations(facts: RunFacts, share: float) -> float:
    """Return by how much the best loss fell in the last `share` of the evaluations, relative to before."""
    values = [event.metrics.get("loss") for event in facts.evaluated]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return 0.0
    split = max(1, round((1 - share) * len(known)))
    before, after = min(known[:split]), min(known[split:], default=math.inf)
    return max(0.0, before - after) / abs(before) if before else 0.0


def check_overflow(facts: RunFacts) -> Outcome:
    """Updates that fp16 skips because gradients overflow."""
    if facts.start.precision != "fp16":
        return NOT_APPLICABLE
    if facts.num_warm < MIN_OVERFLOW_STEPS:
        return Missing(f"it needs {MIN_OVERFLOW_STEPS} steps after the first, got {facts.num_warm}")
    skipped = sum(point.num_steps for point in facts.warm if point.grad_norm is None)
    share = skipped / facts.num_warm
    if share < OVERFLOW_SHARE:
        return []
    return [
        Evidence(
            f"fp16 overflowed in {share:.0%} of the steps, whose updates were skipped",
            {"steps": facts.num_warm, "skipped": skipped},
            share,
            f"{facts.again} --precision bf16",
        )
    ]
