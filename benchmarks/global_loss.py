"""A loss over the global batch on two ranks: steps/s relative to a loss as large that is not gathered.

    python benchmarks/global_loss.py [--rounds 12]

Both contenders train the encoder of examples/contrastive.py under ddp. The other contender repeats the
embeddings of its own samples in place of those of the other rank, so that it computes as large a loss, and
nothing is gathered. So the ratio is the cost of `global_loss` beyond the loss itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import turns
from paceline import Spec, Task
from paceline.distributed.world import read_world
from paceline.plan.plan import Plan
from paceline.task import load_task
from paceline.training.ddp_warmup import warm_up_ddp
from paceline.training.setup import build_training

EXAMPLE: Any = load_task(f"{Path(__file__).parents[1] / 'examples/contrastive.py'}:Contrastive", {})
CPU = torch.device("cpu")
BATCHES = (128, 256)  # global
BLOCK = 20  # steps


class Repeated(Task):
    """The example with a loss of the same size, made of the samples of this rank."""

    def model(self) -> Any:
        return EXAMPLE.model()

    def inputs(self, batch: list[Tensor]) -> list[Tensor]:
        return batch

    def dataset(self, split: str) -> Any:
        return EXAMPLE.dataset(split)

    def loss(self, output: tuple[Tensor, Tensor, Tensor], batch: list[Tensor]) -> Tensor:
        first, second, scale = output
        others = dist.get_world_size() - 1 if dist.is_initialized() else 0
        whole = (torch.cat([own, *[own.detach()] * others]) for own in (first, second))
        loss: Tensor = EXAMPLE.global_loss((*whole, scale), batch)
        return loss


def build(task: Task, batch: int) -> Callable[[], Any]:
    world = read_world()
    prepared = build_training(Spec(batch=batch), Plan().resolve(world.size), world, task, CPU)
    samples = EXAMPLE.dataset("train")
    torch.manual_seed(world.rank)
    own = range(world.rank * batch // world.size, (world.rank + 1) * batch // world.size)
    views = [torch.stack(view) for view in zip(*(samples[index] for index in own), strict=True)]
    prepared.step.model = warm_up_ddp(prepared.step, views)
    return lambda: prepared.step([views], 1, 1.0)


def run_rank(rounds: int) -> None:
    for batch in BATCHES:
        contenders = build(EXAMPLE, batch), build(Repeated(), batch)
        turns.compare(f"batch {batch}", *contenders, rounds, BLOCK, "a loss that is not gathered")


if __name__ == "__main__":
    turns.main(__doc__, run_rank, (2,))
