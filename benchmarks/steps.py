"""Steps/s on two ranks: Paceline beside loops written by hand and other libraries, in one run.

Each contender has two processes of its own, started as its users start them: `paceline train`, and torchrun for the others. They
take turns, a block of steps each, and wait meanwhile. What counts is the ratio of two blocks of the same round: the speed of a
machine drifts, and that of two neighbouring blocks hardly does. A block that other programs disturbed is done again. A library that
is not installed, or does not start, is named and left out: pip install --constraint constraints.txt --editable ".[bench]"

Started by torchrun, this file is one of the loops; for Paceline it is the file with the tasks.
"""

import argparse
import contextlib
import importlib.util
import itertools
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline import Task
from paceline.tasks.digits import Digits, Images

RANKS = 2
STARTS_WITHIN_S = 300
PACELINE, ONE_BY_ONE = "Paceline", "Paceline, sample by sample"
TEXTBOOK, TUNED = "textbook DDP", "DDP tuned by hand"


class Gate:
    """Where the processes of a contender wait for their turn: on the socket that GATE names. To be passed once in each step."""

    def __init__(self) -> None:
        self.left, self.began = 0, (0.0, 0.0)
        self.line = socket.socket(socket.AF_UNIX)
        self.line.connect(os.environ["GATE"])

    def __call__(self) -> None:
        if not self.left:
            took = [now - began for now, began in zip(self.now(), self.began, strict=True)]
            self.line.sendall(f"{took[0]} {took[1]}\n".encode())
            count = self.line.recv(64)
            if not count:  # nobody asks for more
                os._exit(0)
            self.left = int(count)
            self.began = self.now()
        self.left -= 1

    def now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


gate = cache(Gate)


class Gated(Task):
    def inputs(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        gate()()
        return batch[0]


class DigitsCnn(Gated, Digits):
    """The built-in task without its validation, so that only steps are timed."""

    def dataset(self, split: str) -> Any:
        return Digits.dataset(self, split) if split == "train" else None


class Mlp(Gated):
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


class Encoder(nn.Module):
    """torch's own encoder as a language model: 256 tokens, 32 positions."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.token, self.position = nn.Embedding(256, 64), nn.Embedding(32, 64)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
        self.head = nn.Linear(64, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        x = self.token(tokens) + self.position(torch.arange(tokens.size(1)))
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class Transformer(Gated):
    """135 thousand parameters, random tokens."""

    def model(self) -> nn.Module:
        return Encoder()

    def dataset(self, split: str) -> Any:
        if split != "train":
            return None
        tokens = torch.randint(256, (4096, 33), generator=torch.Generator().manual_seed(0))
        return Images(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="none")


class DigitsOneByOne(DigitsCnn):
    def dataset(self, split: str) -> Any:
        return one_by_one(super().dataset(split))


class MlpOneByOne(Mlp):
    def dataset(self, split: str) -> Any:
        return one_by_one(super().dataset(split))


class TransformerOneByOne(Transformer):
    def dataset(self, split: str) -> Any:
        return one_by_one(super().dataset(split))


def one_by_one(images: Images | None) -> TensorDataset | None:
    """The same data without `batch_of`: it is fetched sample by sample, as torch's DataLoader does for the loops beside."""
    return images and TensorDataset(images.images, images.labels)


@dataclass(frozen=True)
class Case:
    name: str
    task: type[Task]
    one_by_one: type[Task]  # the same, its samples fetched one by one
    batch: int  # global
    block: int  # steps in a turn

    @property
    def share(self) -> int:
        return self.batch // RANKS

    @property
    def dataset(self) -> Any:
        return self.task().dataset("train")

    def model(self) -> nn.Module:
        return self.task().model()


CASES = {
    "digits": Case("digits CNN, batch 64", DigitsCnn, DigitsOneByOne, 64, 100),
    "mlp": Case("MLP of 10.5 M parameters, batch 128", Mlp, MlpOneByOne, 128, 5),
    "transformer": Case(
        "transformer of 135 k parameters, batch 64", Transformer, TransformerOneByOne, 64, 30
    ),
}


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def textbook(case: Case, turn: Gate) -> None:
    """DistributedDataParallel as in the tutorials: the defaults of all parts, and the loss is read in each step."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(case.model())
    optimizer = torch.optim.AdamW(model.parameters())
    dataset = case.dataset
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=case.share, sampler=sampler)
    running = 0.0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for images, labels in loader:
            turn()
            optimizer.zero_grad()
            loss = mean_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()


def tuned(case: Case, turn: Gate) -> None:
    """All that one can turn by hand without leaving DistributedDataParallel; no norm of the gradient, nothing written down."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(case.model(), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    dataset = case.dataset
    images, labels = dataset.images, dataset.labels
    first = dist.get_rank() * case.share
    running = torch.zeros(())
    for epoch in itertools.count():
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for begin in range(first, len(labels) - case.batch + 1, case.batch):
            turn()
            chosen = order[begin : begin + case.share]
            loss = mean_loss(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            running += loss.detach()


def fabric(case: Case, turn: Gate) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    model = case.model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(case.dataset, batch_size=case.share, shuffle=True))
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            turn()
            optimizer.zero_grad()
            fabric.backward(mean_loss(model(images), labels))
            optimizer.step()


def accelerate(case: Case, turn: Gate) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = case.model()
    loader = DataLoader(case.dataset, batch_size=case.share, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    while True:
        for images, labels in loader:
            turn()
            optimizer.zero_grad()
            accelerator.backward(mean_loss(model(images), labels))
            optimizer.step()


def transformers(case: Case, turn: Gate) -> None:
    from torch.utils.data import default_collate
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self, model: nn.Module):
            super().__init__()
            self.model = model

        def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.model(images)
            return {"loss": mean_loss(output, labels), "logits": output}

    class Turns(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            turn()

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
            model=WithLoss(case.model()),
            args=arguments,
            train_dataset=case.dataset,
            data_collator=lambda samples: dict(
                zip(("images", "labels"), default_collate(samples), strict=True)
            ),
            callbacks=[Turns()],
        ).train()


# With the modules that a loop needs; Paceline's is its own.
LOOPS: dict[str, tuple[Callable[[Case, Gate], None] | None, tuple[str, ...]]] = {
    PACELINE: (None, ()),
    ONE_BY_ONE: (None, ()),
    TEXTBOOK: (textbook, ()),
    TUNED: (tuned, ()),
    "Lightning Fabric": (fabric, ("lightning_fabric",)),
    "Accelerate": (accelerate, ("accelerate",)),
    "HF Trainer": (transformers, ("transformers", "accelerate")),
}


def missing(name: str) -> list[str]:
    """The modules that a contender needs and that are not installed."""
    return [module for module in LOOPS[name][1] if importlib.util.find_spec(module) is None]


class NotStartedError(Exception):
    """A contender ended before its first step, or did not reach it in time."""


@dataclass(frozen=True)
class Block:
    step_s: float
    cpu_s: float  # of a step, over both ranks
    others: float  # share of the machine that other programs took


class Contender:
    """The processes of one contender, each waiting at its gate."""

    def __init__(self, name: str, case: str, folder: Path):
        self.name, self.block = name, CASES[case].block
        loop, _ = LOOPS[name]
        if loop is None:
            task = CASES[case].task if name == PACELINE else CASES[case].one_by_one
            wish = ["--batch", str(CASES[case].batch), "--steps", str(10**9), "--ranks", str(RANKS)]
            wish += ["--timeout", "86400"]  # while the others have their turns it stands still
            words = [
                "paceline",
                "train",
                f"{__file__}:{task.__name__}",
                *wish,
                "--run-dir",
                str(folder / "run"),
            ]
        else:
            words = [
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(RANKS),
                __file__,
                case,
                "--loop",
                name,
            ]
        path, self.errors = folder / "gate", folder / "stderr"
        with socket.socket(socket.AF_UNIX) as gate, open(self.errors, "wb") as said:
            gate.bind(str(path))
            gate.listen()
            gate.settimeout(1)
            environ = os.environ | {
                "GATE": str(path),
                "OMP_NUM_THREADS": "1",
            }  # as torchrun does, with a warning
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", *words], env=environ, stdout=subprocess.DEVNULL, stderr=said
            )
            try:
                self.lines = [self._accepted(gate).makefile("rw") for _ in range(RANKS)]
                for line in self.lines:
                    if not line.readline():  # it has come to its first step
                        raise NotStartedError
            except NotStartedError:
                self.end()
                raise NotStartedError(self._reason() or f"no first step within {STARTS_WITHIN_S} s") from None

    def _reason(self) -> str:
        """What its processes say of their end: the first line that names an exception, or else the last lines."""
        text = self.errors.read_text(errors="replace").strip()
        named = [
            line for line in text.splitlines() if re.match(r"(\[\w+\]:)?(\w+\.)*\w*(Error|Exception)\b", line)
        ]
        return named[0] if named else text[-500:]

    def _accepted(self, gate: socket.socket) -> socket.socket:
        until = time.monotonic() + STARTS_WITHIN_S
        while time.monotonic() < until and self.launcher.poll() is None:
            with contextlib.suppress(TimeoutError):
                return gate.accept()[0]
        raise NotStartedError

    def turn(self) -> Block:
        gauge = machine.Gauge()
        try:
            for line in self.lines:
                line.write(str(self.block))
                line.flush()
            took = [[float(word) for word in line.readline().split()] for line in self.lines]
        except OSError:
            took = [[]]
        if not all(took):
            sys.exit(f"{self.name} has ended: {self._reason()}")
        cpu_s = sum(cpu for _, cpu in took)
        return Block(max(wall for wall, _ in took) / self.block, cpu_s / self.block, gauge.others(cpu_s))

    def end(self) -> None:
        for process in [self.launcher, *psutil.Process(self.launcher.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.launcher.wait()


@contextlib.contextmanager
def started(name: str, case: str) -> Iterator[Contender]:
    with tempfile.TemporaryDirectory() as folder:
        contender = Contender(name, case, Path(folder))
        try:
            yield contender
        finally:
            contender.end()


def measure(case: str, names: list[str], rounds: int, tries: int) -> dict[str, list[Block]]:
    """The blocks of each contender, round by round, in an order that is drawn anew for each round."""
    with contextlib.ExitStack() as running:
        contenders: dict[str, Contender] = {}
        for name in names:
            try:
                contenders[name] = running.enter_context(started(name, case))
            except NotStartedError as error:
                if not LOOPS[name][1]:
                    sys.exit(f"{name} did not start: {error}")
                print(f"{name} is left out, since it does not start: {error}")
        found: dict[str, list[Block]] = {name: [] for name in contenders}
        for contender in contenders.values():
            contender.turn()  # warm up
        for turn in range(rounds):
            for name in random.Random(turn).sample(list(contenders), len(contenders)):
                for at in range(tries):
                    block = contenders[name].turn()
                    if block.others < machine.OTHERS:
                        break
                    if at + 1 < tries:
                        time.sleep(1)
                found[name].append(block)
    return found


def table(case: Case, found: dict[str, list[Block]], tries: int) -> None:
    print(
        f"\n{case.name}\n{'':28}{'steps/s':>9}{'ms/step':>9}{'CPU ms':>9}   {'to the textbook loop':24}{'to the tuned loop'}"
    )
    for name in LOOPS:
        if name not in found:
            print(
                f"{name:28}"
                + (
                    f"left out: {' and '.join(absent)} not installed"
                    if (absent := missing(name))
                    else "left out"
                )
            )
            continue
        step_s, cpu_s = (
            statistics.median(getattr(block, field) for block in found[name]) for field in ("step_s", "cpu_s")
        )
        ratios = [_ratio(found[other], found[name]) if other in found else "" for other in (TEXTBOOK, TUNED)]
        print(f"{name:28}{1 / step_s:9.1f}{step_s * 1e3:9.2f}{cpu_s * 1e3:9.2f}   {ratios[0]:24}{ratios[1]}")
    disturbed = sum(block.others >= machine.OTHERS for blocks in found.values() for block in blocks)
    if disturbed:
        print(
            f"{disturbed} of {sum(map(len, found.values()))} blocks were disturbed by other programs, {tries} times in a row"
        )


def _ratio(other: list[Block], own: list[Block]) -> str:
    """Median of the ratios of the rounds, and their quartiles."""
    ratios = [a.step_s / b.step_s for a, b in zip(other, own, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)}; all if none is said")
    parser.add_argument("--rounds", type=int, default=60, help="at least 2")
    parser.add_argument(
        "--tries",
        type=int,
        default=machine.TRIES,
        help="at most so many times for a block that other programs disturb",
    )
    parser.add_argument("--only", nargs="+", choices=LOOPS, metavar="CONTENDER", help=", ".join(LOOPS))
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"there is no case {', '.join(unknown)}")
    if options.loop is not None:
        loop, _ = LOOPS[options.loop]
        assert loop is not None
        loop(CASES[options.cases[0]], Gate())
        return
    names = [name for name in LOOPS if not missing(name) and (options.only is None or name in options.only)]
    print(f"{machine.description()}, torch {torch.__version__}; {RANKS} ranks over gloo, one thread each")
    print(f"{options.rounds} rounds; median of the ratios of the rounds (quartiles); above 1 is faster")
    for case in options.cases or CASES:
        table(CASES[case], measure(case, names, options.rounds, options.tries), options.tries)


if __name__ == "__main__":
    import machine

    main()
