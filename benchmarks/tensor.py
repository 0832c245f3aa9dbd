"""Tensor parallelism on two ranks, and on two times two: steps/s relative to torch's parallelize_module.

    python benchmarks/tensor.py [--rounds 12]

The handwritten loop uses a plan of names for parallelize_module, cross entropy over the split vocabulary,
`fully_shard` over the data ranks, and fused AdamW. It does not compute the gradient norm, which Paceline
computes in each step.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import turns
from paceline import Spec
from paceline.distributed.world import read_world
from paceline.plan.plan import parse
from paceline.tasks.text import Text
from paceline.training.setup import build_training

TP, SAMPLES = 2, 8  # degree, and samples per data rank
TASK = Text(width=256, depth=4, context=128)
CPU = torch.device("cpu")


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(256, (SAMPLES, TASK.context + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


def build_paceline() -> Callable[[], Any]:
    dp = dist.get_world_size() // TP
    plan = parse(f"tp={TP}" + (f",dp={dp},zero=2" if dp > 1 else "")).resolve(dist.get_world_size())
    prepared = build_training(Spec(batch=SAMPLES * dp), plan, read_world(), TASK, CPU)
    micro_batches = [make_batch()]
    return lambda: prepared.step(micro_batches, 0, 1.0)


def build_handwritten() -> Callable[[], Any]:
    dp = dist.get_world_size() // TP
    mesh = init_device_mesh("cpu", (dp, TP), mesh_dim_names=("dp", "tp"))
    model: Any = TASK.model()
    columns, rows = ("query", "key", "value", "up"), ("out", "down")
    parallelize_module(
        model,
        mesh["tp"],
        {
            "token": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": ColwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False
            ),
            **{f"blocks.*.{name}": ColwiseParallel() for name in columns},
            **{f"blocks.*.{name}": RowwiseParallel() for name in rows},
        },
    )
    if dp > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=False)
    by_mesh: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.AdamW([{"params": params} for params in by_mesh.values()], fused=True)
    x, y = make_batch()

    def step() -> None:
        with loss_parallel():
            F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run_rank(rounds: int) -> None:
    dp = dist.get_world_size() // TP
    name = f"tp={TP}" + (f", dp={dp}, zero=2" if dp > 1 else "")
    turns.compare(name, build_paceline(), build_handwritten(), rounds)


if __name__ == "__main__":
    turns.main(__doc__, run_rank, (TP, 2 * TP))
