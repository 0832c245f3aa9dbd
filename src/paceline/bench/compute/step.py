"""The training step of a task on one rank, as a whole and block by block."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from paceline.batch import move
from paceline.bench.compute.kernels import MIN_REPETITIONS, clock_for
from paceline.bench.result import Row
from paceline.bench.timer import Budget, Timing, measure
from paceline.data.fake import example_batch
from paceline.data.samples import Batch
from paceline.distributed.process_group import process_group
from paceline.distributed.world import World
from paceline.parallel.blocks import find_blocks
from paceline.parallel.loss.forward import autocast, call_model
from paceline.plan.comm_volume import block_pattern
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task, read_layout
from paceline.training.optimization.read_updates import refuse_updates
from paceline.training.prepared import PreparedTraining
from paceline.training.setup import build_training
from paceline.training.step.step import TrainingStep


@dataclass(frozen=True)
class ReadyStep:
    """A prepared training and a batch on the device. Calling it makes one step."""

    prepared: PreparedTraining
    batch: Batch

    @property
    def step(self) -> TrainingStep:
        return self.prepared.step

    def __call__(self) -> None:
        self.on(self.batch)

    def on(self, batch: Batch) -> None:
        """Make one step on this batch."""
        self.step([batch], 0, 1.0)


@contextlib.contextmanager
def prepare_step(spec: Spec, task: Task, device: torch.device) -> Iterator[ReadyStep]:
    """Yield the step of a task on one process. Raises the errors of a training before its first step."""
    plan = ResolvedPlan()
    refuse_updates(task, "this bench", "use a task with one loss")
    with process_group(World(), device, spec.timeout_s, Path("runs")):
        batch = example_batch(spec, task, plan)
        prepared = build_training(spec, plan, World(), task, device)
        yield ReadyStep(prepared, move(batch, device))


def time_step(ready: ReadyStep, budget_s: float) -> Timing:
    """Return the time of one step."""
    budget = Budget(budget_s * 0.8, budget_s * 0.1, min_count=MIN_REPETITIONS)
    return measure(ready, budget, clock_for(ready.step.device))


def measure_step(ready: ReadyStep, spec: Spec, budget_s: float) -> Iterator[Row]:
    """Yield a row for the whole step, and two for each kind of block: forward and backward."""
    kinds = _find_block_kinds(ready)
    each_s = budget_s / (1 + 2 * len(kinds))
    flop = count_flop(ready)
    timing = time_step(ready, each_s)
    row: dict[str, Any] = {"operation": "step", "dtype": spec.precision, "shape": f"{spec.batch} samples"}
    yield (
        row
        | {"flop": flop, "flops": flop / timing.median_s, "per_s": spec.batch / timing.median_s}
        | timing.fields()
    )
    for kind in kinds:
        for name, run in kind.build_runs(ready.step).items():
            flop = count_flop(run)
            budget = Budget(each_s * 0.7, each_s * 0.2, min_count=MIN_REPETITIONS)
            timing = measure(run, budget, clock_for(ready.step.device))
            row = {
                "operation": f"block {name}",
                "dtype": spec.precision,
                "shape": kind.name,
                "count": kind.count,
            }
            yield row | {"flop": flop, "flops": flop / timing.median_s} | timing.fields()


@dataclass
class _BlockKind:
    """Identical blocks, and the arguments with which the first of them was called."""

    name: str
    count: int
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def build_runs(self, step: TrainingStep) -> dict[str, Callable[[], object]]:
        """Return functions that run the block forward and, if it has gradients, backward."""
        args, kwargs = tree_map(_as_leaf, (self.args, self.kwargs))
        inputs = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        inputs += [parameter for parameter in self.block.parameters() if parameter.requires_grad]

        def forward() -> Any:
            with autocast(step.precision, step.device):
                return self.block(*args, **kwargs)

        outputs = [leaf for leaf in tree_leaves(forward()) if isinstance(leaf, Tensor) and leaf.requires_grad]
        runs: dict[str, Callable[[], object]] = {"forward": forward}
        if inputs and outputs:
            gradients = [torch.randn_like(output) for output in outputs]
            runs["backward"] = lambda: torch.autograd.grad(
                outputs, inputs, gradients, retain_graph=True, allow_unused=True
            )
        return runs


def _as_leaf(item: Any) -> Any:
    """Return a tensor as a leaf of a new graph."""
    return item.detach().clone().requires_grad_(item.requires_grad) if isinstance(item, Tensor) else item


def _find_block_kinds(ready: ReadyStep) -> list[_BlockKind]:
    """Return the blocks, grouped by class, shapes of parameters and shapes of inputs."""
    model, task = ready.prepared.model, ready.step.task
    units = {id(block) for block in find_blocks(model, read_layout(task))}
    kinds: dict[object, _BlockKind] = {}
    names = {id(module): name for name, module in model.named_modules()}

    def record(block: nn.Module, args: Any, kwargs: Any) -> None:
        key = (type(block), *_shapes(list(block.parameters())), *_shapes((args, kwargs)))
        if (kind := kinds.get(key)) is not None:
            kind.count += 1
            kind.name = f"{block_pattern(names[id(kind.block)])} {type(block).__name__} × {kind.count}"
        else:
            kinds[key] = _BlockKind(f"{names[id(block)]} {type(block).__name__}", 1, block, args, kwargs)

    hooks = [
        module.register_forward_pre_hook(record, with_kwargs=True)
        for module in model.modules()
        if id(module) in units
    ]
    try:
        with autocast(ready.step.precision, ready.step.device):
            call_model(task, model, ready.batch)
    finally:
        for hook in hooks:
            hook.remove()
    return list(kinds.values())


def _shapes(tree: Any) -> list[object]:
    leaves, structure = tree_flatten(tree)
    return [
        structure,
        *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves),
    ]


def count_flop(run: Callable[[], object]) -> int:
    """Return the FLOP of a call as torch counts them, plus attention on a CPU."""
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        run()
    return int(counter.get_total_flops())


def _forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _backward(
    gradient: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


ATEN = torch.ops.aten
# torch 2.13: FlopCounterMode does not count attention on a CPU.
CPU_ATTENTION = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: _forward,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
