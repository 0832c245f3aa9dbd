"""Steps/s on two ranks: Paceline beside loops written by hand and other libraries, in one run.

All contenders live in the same two processes and take turns, a block of steps each, with one thread a rank. What counts is
the ratio of two blocks of the same round: the speed of a machine drifts, and that of two neighbouring blocks hardly does.
A block that other programs disturbed is done again.
"""

import argparse
import importlib.util
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import machine
from machine import OTHERS, TRIES, Gauge
from paceline import Spec, Task, train
from paceline.events import Step, Writer
from paceline.tasks.digits import Digits, Images

RANKS = 2


class DigitsCnn(Digits):
    """The built-in task without its validation, so that only steps are timed."""

    def dataset(self, split: str) -> Any:
        return super().dataset(split) if split == "train" else None


class Mlp(Task):
    """10.5 million parameters, random data."""

    def model(self) -> nn.Module:
        sizes = (1024, 2048, 2048, 2048)
        hidden = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))

    def dataset(self, split: str) -> Any:
        if split != "train":
            return None
        drawn = torch.Generator().manual_seed(0)
        return Images(torch.randn(4096, 1024, generator=drawn), torch.randint(10, (4096,), generator=drawn))

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class DigitsOneByOne(DigitsCnn):
    def dataset(self, split: str) -> Any:
        return one_by_one(super().dataset(split))


class MlpOneByOne(Mlp):
    def dataset(self, split: str) -> Any:
        return one_by_one(super().dataset(split))


def one_by_one(images: Images | None) -> TensorDataset | None:
    """The same data without `batch_of`: it is fetched sample by sample, as torch's DataLoader does for the loops beside."""
    return images and TensorDataset(images.images, images.labels)


@dataclass(frozen=True)
class Case:
    name: str
    task: Task
    one_by_one: Task  # the same, its samples fetched one by one
    batch: int  # global
    block: int  # steps in a turn

    @property
    def share(self) -> int:
        return self.batch // dist.get_world_size()

    @property
    def dataset(self) -> Any:
        return self.task.dataset("train")


CASES = {
    "digits": Case("digits CNN, batch 64", DigitsCnn(), DigitsOneByOne(), 64, 100),
    "mlp": Case("MLP of 10.5 M parameters, batch 128", Mlp(), MlpOneByOne(), 128, 10),
}

# A contender is a generator: each `next` is one step.


def paceline(case: Case) -> Iterator[None]:
    return _paceline(case, case.task)


def paceline_one_by_one(case: Case) -> Iterator[None]:
    return _paceline(case, case.one_by_one)


def _paceline(case: Case, task: Task) -> Iterator[None]:
    """As a rank of the launcher consumes it: rank 0 writes each event to events.jsonl."""
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(Path(folder) / "events.jsonl") if dist.get_rank() == 0 else None
        for event in train(Spec(batch=case.batch, steps=10**9), task=task, device="cpu"):
            if writer is not None:
                writer.write(event)
            if isinstance(event, Step):
                yield


def textbook(case: Case) -> Iterator[None]:
    """DistributedDataParallel as in the tutorials: the defaults of all parts, and the loss is read in each step."""
    model = DistributedDataParallel(case.task.model())
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = case.dataset
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=case.share, sampler=sampler)
    running = 0.0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()
            yield


def tuned(case: Case) -> Iterator[None]:
    """All that one can turn by hand without leaving DistributedDataParallel; no norm of the gradient, nothing written down."""
    model = DistributedDataParallel(case.task.model(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    dataset = case.dataset
    images, labels = dataset.images, dataset.labels
    first = dist.get_rank() * case.share
    running = torch.zeros(())
    for epoch in itertools.count():
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for begin in range(first, len(labels) - case.batch + 1, case.batch):
            chosen = order[begin : begin + case.share]
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            running += loss.detach()
            yield


def fabric(case: Case) -> Iterator[None]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    model = case.task.model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(case.dataset, batch_size=case.share, shuffle=True))
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            fabric.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            yield


def accelerate(case: Case) -> Iterator[None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = case.task.model()
    loader = DataLoader(case.dataset, batch_size=case.share, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    while True:
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(images), labels))
            optimizer.step()
            yield


def transformers(case: Case) -> Iterator[None]:
    """The Trainer owns its loop, so it runs in a thread of its own that stands still between two turns."""
    from torch.utils.data import default_collate
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self, model: nn.Module):
            super().__init__()
            self.model = model

        def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.model(images)
            return {"loss": F.cross_entropy(output, labels), "logits": output}

    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class Turns(TrainerCallback):
        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            done.release()
            go.acquire()

    def run() -> None:
        go.acquire()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                use_cpu=True,
                per_device_train_batch_size=case.share,
                max_steps=10**9,
                save_strategy="no",
                report_to="none",
                logging_strategy="no",
                disable_tqdm=True,
            )
            Trainer(
                model=WithLoss(case.task.model()),
                args=arguments,
                train_dataset=case.dataset,
                data_collator=lambda samples: dict(zip(("images", "labels"), default_collate(samples), strict=True)),
                callbacks=[Turns()],
            ).train()

    threading.Thread(target=run, daemon=True).start()
    while True:
        go.release()
        done.acquire()
        yield


CONTENDERS: dict[str, tuple[Callable[[Case], Iterator[None]], str | None]] = {
    "Paceline": (paceline, None),
    "Paceline, sample by sample": (paceline_one_by_one, None),
    "textbook DDP": (textbook, None),
    "DDP tuned by hand": (tuned, None),
    "Lightning Fabric": (fabric, "lightning_fabric"),
    "Accelerate": (accelerate, "accelerate"),
    "HF Trainer": (transformers, "transformers"),
}


@dataclass(frozen=True)
class Block:
    step_s: float
    cpu_s: float  # of a step, over both ranks
    others: float  # share of the machine that other programs took


def time_block(steps: Iterator[None], count: int) -> Block:
    dist.barrier()
    gauge, own, began = Gauge(), time.process_time(), time.perf_counter()
    for _ in range(count):
        next(steps)
    cpu = torch.tensor(time.process_time() - own)
    dist.all_reduce(cpu)  # a barrier as well
    wall_s = time.perf_counter() - began
    others = torch.tensor(gauge.others(cpu.item()))
    dist.broadcast(others, src=0)
    return Block(wall_s / count, cpu.item() / count, others.item())


def measure(case: Case, names: list[str], rounds: int) -> dict[str, list[Block]]:
    """The blocks of each contender, round by round, in an order that is drawn anew for each round."""
    running = {name: CONTENDERS[name][0](case) for name in names}
    found: dict[str, list[Block]] = {name: [] for name in names}
    for name in names:
        time_block(running[name], case.block)  # warm up
    for turn in range(rounds):
        for name in random.Random(turn).sample(names, len(names)):
            for _ in range(TRIES):
                block = time_block(running[name], case.block)
                if block.others < OTHERS:
                    break
                time.sleep(1)
            found[name].append(block)
    return found


def table(case: Case, found: dict[str, list[Block]]) -> None:
    print(f"\n{case.name}\n{'':28}{'steps/s':>9}{'ms/step':>9}{'CPU ms':>9}   {'to the textbook loop':24}{'to the tuned loop'}")
    for name, (_, module) in CONTENDERS.items():
        if name not in found:
            print(f"{name:28}{'not installed' if module and importlib.util.find_spec(module) is None else 'left out':>18}")
            continue
        step_s, cpu_s = (statistics.median(getattr(block, field) for block in found[name]) for field in ("step_s", "cpu_s"))
        ratios = [_ratio(found[other], found[name]) if other in found else "" for other in ("textbook DDP", "DDP tuned by hand")]
        print(f"{name:28}{1 / step_s:9.1f}{step_s * 1e3:9.2f}{cpu_s * 1e3:9.2f}   {ratios[0]:24}{ratios[1]}")
    disturbed = sum(block.others >= OTHERS for blocks in found.values() for block in blocks)
    if disturbed:
        print(f"{disturbed} of {sum(map(len, found.values()))} blocks were disturbed by other programs, {TRIES} times in a row")


def _ratio(other: list[Block], own: list[Block]) -> str:
    """Median of the ratios of the rounds, and their quartiles."""
    ratios = [a.step_s / b.step_s for a, b in zip(other, own, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all if none is said")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="CONTENDER", help=", ".join(CONTENDERS))
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"there is no case {', '.join(unknown)}")
    if "RANK" not in os.environ:
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *sys.argv]
        sys.exit(subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    names = [name for name, (_, module) in CONTENDERS.items() if module is None or importlib.util.find_spec(module) is not None]
    names = [name for name in names if options.only is None or name in options.only]
    if dist.get_rank() == 0:
        print(f"{machine.description()}, torch {torch.__version__}; {RANKS} ranks over gloo, one thread each")
        print(f"{options.rounds} rounds; median of the ratios of the rounds (quartiles); above 1 is faster")
    for case in [CASES[name] for name in options.cases or CASES]:
        found = measure(case, names, options.rounds)
        if dist.get_rank() == 0:
            table(case, found)
    sys.stdout.flush()
    os._exit(0)  # the threads and generators of all contenders end with the process


if __name__ == "__main__":
    main()
