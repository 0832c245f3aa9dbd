"""Learning-rate schedules: factors on the learning rate as functions of the samples consumed."""

import inspect
import math
from collections.abc import Callable, Mapping

from paceline.errors import SpecError, TaskError
from paceline.spec import Schedule, Spec
from paceline.task import Task
from paceline.user_code import UserCode

ONE_CYCLE_WARMUP = 0.3  # share of the training, as in torch's OneCycleLR
ONE_CYCLE_START = 1 / 25
WSD_DECAY = 0.2  # share of the training

# The factor of each shape, given the schedule with lengths in samples, the samples done, and its length.
Shape = Callable[[Schedule, int, int], float]


def check_schedule(schedule: Schedule, total: int, task: Task | None = None) -> None:
    """Raise SpecError if a schedule does not fit its training, and TaskError if the task lacks `lr_factor`.

    schedule: with lengths in samples. `total`: samples of the training.
    """
    assert isinstance(schedule.warmup, int)
    length = _length(schedule, total)
    if schedule.warmup > total:
        raise SpecError(
            f"schedule.warmup={schedule.warmup} samples is longer than the training, {total} samples; use a "
            "shorter warm-up, or train longer"
        )
    if schedule.warmup >= length and schedule.name != "constant":
        raise SpecError(
            f"schedule.warmup={schedule.warmup} samples leaves nothing of the {length} samples of schedule "
            f"{schedule.name}; use a shorter warm-up, or --schedule constant"
        )
    if schedule.name == "inverse-sqrt" and not schedule.warmup:
        raise SpecError(
            "schedule inverse-sqrt decays after schedule.warmup, which is 0 samples; use a longer warm-up"
        )
    if schedule.name == "milestones" and _in_samples(schedule.milestones[-1]) >= total:
        raise SpecError(
            f"schedule.milestones has {schedule.milestones[-1]} samples, but the training has {total}; leave "
            "it out, or train longer"
        )
    if schedule.name == "wsd" and schedule.warmup + _wsd_decay(schedule, length) > length:
        raise SpecError(
            f"schedule.warmup={schedule.warmup} and schedule.decay={_wsd_decay(schedule, length)} samples "
            f"are longer than the schedule, {length} samples; use shorter ones"
        )
    if schedule.name != "task" and task is not None and (name := task._own_schedule()) is not None:
        raise TaskError(
            f"{type(task).__name__} has the schedule {name}, and the request has {schedule.name}; use "
            "--schedule task"
        )
    if schedule.name == "task" and task is not None and type(task).lr_factor is Task.lr_factor:
        raise TaskError(
            f"schedule task requires a method lr_factor(progress) of {type(task).__name__}; add it, or use "
            "another schedule"
        )


def check_schedule_end(schedule: Schedule, total: int) -> list[str]:
    """Return a note if a schedule is longer than its training, which does not reach its end.

    schedule: with lengths in samples. `total`: samples of the training.
    """
    if schedule.length is None or _in_samples(schedule.length) <= total:
        return []
    return [
        f"schedule.length={schedule.length} samples is longer than the training, {total} samples: the "
        "learning rate does not reach the end of the schedule"
    ]


def compute_lr_factor(
    schedule: Schedule, samples: int, total: int, task: Task | None = None, step: int = 0, epoch: int = 0
) -> float:
    """Return the factor on the learning rate after `samples` of `total` samples.

    The warm-up is linear and starts at `schedule.start`, or 1 / (warmup + 1). `schedule`: with lengths in
    samples. task: has the function of schedule `task`, which may use the steps and
    the whole epochs that are done. Plateaus are no function of the samples.
    """
    length = _length(schedule, total)
    warmup = _in_samples(schedule.warmup)
    if schedule.name == "one-cycle":
        return _one_cycle(schedule, samples, length)
    if samples < warmup:
        if schedule.start is not None:
            return schedule.start + (1 - schedule.start) * samples / warmup
        return (samples + 1) / (warmup + 1)
    if schedule.name == "task":
        assert task is not None
        return call_lr_factor(task, min(1.0, samples / max(1, length)), step, epoch)
    return SHAPES[schedule.name](schedule, samples, length)


def resolve_schedule(spec: Spec, task: Task, epoch_samples: int) -> Schedule:
    """Return the schedule of a request with all lengths in samples. Raises SpecError."""
    return spec.schedule.in_samples(spec.batch, epoch_samples, tokens_per_sample(task))


def tokens_per_sample(task: Task) -> float | None:
    """Return the number of tokens of a sample, if the task has it as an attribute or a property."""
    tokens = getattr(task, "tokens_per_sample", None)
    if tokens is None:
        return None
    if isinstance(tokens, bool) or not isinstance(tokens, (int, float)) or not 0 < tokens < math.inf:
        raise TaskError(
            f"tokens_per_sample of {type(task).__name__} must be a number above 0, got {tokens!r}"
        )
    return float(tokens)


def call_lr_factor(task: Task, progress: float, step: int, epoch: int) -> float:
    """Return the factor of the task. Raises TaskError if it is no number."""
    takes = inspect.signature(task.lr_factor).parameters
    counts = {name: count for name, count in (("step", step), ("epoch", epoch)) if name in takes}
    with UserCode("lr_factor()", task.lr_factor):
        factor = float(task.lr_factor(progress, **counts))
    if not math.isfinite(factor) or factor < 0:
        raise TaskError(
            f"lr_factor({progress:.6g}) returned {factor}; return a factor on the learning rate, at least 0"
        )
    return factor


def depends_on_length(schedule: Schedule) -> bool:
    """Return whether the factor depends on the length of the training."""
    return schedule.length is None and schedule.name in (*TO_THE_END, "one-cycle", "task", "wsd")


def _length(schedule: Schedule, total: int) -> int:
    return _in_samples(schedule.length) if schedule.length is not None else total


def _in_samples(length: int | str | None) -> int:
    assert isinstance(length, int)
    return length


def _done(schedule: Schedule, samples: int, length: int) -> float:
    """Return the share of the schedule after its warm-up that is done."""
    warmup = _in_samples(schedule.warmup)
    return min(1.0, (samples - warmup) / max(1, length - warmup))


def _cosine(done: float, floor: float) -> float:
    return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2


def _cosine_restarts(schedule: Schedule, samples: int, length: int) -> float:
    """Loshchilov, Hutter, SGDR, 2017: cycles of `every` samples, each `growth` times as long as the last."""
    cycle = float(_in_samples(schedule.every))
    growth = schedule.growth or 1.0
    done = float(samples - _in_samples(schedule.warmup))
    if growth == 1.0:
        return _cosine(done % cycle / cycle, schedule.floor)
    while done >= cycle:
        done -= cycle
        cycle *= growth
    return _cosine(done / cycle, schedule.floor)


def _polynomial(schedule: Schedule, samples: int, length: int) -> float:
    power = schedule.power if schedule.power is not None else 2.0
    remaining: float = (1 - _done(schedule, samples, length)) ** power
    return schedule.floor + (1 - schedule.floor) * remaining


def _step(schedule: Schedule, samples: int, length: int) -> float:
    factor: float = schedule.factor ** (samples // _in_samples(schedule.every))
    return factor


def _milestones(schedule: Schedule, samples: int, length: int) -> float:
    """Goyal et al., Accurate, large minibatch SGD, 2017: a decay at each milestone."""
    factor: float = schedule.factor ** sum(samples >= _in_samples(at) for at in schedule.milestones)
    return factor


def _inverse_sqrt(schedule: Schedule, samples: int, length: int) -> float:
    """Vaswani et al., Attention is all you need, 2017, with a factor of 1 at the end of the warm-up."""
    return math.sqrt(_in_samples(schedule.warmup) / samples)


def _wsd_decay(schedule: Schedule, length: int) -> int:
    return _in_samples(schedule.decay) if schedule.decay is not None else round(WSD_DECAY * length)


def _warmup_stable_decay(schedule: Schedule, samples: int, length: int) -> float:
    """Hu et al., MiniCPM, 2024: constant, then a decay at the end (1 − √: Hägele et al., 2024)."""
    decay = _wsd_decay(schedule, length)
    done = min(1.0, max(0.0, (samples - (length - decay)) / max(1, decay)))
    remaining = {"linear": 1 - done, "1-sqrt": 1 - math.sqrt(done), "cosine": _cosine(done, 0.0)}
    return schedule.floor + (1 - schedule.floor) * remaining[schedule.decay_shape or "linear"]


def _one_cycle(schedule: Schedule, samples: int, length: int) -> float:
    """Smith, Topin, Super-convergence, 2018: a cosine up during the warm-up, and one down to the floor."""
    up = _in_samples(schedule.warmup) or round(ONE_CYCLE_WARMUP * length)
    start = schedule.start if schedule.start is not None else ONE_CYCLE_START
    if samples < up:
        return _cosine(1 - samples / up, start)
    return _cosine(min(1.0, (samples - up) / max(1, length - up)), schedule.floor)


# Shapes that reach their floor at the end of the schedule.
TO_THE_END: Mapping[str, Shape] = {
    "cosine": lambda schedule, samples, length: _cosine(_done(schedule, samples, length), schedule.floor),
    "linear": lambda schedule, samples, length: 1 - (1 - schedule.floor) * _done(schedule, samples, length),
    "polynomial": _polynomial,
}
SHAPES: Mapping[str, Shape] = {
    "constant": lambda schedule, samples, length: 1.0,
    "plateau": lambda schedule, samples, length: 1.0,
    **TO_THE_END,
    "cosine-restarts": _cosine_restarts,
    "step": _step,
    "milestones": _milestones,
    "inverse-sqrt": _inverse_sqrt,
    "wsd": _warmup_stable_decay,
}
