"""Compute time of ranks that share a core, compared with one rank per core: text task without collectives.

python benchmarks/crowd.py [--steps 12] [--times 3]
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

import crowd  # under the name by which the ranks import it
import machine
from paceline.cluster.limits import usable_cores
from paceline.distributed.process_group import keep_freed_memory
from paceline.launch.rank_pool import Ranks
from paceline.task import load_task

SAMPLES = 16  # per rank


def measure_step_s(steps: int) -> float:
    """Return the median time of a step, on one thread; all ranks begin each step together."""
    keep_freed_memory()
    torch.set_num_threads(1)
    task = load_task("text", {})
    model, dataset = task.model(), task.dataset("train")
    assert dataset is not None
    batch = default_collate([dataset[index] for index in range(SAMPLES)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    times_s = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        loss = task.loss(model(task.inputs(batch)), batch)
        assert isinstance(loss, torch.Tensor)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    cores = usable_cores()
    print(f"{machine.description()}, torch {torch.__version__}\n")
    print("| ranks | ms per step | relative to one rank per core, per share of a core |\n| -- | -- | -- |")
    step_s: dict[int, list[float]] = {cores: [], 2 * cores: []}
    for _ in range(options.times):
        for ranks, seconds in step_s.items():
            with Ranks(ranks) as started:
                seconds.append(statistics.mean(started(crowd.measure_step_s, options.steps, timeout_s=300)))
    for ranks, seconds in step_s.items():
        ratios = [shared / alone for shared, alone in zip(seconds, step_s[cores], strict=True)]
        ratio = statistics.median(ratios) / (ranks / cores)
        print(f"| {ranks} | {statistics.median(seconds) * 1e3:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
