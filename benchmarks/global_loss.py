"""Cost of `global_loss` beyond the loss itself, on two ranks.

    python benchmarks/global_loss.py [--rounds 12] [--width 16]

Three things alternate in the same ranks, a block of steps each:

* whole: steps of an example under ddp, whose loss is that of the whole global batch;
* encoder: the same steps with a loss of the samples of each rank that costs almost nothing: the sum of their
  embeddings, each multiplied by a constant;
* loss: the loss of the whole global batch, forward and backward, with respect to embeddings that each rank
  already has. Each rank computes it as one process does: nothing is gathered.

The cost of `global_loss` is what `whole` takes longer than `encoder` and `loss` together. The examples are
examples/clip.py with its sizes, and the small examples/contrastive.py with --width.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import turns
from paceline import Spec, Task
from paceline.distributed.process_group import keep_freed_memory
from paceline.distributed.world import read_world
from paceline.plan.plan import Plan
from paceline.task import load_task
from paceline.training.setup import build_training
from paceline.training.step.ddp_warmup import warm_up_ddp

EXAMPLES = Path(__file__).parents[1] / "examples"
CPU = torch.device("cpu")
CLIP, CONTRASTIVE = "clip.py:Clip", "contrastive.py:Contrastive"
CASES = ((CLIP, 64, 4), (CONTRASTIVE, 128, 20), (CONTRASTIVE, 256, 20))  # batch: global; steps of a block


class EncoderOnly(Task):
    """An example with almost no loss."""

    example: str
    width: int

    def model(self) -> Any:
        return load_example(self.example, self.width).model()

    def inputs(self, batch: list[Tensor]) -> list[Tensor]:
        return batch

    def dataset(self, split: str) -> Any:
        return load_example(self.example, self.width).dataset(split)

    def loss(self, output: tuple[Tensor, Tensor, Tensor], batch: list[Tensor]) -> Tensor:
        first, second, scale = output
        return (first.sum() - second.sum()) * scale


def load_example(name: str, width: int) -> Any:
    return load_task(f"{EXAMPLES}/{name}", {"width": width} if name == CONTRASTIVE else {})


def read_batch(task: Task, indices: range) -> list[Tensor]:
    samples: Any = task.dataset("train")
    return [torch.stack(part) for part in zip(*(samples[index] for index in indices), strict=True)]


def build_step(task: Task, batch: int) -> Callable[[], Any]:
    world = read_world()
    prepared = build_training(Spec(batch=batch), Plan().resolve(world.size), world, task, CPU)
    torch.manual_seed(world.rank)
    own = range(world.rank * batch // world.size, (world.rank + 1) * batch // world.size)
    views = read_batch(task, own)
    prepared.step.model = warm_up_ddp(prepared.step, views)
    return lambda: prepared.step([views], 1, 1.0)


def build_loss(task: Any, batch: int) -> Callable[[], Any]:
    """Return a function that computes the loss of a global batch and its gradients."""
    torch.manual_seed(0)
    whole = read_batch(task, range(batch))
    # Of unit length, as the encoder's: the softmax of larger products has slow, denormal numbers.
    views = (torch.nn.functional.normalize(torch.randn(batch, task.width), dim=-1) for _ in range(2))
    embedded = [view.requires_grad_() for view in views]
    leaves = [*embedded, torch.tensor(5.0, requires_grad=True)]
    return lambda: torch.autograd.grad(task.global_loss(tuple(leaves), whole), leaves)


def run_rank(rounds: int, width: int) -> None:
    keep_freed_memory()  # as trainings do
    for name, batch, block in CASES:
        example = load_example(name, width)
        parts = {
            "whole": build_step(example, batch),
            "encoder": build_step(EncoderOnly(example=name, width=width), batch),
            "loss": build_loss(example, batch),
        }
        for run in [*parts.values()] * 2:  # the warm-up
            turns.time_block(run, block)
        times_s: dict[str, list[float]] = {part: [] for part in parts}
        for index in range(rounds):
            for part in list(parts)[:: 1 if index % 2 else -1]:
                times_s[part].append(turns.time_block(parts[part], block))
        costs = [
            whole / (encoder + loss) - 1
            for whole, encoder, loss in zip(*(times_s[part] for part in parts), strict=True)
        ]
        low, median, high = statistics.quantiles(costs, n=4)
        described = ", ".join(f"{part} {1e3 * statistics.median(times_s[part]):.2f} ms" for part in parts)
        turns.print_on_rank_0(
            f"{name.partition('.')[0]}, width {example.width}, batch {batch}: {described}; global_loss costs "
            f"{median:.1%} ({low:.1%} to {high:.1%}) of a step"
        )


if __name__ == "__main__":
    turns.main(__doc__, run_rank, (2,), width=16)
