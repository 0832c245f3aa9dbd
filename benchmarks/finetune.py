"""Fine-tuning of a small Llama on two ranks: Paceline's hf:, HF Trainer and Accelerate, in one run.

All contenders load the same folder of weights, and train on the same samples in the same order, in float32
and without dropout. Three measurements:

* losses: the largest relative difference of a loss from that of Paceline, over the first steps.
* start: the time from the command to the end of the first step. The contenders alternate.
* speed: tokens/s. The contenders alternate, a block of steps each, and wait in between. The ratio of two
  blocks of the same round counts. A block that other programs disturbed is repeated.

The larger the model, the smaller the share of a step that is not spent in its products of matrices, which
are the same for all contenders. --width, --layers and --length choose another size.

A library that is not installed, or does not start, is named and left out:
pip install --constraint constraints.txt --editable ".[bench]"

Started by torchrun, this file is one of the loops. It imports what such a loop needs, no more.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gates import RANKS, Block, Gate, count_disturbed, describe_ratio, find_reason, measure

if TYPE_CHECKING:
    from torch import Tensor

PACELINE = "Paceline hf:"
LEARNING_RATE = 1e-3
EPOCHS = 20  # of the list of samples; a contender that needs more begins again
WORDS = 4000  # different words of the text
TASK = Path(__file__).with_name("finetune_task.py")


@dataclass(frozen=True)
class Setting:
    """What all contenders train."""

    folder: str  # of the model
    text: str  # file
    order: str  # file with the indices of the samples
    length: int  # tokens of a sample
    batch: int  # global

    @property
    def share(self) -> int:
        return self.batch // RANKS


# What a loop does at the begin and at the end of a step; the end has the mean loss of this rank.
Begin, End = Callable[[], None], Callable[["Tensor"], None]


class Windows:
    """The samples in the order of the training: windows of tokens, labelled with the next tokens."""

    def __init__(self, setting: Setting):
        import torch
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(setting.folder)
        numbers = tokenizer(Path(setting.text).read_text(), verbose=False)["input_ids"]
        tokens = torch.tensor([*numbers, tokenizer.eos_token_id])
        count = (len(tokens) - 1) // setting.length
        inputs = tokens[: count * setting.length].view(count, setting.length)
        labels = tokens[1 : count * setting.length + 1].view(count, setting.length)
        order = torch.tensor(json.loads(Path(setting.order).read_text()))
        self.inputs, self.labels = inputs[order], labels[order]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> "dict[str, Tensor]":
        # shift_labels: labels that are shifted already, so that no position is computed in vain
        labels = self.labels[index]
        return {"input_ids": self.inputs[index], "labels": labels, "shift_labels": labels}


def load_model(setting: Setting) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.float32)


def accelerate(setting: Setting, begin: Begin, end: End) -> None:
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    model = load_model(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    loader: Any = DataLoader(Windows(setting), batch_size=setting.share)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    while True:
        for batch in loader:
            begin()
            optimizer.zero_grad()
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            end(loss.detach())


def trainer(setting: Setting, begin: Begin, end: End) -> None:
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses: list[Tensor] = []

    class InOrder(Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            losses[:] = [super().training_step(*arguments, **options)]
            return losses[0]

    class Turns(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            begin()

        def on_step_end(self, *arguments: Any, **options: Any) -> None:
            end(losses[0])

    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            use_cpu=True,
            per_device_train_batch_size=setting.share,
            max_steps=10**9,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=0.0,
            remove_unused_columns=False,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        )
        InOrder(
            model=load_model(setting),
            args=arguments,
            train_dataset=Windows(setting),  # type: ignore[arg-type]
            callbacks=[Turns()],
        ).train()


# (loop, modules that it requires); Paceline has its own loop.
LOOPS: dict[str, tuple[Callable[[Setting, Begin, End], None] | None, tuple[str, ...]]] = {
    PACELINE: (None, ("transformers",)),
    "HF Trainer": (trainer, ("transformers", "accelerate")),
    "Accelerate": (accelerate, ("transformers", "accelerate")),
}


def missing_modules(name: str) -> list[str]:
    """Return the required modules of a contender that are not installed."""
    return [module for module in LOOPS[name][1] if importlib.util.find_spec(module) is None]


# In a rank of torchrun


def run_loop(name: str, setting: Setting, steps: int, answer: Path | None) -> None:
    """Run a loop behind a gate; with `answer`, run so many steps and write their losses and end there."""
    loop, _ = LOOPS[name]
    assert loop is not None
    if answer is None:
        loop(setting, Gate(), lambda loss: None)
        return
    losses: list[float] = []

    def end(loss: "Tensor") -> None:
        import torch.distributed as dist

        ended = time.time()
        mean = loss.clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / RANKS)
        if len(losses) == steps:
            if dist.get_rank() == 0:
                answer.write_text(json.dumps({"time": ended, "losses": losses}))
            dist.barrier()
            os._exit(0)  # the end is not measured

    loop(setting, lambda: None, end)


# In the benchmark


@dataclass(frozen=True)
class Attempt:
    """The first steps of a contender: seconds until the first ended, and the losses."""

    start_s: float
    losses: list[float]


class FailedError(Exception):
    """A contender failed. The message is the reason."""


def run_steps(name: str, setting: Setting, steps: int) -> Attempt:
    """Run so many steps of a contender in processes of its own. Raises FailedError."""
    with tempfile.TemporaryDirectory() as folder:
        run, answer = Path(folder) / "run", Path(folder) / "answer"
        if LOOPS[name][0] is None:
            words = [f"hf:{setting.folder}", "--set", f"data={setting.text}", "--steps", str(steps)]
            words += ["--set", "spec.save.minutes=1000000000"]
            command = build_paceline_command(words, setting, run)
        else:
            command = [*build_torchrun_command(name, setting), "--steps", str(steps), "--answer", str(answer)]
        # Without compiled files next to the sources, each start would compile Paceline again, but not torch.
        environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environ["OMP_NUM_THREADS"] = "1"  # torchrun sets the same, with a warning
        start = time.time()
        done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True)
        if done.returncode or (LOOPS[name][0] is not None and not answer.exists()):
            raise FailedError(find_reason(done.stderr))
        if LOOPS[name][0] is not None:
            found = json.loads(answer.read_text())
            return Attempt(found["time"] - start, found["losses"])
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        found_steps = [event for event in events if event["event"] == "step"]
        return Attempt(found_steps[0]["time"] - start, [event["loss"] for event in found_steps])


def build_paceline_command(words: Sequence[str], setting: Setting, run: Path | str) -> list[str]:
    return [
        *("-m", "paceline", "train", *words, "--run-dir", str(run), "--set", f"length={setting.length}"),
        *(
            "--batch",
            str(setting.batch),
            "--ranks",
            str(RANKS),
            "--lr",
            str(LEARNING_RATE),
            "--device",
            "cpu",
        ),
    ]


def build_torchrun_command(name: str, setting: Setting) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    return [*torchrun, __file__, "--loop", name, "--setting", json.dumps(asdict(setting))]


def build_endless_command(name: str, setting: Setting) -> list[str]:
    """Return the arguments of Python that start a contender behind its gate."""
    if LOOPS[name][0] is not None:
        return build_torchrun_command(name, setting)
    words = [f"{TASK}:Gated", "--set", f"folder={setting.folder}", "--set", f"data={setting.text}"]
    words += ["--steps", str(10**9), "--timeout", "86400"]  # it stands still during the blocks of the others
    return build_paceline_command(words, setting, "FOLDER/run")


@contextlib.contextmanager
def write_inputs(options: argparse.Namespace) -> Iterator[Setting]:
    """Write a model with random weights, a tokenizer, a text and the order of the samples."""
    import random

    import numpy as np
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    from paceline.data.order import shuffle

    disable_progress_bar()
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(WORDS)]
    text = " ".join(draw.choices(words, k=options.words))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<eos>", "<unk>"]
    tokenizer.train_from_iterator(
        [" ".join(words)],
        trainers.BpeTrainer(vocab_size=options.vocabulary, special_tokens=special, show_progress=False),
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=3 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.width // 64),
        num_key_value_heads=max(1, options.width // 64),
        max_position_embeddings=options.length,
        attention_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ).save_pretrained(folder)
        file, order = Path(name) / "text.txt", Path(name) / "order.json"
        file.write_text(text)
        samples = len(tokenizer.encode(text).ids) // options.length
        if samples < options.batch:
            sys.exit(f"--words {options.words} makes {samples} samples, fewer than --batch {options.batch}")
        numbers = np.arange(samples * EPOCHS // options.batch * options.batch)
        order.write_text(json.dumps(shuffle(numbers, samples, 0).tolist()))
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(
            f"Llama of {millions:.1f} million parameters: {options.layers} layers of width {options.width}; "
            f"vocabulary of {options.vocabulary}; batch {options.batch} of {options.length} tokens"
        )
        yield Setting(str(folder), str(file), str(order), options.length, options.batch)


def compare_losses(names: list[str], setting: Setting, steps: int) -> list[str]:
    """Print the differences of the losses. Returns the contenders that run."""
    print(f"\nlosses of {steps} steps")
    expected = run_steps(PACELINE, setting, steps).losses
    print(f"{PACELINE:14}{expected[0]:.7f} … {expected[-1]:.7f}")
    running = [PACELINE]
    for name in names[1:]:
        try:
            losses = run_steps(name, setting, steps).losses
        except FailedError as error:
            print(f"{name:14}left out because it fails: {error}")
            continue
        running.append(name)
        differences = [abs(a / b - 1) for a, b in zip(losses, expected, strict=True)]
        print(f"{name:14}largest relative difference {max(differences):.1e}")
    return running


def compare_starts(names: list[str], setting: Setting, rounds: int, tries: int) -> None:
    import psutil

    from machine import MAX_OTHER_SHARE, LoadMeter

    def children_cpu_s() -> float:
        times = psutil.Process().cpu_times()
        return times.children_user + times.children_system

    times: dict[str, list[float]] = {name: [] for name in names}
    disturbed = 0
    for index in range(-1, rounds):  # the first round is the warm-up
        for name in names[:: 1 if index % 2 else -1]:
            for _ in range(tries if index >= 0 else 1):
                load, cpu_s = LoadMeter(), children_cpu_s()
                start_s = run_steps(name, setting, 1).start_s
                is_disturbed = load.other_share(children_cpu_s() - cpu_s) >= MAX_OTHER_SHARE
                if not is_disturbed:
                    break
            if index >= 0:
                times[name].append(start_s)
                disturbed += is_disturbed
    print(f"\nseconds from the command to the end of the first step, {rounds} rounds")
    for name in names:
        ratio = ""
        if name != PACELINE:
            pairs = zip(times[name], times[PACELINE], strict=True)
            low, median, high = statistics.quantiles((other / own for other, own in pairs), n=4)
            ratio = f"   {median:.3f} ({low:.3f}–{high:.3f}) times the start of Paceline"
        print(f"{name:14}{statistics.median(times[name]):7.2f} s (fastest {min(times[name]):.2f} s){ratio}")
    if disturbed:
        print(f"{disturbed} of {rounds * len(names)} starts were disturbed by other programs")


def print_speeds(setting: Setting, blocks: dict[str, list[Block]]) -> None:
    print(f"\n{'':14}{'tokens/s':>10}{'ms/step':>9}{'CPU ms':>9}   Paceline, relative to it")
    for name, own in blocks.items():
        step_s, cpu_s = (
            statistics.median(values) for values in zip(*((b.step_s, b.cpu_s) for b in own), strict=True)
        )
        ratio = "" if name == PACELINE else describe_ratio(own, blocks[PACELINE])
        tokens = setting.batch * setting.length / step_s
        print(f"{name:14}{tokens:10,.0f}{step_s * 1e3:9.2f}{cpu_s * 1e3:9.2f}   {ratio}")
    disturbed, number = count_disturbed(blocks)
    if disturbed:
        print(f"{disturbed} of {number} blocks were disturbed by other programs")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measurements = ("losses", "start", "speed")
    parser.add_argument("measurements", nargs="*", help=f"{', '.join(measurements)} [default: all]")
    parser.add_argument("--rounds", type=int, default=30, help="of speed, at least 2")
    parser.add_argument("--starts", type=int, default=8, help="rounds of starts, at least 2")
    parser.add_argument("--tries", type=int, default=20, help="attempts if other programs disturb")
    parser.add_argument("--block", type=int, default=20, help="steps of a turn")
    parser.add_argument("--steps", type=int, default=20, help="whose losses are compared")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--batch", type=int, default=16, help="samples of both ranks")
    parser.add_argument("--words", type=int, default=100_000, help="of the text")
    parser.add_argument("--only", nargs="+", choices=LOOPS, metavar="CONTENDER", help=", ".join(LOOPS))
    parser.add_argument("--loop", choices=LOOPS, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop is not None:
        run_loop(options.loop, Setting(**json.loads(options.setting)), options.steps, options.answer)
        return
    if unknown := {*options.measurements} - {*measurements}:
        parser.error(f"unknown measurement {', '.join(unknown)}; choose from {', '.join(measurements)}")
    if options.batch % RANKS:
        parser.error(f"--batch {options.batch} is not divisible by {RANKS} ranks")
    import torch

    import machine

    chosen = options.measurements or measurements
    print(f"{machine.description()}, torch {torch.__version__}; {RANKS} ranks over gloo, one thread each")
    names = []
    for name in LOOPS:
        if missing := missing_modules(name):
            print(f"{name:14}left out: {' and '.join(missing)} not installed")
        elif name == PACELINE or options.only is None or name in options.only:
            names.append(name)
    if PACELINE not in names:
        return
    with write_inputs(options) as setting:
        try:
            if "losses" in chosen:
                names = compare_losses(names, setting, options.steps)
            if "start" in chosen:
                compare_starts(names, setting, options.starts, options.tries)
        except FailedError as error:
            sys.exit(f"a contender failed: {error}")
        if "speed" in chosen:
            commands = {name: build_endless_command(name, setting) for name in names}
            blocks = measure(commands, [PACELINE], options.block, options.rounds, options.tries)
            print_speeds(setting, blocks)


if __name__ == "__main__":
    main()
