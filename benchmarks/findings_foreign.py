"""A script without Paceline, for benchmarks/findings.py: DDP. Arguments: steps, MB that a step leaks."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(steps: int, leak_MB: float) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    layers = [nn.Conv1d(4, 32, 5), nn.GELU(), nn.Conv1d(32, 32, 5), nn.Flatten(), nn.Linear(32 * 56, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    history = []
    for step in range(steps):
        x, y = torch.randn(16, 4, 64), torch.randint(10, (16,))
        time.sleep(0.02)  # as a larger model would take
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if leak_MB:
            history.append(torch.ones(int(leak_MB * 2**18)))
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


train(int(sys.argv[1]), float(sys.argv[2]))
