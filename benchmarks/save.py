"""Delay of training by an asynchronous save of 100 million parameters, relative to a synchronous save.

Each round runs steps without a save, then a synchronous save, then the same number of steps during a
background save, at least until it is complete. The delay is the additional time of these steps, including the
copy of the state.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import machine
from paceline.distributed.process_group import threads_per_rank
from paceline.plan.plan import Plan
from paceline.run import RunFolder
from paceline.training.checkpoint.index import Index
from paceline.training.checkpoint.save import Saver
from paceline.training.checkpoint.state import collect_state, describe_tensors
from paceline.units import format_bytes, format_count, several

WIDTH, LAYERS, BATCH = 4096, 6, 64  # six layers of 16.8 million parameters


class Training:
    def __init__(self, ranks: int):
        self.model = nn.Sequential(
            *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        )
        self.wrapped = (
            DistributedDataParallel(self.model, gradient_as_bucket_view=True) if ranks > 1 else self.model
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.inputs = torch.randn(BATCH // ranks, WIDTH)
        self.ranks = ranks
        self.step = 0

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            F.mse_loss(self.wrapped(self.inputs), self.inputs).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def state(self) -> dict[str, Tensor]:
        return collect_state(self.model, [self.optimizer])

    def index(self) -> Index:
        facts = {
            "task": "save",
            "set": {},
            "plan": "ddp" if self.ranks > 1 else "single",
            "ranks": self.ranks,
            "seed": 0,
            "epoch_samples": BATCH,
        }
        return Index(step=self.step, samples=self.step * BATCH, **facts, **describe_tensors(self.model))


def all_true(flag: bool) -> bool:
    """Return whether the flag is true on all ranks."""
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return bool(flags)


class Round(NamedTuple):
    """Seconds of one round."""

    step_s: float  # of a step without a save
    sync_s: float  # of a synchronous save
    start_s: float  # until `Saver.start` returned: the state is copied
    complete_s: float  # until the asynchronous save was complete
    delay_s: float  # of the steps by the asynchronous save


def measure_round(training: Training, saver: Saver, count: int) -> Round:

    def now() -> float:
        dist.barrier()
        return time.perf_counter()

    start = now()
    training.run_steps(count)
    step_s = (now() - start) / count

    start = now()
    saver.start(training.index(), training.state())
    is_saved(saver.result(wait=True))
    sync_s = now() - start

    training.run_steps(1)
    start, first_step, complete_s = now(), training.step, None
    saver.start(training.index(), training.state())
    start_s = time.perf_counter() - start
    while complete_s is None or training.step - first_step < count:
        training.run_steps(1)
        if complete_s is None and all_true(not saver.busy or is_saved(saver.result(wait=False))):
            complete_s = time.perf_counter() - start
    delay_s = now() - start - (training.step - first_step) * step_s
    return Round(step_s, sync_s, start_s, complete_s, delay_s)


def is_saved(result: object) -> bool:
    """Return whether a save has finished; exit if it failed."""
    if (error := getattr(result, "error", None)) is not None:
        sys.exit(f"the save failed: {error}")
    return result is not None


def measure(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(threads_per_rank(ranks, options.threads))
    training = Training(ranks)
    run = RunFolder(Path(os.environ["SAVE_TO"]))
    saver = Saver(run, Plan().resolve(ranks), rank, ranks, torch.device("cpu"))
    training.run_steps(2)
    measure_round(training, saver, 2)  # warm-up; allocates the memory to which the state is copied
    rounds = [measure_round(training, saver, options.steps) for _ in range(options.rounds)]
    if rank == 0:
        report(training, rounds)
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def report(training: Training, rounds: list[Round]) -> None:
    num_parameters = sum(parameter.numel() for parameter in training.model.parameters())
    state_bytes = sum(tensor.nbytes for tensor in training.state().values())
    median = Round(*map(statistics.median, zip(*rounds, strict=True)))
    low, middle, high = statistics.quantiles((item.delay_s / item.sync_s for item in rounds), n=4)
    print(
        f"\n{several(training.ranks, 'rank')}, {format_count(num_parameters)} parameters, "
        f"{format_bytes(state_bytes)} of state, {len(rounds)} rounds, medians"
    )
    print(f"  step without a save           {median.step_s:7.3f} s")
    print(
        f"  synchronous save              {median.sync_s:7.3f} s   "
        f"{format_bytes(state_bytes / median.sync_s)}/s"
    )
    print(f"  asynchronous save: copied in  {median.start_s:7.3f} s")
    print(f"                 complete after {median.complete_s:7.3f} s")
    print(
        f"                 delay of steps {median.delay_s:7.3f} s   "
        f"{middle:.1%} of a synchronous save (quartiles {low:.1%}–{high:.1%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, help="threads of torch per rank [default: cores / ranks]")
    parser.add_argument("--steps", type=int, default=8, help="minimum number of steps during a save")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="folder to write to [default: .]")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
    print(f"{machine.description()}, torch {torch.__version__}, gloo, {options.folder.resolve()}")
    sys.stdout.flush()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            threads = str(threads_per_rank(ranks, options.threads))
            environ = os.environ | {"SAVE_TO": folder, "OMP_NUM_THREADS": threads}
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            subprocess.run([sys.executable, *torchrun, *sys.argv], env=environ, check=True)


if __name__ == "__main__":
    main()
