"""The kinds of events, each a class whose fields are those of a line in `events.jsonl`."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of all events of a run. `train` yields them, and `events.jsonl` contains them.

        for event in paceline.train(spec):
            if isinstance(event, paceline.Step):
                print(event.step, event.loss)

    time  seconds since the epoch
    """

    time: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """The training starts or resumes; the first event of each start.

        if isinstance(event, Started):
            print(event.plan, event.ranks, event.steps - event.step)

    task        the task, as `Spec.task` names it
    plan        the plan, such as "zero3"
    ranks       number of ranks
    batch       samples of the global batch
    step        steps done before: 0, or the step of the checkpoint from which the run resumed
    steps       the step after which the run is complete
    samples     samples in one epoch
    parameters  number of parameters of the model
    device      "cpu", or the name of the GPU
    precision   data type in which the model computes, such as "bf16"
    threads     CPU threads of torch on each rank
    notes       sentences for the user about how the training is done
    lr_group    the parameter group whose learning rate the steps report, if groups have different rates
    start_s     seconds of each phase of the start, in their order
    facts       numbers of rank 0 for findings: cores (that it may use), local_ranks (on its machine),
                memory_bytes (of the GPU, or the limit of the job), convolutions (of the model),
                channels_last (1 if their weights are in this format, else 0), cudnn_benchmark (likewise),
                capability (10 × compute capability of a CUDA device), native_precision (1 if the device
                computes in `precision`; only for bf16 and fp16)
    """

    task: str
    plan: str
    ranks: int
    batch: int
    step: int
    steps: int
    samples: int
    parameters: int
    device: str
    precision: str
    threads: int
    notes: tuple[str, ...] = ()
    lr_group: str = ""
    start_s: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One update of the weights.

        losses = [event.loss for event in train(spec) if isinstance(event, Step)]

    step           number of updates made so far, counted from 1
    samples        samples consumed so far, over all ranks
    loss           mean over the global batch, before the update
    grad_norm      norm of the whole gradient before clipping; None if fp16 overflowed (the update is skipped)
    lr             learning rate of the update
    step_s         wall time of this step in seconds, data_s included
    data_s         seconds of waiting for the batch
    samples_per_s  samples of the global batch per second
    losses         means over the global batch of the losses that `Task.loss` returns by name, and of the loss
                   of each update that ran if the task has `updates`; `loss` is then the sum over them
    """

    step: int
    samples: int
    loss: float
    grad_norm: float | None
    lr: float
    step_s: float
    data_s: float
    samples_per_s: float
    losses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Noted(Event):
    """Something that the user should know, which showed during the training.

    step     the last step done
    message  one sentence
    """

    step: int
    message: str


@dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """Where the time and memory of some steps went.

    The last `num_steps` steps up to `step` were profiled, and were slower for it.

    step       the last profiled step
    num_steps  number of profiled steps
    step_s     mean wall time of these steps in seconds
    seconds    seconds of step_s by part: the mean over the ranks, or over those of a pipeline's busiest stage
    input_s    seconds that rank 0 waits for the batch in a step, as data_s of Step
    slowest    rank that is busy longest, for which the others wait
    slowest_s  seconds per step in which that rank does not wait for others
    busy_s     the same, as the mean over all ranks
    fullest    rank with the highest peak memory
    memory     bytes of that rank at its peak, by part
    costs_s    seconds that profiling cost the run
    """

    step: int
    num_steps: int
    step_s: float
    seconds: Mapping[str, float]
    input_s: float
    slowest: int
    slowest_s: float
    busy_s: float
    fullest: int
    memory: Mapping[str, int]
    costs_s: float


@dataclass(frozen=True, kw_only=True)
class NoiseMeasured(Event):
    """The gradient noise scale of the last measured steps, up to 50 of them.

    step              the last measured step
    noise_scale       in samples; None if the gradient is lost in its noise
    error             relative standard error of noise_scale; None after one measurement
    variance          trace of the covariance of the gradients of samples, in this step
    squared_gradient  estimate of the squared norm of the true gradient in this step; may be negative
    """

    step: int
    noise_scale: float | None
    error: float | None
    variance: float
    squared_gradient: float


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """An evaluation of the model on the validation split, and on those of `evaluate_splits`.

        if isinstance(event, Evaluated):
            print(event.step, event.metrics["loss"])

    step     the last step done
    metrics  value of each metric by name; NaN or infinity is null in JSON. Names for splits besides
             validation begin with the split: "test/loss"
    seconds  duration of the evaluation
    """

    step: int
    metrics: Mapping[str, float]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint is complete.

    step       the step of the checkpoint
    path       its path in the run folder
    bytes      its size
    seconds    time from the request until it was complete on disk
    blocked_s  the part of `seconds` in which training stood still
    """

    step: int
    path: str
    bytes: int
    seconds: float
    blocked_s: float


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """Something failed; `what` determines whether the run continues.

    what       "save", "worker" (of a parameter server), "rank", "node": the run continues; "run": a rank ends
    message    one sentence about the cause
    step       the last step done
    rank       the rank that failed, if it is known
    lost_peer  whether this rank failed only because another rank was lost
    meant      whether Paceline raised the error on purpose, so that the message is complete
    error      name of the class of the error, such as "TaskError"; empty if the rank reported no error
    """

    what: str
    message: str
    step: int
    rank: int | None = None
    lost_peer: bool = False
    meant: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Stalled(Event):
    """No rank has made progress for a while.

    step     the last step done
    ranks    ranks for which the others wait
    message  one sentence about the cause
    """

    step: int
    ranks: tuple[int, ...]
    message: str


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """The training ended: it is complete, or was stopped. The last event of a run.

    step           the last step done
    reason         "done" (also if a metric ended it before its length) or "stopped" (`resume` continues)
    why            a sentence, if a metric or max_time ended it; else empty
    communication  share of the step time spent waiting for other ranks, if the engine reports it
    lead           parameter server: the most steps by which a worker was ahead of the slowest
    """

    step: int
    reason: str
    why: str = ""
    communication: float | None = None
    lead: int | None = None

    def describe(self) -> str:
        """Return how the training ended, such as `stopped at step 20: max_time=2h is over`."""
        return f"{self.reason} at step {self.step}" + (f": {self.why}" if self.why else "")


KINDS: dict[str, type[Event]] = {
    kind.__name__.lower(): kind
    for kind in (Started, Step, Noted, Profiled, NoiseMeasured, Evaluated, Saved, Failed, Stalled, Ended)
}


def describe_metric(name: str) -> str:
    """Return the words for a metric of an evaluation: "validation loss", or with its split "test/loss"."""
    return name if "/" in name else f"validation {name}"
