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

from paceline.bench.compute.kernels import LEAST, clock
from paceline.bench.result import Row
from paceline.bench.timer import Budget, Timing, measure
from paceline.data.fake import example_batch
from paceline.data.loader import Batch
from paceline.distributed.process_group import process_group
from paceline.distributed.world import World
from paceline.parallel.blocks import find_blocks
from paceline.parallel.forward import autocast, call_model
from paceline.plan.comm_volume import pattern
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task, read_layout
from paceline.training.setup import PreparedTraining, build_training
from paceline.training.step import TrainingStep


@dataclass(frozen=True)
class ReadyStep:
    """A task that is ready to step: its model on the device, and a batch."""

    laid: PreparedTraining
    batch: Batch

    @property
    def step(self) -> TrainingStep:
        return self.laid.step

    def __call__(self) -> None:
        self.on(self.batch)

    def on(self, batch: Batch) -> None:
        self.step([batch], 0, 1.0)


@contextlib.contextmanager
def ready(spec: Spec, task: Task, device: torch.device) -> Iterator[ReadyStep]:
    """Raises the errors that a training would before its first step."""
    plan = ResolvedPlan()
    with process_group(World(), device, spec.timeout_s, Path("runs")):
        batch = example_batch(spec, task, plan)
        laid = build_training(spec, plan, World(), task, device)
        yield ReadyStep(
            laid, tree_map(lambda item: item.to(device) if isinstance(item, Tensor) else item, batch)
        )


def time_step(of: ReadyStep, budget_s: float) -> Timing:
    return measure(of, Budget(budget_s * 0.8, budget_s * 0.1, least=LEAST), clock(of.step.device))


def measure_step(of: ReadyStep, spec: Spec, budget_s: float) -> Iterator[Row]:
    """A row for the whole step, and two for each kind of block: forward and backward."""
    kinds = _kinds(of)
    each_s = budget_s / (1 + 2 * len(kinds))
    flop = counted(of)
    found = time_step(of, each_s)
    row: dict[str, Any] = {"operation": "step", "dtype": spec.precision, "shape": f"{spec.batch} samples"}
    yield (
        row
        | {"flop": flop, "flops": flop / found.median_s, "per_s": spec.batch / found.median_s}
        | found.fields()
    )
    for kind in kinds:
        for name, run in kind.runs(of.step).items():
            flop = counted(run)
            found = measure(run, Budget(each_s * 0.7, each_s * 0.2, least=LEAST), clock(of.step.device))
            row = {
                "operation": f"block {name}",
                "dtype": spec.precision,
                "shape": kind.name,
                "count": kind.count,
            }
            yield row | {"flop": flop, "flops": flop / found.median_s} | found.fields()


@dataclass
class _Kind:
    """Blocks that are alike, and what the first of them was called with."""

    name: str
    count: int
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def runs(self, step: TrainingStep) -> dict[str, Callable[[], object]]:
        args, kwargs = tree_map(_leaf, (self.args, self.kwargs))
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


def _leaf(item: Any) -> Any:
    return item.detach().clone().requires_grad_(item.requires_grad) if isinstance(item, Tensor) else item


def _kinds(of: ReadyStep) -> list[_Kind]:
    """Blocks with the same class, parameters and inputs are of one kind."""
    model, task = of.laid.model, of.step.task
    units = {id(block) for block in find_blocks(model, read_layout(task))}
    found: dict[object, _Kind] = {}
    names = {id(module): name for name, module in model.named_modules()}

    def note(block: nn.Module, args: Any, kwargs: Any) -> None:
        key = (type(block), *_shapes(list(block.parameters())), *_shapes((args, kwargs)))
        if key in found:
            found[key].count += 1
            found[
                key
            ].name = f"{pattern(names[id(found[key].block)])} {type(block).__name__} × {found[key].count}"
        else:
            found[key] = _Kind(f"{names[id(block)]} {type(block).__name__}", 1, block, args, kwargs)

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if id(module) in units
    ]
    try:
        with autocast(of.step.precision, of.step.device):
            call_model(task, model, of.batch)
    finally:
        for hook in hooks:
            hook.remove()
    return list(found.values())


def _shapes(tree: Any) -> list[object]:
    leaves, structure = tree_flatten(tree)
    return [
        structure,
        *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves),
    ]


def counted(run: Callable[[], object]) -> int:
    """FLOPs of a call, as torch counts them; attention on a CPU, which it leaves out (torch 2.13), included."""
    with FlopCounterMode(display=False, custom_mapping=OF_CPU) as counter:
        run()
    return int(counter.get_total_flops())


def _forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _backward(
    gradient: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


ATEN = torch.ops.aten
OF_CPU = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: _forward,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
