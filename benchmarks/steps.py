"""Steps/s on two ranks: Paceline, handwritten loops and other libraries, in one run.

Each contender has two processes, started as its users start them: by `paceline train`, and by torchrun for
the others. The contenders alternate, a block of steps each, and wait in between. The ratio of two blocks of
the same round counts: the speed of a machine drifts, but hardly between adjacent blocks. A block that other
programs disturbed is repeated. A library that is not installed, or does not start, is named and left out:
pip install --constraint constraints.txt --editable ".[bench]"

Started by torchrun, this file is one of the loops; for Paceline it is the file with the tasks.
"""

import argparse
import importlib.util
import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gates import RANKS, Block, Gate, count_disturbed, describe_ratio, gate, measure
from paceline import Task
from paceline.tasks.digits import Digits, Images
from paceline.units import several

PACELINE, PACELINE_BY_SAMPLE = "Paceline", "Paceline, sample by sample"
TEXTBOOK, TUNED = "textbook DDP", "DDP tuned by hand"


class Gated(Task):
    """A task whose steps wait at the gate."""

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
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, 1024, generator=generator)
        return Images(inputs, torch.randint(10, (4096,), generator=generator))

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")


class Encoder(nn.Module):
    """torch's encoder as a language model: 256 tokens, 32 positions."""

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


class DigitsBySample(DigitsCnn):
    def dataset(self, split: str) -> Any:
        return without_batch_of(super().dataset(split))


class MlpBySample(Mlp):
    def dataset(self, split: str) -> Any:
        return without_batch_of(super().dataset(split))


class TransformerBySample(Transformer):
    def dataset(self, split: str) -> Any:
        return without_batch_of(super().dataset(split))


def without_batch_of(images: Images | None) -> TensorDataset | None:
    """Return the same data without `batch_of`: samples are read one by one, as by torch's DataLoader."""
    return images and TensorDataset(images.images, images.labels)


@dataclass(frozen=True)
class Case:
    name: str
    task: type[Task]
    by_sample: type[Task]  # the same task without `batch_of`
    batch: int  # global
    block: int  # steps

    @property
    def share(self) -> int:
        return self.batch // RANKS

    @property
    def dataset(self) -> Any:
        return self.task().dataset("train")

    def model(self) -> nn.Module:
        return self.task().model()


CASES = {
    "digits": Case("digits CNN, batch 64", DigitsCnn, DigitsBySample, 64, 100),
    "mlp": Case("MLP of 10.5 M parameters, batch 128", Mlp, MlpBySample, 128, 5),
    "transformer": Case(
        "transformer of 135 k parameters, batch 64", Transformer, TransformerBySample, 64, 30
    ),
}


def mean_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def textbook(case: Case, wait_for_turn: Gate) -> None:
    """Run DistributedDataParallel as in the tutorials: defaults, and the loss is read in each step."""
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
            wait_for_turn()
            optimizer.zero_grad()
            loss = mean_loss(model(images), labels)
            loss.backward()
            optimizer.step()
            running += loss.item()


def tuned(case: Case, wait_for_turn: Gate) -> None:
    """Run DistributedDataParallel with all its optimizations; no gradient norm, no output."""
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
            wait_for_turn()
            chosen = order[begin : begin + case.share]
            loss = mean_loss(model(images[chosen]), labels[chosen])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            running += loss.detach()


def fabric(case: Case, wait_for_turn: Gate) -> None:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    model = case.model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    loader = fabric.setup_dataloaders(DataLoader(case.dataset, batch_size=case.share, shuffle=True))
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            wait_for_turn()
            optimizer.zero_grad()
            fabric.backward(mean_loss(model(images), labels))
            optimizer.step()


def accelerate(case: Case, wait_for_turn: Gate) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = case.model()
    loader = DataLoader(case.dataset, batch_size=case.share, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
    while True:
        for images, labels in loader:
            wait_for_turn()
            optimizer.zero_grad()
            accelerator.backward(mean_loss(model(images), labels))
            optimizer.step()


def transformers(case: Case, wait_for_turn: Gate) -> None:
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
            wait_for_turn()

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


# (loop, modules that it requires); Paceline has its own loop.
LOOPS: dict[str, tuple[Callable[[Case, Gate], None] | None, tuple[str, ...]]] = {
    PACELINE: (None, ()),
    PACELINE_BY_SAMPLE: (None, ()),
    TEXTBOOK: (textbook, ()),
    TUNED: (tuned, ()),
    "Lightning Fabric": (fabric, ("lightning_fabric",)),
    "Accelerate": (accelerate, ("accelerate",)),
    "HF Trainer": (transformers, ("transformers", "accelerate")),
}


def missing_modules(name: str) -> list[str]:
    """Return the required modules of a contender that are not installed."""
    return [module for module in LOOPS[name][1] if importlib.util.find_spec(module) is None]


def build_command(name: str, case: str) -> list[str]:
    """Return the arguments of Python that start a contender."""
    loop, _ = LOOPS[name]
    if loop is not None:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        return [*torchrun, __file__, case, "--loop", name]
    task = CASES[case].task if name == PACELINE else CASES[case].by_sample
    return [
        *("-m", "paceline", "train", f"{__file__}:{task.__name__}", "--run-dir", "FOLDER/run"),
        *("--batch", str(CASES[case].batch), "--steps", str(10**9), "--ranks", str(RANKS)),
        *("--timeout", "86400"),  # it stands still during the blocks of the others
    ]


def print_table(case: Case, blocks: dict[str, list[Block]], tries: int) -> None:
    head = f"{'':28}{'steps/s':>9}{'ms/step':>9}{'CPU ms':>9}   {'vs textbook loop':24}{'vs tuned loop'}"
    print(f"\n{case.name}\n{head}")
    for name in LOOPS:
        if name not in blocks:
            absent = missing_modules(name)
            reason = f": {' and '.join(absent)} not installed" if absent else ""
            print(f"{name:28}left out{reason}")
            continue
        step_s, cpu_s = (
            statistics.median(getattr(block, field) for block in blocks[name])
            for field in ("step_s", "cpu_s")
        )
        ratios = [
            describe_ratio(blocks[other], blocks[name]) if other in blocks else ""
            for other in (TEXTBOOK, TUNED)
        ]
        print(f"{name:28}{1 / step_s:9.1f}{step_s * 1e3:9.2f}{cpu_s * 1e3:9.2f}   {ratios[0]:24}{ratios[1]}")
    disturbed, number = count_disturbed(blocks)
    if disturbed:
        print(
            f"{disturbed} of {number} blocks were disturbed by other programs in {several(tries, 'attempt')}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} [default: all]")
    parser.add_argument("--rounds", type=int, default=60, help="at least 2")
    parser.add_argument(
        "--tries",
        type=int,
        default=machine.TRIES,
        help="maximum number of attempts for a block that other programs disturb",
    )
    parser.add_argument("--only", nargs="+", choices=LOOPS, metavar="CONTENDER", help=", ".join(LOOPS))
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.cases) - CASES.keys():
        parser.error(f"unknown case {', '.join(unknown)}; choose from {', '.join(CASES)}")
    if options.loop is not None:
        loop, _ = LOOPS[options.loop]
        assert loop is not None
        loop(CASES[options.cases[0]], Gate())
        return
    names = [
        name for name in LOOPS if not missing_modules(name) and (options.only is None or name in options.only)
    ]
    print(f"{machine.description()}, torch {torch.__version__}; {RANKS} ranks over gloo, one thread each")
    print(f"{options.rounds} rounds; median of the ratios of the rounds (quartiles); above 1 is faster")
    for case in options.cases or CASES:
        commands = {name: build_command(name, case) for name in names}
        required = [name for name in names if not LOOPS[name][1]]
        blocks = measure(commands, required, CASES[case].block, options.rounds, options.tries)
        print_table(CASES[case], blocks, options.tries)


if __name__ == "__main__":
    import machine

    main()
