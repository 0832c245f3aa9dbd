"""The training loop: a generator of events. Whoever iterates it decides what to do with them."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import task as tasks
from paceline.data.loader import Batch, RankBatchSlice, batches, training_parts
from paceline.distributed import mesh
from paceline.distributed.process_group import (
    SAVE_TIMEOUT_S,
    StartClock,
    choose_device,
    count_free_threads,
    process_group,
    set_collective_timeout,
    start_timeout_s,
    threads_per_rank,
    workers_per_rank,
)
from paceline.distributed.world import World
from paceline.distributed.world import read_world as world_of
from paceline.doctor.heartbeat import DATA, REPORT, SAVE
from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.errors import CheckpointError, DivergedError, PlanError, SpecError
from paceline.events import Ended, Evaluated, Event, Failed, Saved, Started, Step
from paceline.parallel.ddp import release
from paceline.plan.plan import AUTO, Plan, ResolvedPlan, micro_batch_size, parse
from paceline.report.run_view import glance
from paceline.run import RunFolder
from paceline.spec import Spec, nearest
from paceline.task import Task
from paceline.training.checkpoint import save as checkpoint
from paceline.training.checkpoint.identity import identity
from paceline.training.ddp_warmup import settle
from paceline.training.evaluate import evaluate
from paceline.training.first_loss import FirstLoss
from paceline.training.initial_weights import check_once
from paceline.training.optimizer import check_schedule, factor
from paceline.training.profiling.profiler import StepProfiler
from paceline.training.rank_checks import roll_call
from paceline.training.setup import (
    PreparedTraining,
    TrainingData,
    analyze_model,
    build,
    build_training,
    check_enough,
    open_data,
    resume,
)
from paceline.training.step import TrainingStep as Update
from paceline.training.step_metrics import (
    ControlFlags,
    LocalStepStats,
    Pending,
    StepMetrics,
    reduce_metrics_async,
)


def train(
    spec: Spec,
    plan: Plan | str | None = None,
    world: World | None = None,
    *,
    task: Task | None = None,
    run: RunFolder | None = None,
    device: str | None = None,
    stop: Callable[[], bool] = lambda: False,
    observe: Callable[[nn.Module, str, int], None] | None = None,
    notes: Sequence[str] = (),
) -> Generator[Event]:
    """Train as `spec` says, laid out by `plan`; one event after another comes out. All ranks must iterate in step.

    spec: what is wanted. `plan`: `single` on one rank and `ddp` on several, if not said; in words, as of the command line;
    auto: the fastest that fits, as rank 0 predicts it. `world`: who this process is, read
    from the environment if not said. `task`: an instance, in place of the one that `spec` names.
    run: where checkpoints go; a training that has checkpoints there goes on from the last whole one. None: none are written.
    device: "cpu" or "cuda"; None: CUDA where there is some. `stop`: asked at each step; when any rank answers yes, all save and end.
    observe: called on every rank with the model as it is laid out, and ("gradients", step) before or ("weights", step) after each update.
    notes: what else is to be said at the start.

    Raises PlanError, DataError, TaskError, CheckpointError before the first step, DivergedError for a loss that is not finite, and
    CheckpointError at the end where the last checkpoint could not be written.
    """
    world = world if world is not None else world_of()
    if plan is None:
        plan = Plan(dp=1) if world.size == 1 else Plan()
    if isinstance(plan, str) and plan != AUTO:
        plan = parse(plan)
    if not isinstance(plan, (Plan, str)):
        raise PlanError(f"plan must be a Plan or its words, such as 'zero3', got {type(plan).__name__}")
    clock = StartClock()
    with contextlib.ExitStack() as held:
        pulse = held.enter_context(
            HeartbeatWriter(run, world.rank, world.size, start_timeout_s(spec.timeout_s), SAVE_TIMEOUT_S)
        )
        if task is None:
            task = tasks.load_task(spec.task, spec.set)
        else:
            spec = spec.model_copy(update={"task": tasks.reference_to(task), "set": tasks.field_values(task)})
        here = choose_device(world, device)
        held.enter_context(_settings(spec, world))
        held.enter_context(
            process_group(world, here, spec.timeout_s, run.path if run is not None else Path("runs"))
        )
        notes = (*notes, *_set_threads(spec, world, run, here), *_without_effect(spec, here))
        clock.mark("ranks meet")
        if isinstance(plan, str):
            from paceline.training.auto_plan import broadcast_choice

            choice = broadcast_choice(spec, task, world, device)
            plan, notes = choice.plan, (*notes, choice.why)
        laid_out = plan.resolve(world.size)
        micro_batch_size(spec.batch, laid_out)
        data = open_data(spec, task)
        notes = (*notes, *roll_call(task, world, data.lengths))
        notes = (*notes, *check_enough(data.samples, laid_out, spec.batch))
        clock.mark("data")
        studied = (
            analyze_model(spec, laid_out, task, here, data.training)
            if laid_out.servers is None
            else build(spec, task)
        )
        notes = (*notes, *check_once(spec, task, studied.model, studied.weights, world))
        if laid_out.servers is not None:
            from paceline.training.parameter_server.train import train_against_servers

            def loop(
                plan_of_one: ResolvedPlan,
                me: World,
                nothing: TrainingData,
                laid: PreparedTraining,
                stop: Callable[[], bool],
            ) -> _Loop:
                return _Loop(
                    spec, plan_of_one, str(plan), me, task, run, here, stop, nothing, laid, pulse, world.size
                )

            pulse.patience_s = None  # of servers and workers, which wait for one another by other means
            yield from clock.tell(
                train_against_servers(spec, laid_out, str(plan), world, task, here, stop, data, loop, notes)
            )
            return
        laid = build_training(spec, laid_out, world, task, here, studied=studied)
        laid = dataclasses.replace(laid, notes=(*notes, *laid.notes))
        clock.mark("model")
        if observe is not None:
            laid.step.observe = partial(observe, laid.model)
        try:
            yield from clock.tell(
                _Loop(spec, laid_out, str(plan), world, task, run, here, stop, data, laid, pulse).events()
            )
        finally:
            release(laid.update.model)
            mesh.destroy_meshes()


def _set_threads(spec: Spec, world: World, run: RunFolder | None, device: torch.device) -> Sequence[str]:
    """Set the threads of torch by what is free, and return what the user should know of it. A collective.

    A run that goes on keeps the threads that it had: other threads round sums otherwise."""
    if spec.threads is not None or device.type != "cpu" or run is None:
        return ()
    share = threads_per_rank(world.local_size, None)
    free, busy = count_free_threads(world)
    started = glance(run).summary.started if world.rank == 0 and run.events.exists() else None
    before = torch.tensor([started.threads if started is not None and started.ranks == world.size else 0])
    if world.size > 1:
        dist.broadcast(before, 0)
    had = int(before)
    threads = had if 0 < had <= share else free
    torch.set_num_threads(threads)
    found = [busy] if busy is not None else []
    if had and threads != had:
        found.append(f"threads={threads} on each rank, and {had} before: they round sums otherwise")
    elif threads < share:
        found.append(
            f"threads={threads} on each rank {'as before' if had else f'in place of {share}'}; --set spec.threads={share} sets them"
        )
    return found


def _without_effect(spec: Spec, device: torch.device) -> Sequence[str]:
    """What was asked for and changes nothing here."""
    wanted = (
        {"tf32": spec.tf32 and "it is of CUDA devices, and this training runs on the CPU"}
        if device.type == "cpu"
        else {}
    )
    return [f"{name} has no effect: {why}" for name, why in wanted.items() if why]


@contextlib.contextmanager
def _settings(spec: Spec, world: World) -> Iterator[None]:
    """torch's global settings, as they were again afterwards."""
    before = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.set_num_threads(threads_per_rank(world.local_size, spec.threads))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = spec.tf32
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before[1:]


class _Loop:
    """The state of one training on one rank."""

    def __init__(
        self,
        spec: Spec,
        plan: ResolvedPlan,
        asked: str,  # the plan as it was said
        world: World,
        task: Task,
        run: RunFolder | None,
        device: torch.device,
        stop: Callable[[], bool],
        data: TrainingData,
        laid: PreparedTraining,
        pulse: HeartbeatWriter,
        ranks: int | None = None,  # that were started, where they are not those of `world`
    ):
        self.spec, self.plan, self.asked, self.world, self.task, self.run = (
            spec,
            plan,
            asked,
            world,
            task,
            run,
        )
        self.device, self.stop, self.pulse, self.ranks = device, stop, pulse, ranks or world.size
        self.data, self.laid, self.update = data, laid, laid.update
        self.total = spec.total_steps(data.samples)
        self.schedule = spec.schedule.in_samples(spec.batch, data.samples)
        check_schedule(self.schedule, self.total * spec.batch)
        laid.step.enter = pulse.enter
        samples = RankBatchSlice(spec.batch, plan.microbatches, plan.place(world.rank).dp, plan.dp).share
        self.first_loss = FirstLoss(
            laid.step, samples, plan.dp * plan.microbatches > 1, spec.allow_local_loss
        )
        if isinstance(self.update, Update):
            laid.step.examine = self.first_loss
        self.workers = workers_per_rank(world.local_size, device, spec.data.workers)
        self.saver = (
            checkpoint.Saver(run, plan, world.rank, world.size, device, laid.group)
            if run is not None
            else None
        )
        resumed = resume(spec, world, run, laid, data.samples) if run is not None else None
        self.first = self.step = resumed.step if resumed else 0
        self.best = resumed.best if resumed else None
        self.notes = [*laid.notes, *(resumed.notes if resumed else ())]
        self.metrics: dict[str, float] = {}
        self.evaluated_step: int | None = None
        self.owes_evaluation = self.first > 0 and not (
            resumed is not None and resumed.evaluated
        )  # one that was given up
        self.saved_step = self.first
        self.unsaved: str | None = None  # why the last checkpoint was not written, if it was not
        self.saved_at = time.perf_counter()
        self.last_loss: float | None = None
        self.stopping = self.stop_wished = self.save_wished = False
        self.launched: list[_Launched] = []  # steps that were not told of yet
        self.told: tuple[list[_Launched], Pending] | None = None  # those whose figures are on their way
        self.together = 1  # steps to be told together
        self.profiler = StepProfiler(spec.profile, self.first, self.total, laid, plan, world, device)

    def events(self) -> Generator[Event]:
        """The loop. The figures of a step are read while the next one runs, so that neither the host nor another
        rank is waited for; those of quick steps are read together."""
        if self.run is not None and self.world.rank == 0 and self.run.ckpt.exists():
            checkpoint.clean(self.run)
        self.pulse.begin(self.step, self.total)
        yield self._started()
        if self.owes_evaluation and self._evaluation_is_due():
            if (yield from self._evaluated()) and self._is_best():
                yield from self._save()
            self._wait_at_most(start_timeout_s(self.spec.timeout_s))
        part = RankBatchSlice(
            self.spec.batch, self.plan.microbatches, self.plan.place(self.world.rank).dp, self.plan.dp
        )
        parts = training_parts(part, self.data.samples, self.spec.seed, self.first, self.total)
        source = batches(self.data.training, parts, self.device, self.workers, self.spec.data.prefetch)
        with contextlib.closing(source), contextlib.closing(self.profiler):
            yield from self._steps(source)
        if self.saver is not None:
            if self.saved_step != self.step:
                yield from self._save()
            yield from self._saved(wait=True)
            self.saver.close()
            if self.unsaved is not None:
                raise self._not_saved(self.unsaved)
        if self.laid.local is not None:
            self.laid.local.average_()
        is_done = self.step == self.total and not (
            self.stopping and self._evaluation_is_due() and self.evaluated_step != self.step
        )
        reason = "done" if is_done else "stopped"
        yield Ended(step=self.step, reason=reason, communication=self._communication())

    def _steps(self, source: Iterator[Batch]) -> Iterator[Event]:
        while self.step < self.total and not self.stopping:
            self.profiler.begin(self.step)
            began = time.perf_counter()
            self.pulse.enter(DATA)
            micro_batches = [next(source) for _ in range(self.plan.microbatches)]
            data_s = time.perf_counter() - began
            if self.laid.local is not None:
                self.laid.local.before(self.step)
            if self.step == self.first and isinstance(self.update, Update):
                self.update.model = settle(self.update, micro_batches[0])
            lr_factor = factor(self.schedule, self.step * self.spec.batch, self.total * self.spec.batch)
            local = self.update(micro_batches, self.step, lr_factor)
            if self.step == self.first and isinstance(self.update, Update):
                self.first_loss.finish()
            self.step += 1
            self.pulse.enter(REPORT)
            if self.laid.local is not None:
                self.laid.local.after(self.step)
            if self.saver is not None and self.step == self.first + 1:
                self.saver.prepare()
            figures = self._read()
            if self.step == self.first + 2:  # every rank has done a whole step
                self._wait_at_most(self.spec.timeout_s)
            step_s = time.perf_counter() - began
            self.launched.append(
                _Launched(local, self.step, self.update.base_lrs[0] * lr_factor, data_s, step_s, time.time())
            )
            yield from self.profiler.end(self.step, data_s)
            self.stop_wished |= self.stop()
            self.pulse.done(self.step)
            if len(self.launched) >= self.together:
                self._tell()
            if figures:
                yield from self._finished(figures)
            evaluate_now, save_now = self._evaluation_is_due(), self._save_is_due()
            if self.step == self.total or self.stopping or evaluate_now or save_now:
                yield from self._flush()
            if evaluate_now:
                evaluated = yield from self._evaluated()
                save_now = (evaluated and self._is_best()) or save_now
            if save_now:
                yield from self._save()
            yield from self._saved(wait=False)
        yield from self._flush()

    def _started(self) -> Started:
        return Started(
            task=self.spec.task,
            plan=self.asked,
            ranks=self.ranks,
            batch=self.spec.batch,
            step=self.first,
            steps=self.total,
            samples=self.data.samples,
            parameters=sum(parameter.numel() for parameter in self.laid.model.parameters()),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            precision=self.spec.precision,
            threads=torch.get_num_threads(),
            notes=tuple(self.notes),
            lr_group=self.laid.lr_group,
        )

    def _tell(self) -> None:
        """Send the figures of the launched steps off."""
        assert self.told is None
        overdue = self.saver is not None and time.perf_counter() - self.saved_at > 60 * self.spec.save.minutes
        wishes = ControlFlags(stop=self.stop_wished, save=overdue and self.world.rank == 0)
        seconds = sum(launched.step_s for launched in self.launched)
        pending = reduce_metrics_async(
            [launched.local for launched in self.launched], wishes, seconds, self.world.size, self.device
        )
        self.launched, self.told = [], (self.launched, pending)

    def _read(self) -> list[tuple["_Launched", StepMetrics]]:
        """The figures that were sent off before, if any."""
        if self.told is None:
            return []
        (launched, pending), self.told = self.told, None
        told = pending.result()
        self.stopping |= told.wishes.stop
        self.save_wished |= told.wishes.save
        self.together = told.together
        self.profiler.add_measured_steps(told.step_s, len(launched))
        if self.device.type == "cuda":  # one of them waited for all
            step_s, data_s = (
                statistics.mean(getattr(one, field) for one in launched) for field in ("step_s", "data_s")
            )
            launched = [one._replace(step_s=step_s, data_s=data_s) for one in launched]
        return list(zip(launched, told.steps, strict=True))

    def _finished(self, steps: list[tuple["_Launched", StepMetrics]]) -> Iterator[Event]:
        for launched, figures in steps:
            if not math.isfinite(figures.loss) or (
                not math.isfinite(figures.grad_norm) and self.update.loss_scale is None
            ):
                yield from self._saved(wait=True)  # to go back to
                raise self._diverged(launched.step, figures)
            self.last_loss = figures.loss
            yield Step(
                time=launched.time,
                step=launched.step,
                samples=launched.step * self.spec.batch,
                loss=figures.loss,
                grad_norm=figures.grad_norm if math.isfinite(figures.grad_norm) else None,
                lr=launched.lr,
                step_s=launched.step_s,
                data_s=launched.data_s,
                samples_per_s=self.spec.batch / launched.step_s,
            )

    def _flush(self) -> Iterator[Event]:
        """All steps whose figures are still out."""
        yield from self._finished(self._read())
        if self.launched:
            self._tell()
            yield from self._finished(self._read())

    def _diverged(self, step: int, figures: StepMetrics) -> DivergedError:
        what = (
            f"the loss is {figures.loss}"
            if not math.isfinite(figures.loss)
            else f"the norm of the gradient is {figures.grad_norm}"
        )
        before = (
            f"the last finite loss was {self.last_loss:.6g}"
            if self.last_loss is not None
            else "there was no finite loss before"
        )
        steps = self.run.checkpoints() if self.run is not None else []
        if steps and self.run is not None:
            hint = f"go back to step {steps[-1]} with: paceline resume {self.run.path} --lr SMALLER"
        else:
            hint = "no checkpoint was written yet; try a smaller --lr, --set schedule.warmup=SAMPLES or --clip NORM"
        return DivergedError(f"{what} at step {step}; {before}; {hint}")

    def _evaluation_is_due(self) -> bool:
        if self.data.validation is None:
            return False
        if self.step == self.total:
            return True
        if self.spec.evaluate_every is not None:
            return self.step % self.spec.evaluate_every == 0
        epochs, epochs_before = (
            step * self.spec.batch // self.data.samples for step in (self.step, self.step - 1)
        )
        return epochs > epochs_before

    def _evaluated(self) -> Generator[Event, None, bool]:
        """False where it was given up, since any rank was asked to stop."""
        assert self.data.validation is not None
        began = time.perf_counter()
        is_first = self.evaluated_step is None  # which may compile, one stage after the other
        if is_first:
            self._wait_at_most(start_timeout_s(self.spec.timeout_s))
        with self.laid.whole():
            metrics = evaluate(
                self.laid.step,
                self.data.validation,
                self.spec.batch,
                self.workers,
                self.spec.data.prefetch,
                self.laid.group,
                lambda: self.stop_wished or self.stop(),
            )
        if is_first:
            self._wait_at_most(self.spec.timeout_s)
        if metrics is None:
            self.stopping = True
            return False
        self.metrics, self.evaluated_step = metrics, self.step
        yield Evaluated(step=self.step, metrics=self.metrics, seconds=time.perf_counter() - began)
        return True

    def _wait_at_most(self, seconds: float) -> None:
        """Of a save nothing is said: the ranks wait for the slowest disk."""
        self.pulse.patience_s = seconds
        if self.world.size > 1:
            set_collective_timeout(seconds, but=self.saver.group if self.saver is not None else None)

    def _is_best(self) -> bool:
        direction, name = self.spec.save.best.split()
        if name not in self.metrics:
            raise SpecError(
                f"save.best={self.spec.save.best!r}, but the evaluation has no {name}{nearest(name, self.metrics)}"
            )
        score = self.metrics[name] if direction == "min" else -self.metrics[name]
        if math.isnan(score) or (self.best is not None and score >= self.best):
            return False
        self.best = score
        return self.saver is not None

    def _save_is_due(self) -> bool:
        every = self.spec.save.every
        due = self.save_wished or (every is not None and self.step % every == 0)
        self.save_wished = False
        return self.saver is not None and due

    def _save(self) -> Iterator[Event]:
        """Start a checkpoint of this step, after the one before is done."""
        assert self.saver is not None
        yield from self._saved(wait=True)
        found, own = self.laid.state(self.world.rank)
        index = checkpoint.Index(
            step=self.step,
            samples=self.step * self.spec.batch,
            epoch_samples=self.data.samples,
            task=self.spec.task,
            set=self.spec.set,
            plan=self.asked,
            ranks=self.ranks,
            seed=self.spec.seed,
            own=bool(own),
            loss_scale=dataclasses.asdict(self.update.loss_scale)
            if self.update.loss_scale is not None
            else None,
            metrics=self.metrics if self.evaluated_step == self.step else {},
            identity=identity(self.spec, self.task, self.laid.modules, self.laid.step.optimizer),
            **checkpoint.describe(self.laid.model),
        )
        self.saver.start(index, found, own)
        self.saved_step, self.saved_at = self.step, time.perf_counter()

    def _saved(self, wait: bool) -> Iterator[Event]:
        """What became of the checkpoint under way. One that failed is said, and costs neither the run nor the checkpoints before."""
        if wait:
            self.pulse.enter(SAVE)
        result = self.saver.result(wait) if self.saver is not None else None
        if result is None or self.run is None:
            return
        self.unsaved = result.error
        if result.error is not None:
            yield Failed(
                what="save",
                step=result.index.step,
                message=f"checkpoint of step {result.index.step} was not written: {result.error}; {_last_good(self.run)}",
            )
            return
        if self.world.rank == 0:
            checkpoint.prune(self.run, self.spec.save.keep, self.spec.save.best)
        path = self.run.checkpoint(result.index.step).relative_to(self.run.path)
        yield Saved(
            step=result.index.step,
            path=str(path),
            bytes=result.bytes,
            seconds=result.seconds,
            blocked_s=result.blocked_s,
        )

    def _not_saved(self, why: str) -> CheckpointError:
        assert self.run is not None
        kept, hint = (
            _last_good(self.run),
            f"make room in {self.run.ckpt}, then: paceline resume {self.run.path}",
        )
        return CheckpointError(
            f"the training came to step {self.step} of {self.total}, but its last checkpoint was not written: {why}; {kept}; {hint}"
        )

    def _communication(self) -> float | None:
        """Share of a step in which the backward pass only waited for other ranks, where torch's engine tells."""
        if not isinstance(self.update.model, DistributedDataParallel):
            return 0.0 if self.world.size == 1 else None
        told = self.update.model._get_ddp_logging_data()
        names = (
            "avg_forward_compute_time",
            "avg_backward_compute_time",
            "avg_backward_comm_time",
            "avg_backward_compute_comm_overlap_time",
        )
        forward, backward, comm, hidden = (told.get(name, 0) for name in names)
        exposed = max(0, comm - hidden)
        whole = forward + backward + exposed
        return exposed / whole if whole else None


class _Launched(NamedTuple):
    """A step whose figures are not known yet."""

    local: LocalStepStats
    step: int
    lr: float
    data_s: float
    step_s: float
    time: float


def _last_good(run: RunFolder) -> str:
    kept = run.checkpoints()
    return f"the last good checkpoint is step {kept[-1]}" if kept else "there is no checkpoint"
