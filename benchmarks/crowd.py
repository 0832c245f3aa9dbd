"""What ranks compute that share a core, beside as many ranks as there are cores: steps of the text task without any collective in them.

python benchmarks/crowd.py [--steps 12] [--times 3]
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

import crowd  # by the name that the ranks know
import machine
from paceline.cluster.limits import usable_cores
from paceline.distributed.process_group import keep_freed_memory
from paceline.launch.rank_pool import Ranks
from paceline.task import load_task

SAMPLES = 16  # of a rank


def step_s(steps: int) -> float:
    """The median, on one thread; ranks begin each step together."""
    keep_freed_memory()
    torch.set_num_threads(1)
    task = load_task("text", {})
    model, dataset = task.model(), task.dataset("train")
    assert dataset is not None
    batch = default_collate([dataset[index] for index in range(SAMPLES)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    taken = []
    for _ in range(steps):
        dist.barrier()
        began = time.perf_counter()
        loss = task.loss(model(task.inputs(batch)), batch)
        assert isinstance(loss, torch.Tensor)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    cores = usable_cores()
    print(f"{machine.description()}, torch {torch.__version__}\n")
    print("| ranks | ms a step | beside one rank a core, each having its share of a core |\n| -- | -- | -- |")
    found: dict[int, list[float]] = {cores: [], 2 * cores: []}
    for _ in range(options.times):
        for ranks, seconds in found.items():
            with Ranks(ranks) as started:
                seconds.append(statistics.mean(started(crowd.step_s, options.steps, timeout_s=300)))
    for ranks, seconds in found.items():
        ratio = statistics.median(mine / alone for mine, alone in zip(seconds, found[cores], strict=True)) / (
            ranks / cores
        )
        print(f"| {ranks} | {statistics.median(seconds) * 1e3:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
