"""Rules about the time of a step and around it: input, evaluations, checkpoints."""

import itertools
import math
import statistics
from collections.abc import Sequence

from paceline.events import Saved
from paceline.inspect.contention import CONTENTION_SHARE, measure_contention
from paceline.inspect.facts import RunFacts, StepPoint, sum_over_steps
from paceline.inspect.finding import Evidence, Missing, Outcome
from paceline.units import format_seconds, several

MIN_STEPS = 10  # after the warm-up
MIN_MEAN_STEPS = 20  # the mean of fewer varies too much
MIN_WARM_S = 0.5  # of these steps; in less time, a single pause of the machine is a large share
INPUT_SHARE, INPUT_WAIT_S = 0.2, 4e-3  # collating a small batch in Python takes a millisecond or two
WORKERS_CONTENTION = 2.0  # times the share of the time without a core, which workers may cost besides
STALLS = 0.02  # of the steps: the longest waits are left out, which may be single stalls of a file system
MAX_STALLS = 5  # of them: more are no accident, and a long run has many
LATE_INPUT_SHARE = 0.1  # in the second half of the steps: a first epoch that fills a cache is no fault
SPARE = 1.1  # readers that are faster than the training by this factor keep it busy
MAX_WORKERS = 1024  # as in spec.Loading
MIN_EVALUATIONS = 3
EVALUATION_SHARE = 0.25  # an evaluation of as many samples as an epoch takes about a third of its time
DEFAULT_EVALUATION_SHARE = 0.4  # if each epoch is evaluated by default: noise and workers add to a third
FREQUENT_EVALUATION_SHARE, FREQUENT_STEPS = 0.15, 5  # if the request evaluates after every few steps
MIN_EVALUATION_STEPS = 10  # that an evaluation takes as long as, if each epoch is evaluated by default
GOOD_EVALUATION_SHARE = 0.05
MIN_SAVES, MIN_SAVE_S = 3, 0.5
SAVE_SHARE = 0.15
BEST_SAVE_SHARE = 0.25  # if only better metrics cause the saves: a short run improves at each evaluation
BEST_SAVE_S = 0.2
GOOD_SAVE_SHARE = 0.02
BEST_SAVE_CONTENTION = 0.25  # of the time, in which a rank waits for a core
WRITTEN_SHARE, GOOD_WRITTEN_SHARE = 0.6, 0.1  # of the time, in which a checkpoint is being written
MIN_COMPARED = 5  # steps while a checkpoint is written, and other steps
MIN_SLOWED = 0.25  # of a step, by which it is longer while a checkpoint is written; less may be noise


def lacks_steps(facts: RunFacts) -> Missing | None:
    """Return what is missing if there are too few steps after the warm-up, else None."""
    if facts.num_warm < MIN_STEPS:
        return Missing(f"it needs {MIN_STEPS} steps after the first, got {facts.num_warm}")
    seconds = sum_over_steps(facts.warm, [point.step_s for point in facts.warm])
    if seconds < MIN_WARM_S:
        return Missing(f"it needs steps of {MIN_WARM_S} s together, got {format_seconds(seconds)}")
    return None


def check_input(facts: RunFacts) -> Outcome:
    """Steps that wait for their batch, and the number of workers with which they would not."""
    if (missing := lacks_steps(facts)) is not None:
        return missing
    workers = facts.spec.data.workers if facts.spec is not None else None
    if workers is None:
        workers = _count_default_workers(facts)
    contention = measure_contention(facts)
    measure = _measure_input if facts.num_warm >= MIN_MEAN_STEPS else _measure_few
    data_s, step_s = measure(facts.warm, workers, contention)
    # Workers wait for cores, too, and then the training waits for them.
    limit = INPUT_SHARE + (WORKERS_CONTENTION * (contention or 0.0) if workers else 0.0)
    if not step_s or data_s / step_s < limit or data_s < INPUT_WAIT_S:
        return []
    late = facts.warm[len(facts.warm) // 2 :]
    late_data_s, late_step_s = measure(late, workers, contention)
    if late_data_s < LATE_INPUT_SHARE * late_step_s:
        return []
    share = data_s / step_s
    values = {"data_s": data_s, "step_s": step_s, "share": share}
    sentence = (
        f"the training waits for its input for {share:.0%} of the time: {format_seconds(data_s)} of "
        f"{format_seconds(step_s)} a step"
    )
    # Without workers, the wait is the time to read a batch. Workers that limit the training read one batch
    # each in `workers` steps.
    read_s = data_s if workers == 0 else workers * step_s
    compute_s = max(step_s - data_s, 1e-4)
    needed = min(MAX_WORKERS, max(workers + 1, math.ceil(SPARE * read_s / compute_s)))
    values |= {"workers": workers, "workers_needed": needed}
    present = f"{several(workers, 'worker')} read" if workers else "no worker reads"
    sentence += f"; {present} ahead, and {needed} per rank would suffice"
    cores, ranks = facts.facts.get("cores"), facts.facts.get("local_ranks", 1.0)
    if cores and needed * ranks > cores:
        sentence += f" if reading waits for files rather than computes (the machine has {cores:.0f} cores)"
    return [Evidence(sentence, values, share, f"{facts.again} --workers {needed}")]


def _measure_input(
    points: tuple[StepPoint, ...], workers: int, contention: float | None
) -> tuple[float, float]:
    """Return the seconds of waiting for input, and of the whole step."""
    usual = _without_stalls(points)
    count = sum(point.num_steps for point in usual)
    data_s = sum_over_steps(usual, [point.data_s for point in usual]) / count
    step_s = sum_over_steps(usual, [point.step_s for point in usual]) / count
    if workers or (contention is not None and contention <= CONTENTION_SHARE):
        return data_s, step_s
    # A rank that loses its core while it reads seems to wait, in some of the steps: the median leaves these
    # out, and so does the mean without the time that the rank had no core.
    lost = contention or 0.0
    own = max(0.1, 1 - lost)
    median_s = statistics.median(point.data_s for point in points) * own
    if contention is not None and data_s - lost * step_s > median_s:
        return data_s - lost * step_s, step_s
    return median_s, statistics.median(point.step_s for point in points) * own


def _measure_few(
    points: tuple[StepPoint, ...], workers: int, contention: float | None
) -> tuple[float, float]:
    """Return the same for a few steps: their medians, which a single pause does not change."""
    return (
        statistics.median(point.data_s for point in points),
        statistics.median(point.step_s for point in points),
    )


def _count_default_workers(facts: RunFacts) -> int:
    """Return the workers of a rank by default: none without a GPU, else spare cores, at most 4."""
    cores, ranks = facts.facts.get("cores"), facts.facts.get("local_ranks", 1.0)
    if facts.is_cpu or not cores:
        return 0 if facts.is_cpu else 4
    return int(min(4, max(0, cores // ranks - 1)))


def _without_stalls(points: tuple[StepPoint, ...]) -> tuple[StepPoint, ...]:
    ordered = sorted(points, key=lambda point: point.data_s)
    count = min(MAX_STALLS, max(1, round(STALLS * len(ordered))))
    return tuple(ordered[: max(1, len(ordered) - count)])


def check_evaluations(facts: RunFacts) -> Outcome:
    """Evaluations that take a large share of the time, and how often they should run."""
    if len(facts.evaluated) < MIN_EVALUATIONS:
        return Missing(f"it needs {MIN_EVALUATIONS} evaluations, got {len(facts.evaluated)}")
    each_s = statistics.median(event.seconds for event in facts.evaluated)
    count = len(facts.evaluated) - 1  # the evaluation at the end is always wanted
    # Each better metric saves a checkpoint, whose time must not hide that of the evaluations.
    unsaved_s = facts.run_s - sum(event.blocked_s for event in facts.saved)
    is_default = facts.spec is not None and facts.spec.evaluate_every is None
    steps = [event.step for event in facts.evaluated]
    every = max(1, round(statistics.median(b - a for a, b in itertools.pairwise(steps))))
    limit = DEFAULT_EVALUATION_SHARE if is_default else EVALUATION_SHARE
    limit = FREQUENT_EVALUATION_SHARE if not is_default and every <= FREQUENT_STEPS else limit
    if unsaved_s <= 0 or count * each_s / unsaved_s < limit:
        return []
    share = min(1.0, count * each_s / facts.run_s)
    step_s = statistics.median(point.step_s for point in facts.steps)
    if is_default and each_s < MIN_EVALUATION_STEPS * step_s:
        return []  # an epoch of a few steps
    wanted = _round_up(each_s * (1 - GOOD_EVALUATION_SHARE) / (GOOD_EVALUATION_SHARE * max(step_s, 1e-6)))
    wanted = min(max(wanted, every + 1), max(facts.start.steps, every + 1))
    sentence = (
        f"evaluations take {share:.0%} of the time: {format_seconds(each_s)} each, every "
        f"{several(every, 'step').removeprefix('1 ')}"
    )
    values = {"evaluation_s": each_s, "evaluations": len(facts.evaluated), "every": every, "share": share}
    return [
        Evidence(
            sentence,
            values | {"every_needed": wanted},
            share * (1 - every / wanted),
            f"{facts.again} --set spec.evaluate_every={wanted}",
        )
    ]


def check_checkpoints(facts: RunFacts) -> Outcome:
    """Saves that block the training, or slow its steps down, for a large share of the time."""
    last = facts.start.steps
    saves = [event for event in facts.saved if event.step < last]
    if len(saves) < MIN_SAVES:
        return Missing(f"it needs {MIN_SAVES} checkpoints before the end, got {len(saves)}")
    slowed_s = _measure_slowed_s(facts.warm, saves)
    blocked_s = sum(event.blocked_s for event in saves)
    lost_s = blocked_s + slowed_s
    share = min(1.0, lost_s / facts.run_s) if facts.run_s else 0.0
    every = facts.spec.save.every if facts.spec is not None else None
    each_s = statistics.median(event.blocked_s for event in saves) + slowed_s / len(saves)
    if every is not None and share < SAVE_SHARE:
        return _find_steady_writing(facts, saves, share)
    if share < (BEST_SAVE_SHARE if every is None else SAVE_SHARE) or lost_s < MIN_SAVE_S:
        return []
    if every is None and each_s < BEST_SAVE_S:
        return []  # a short run of a small model
    if every is None and (measure_contention(facts) or 0.0) > BEST_SAVE_CONTENTION:
        return Missing("other programs used the cores that write checkpoints")
    step_s = max(statistics.median(point.step_s for point in facts.steps), 1e-6)
    wanted = _round_up(each_s * (1 - GOOD_SAVE_SHARE) / (GOOD_SAVE_SHARE * step_s))
    speed = statistics.median(event.bytes / max(event.seconds, 1e-6) for event in saves) / 1e6
    does = "blocked the training" if slowed_s < blocked_s else "blocked the training and slowed its steps"
    sentence = (
        f"checkpoints take {share:.0%} of the time: {len(saves)} {does} for {format_seconds(each_s)} each, "
        f"at {speed:.3g} MB/s"
    )
    fix = (
        f"{facts.again} --save-every {wanted}"
        if every is not None
        else f"evaluate less often, since each better metric is saved: {facts.again} "
        f"--set spec.evaluate_every={wanted}"
    )
    values = {"blocked_s": blocked_s / len(saves), "slowed_s": slowed_s / len(saves), "saves": len(saves)}
    return [Evidence(sentence, values | {"MBps": speed, "share": share}, share, fix)]


def _find_steady_writing(facts: RunFacts, saves: Sequence[Saved], share: float) -> list[Evidence]:
    """Return a finding if nearly always a checkpoint is being written by the cores that compute.

    Then there are too few other steps to compare those with that it slows down."""
    each_s = statistics.median(event.seconds for event in saves)
    written = sum(event.seconds for event in saves) / max(facts.run_s, 1e-9)
    if not facts.is_cpu or written < WRITTEN_SHARE or each_s < MIN_SAVE_S:
        return []
    every = facts.request.save.every or 1
    wanted = _round_up(every * written / GOOD_WRITTEN_SHARE)
    return [
        Evidence(
            f"a checkpoint is written for {min(1.0, written):.0%} of the time, by the cores that compute: "
            f"{len(saves)} took {format_seconds(each_s)} each",
            {"saves": len(saves), "written_s": each_s, "written_share": written, "share": share},
            share,
            f"{facts.again} --save-every {wanted}",
        )
    ]


def _measure_slowed_s(points: Sequence[StepPoint], saves: Sequence[Saved]) -> float:
    """Return the time by which steps are longer while a checkpoint is written in the background."""
    if any(point.num_steps > 1 for point in points):
        return 0.0  # a point of several steps may be in a save and not
    spans = [(event.time - event.seconds, event.time) for event in saves]
    within: list[float] = []
    beside: list[float] = []
    at = 0
    for point in points:
        begin, end = point.time - point.step_s, point.time
        while at < len(spans) and spans[at][1] < begin:
            at += 1
        is_within = at < len(spans) and spans[at][0] < end
        (within if is_within else beside).append(point.step_s)
    if len(within) < MIN_COMPARED or len(beside) < MIN_COMPARED:
        return 0.0
    slower_s = statistics.median(within) - statistics.median(beside)
    return len(within) * slower_s if slower_s > MIN_SLOWED * statistics.median(beside) else 0.0


def _round_up(count: float) -> int:
    """Return a count of at least 1, rounded up to one or two digits."""
    if count <= 10:
        return max(1, math.ceil(count))
    unit = 10 ** (math.floor(math.log10(count)) - 1) * 5
    return math.ceil(count / unit) * unit
