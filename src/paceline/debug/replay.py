"""paceline replay: repeat one step of a run on one process, and look inside it.

The run folder is only read. The step starts from the nearest checkpoint before it, or from the initial
weights; steps in between are repeated too.
"""

import contextlib
import math
import pdb
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import task as tasks
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.debug.steps import StepTable, read_steps
from paceline.distributed.process_group import choose_device, process_group
from paceline.distributed.world import World
from paceline.errors import CheckpointError, Error, PlanError, RunError, TaskError
from paceline.parallel.loss.forward import has_global_loss
from paceline.plan.plan import Plan, parse
from paceline.run import RunFolder
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.checkpoint.index import Index, read_index
from paceline.training.checkpoint.integrity import verify_files
from paceline.training.checkpoint.load import check_same_model, load_
from paceline.training.optimization.batch_scaling import lr_factor_of_batch
from paceline.training.optimization.batches import changing_batches
from paceline.training.optimization.schedule import compute_lr_factor, resolve_schedule
from paceline.training.prepared import PreparedTraining
from paceline.training.setup import build_training
from paceline.training.step.step import TrainingStep
from paceline.training.step.step_metrics import ControlFlags, StepMetrics, reduce_metrics_async
from paceline.training.step.update_sequence import UpdateSequence
from paceline.training.torch_settings import torch_settings
from paceline.training.training_data import TrainingData, open_data
from paceline.user_code import is_user_file, relative_path

FAILED_OPERATION = re.compile(r"Function '(\w+?)Backward\d*' returned nan values")
FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')


class DebuggerLeft(Error):
    """The user left the debugger, which ends the replay."""


@dataclass(frozen=True)
class ModuleGradient:
    """The gradient of the parameters that a module holds itself.

    module      its name in the model; "" for the model itself
    norm        norm over these parameters, before clipping; NaN or inf if an element is
    num_params  number of parameters with a gradient
    not_finite  number of elements that are NaN or infinite
    """

    module: str
    norm: float
    num_params: int
    not_finite: int


@dataclass(frozen=True)
class ReplayedStep:
    """A step, repeated on one process.

    step       its number, from 1
    begin      step of the checkpoint from which the replay began; 0: the initial weights
    indices    index of each sample in dataset("train"), by micro-batch
    loss       mean over the batch; None if --anomaly found an operation that failed before
    losses     means of the losses that loss() returns by name, and of the loss of each update of `updates`
    grad_norm  norm of the whole gradient before clipping
    lr         learning rate of the update, or of the first of several
    gradients  by module, in the order of the model
    run_loss, run_grad_norm  the values of the run, if its events have this step
    findings   what is not finite, the first cause first
    notes      sentences about differences from the run
    """

    step: int
    begin: int
    indices: tuple[tuple[int, ...], ...]
    loss: float | None
    losses: Mapping[str, float]
    grad_norm: float | None
    lr: float
    gradients: tuple[ModuleGradient, ...]
    run_loss: float | None
    run_grad_norm: float | None
    findings: tuple[str, ...]
    notes: tuple[str, ...]


def replay(
    run: RunFolder, step: int, device: str | None = None, anomaly: bool = False, debugger: bool = False
) -> ReplayedStep:
    """Repeat a step of a run on this process.

    step: its number, from 1.
    device: "cpu" or "cuda" [default: cuda if it is available].
    anomaly: check the outputs of modules and the gradients of operations for NaN in this step.
    debugger: start pdb when this step calls the task's loss().

    Raises RunError for a step that the run does not have, PlanError if the plan of the run makes other
    updates than one process, and the errors of `train`.
    """
    spec, launch = run.request()
    task = tasks.load_task(spec.task, spec.set)
    table = read_steps(run)
    plan, microbatches = _read_plan(table, launch.plan, launch.ranks)
    world = World()
    torch_device = choose_device(world, device)
    with (
        torch_settings(spec, world),
        tempfile.TemporaryDirectory(prefix="paceline-replay-") as meeting_place,
        process_group(world, torch_device, spec.timeout_s, Path(meeting_place)),
    ):
        data = open_data(spec, task)
        total = spec.total_steps(data.samples)
        if spec.schedule.name == "plateau":
            raise RunError(
                f"{run.path} has the schedule plateau, whose learning rate follows evaluations that a replay "
                "does not repeat; replay a run with another schedule"
            )
        if not 1 <= step <= total:
            raise RunError(f"{run.path} has steps 1 to {total}, got --step {step}; specify one of them")
        resolved = Plan(dp=1, microbatches=microbatches).resolve(1)
        prepared = build_training(spec, resolved, world, task, torch_device, training=data.training)
        begin, notes = _load_before(run, step, spec, data, prepared)
        notes += _describe_plan(plan, microbatches)
        return _Replay(spec, task, data, prepared, microbatches, table).run(
            begin, step, tuple(notes), anomaly, debugger
        )


def _read_plan(table: StepTable, requested: str | None, ranks: int | None) -> tuple[str, int]:
    """Return the plan of the last start, and its number of micro-batches."""
    text = table.starts[-1].plan if table.starts else requested or "single"
    count = table.starts[-1].ranks if table.starts else ranks or 1
    plan = parse(text).resolve(count)
    if plan.is_asynchronous:
        raise PlanError(
            f"plan {text} makes other updates than one process, so its steps cannot be replayed; "
            "replay a run of another plan"
        )
    return text, plan.microbatches


def _describe_plan(plan: str, microbatches: int) -> list[str]:
    if plan == "single":
        return []
    split = f" in {microbatches} micro-batches" if microbatches > 1 else ""
    return [
        f"the run had plan {plan}; this is one process{split}, so random draws of the model, such as "
        "dropout, may differ"
    ]


def _load_before(
    run: RunFolder, step: int, spec: Spec, data: TrainingData, prepared: PreparedTraining
) -> tuple[int, list[str]]:
    """Load the last undamaged checkpoint before a step. Return its step, or 0, and notes."""
    notes = []
    for saved in reversed([saved for saved in run.checkpoints() if saved < step]):
        path = run.checkpoint(saved)
        try:
            index = read_index(path)
            wrong = verify_files(path, index)
        except CheckpointError as error:
            wrong = str(error)
        if wrong:
            notes.append(f"checkpoint {path} is damaged and was skipped: {wrong}")
            continue
        check_same_model(path, index, spec.task, spec.set, prepared.model)
        _check_order(path, index, spec, data)
        load_(path, prepared.model, prepared.optimizers)
        scale = prepared.step.loss_scale
        if scale is not None and index.loss_scale is not None:
            scale.scale, scale.good_steps = index.loss_scale["scale"], int(index.loss_scale["good_steps"])
        return saved, notes
    return 0, notes


def _check_order(path: Path, index: Index, spec: Spec, data: TrainingData) -> None:
    if index.epoch_samples != data.samples:
        raise CheckpointError(
            f"{path} was made with {index.epoch_samples} training samples, got {data.samples}; the order of "
            "samples depends on it: restore the data"
        )
    if index.order != (order := data.order.describe(index.samples)):
        raise CheckpointError(
            f"{path} was made with order of samples {index.order}, got {order}; restore the request"
        )


class _Replay:
    """The steps from a checkpoint to the replayed one."""

    def __init__(
        self,
        spec: Spec,
        task: Task,
        data: TrainingData,
        prepared: PreparedTraining,
        microbatches: int,
        table: StepTable,
    ):
        self.spec, self.data, self.prepared, self.table = spec, data, prepared, table
        self.part = RankBatchSlice(spec.batch, microbatches, 0, 1, changing_batches(spec))
        self.total = spec.total_steps(data.samples)
        self.schedule = resolve_schedule(spec, task, data.samples)
        update = prepared.update
        assert isinstance(update, TrainingStep | UpdateSequence)
        self.update = update
        self.task, self.tasks = task, [task]
        if isinstance(update, UpdateSequence):
            update.set_length(task, spec.batch, data.samples, spec.batches.samples_before(self.total))
            self.tasks = [of_pass.steps[0].task for of_pass in update.passes]

    def run(
        self, begin: int, step: int, notes: tuple[str, ...], anomaly: bool, debugger: bool
    ) -> ReplayedStep:
        parts = list(training_parts(self.part, self.data.order, begin, step))
        last = parts[-self.part.microbatches :]
        gradients: list[ModuleGradient] = []
        findings: list[str] = []
        metrics: StepMetrics | None = None
        source = batches(
            self.data.training,
            parts,
            self.prepared.step.device,
            workers=0,
            prefetch=self.spec.data.prefetch,
            together=self.part.microbatches,
        )
        with contextlib.closing(source):
            for done in range(begin, step):
                micro_batches = [next(source) for _ in range(self.part.microbatches)]
                is_last = done == step - 1
                with contextlib.ExitStack() as stack:
                    if is_last:
                        self.update.observe = self._observe(gradients)
                        for task in self.tasks if debugger else ():
                            stack.enter_context(_debug_loss(task))
                        if anomaly:
                            stack.enter_context(_find_anomalies(self.prepared.model, findings))
                    stats = self.update(micro_batches, done, self._lr_factor(done))
                    if is_last:
                        names = {name: list(part.named or ()) for name, part in stats.by_pass().items()}
                        reduced = reduce_metrics_async(
                            [stats], ControlFlags(), 0.0, 1, self.update.device, names
                        ).result()
                        [metrics] = reduced.steps
        run_loss, run_norm = self._values_of_run(step)
        return ReplayedStep(
            step=step,
            begin=begin,
            indices=tuple(tuple(indices) for _, indices in last),
            loss=metrics.loss if metrics is not None else None,
            losses=metrics.losses if metrics is not None else {},
            grad_norm=metrics.grad_norm if metrics is not None else None,
            lr=self.update.lr_at(step - 1, self._lr_factor(step - 1))
            if isinstance(self.update, UpdateSequence)
            else self.update.base_lrs[0] * self._lr_factor(step - 1),
            gradients=tuple(gradients),
            run_loss=run_loss,
            run_grad_norm=run_norm,
            findings=tuple(findings),
            notes=notes,
        )

    def _lr_factor(self, done: int) -> float:
        batches = self.spec.batches
        samples = batches.samples_before(done)
        factor = compute_lr_factor(
            self.schedule,
            samples,
            batches.samples_before(self.total),
            self.task,
            done,
            samples // self.data.samples,
        )
        return factor * lr_factor_of_batch(self.spec, done)

    def _observe(self, gradients: list[ModuleGradient]) -> Callable[[str, int], None]:
        def observe(what: str, step: int) -> None:
            if what == "gradients":
                gradients.extend(measure_gradients(self.prepared.model, self.prepared.step.gradient_scale))

        return observe

    def _values_of_run(self, step: int) -> tuple[float | None, float | None]:
        if step not in self.table.steps:
            return None, None
        at = self.table.steps.index(step)
        norm = self.table.values["grad_norm"][at]
        return self.table.values["loss"][at], None if math.isnan(norm) else norm


def measure_gradients(model: nn.Module, scale: float = 1.0) -> Iterator[ModuleGradient]:
    """Yield the gradient of each module with own parameters, in the order of the model.

    scale: by which the gradients are too large (fp16).
    """
    for name, module in model.named_modules():
        grads = [p.grad for p in module.parameters(recurse=False) if p.grad is not None]
        if grads:
            norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
            count = sum(int((~grad.isfinite()).sum()) for grad in grads)
            yield ModuleGradient(
                name, float(torch.linalg.vector_norm(torch.stack(norms))) / scale, len(grads), count
            )


class _LossDebugger(pdb.Pdb):
    """pdb, which records that the user quits: `quitting` is true after every `runcall`."""

    was_left = False

    def set_quit(self) -> None:
        self.was_left = True
        super().set_quit()


@contextlib.contextmanager
def _debug_loss(task: Task) -> Iterator[None]:
    """Start pdb at each call of loss() or global_loss(). Raises DebuggerLeft when the user quits."""
    method = "global_loss" if has_global_loss(task) else "loss"
    original, own = getattr(task, method), vars(task).get(method)

    def loss(output: Any, batch: Any) -> Any:
        debugger = _LossDebugger(nosigint=True)
        values = debugger.runcall(original, output, batch)
        if debugger.was_left:  # runcall returns None then
            raise DebuggerLeft("the debugger was left")
        return values

    object.__setattr__(task, method, loss)  # a task is frozen
    try:
        yield
    finally:
        object.__delattr__(task, method)
        if own is not None:  # the loss of an update
            object.__setattr__(task, method, own)


@contextlib.contextmanager
def _find_anomalies(model: nn.Module, findings: list[str]) -> Iterator[None]:
    """Append a sentence for the first module whose output is not finite, and for the operation whose gradient
    is not finite. The backward pass ends there."""
    handles = []

    def check(name: str, module: nn.Module, output: Any) -> None:
        tensors = torch.utils._pytree.tree_leaves(output)
        if not findings and any(
            isinstance(tensor, Tensor) and tensor.is_floating_point() and not tensor.isfinite().all()
            for tensor in tensors
        ):
            findings.append(
                f"the output of module {name or 'the model'} ({type(module).__name__}) is not finite"
            )

    for name, module in model.named_modules():
        handles.append(
            module.register_forward_hook(lambda module, _, output, name=name: check(name, module, output))
        )
    try:
        with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
            warnings.simplefilter("always")
            try:
                yield
            except TaskError as error:
                match = FAILED_OPERATION.search(str(error.__cause__))
                if match is None:
                    raise
                line = find_forward_line([str(warning.message) for warning in caught])
                findings.append(f"the gradient of {match[1]} is NaN{f' ({line})' if line else ''}")
    finally:
        for handle in handles:
            handle.remove()


def find_forward_line(messages: list[str]) -> str | None:
    """Return file and line of the user's code that called the failed operation, from torch's warnings."""
    for message in messages:
        for file, line, _ in reversed(FRAME.findall(message)):
            if is_user_file(file):
                return f"{relative_path(file)}, line {line}"
    return None
