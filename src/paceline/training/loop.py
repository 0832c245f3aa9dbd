"""The loop of a training on one rank: its steps, evaluations and checkpoints, as events."""

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterator

import torch
import torch.distributed as dist

from paceline.data.batch_slices import training_parts
from paceline.data.loader import batches
from paceline.data.open_samples import describe_streams, find_streams
from paceline.data.ragged import agree_on_longest
from paceline.data.samples import Batch
from paceline.distributed.process_group import (
    set_collective_timeout,
    start_timeout_s,
    workers_per_rank,
)
from paceline.doctor.heartbeat import DATA, REPORT
from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.errors import Error
from paceline.events import Ended, Event, Noted, Started
from paceline.files import reason
from paceline.parallel.data_parallel.buffer_comparison import describe_different_buffers
from paceline.parallel.data_parallel.ddp import exposed_communication
from paceline.training.checkpoint_policy import CheckpointPolicy
from paceline.training.checks.first_loss import FirstLossCheck
from paceline.training.divergence import describe_skipped, diverged_error
from paceline.training.evaluation.evaluate import Evaluator
from paceline.training.evaluation.figures import FigureWriter
from paceline.training.guard.replica_guard import ReplicaGuard
from paceline.training.histograms.recorder import HistogramRecorder
from paceline.training.optimization.batch_scaling import lr_factor_of_batch
from paceline.training.optimization.batches import check_batches_end
from paceline.training.optimization.plateau import PlateauState, add_evaluation, plateau_metric
from paceline.training.optimization.schedule import (
    check_schedule,
    check_schedule_end,
    compute_lr_factor,
    resolve_schedule,
)
from paceline.training.prepared import PreparedTraining, RankContext
from paceline.training.profiling.profiler import StepProfiler
from paceline.training.start_facts import collect_start_facts
from paceline.training.step.ddp_warmup import warm_up_ddp
from paceline.training.step.noise_scale import NoiseMeter
from paceline.training.step.step import TrainingStep
from paceline.training.step.step_metrics import ControlFlags, LaunchedStep, MetricsReducer, StepMetrics
from paceline.training.step.update_sequence import UpdateSequence
from paceline.training.step.weight_operations import check_average_start
from paceline.training.stop_policy import StopPolicy
from paceline.training.tracing.step_tracer import StepTracer
from paceline.training.training_data import TrainingData
from paceline.units import format_seconds

MAX_SKIPPED = 10  # steps in a row whose update on_nan=skip skips
MAX_OVERFLOWS = 40  # steps in a row whose update fp16 skips; the scale is then 6e-8


class TrainingLoop:
    """One training on one rank: its steps, evaluations and checkpoints.

    The metrics of a step are read while the next step runs, so that neither the host nor another rank waits;
    those of quick steps are read together.
    """

    def __init__(
        self,
        context: RankContext,
        data: TrainingData,
        prepared: PreparedTraining,
        heartbeat: HeartbeatWriter,
        stop: Callable[[], bool],
    ):
        spec, world = context.spec, context.world
        self.context, self.spec, self.world, self.device = context, spec, world, context.device
        self.data, self.prepared, self.update = data, prepared, prepared.update
        self.heartbeat = heartbeat
        self.total = spec.total_steps(data.samples)
        self.schedule = resolve_schedule(spec, context.task, data.samples)
        self.batches = spec.batches
        self.total_samples = self.batches.samples_before(self.total)
        check_schedule(self.schedule, self.total_samples, context.task)
        prepared.step.on_phase = heartbeat.enter
        if isinstance(self.update, UpdateSequence):
            self.update.set_phases(heartbeat.enter)
            self.update.set_length(context.task, spec.batch, data.samples, self.total_samples)
        self.batch_slice = context.batch_slice
        divides_batch = self.batch_slice.ranks * self.batch_slice.microbatches > 1
        self.workers = workers_per_rank(world.local_size, context.device, spec.data.workers)
        self.checkpoints = CheckpointPolicy(context, prepared, data.order, heartbeat)
        self.figures = FigureWriter(context)
        self.evaluator = Evaluator(spec, data, prepared, self.workers, self.figures)
        self.first = self.step = self.checkpoints.resumed.step  # steps done: at the start, now
        self.first_losses: dict[int, list[FirstLossCheck]] = {}  # by the steps done before their pass runs
        for done, step in self._find_first_passes():
            step.on_first_loss = FirstLossCheck(
                step,
                self.batch_slice.of_step(done).share,
                divides_batch and step.global_loss is None,
                spec.allow_local_loss,
            )
            self.first_losses.setdefault(done, []).append(step.on_first_loss)
        self.metrics = MetricsReducer(world.size, context.device)
        self.last_loss: float | None = None
        self.skipped = 0  # steps in a row whose gradient was not finite
        resumed = self.checkpoints.resumed
        self.stopping = StopPolicy(spec, world.rank, stop, context.deadline, resumed.stop, resumed.metrics)
        self.plateau = resumed.plateau
        if self.plateau is None and spec.schedule.name == "plateau":
            self.plateau = PlateauState(plateau_metric(spec))
        self.profiler = StepProfiler(
            spec.profile, self.first, self.total, prepared, context.plan, world, context.device
        )
        self.tracer = StepTracer(context, prepared, heartbeat, self.first)
        self.profiler.traced = self.tracer.steps
        self.histograms = HistogramRecorder(context, prepared, self.first, data.training)
        self.guard = ReplicaGuard(context, prepared, data, self.first)
        self.noise = NoiseMeter(spec, context.plan, self.update, self.first)

    def events(self) -> Generator[Event]:
        """Train, and yield what happens."""
        self.checkpoints.clean()
        self.heartbeat.begin(self.step, self.total)
        yield self._started()
        yield from self._write_graph()
        resumed = self.checkpoints.resumed
        if self.first > 0 and not resumed.evaluated and self.evaluator.is_due(self.step):
            # The evaluation of this step was abandoned when the run stopped.
            if (yield from self._evaluate()):
                yield from self._save()
            self._set_timeout(start_timeout_s(self.spec.timeout_s))
        parts = training_parts(self.batch_slice, self.data.order, self.first, self.total)
        source = batches(
            self.data.training,
            parts,
            self.device,
            self.workers,
            self.spec.data.prefetch,
            self.batch_slice.microbatches,
            agree_on_longest(None, self.device),
        )
        with (
            contextlib.closing(source),
            contextlib.closing(self.profiler),
            contextlib.closing(self.tracer),
            contextlib.closing(self.histograms),
            contextlib.closing(self.figures),
        ):
            yield from self._run_steps(source)
        yield from self._note_unreadable()
        yield from self._compare_ranks(at_once=True)
        for message in self.data.caches.describe():
            yield Noted(step=self.step, message=message)
        yield from self.checkpoints.finish(
            self.step, self.total, self.evaluator.metrics_at(self.step), self.stopping.state, self.plateau
        )
        if self.prepared.local is not None:
            self.prepared.local.average_()
        lacks_evaluation = self.evaluator.is_due(self.step) and self.evaluator.last_step != self.step
        is_complete = self.step == self.total and not (self.stopping.is_stopping and lacks_evaluation)
        is_done = is_complete or self.stopping.why is not None
        why = self.stopping.why or ""
        if not is_done:
            why = self.stopping.explain_stopping(self.world.size, self.device)
        yield Ended(
            step=self.step,
            reason="done" if is_done else "stopped",
            why=why,
            communication=exposed_communication(self.update.model, self.world.size),
        )

    def _write_graph(self) -> Iterator[Event]:
        """Write the graph of the model, if it is requested and this start is the first."""
        run = self.context.run
        if not self.spec.graph or self.first or run is None or self.world.rank:
            return
        from paceline.training.model_facts.model_graph import write_model_graph

        try:
            write_model_graph(self.spec, self.context.task, run)
        except (Error, OSError) as error:
            yield Noted(step=self.step, message=f"the graph of the model is not written: {reason(error)}")

    def _run_steps(self, source: Iterator[Batch]) -> Iterator[Event]:
        while self.step < self.total and not self.stopping.is_over:
            self.profiler.begin(self.step)
            self.tracer.begin(self.step)
            self.histograms.begin(self.step)
            launched, finished = self._run_step(source)
            self.metrics.add(launched)
            self.histograms.end(self.step, launched.time)
            yield from self.profiler.end(self.step, launched.data_s)
            yield from self.tracer.end(self.step)
            self.stopping.poll()
            self.heartbeat.done(self.step)
            yield from self._note_whole_blocks()
            yield from self._note_skipped(launched.data_s)
            yield from self._compare_buffers()
            yield from self._compare_ranks()
            if self.metrics.is_due:
                self._start_reduction()
            yield from self._report(finished)
            is_evaluation_due, is_save_due = (
                self.evaluator.is_due(self.step),
                self.checkpoints.take_due(self.step),
            )
            if self.step == self.total or self.stopping.is_stopping or is_evaluation_due or is_save_due:
                yield from self._flush_metrics()
            if is_evaluation_due:
                is_save_due = (yield from self._evaluate()) or is_save_due
            if is_save_due:
                yield from self._save()
            yield from self.checkpoints.report(wait=False)
        yield from self.tracer.finish(self.step)
        yield from self._flush_metrics()

    def _note_skipped(self, data_s: float) -> Iterator[Event]:
        """Report the cost of a resume that had to read a stream from its beginning."""
        if 0 < self.first == self.step - 1 and find_streams(self.data.training.dataset):
            first = self.batches.samples_before(self.first) % self.data.samples
            yield Noted(
                step=self.step,
                message=f"reading the stream up to sample {first:,} took {format_seconds(data_s)}",
            )

    def _run_step(
        self, source: Iterator[Batch]
    ) -> tuple[LaunchedStep, list[tuple[LaunchedStep, StepMetrics]]]:
        """Launch one step, and read the metrics of earlier ones meanwhile."""
        began = time.perf_counter()
        self.heartbeat.enter(DATA)
        micro_batches = [next(source) for _ in range(self.batch_slice.microbatches)]
        data_s = time.perf_counter() - began
        self.histograms.expect(micro_batches)
        local = self.prepared.local
        if local is not None:
            local.before_step(self.step)
        is_first = self.step == self.first
        if is_first and isinstance(self.update, TrainingStep):
            self.update.model = warm_up_ddp(self.prepared.step, micro_batches[0])
        elif is_first and isinstance(self.update, UpdateSequence):
            self.update.warm_up(micro_batches[0], self.step)
        self.guard.before_step(self.step)
        lr_factor = self._compute_lr_factor()
        self.noise.measure(micro_batches, self.step)
        stats = self.update(micro_batches, self.step, lr_factor)
        for check in self.first_losses.pop(self.step, ()):
            check.finish()
        lr = (
            self.update.lr_at(self.step, lr_factor)
            if isinstance(self.update, UpdateSequence)
            else self.update.base_lrs[0] * lr_factor
        )
        self.step += 1
        self.guard.after_step(self.step)
        self.heartbeat.enter(REPORT)
        if local is not None:
            local.after_step(self.step)
        if self.step == self.first + 1:
            self.checkpoints.prepare()
        finished = self._finish_reduction()
        if self.step == self.first + 2:  # every rank has done a whole step
            self._set_timeout(self.spec.timeout_s)
        step_s = time.perf_counter() - began
        return LaunchedStep(stats, self.step, lr, data_s, step_s, time.time()), finished

    def _compute_lr_factor(self) -> float:
        """Return the factor on the learning rates in the next step."""
        done = self.batches.samples_before(self.step)
        factor = compute_lr_factor(
            self.schedule,
            done,
            self.total_samples,
            self.context.task,
            self.step,
            done // self.data.samples,
        )
        factor *= lr_factor_of_batch(self.spec, self.step)
        return factor * self.plateau.factor if self.plateau is not None else factor

    def _note_unreadable(self) -> Iterator[Event]:
        """Report samples that could not be read. A collective, if the request allows them."""
        if not self.spec.data.skip_corrupt:
            return
        unreadable: list[dict[int, str]] = [self.data.training.unreadable]
        if self.world.size > 1 and self.prepared.servers is None:
            unreadable *= self.world.size
            dist.all_gather_object(unreadable, self.data.training.unreadable)
        found = {index: message for part in unreadable for index, message in part.items()}
        if found:
            first = min(found)
            noun = "sample" if len(found) == 1 else "samples"
            message = f"{len(found)} {noun} could not be read, and others were used instead: {found[first]}"
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            yield Noted(step=self.step, message=message + more)

    def _note_whole_blocks(self) -> Iterator[Event]:
        """Report blocks that cp runs on whole sequences, which the first step has found."""
        if self.context.plan.cp > 1 and self.step == self.first + 1:
            from paceline.parallel.context.apply import note_whole_blocks

            if (note := note_whole_blocks(self.prepared.model)) is not None:
                yield Noted(step=self.step, message=note)

    def _compare_buffers(self) -> Iterator[Event]:
        """Report buffers that differ between data ranks, from time to time. A collective."""
        comparison = self.prepared.comparison
        if comparison is None or not comparison.is_due(self.step - self.first):
            return
        if found := comparison.find():
            yield Noted(step=self.step, message=describe_different_buffers(found))

    def _compare_ranks(self, at_once: bool = False) -> Iterator[Event]:
        """Compare the weights of ranks if it is time, or at once. Raises CorruptionError."""
        while self.guard.notes:
            yield Noted(step=self.step, message=self.guard.notes.pop())
        if found := self.guard.compare(at_once):
            yield from self.checkpoints.report(wait=True)  # the user can go back to it
            self.guard.fail(found)

    def _find_first_passes(self) -> list[tuple[int, TrainingStep]]:
        """Return what computes the gradients of each pass, and the steps done before the pass runs first."""
        if isinstance(self.update, TrainingStep):
            return [(self.step, self.update)]
        if isinstance(self.update, UpdateSequence):
            return [(of_pass.next_due(self.step), of_pass.steps[0]) for of_pass in self.update.passes]
        return []

    def _started(self) -> Started:
        return Started(
            task=self.spec.task,
            plan=self.context.requested_plan,
            ranks=self.context.ranks,
            batch=self.spec.batch,
            step=self.first,
            steps=self.total,
            samples=self.data.samples,
            parameters=sum(parameter.numel() for parameter in self.prepared.model.parameters()),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            precision=self.spec.precision,
            threads=torch.get_num_threads(),
            notes=(
                *self.prepared.notes,
                *self.checkpoints.resumed.notes,
                *self.histograms.notes,
                *check_schedule_end(self.schedule, self.total_samples),
                *check_batches_end(self.spec, self.total),
                *check_average_start(self.spec.optimizer, self.total),
                *describe_streams(self.data.training, self.batches.samples_before(self.first)),
            ),
            lr_group=self.prepared.lr_group,
            facts=collect_start_facts(
                self.prepared.model, self.device, self.spec.precision, self.world.local_size
            ),
        )

    def _start_reduction(self) -> None:
        self.metrics.start(ControlFlags(stop=self.stopping.cause > 0, save=self.checkpoints.is_overdue()))

    def _finish_reduction(self) -> list[tuple[LaunchedStep, StepMetrics]]:
        """Return the steps whose reduction was started before, if any."""
        finished = self.metrics.finish()
        if finished is None:
            return []
        self.stopping.is_stopping |= finished.flags.stop
        self.checkpoints.is_requested |= finished.flags.save
        self.profiler.add_measured_steps(finished.step_s, len(finished.steps))
        return finished.steps

    def _flush_metrics(self) -> Iterator[Event]:
        """Report all steps that are not reported yet."""
        yield from self._report(self._finish_reduction())
        if self.metrics.has_launched:
            self._start_reduction()
            yield from self._report(self._finish_reduction())

    def _report(self, steps: list[tuple[LaunchedStep, StepMetrics]]) -> Iterator[Event]:
        """Yield the events of these steps. Raises DivergedError."""
        skips_nan = self.spec.optimizer.on_nan == "skip"
        most_skipped = MAX_OVERFLOWS if self.update.loss_scale is not None else 0
        for launched, metrics in steps:
            has_loss, has_norm = math.isfinite(metrics.loss), math.isfinite(metrics.grad_norm)
            measured = self.noise.report(launched.step, metrics.grad_norm)
            self.skipped = self.skipped + 1 if not (has_loss and has_norm) else 0
            if skips_nan and 0 < self.skipped <= MAX_SKIPPED:
                yield describe_skipped(launched.step, metrics)
                if has_loss:
                    yield launched.event(metrics, self.batches)
                continue
            if not has_loss or self.skipped > most_skipped:
                yield from self._compare_ranks(at_once=True)  # a flipped exponent makes numbers infinite
                yield from self.checkpoints.report(wait=True)  # the user can go back to it
                raise diverged_error(launched.step, metrics, self.skipped, self.last_loss, self.context.run)
            self.last_loss = metrics.loss
            yield launched.event(metrics, self.batches)
            if measured is not None:
                yield measured

    def _evaluate(self) -> Generator[Event, None, bool]:
        """Evaluate, or stop if any rank was asked to.

        Return whether to save because the metrics are the best so far.
        """
        is_first = self.evaluator.last_step is None  # it may compile, one pipeline stage after the other
        if is_first:
            self._set_timeout(start_timeout_s(self.spec.timeout_s))
        evaluated = self.evaluator.run(self.step, self.stopping.poll)
        if is_first:
            self._set_timeout(self.spec.timeout_s)
        if evaluated is None:
            self.stopping.is_stopping = True
            return False
        yield evaluated
        self.stopping.evaluated(self.step, evaluated.metrics)
        if self.plateau is not None:
            self.plateau = add_evaluation(self.spec.schedule, self.plateau, evaluated.metrics)
        return self.checkpoints.is_new_best(evaluated.metrics)

    def _save(self) -> Iterator[Event]:
        yield from self._compare_ranks(at_once=True)
        metrics = self.evaluator.metrics_at(self.step)
        yield from self.checkpoints.save(self.step, metrics, self.stopping.state, self.plateau)

    def _set_timeout(self, seconds: float) -> None:
        """Limit how long ranks wait for each other, except in saves: these wait for the slowest disk."""
        self.heartbeat.patience_s = seconds
        if self.world.size > 1:
            set_collective_timeout(seconds, exclude=self.checkpoints.group)
