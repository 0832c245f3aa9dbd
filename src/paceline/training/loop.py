"""The training loop: a generator of events. Whoever iterates it decides what to do with them."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import task as tasks
from paceline.errors import DataError, DivergedError, PlanError, SpecError
from paceline.events import Ended, Evaluated, Event, Failed, Saved, Started, Step
from paceline.launch.world import World
from paceline.launch.world import world as world_of
from paceline.plan.plan import Plan, share
from paceline.run import RunFolder
from paceline.spec import Spec, nearest
from paceline.task import Task
from paceline.training import checkpoint
from paceline.training.batch_norm import over_all_ranks
from paceline.training.data import Batch, Part, Samples, batches, open_dataset, training_parts
from paceline.training.evaluate import evaluate
from paceline.training.optim import check_schedule, factor, make_optimizer
from paceline.training.parallelize import build_mesh, check_splits, parallelize
from paceline.training.process import choose_device, process_group, threads_per_rank, workers_per_rank
from paceline.training.settle import settle
from paceline.training.step import Figures, Pending, Wishes
from paceline.training.step import Step as Update
from paceline.training.weights import fill_, record


def train(
    spec: Spec,
    plan: Plan | None = None,
    world: World | None = None,
    *,
    task: Task | None = None,
    run: RunFolder | None = None,
    device: str | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Train as `spec` says, laid out by `plan`; one event after another comes out. All ranks must iterate in step.

    spec: what is wanted. `plan`: `single` on one rank and `ddp` on several, if not said. `world`: who this process is, read
    from the environment if not said. `task`: an instance, where `spec.task` does not name one that can be loaded.
    run: where checkpoints go; a training that has checkpoints there goes on from the last whole one. None: none are written.
    device: "cpu" or "cuda"; None: CUDA where there is some. `stop`: asked at each step; when any rank answers yes, all save and end.

    Raises PlanError, DataError, TaskError, CheckpointError before the first step, and DivergedError for a loss that is not finite.
    """
    world = world if world is not None else world_of()
    task = task if task is not None else tasks.load_task(spec.task, spec.set)
    plan = plan if plan is not None else Plan(dp=1) if world.size == 1 else Plan()
    here = choose_device(world, device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads_per_rank(world.local_size, spec.threads))
    tf32_before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = spec.tf32
    try:
        meeting_place = run.path if run is not None else Path("runs")
        with process_group(world, here, spec.timeout_s, meeting_place):
            yield from _Training(spec, plan, world, task, run, here, stop).events()
    finally:
        torch.set_num_threads(before)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32_before


WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class _Training:
    """What lives as long as one training on one rank."""

    def __init__(
        self, spec: Spec, plan: Plan, world: World, task: Task, run: RunFolder | None, device: torch.device, stop: Callable[[], bool]
    ):
        self.spec, self.world, self.task, self.run, self.device, self.stop = spec, world, task, run, device, stop
        self.asked, self.plan = plan, plan.on(world.size)
        self.notes: list[str] = []
        self.part = Part(spec.batch, plan.micro, world.rank, world.size)
        share(spec.batch, plan, world.size)
        self._open_data()
        self._build()
        self._resume()
        self.step = self.first
        self.saved_step: int | None = self.first if self.first else None
        self.saved_at = time.perf_counter()
        self.evaluated_step: int | None = None
        self.last_loss: float | None = None
        self.stopping = self.save_wished = False

    def _open_data(self) -> None:
        spec, world = self.spec, self.world
        floats = torch.float64 if spec.precision == "fp64" else None
        train, validation = open_dataset(self.task, "train"), open_dataset(self.task, "validation")
        assert train is not None
        lengths = [len(train), len(validation) if validation is not None else 0]
        everywhere = [lengths] * world.size
        if world.size > 1:
            dist.all_gather_object(everywhere, lengths)
        for rank, there in enumerate(everywhere):
            if there != everywhere[0]:
                split, at = ("train", 0) if there[0] != everywhere[0][0] else ("validation", 1)
                raise DataError(
                    f"dataset({split!r}) has {everywhere[0][at]} samples on rank 0 and {there[at]} on rank {rank}; "
                    "every rank must see the whole dataset, Paceline splits it"
                )
        self.samples = len(train)
        if world.size > self.samples:
            raise PlanError(f"{world.size} ranks for {self.samples} training samples; use at most --ranks {self.samples}")
        self.training = Samples(train, "train", spec.seed, floats)
        self.validation = Samples(validation, "validation", spec.seed, floats) if validation is not None else None
        self.total = spec.total_steps(self.samples)
        check_schedule(spec.schedule, self.total * spec.batch)
        self.workers = workers_per_rank(world.local_size, self.device, spec.data.workers)

    def _build(self) -> None:
        spec, plan, task, world, device = self.spec, self.plan, self.task, self.world, self.device
        model, weights, recorded = record(task.model, spec.seed)
        if not recorded:
            self.notes.append(
                "the model's constructor looks at values of its tensors, so each rank builds it whole before it keeps its share"
            )
        if spec.precision == "fp64":
            model._apply(lambda tensor: tensor.to(WIDER.get(tensor.dtype)))
        if world.size > 1 and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            model = over_all_ranks(model, device)
        pretrained = task.pretrained()

        def fill(laid_out: nn.Module) -> None:
            fill_(laid_out, weights, device, Path(pretrained) if pretrained is not None else None)

        self.model = model  # under its own names
        laid_out = parallelize(model, task.layout(), plan, build_mesh(plan, device), fill, spec.compile)
        self.optimizer = make_optimizer(task, spec.optimizer, plan, model)
        check_splits(model, plan, self.optimizer)
        params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.update = Update(
            task, laid_out, self.optimizer, params, world.rank, world.size, device, spec.precision, spec.optimizer.clip, spec.seed
        )
        self.saver = checkpoint.Saver(self.run, world.rank, world.size, device, plan.zero == 1) if self.run is not None else None

    def _resume(self) -> None:
        self.first = 0
        self.metrics: dict[str, float] = {}
        self.best: float | None = None
        if self.run is None:
            return
        path, index, notes = checkpoint.last_good(self.run, self.world.rank, self.world.size)
        self.notes += notes
        if path is None or index is None:
            return
        checkpoint.check_same_model(path, index, self.spec.task, self.spec.set, self.model)
        checkpoint.load_(path, self.model, self.optimizer)
        if index.samples != index.step * self.spec.batch:
            raise PlanError(
                f"{path} was made with batch {index.samples // index.step}, got batch {self.spec.batch}; "
                "the order of samples and the schedule count on it"
            )
        self.first = index.step
        self.best = checkpoint.best_score(self.run, self.spec.save.best)
        if self.update.loss_scale is not None and index.loss_scale is not None:
            self.update.loss_scale.scale = index.loss_scale["scale"]
            self.update.loss_scale.good_steps = int(index.loss_scale["good_steps"])

    def events(self) -> Iterator[Event]:
        """The loop. The figures of a step are read while the next one runs, so that neither the host nor another rank is waited for."""
        if self.run is not None and self.world.rank == 0 and self.run.ckpt.exists():
            checkpoint.clean(self.run)
        yield self._started()
        parts = training_parts(self.part, self.samples, self.spec.seed, self.first, self.total)
        with contextlib.closing(batches(self.training, parts, self.device, self.workers, self.spec.data.prefetch)) as source:
            yield from self._steps(source)
        if self.saver is not None:
            if self.saved_step != self.step:
                yield from self._save()
            yield from self._saved(wait=True)
            self.saver.close()
        yield Ended(step=self.step, reason="stopped" if self.stopping else "done", communication=self._communication())

    def _steps(self, source: Iterator[Batch]) -> Iterator[Event]:
        pending: _Launched | None = None
        while self.step < self.total and not self.stopping:
            began = time.perf_counter()
            micro_batches = [next(source) for _ in range(self.plan.micro)]
            data_s = time.perf_counter() - began
            if self.step == self.first:
                self.update.model = settle(self.update, micro_batches[0])
            samples = self.step * self.spec.batch
            lr_factor = factor(self.spec.schedule, samples, self.total * self.spec.batch)
            figures = self.update(micro_batches, self.step, lr_factor, self._wishes())
            self.step += 1
            finished = self._finish(pending) if pending is not None else None
            pending = _Launched(figures, self.step, self.update.base_lrs[0] * lr_factor, data_s, time.perf_counter() - began)
            if finished is not None:
                yield finished
            evaluate_now, save_now = self._evaluation_is_due(), self._save_is_due()
            if self.step == self.total or self.stopping or evaluate_now or save_now:
                yield self._finish(pending)
                pending = None
            if evaluate_now:
                yield self._evaluated()
                save_now = save_now or self._is_best()
            if save_now:
                yield from self._save()
            yield from self._saved(wait=False)
        if pending is not None:
            yield self._finish(pending)

    def _started(self) -> Started:
        return Started(
            task=self.spec.task,
            plan=str(self.asked),
            ranks=self.world.size,
            batch=self.spec.batch,
            step=self.first,
            steps=self.total,
            samples=self.samples,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            device=torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu",
            precision=self.spec.precision,
            threads=torch.get_num_threads(),
            notes=tuple(self.notes),
        )

    def _wishes(self) -> Wishes:
        minutes = self.spec.save.minutes
        overdue = self.saver is not None and minutes is not None and time.perf_counter() - self.saved_at > 60 * minutes
        return Wishes(stop=self.stop(), save=overdue and self.world.rank == 0)

    def _finish(self, launched: "_Launched") -> Step:
        figures = launched.pending.result()
        if not math.isfinite(figures.loss) or (not math.isfinite(figures.grad_norm) and self.update.loss_scale is None):
            raise self._diverged(launched.step, figures)
        self.last_loss = figures.loss
        self.stopping |= figures.stop
        self.save_wished |= figures.save
        return Step(
            step=launched.step,
            samples=launched.step * self.spec.batch,
            loss=figures.loss,
            grad_norm=figures.grad_norm if math.isfinite(figures.grad_norm) else None,
            lr=launched.lr,
            step_s=launched.step_s,
            data_s=launched.data_s,
            samples_per_s=self.spec.batch / launched.step_s,
        )

    def _diverged(self, step: int, figures: Figures) -> DivergedError:
        what = f"the loss is {figures.loss}" if not math.isfinite(figures.loss) else f"the norm of the gradient is {figures.grad_norm}"
        before = f"the last finite loss was {self.last_loss:.6g}" if self.last_loss is not None else "there was no finite loss before"
        steps = self.run.checkpoints() if self.run is not None else []
        if steps and self.run is not None:
            way_out = f"go back to step {steps[-1]} with: paceline resume {self.run.path} --lr SMALLER"
        else:
            way_out = "no checkpoint was written yet; try a smaller --lr, --set schedule.warmup=SAMPLES or --clip NORM"
        return DivergedError(f"{what} at step {step}; {before}; {way_out}")

    def _evaluation_is_due(self) -> bool:
        if self.validation is None:
            return False
        if self.step == self.total:
            return True
        if self.spec.evaluate_every is not None:
            return self.step % self.spec.evaluate_every == 0
        return self.step * self.spec.batch // self.samples > (self.step - 1) * self.spec.batch // self.samples

    def _evaluated(self) -> Evaluated:
        assert self.validation is not None
        began = time.perf_counter()
        self.metrics = evaluate(
            self.task,
            self.update.model,
            self.validation,
            self.spec.batch,
            self.spec.precision,
            self.device,
            self.workers,
            self.spec.data.prefetch,
        )
        self.evaluated_step = self.step
        return Evaluated(step=self.step, metrics=self.metrics, seconds=time.perf_counter() - began)

    def _is_best(self) -> bool:
        direction, name = self.spec.save.best.split()
        if name not in self.metrics:
            raise SpecError(f"save.best={self.spec.save.best!r}, but the evaluation has no {name}{nearest(name, self.metrics)}")
        score = self.metrics[name] if direction == "min" else -self.metrics[name]
        if self.best is not None and score >= self.best:
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
        index = checkpoint.Index(
            step=self.step,
            samples=self.step * self.spec.batch,
            task=self.spec.task,
            set=self.spec.set,
            plan=str(self.asked),
            ranks=self.world.size,
            seed=self.spec.seed,
            loss_scale=asdict(self.update.loss_scale) if self.update.loss_scale is not None else None,
            metrics=self.metrics if self.evaluated_step == self.step else {},
            **checkpoint.describe(self.model),
        )
        self.saver.start(index, checkpoint.tensors(self.model, self.optimizer))
        self.saved_step, self.saved_at = self.step, time.perf_counter()

    def _saved(self, wait: bool) -> Iterator[Event]:
        """What became of the checkpoint under way. One that failed is said, and costs neither the run nor the checkpoints before."""
        result = self.saver.result(wait) if self.saver is not None else None
        if result is None or self.run is None:
            return
        if result.error is not None:
            kept = self.run.checkpoints()
            last = f"the last good one is step {kept[-1]}" if kept else "there is none yet"
            yield Failed(
                what="save",
                step=result.index.step,
                message=f"checkpoint of step {result.index.step} was not written: {result.error}; {last}",
            )
            return
        if self.world.rank == 0:
            checkpoint.prune(self.run, self.spec.save.keep, self.spec.save.best)
        path = self.run.checkpoint(result.index.step).relative_to(self.run.path)
        yield Saved(step=result.index.step, path=str(path), bytes=result.bytes, seconds=result.seconds, blocked_s=result.blocked_s)

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


@dataclass(frozen=True)
class _Launched:
    """A step whose figures are not known yet."""

    pending: Pending
    step: int
    lr: float
    data_s: float
    step_s: float
