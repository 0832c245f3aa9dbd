"""How long an asynchronous save of a 100-million-parameter model holds the steps up, beside the time that a synchronous one takes.

Each round: steps alone; a synchronous save, while nothing else runs; the same number of steps with a save in the background,
at least until it is complete. It holds up by what those steps took longer than the steps alone, the copying aside included.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import machine
from paceline.distributed.process_group import threads_per_rank
from paceline.plan.plan import Plan
from paceline.run import RunFolder
from paceline.training.checkpoint.save import Index, Saver, collect_state, describe_model
from paceline.units import format_bytes, format_count

WIDTH, LAYERS, BATCH = 4096, 6, 64  # six layers of 16.8 million parameters


class Training:
    def __init__(self, ranks: int):
        self.model = nn.Sequential(
            *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU()))
        )
        self.called = (
            DistributedDataParallel(self.model, gradient_as_bucket_view=True) if ranks > 1 else self.model
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.inputs = torch.randn(BATCH // ranks, WIDTH)
        self.ranks = ranks
        self.step = 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            F.mse_loss(self.called(self.inputs), self.inputs).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def state(self) -> dict[str, Tensor]:
        return collect_state(self.model, self.optimizer)

    def index(self) -> Index:
        facts = {
            "task": "save",
            "set": {},
            "plan": "ddp" if self.ranks > 1 else "single",
            "ranks": self.ranks,
            "seed": 0,
            "epoch_samples": BATCH,
        }
        return Index(step=self.step, samples=self.step * BATCH, **facts, **describe_model(self.model))


def together(flag: bool) -> bool:
    """Whether all ranks say so."""
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, op=dist.ReduceOp.MIN)
    return bool(flags)


def round_of(training: Training, saver: Saver, count: int) -> tuple[float, float, float, float, float]:
    """Seconds: of a step alone, of a synchronous save, in which `start` returned, until the save was complete, and held up."""

    def now() -> float:
        dist.barrier()
        return time.perf_counter()

    began = now()
    training.steps(count)
    alone_s = (now() - began) / count

    began = now()
    saver.start(training.index(), training.state())
    _check(saver.result(wait=True))
    sync_s = now() - began

    training.steps(1)
    began, before, complete_s = now(), training.step, None
    saver.start(training.index(), training.state())
    start_s = time.perf_counter() - began
    while complete_s is None or training.step - before < count:
        training.steps(1)
        if complete_s is None and together(not saver.busy or _check(saver.result(wait=False))):
            complete_s = time.perf_counter() - began
    held_s = now() - began - (training.step - before) * alone_s
    return alone_s, sync_s, start_s, complete_s, held_s


def _check(result: object) -> bool:
    if (error := getattr(result, "error", None)) is not None:
        sys.exit(f"the save failed: {error}")
    return result is not None


def measure(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(threads_per_rank(ranks, options.threads))
    training = Training(ranks)
    run = RunFolder(Path(os.environ["SAVE_TO"]))
    saver = Saver(run, Plan().on(ranks), rank, ranks, torch.device("cpu"))
    training.steps(2)
    round_of(training, saver, 2)  # warms up, and allocates the memory that the state is copied to
    found = [round_of(training, saver, options.steps) for _ in range(options.rounds)]
    if rank == 0:
        _report(training, found)
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def _report(training: Training, found: list[tuple[float, float, float, float, float]]) -> None:
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    size = sum(tensor.nbytes for tensor in training.state().values())
    alone_s, sync_s, start_s, complete_s, held_s = map(statistics.median, zip(*found, strict=True))
    low, middle, high = statistics.quantiles((held / sync for _, sync, _, _, held in found), n=4)
    s = "s" * (training.ranks > 1)
    print(
        f"\n{training.ranks} rank{s}, {format_count(parameters)} parameters, {format_bytes(size)} of state, {len(found)} rounds, medians"
    )
    print(f"  a step alone                         {alone_s:7.3f} s")
    print(f"  a synchronous save                   {sync_s:7.3f} s   {format_bytes(size / sync_s)}/s")
    print(f"  an asynchronous save: copied aside   {start_s:7.3f} s")
    print(f"                        complete after {complete_s:7.3f} s")
    print(
        f"                        steps held up  {held_s:7.3f} s   {middle:.1%} of a synchronous save (quartiles {low:.1%}–{high:.1%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, help="of torch on each rank; default: all cores are used")
    parser.add_argument("--steps", type=int, default=8, help="at least so many beside a save")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to write to; default: here")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
    print(f"{machine.description()}, torch {torch.__version__}, gloo, {options.folder.resolve()}")
    sys.stdout.flush()
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            words = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(ranks),
                *sys.argv,
            ]
            environ = os.environ | {
                "SAVE_TO": folder,
                "OMP_NUM_THREADS": str(threads_per_rank(ranks, options.threads)),
            }
            subprocess.run(words, env=environ, check=True)


if __name__ == "__main__":
    main()
