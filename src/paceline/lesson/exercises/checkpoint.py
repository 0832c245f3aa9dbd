"""Exercise: a checkpoint that is never half written."""

# %% exercise
# Write `save(state, path)` and `load(path)`. All ranks call `save` with the same state, and only rank 0 may
# write. After `save` has returned on any rank, the file must be complete for all ranks. If the process dies
# while it writes, `path` must still contain the previous checkpoint. `load` returns the state, or None if
# there is no checkpoint; it must not run code that the file contains (weights_only=True). Write by
# `torch.save` and read by `torch.load`.
import os

import torch
import torch.distributed as dist


def save(state, path):
    raise NotImplementedError


def load(path):
    raise NotImplementedError


# %% solution
import os

import torch
import torch.distributed as dist


def save(state, path):
    if dist.get_rank() == 0:
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)
    dist.barrier()


def load(path):
    return torch.load(path, weights_only=True) if os.path.exists(path) else None


# %% grade
import contextlib
import os
import tempfile
import time

import torch
import torch.distributed as dist

from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import require, run_solution

n = num_ranks()


def try_solution(path):
    rank, save_with_torch, written = dist.get_rank(), torch.save, []

    def slow(state, file):
        written.append(str(file))
        time.sleep(0.1)  # a rank that does not wait reads too early
        save_with_torch(state, file)

    torch.save = slow
    empty = load(path)
    dist.barrier()
    save({"step": 1, "weight": torch.ones(2)}, path)
    loaded = load(path)
    require(loaded is None or hasattr(loaded, "get"), "load must return the saved dict, or None", loaded)
    dist.barrier()
    if rank == 0:

        def die(state, file):
            with open(file, "wb") as half:
                half.write(b"half")
            raise KeyboardInterrupt

        torch.save, barrier = die, dist.barrier
        dist.barrier = lambda: None
        with contextlib.suppress(KeyboardInterrupt):
            save({"step": 2}, path)
        dist.barrier = barrier
    dist.barrier()
    try:
        after = load(path)["step"]
    except Exception as error:
        after = f"{type(error).__name__}"
    return {"empty": empty, "step": loaded and loaded.get("step"), "written": len(written), "after": after}


with tempfile.TemporaryDirectory() as folder:
    results = run_solution(try_solution, os.path.join(folder, "last.pt"))
for rank, line in enumerate(results):
    check(f"rank {rank}: load returns None without a checkpoint", line["empty"], None)
    check(f"rank {rank} reads the checkpoint after save has returned", line["step"], 1)
    check(f"rank {rank} writes {'once' if rank == 0 else 'nothing'}", line["written"], int(rank == 0))
    check(f"rank {rank} has the previous checkpoint if the writer dies", line["after"], 1)
