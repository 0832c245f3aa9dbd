"""Batches that grow during a training: the batch of each step, exact in samples."""

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from paceline.spec.messages import abbreviate
from paceline.units import several

PHASE = re.compile(r"\s*(\d{1,9})\s*:\s*(\d{1,15})\s*", re.ASCII)
MAX_PHASES = 1000


@dataclass(frozen=True)
class StepBatches:
    """The batch of each step. Steps are counted from 0.

    batches: of each phase. first_steps, first_samples: where the phases begin.
    """

    batches: tuple[int, ...]
    first_steps: tuple[int, ...] = (0,)
    first_samples: tuple[int, ...] = (0,)

    def batch_of(self, step: int) -> int:
        """Return the samples of a step."""
        return self.batches[bisect.bisect_right(self.first_steps, step) - 1]

    def samples_before(self, step: int) -> int:
        """Return the samples that the steps before `step` consume."""
        phase = bisect.bisect_right(self.first_steps, step) - 1
        return self.first_samples[phase] + (step - self.first_steps[phase]) * self.batches[phase]

    def steps_for(self, samples: int) -> int:
        """Return the least number of steps that consume at least `samples` samples."""
        phase = bisect.bisect_right(self.first_samples, samples) - 1
        return self.first_steps[phase] + -(-(samples - self.first_samples[phase]) // self.batches[phase])

    def next_change(self, step: int) -> int | None:
        """Return the first step after `step` that has another batch; None if all have the same."""
        phase = bisect.bisect_right(self.first_steps, step)
        return self.first_steps[phase] if phase < len(self.first_steps) else None

    @property
    def is_constant(self) -> bool:
        return len(self.batches) == 1


@lru_cache(maxsize=64)
def build_batches(batch: int, schedule: str | None, warmup: str | None) -> StepBatches:
    """Return the batch of each step.

    schedule: "64:10000,128:50000": batch 64 for samples up to 10,000, 128 up to 50,000, and then `batch`.
    warmup: "64:100000": the batch grows by 64 in equal numbers of samples until it is `batch` at sample
    100,000 (the ramp of Megatron-LM). A phase ends with the step in which its last sample is reached.
    Raises ValueError.
    """
    if schedule is not None and warmup is not None:
        raise ValueError(
            f"batch_schedule={schedule!r} and batch_warmup={warmup!r} contradict each other; leave one out"
        )
    if schedule is None and warmup is None:
        return StepBatches((batch,))
    phases = _parse_schedule(schedule, batch) if schedule is not None else _parse_warmup(warmup or "", batch)
    sizes, lengths, begin = [], [], 0
    for size, end in phases:
        steps = -(-(end - begin) // size)
        if steps > 0:
            sizes.append(size)
            lengths.append(steps)
            begin += steps * size
        elif schedule is not None:
            raise ValueError(
                f"batch_schedule={schedule!r}: batch {size} has no step, because the steps before it "
                f"end after sample {begin:,}; leave it out"
            )
    first_steps = (0, *accumulate(lengths))
    first_samples = (0, *accumulate(size * steps for size, steps in zip(sizes, lengths, strict=True)))
    return StepBatches((*sizes, batch), first_steps, first_samples)


def _parse_schedule(text: str, batch: int) -> list[tuple[int, int]]:
    phases = [_parse_phase(word, text, "batch_schedule") for word in text.split(",")]
    sizes, ends = [size for size, _ in phases] + [batch], [end for _, end in phases]
    if sizes != sorted(set(sizes)):
        raise ValueError(
            f"batch_schedule={text!r} must have growing batches below batch={batch}, which follows them"
        )
    if ends != sorted(set(ends)):
        raise ValueError(f"batch_schedule={text!r} must have growing numbers of samples")
    return phases


def _parse_warmup(text: str, batch: int) -> list[tuple[int, int]]:
    first, samples = _parse_phase(text, text, "batch_warmup")
    if first >= batch or batch % first:
        raise ValueError(f"batch_warmup={text!r} must begin with a divisor of batch={batch} below it")
    increments = batch // first - 1
    if increments > MAX_PHASES:
        raise ValueError(
            f"batch_warmup={text!r} has {several(increments, 'batch')}, and {MAX_PHASES} are possible; begin "
            "with a larger batch"
        )
    return [(first * (k + 1), round(samples * (k + 1) / increments)) for k in range(increments)]


def _parse_phase(word: str, text: str, key: str) -> tuple[int, int]:
    match = PHASE.fullmatch(word)
    if match is None or not int(match[1]) or not int(match[2]):
        example = "'64:10000,128:50000'" if key == "batch_schedule" else "'64:10000'"
        raise ValueError(f"{key} must be batches and samples, such as {example}, got {abbreviate(text)}")
    return int(match[1]), int(match[2])


def list_batches(batches: StepBatches) -> Sequence[int]:
    """Return all batches, each once."""
    return sorted(set(batches.batches))
