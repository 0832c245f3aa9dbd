"""The largest batch that reaches a target accuracy: SGD with linear scaling, LARS and LAMB.

60,000 generated images of 16 × 16 pixels, whose labels a fixed teacher gives; a tenth of the labels is
random. Each optimizer is compared by `paceline batch-size` over batches that double: its learning rate is
tuned for the smallest batch and scaled by a rule. --tune-from also searches the learning rate of each batch
from a size on. The file also has the task. With --keep, a command that is repeated continues.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Task
from paceline.plan.search.rank_counts import parse_counts
from paceline.tasks.digits import Images

PIXELS, CLASSES, NOISE = 16 * 16, 10, 0.1
# Optimizer -> options: the learning rate at the smallest batch, the rule that scales it, and others
OPTIMIZERS = {
    "sgd": ("--lr", "0.025", "--set", "schedule.lr_scale=linear"),
    "lars": ("--lr", "2.0", "--set", "schedule.lr_scale=sqrt", "--set", "optimizer.no_trust=bias"),
    "lamb": ("--lr", "0.004", "--set", "schedule.lr_scale=sqrt", "--set", "optimizer.no_trust=bias"),
}


class Teacher(Task):
    """Images with correlated pixels, and the labels of a network of random, fixed weights."""

    samples: int = 60_000
    width: int = 128

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(PIXELS, self.width),
            nn.ReLU(),
            nn.Linear(self.width, self.width),
            nn.ReLU(),
            nn.Linear(self.width, CLASSES),
        )

    def dataset(self, split: str) -> Any:
        if split not in ("train", "validation"):
            return None
        count = self.samples if split == "train" else self.samples // 6
        draw = torch.Generator().manual_seed(1 if split == "train" else 2)
        images = F.avg_pool2d(torch.randn(count, 1, 20, 20, generator=draw), 5, stride=1) * 5
        labels = label(images)
        is_noisy = torch.rand(count, generator=draw) < NOISE
        noise = torch.randint(CLASSES, (count,), generator=draw)
        return Images(images, torch.where(is_noisy, noise, labels))

    def inputs(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return batch[0]

    def loss(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(output, batch[1], reduction="none")

    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(1) == batch[1]).float()}


def label(images: Tensor) -> Tensor:
    """Return the labels of the teacher."""
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(PIXELS, 24, generator=draw) / PIXELS**0.5
    second = torch.randn(24, CLASSES, generator=draw)
    return torch.tanh(2 * images.flatten(1) @ first).matmul(second).argmax(1)


def compare(
    task: str, name: str, options: argparse.Namespace, folder: Path, is_tuned: bool
) -> dict[str, Any]:
    """Return the results of `paceline batch-size` with an optimizer."""
    out = folder / f"{name}{'-tuned' if is_tuned else ''}.json"
    out.unlink(missing_ok=True)
    batches = parse_counts(options.batches, "--batches")
    first = str(batches[0])
    if is_tuned:
        batches = tuple(batch for batch in batches if batch >= options.tune_from)
    # The period is that of all batches, so that the tuned trainings continue the same folder.
    command = [sys.executable, "-m", "paceline", "batch-size", task, "--batches", ",".join(map(str, batches))]
    command += ["--until", f"accuracy>={options.accuracy}", "--epochs", str(options.epochs), "--batch", first]
    command += ["--optimizer", name, *OPTIMIZERS[name], "--set", f"schedule.base_batch={first}"]
    command += ["--schedule", "cosine", "--set", "schedule.warmup=1 epoch"]
    command += ["--ranks", "1", "--run-dir", str(folder / name), "--json", str(out)]
    done = subprocess.run([*command, *(["--tune"] if is_tuned else [])], text=True, capture_output=True)
    if not out.exists():
        sys.exit(f"{name}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(out.read_text())  # type: ignore[no-any-return]


def print_table(found: dict[str, dict[str, Any]], heading: str) -> None:
    """Print the steps to the target and the learning rate, or the best accuracy in brackets."""
    batches = [row["batch"] for row in next(iter(found.values()))["rows"]]
    print(f"\n{heading}\n")
    print("| batch | " + " | ".join(found) + " |")
    print("| -- |" + " -- |" * len(found))
    for at, batch in enumerate(batches):
        cells = [_cell(results["rows"][at]) for results in found.values()]
        print(f"| {batch:,} | " + " | ".join(cells) + " |")
    print("| largest batch | " + " | ".join(f"{largest(results):,}" for results in found.values()) + " |")


def _cell(row: dict[str, Any]) -> str:
    if row["reached"]:
        return f"{row['steps']:,.0f} steps, lr {row['lr']:.3g}"
    return f"({row['best']:.3f}, lr {row['lr']:.3g})" if row["best"] else f"(diverged, lr {row['lr']:.3g})"


def largest(results: dict[str, Any]) -> int:
    """Return the largest batch that reached the target; 0 if none did."""
    return max((row["batch"] for row in results["rows"] if row["reached"]), default=0)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default=f"{Path(__file__).resolve()}:Teacher")
    parser.add_argument("--batches", default="64:8192")
    parser.add_argument("--accuracy", type=float, default=0.65)
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--optimizers", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    parser.add_argument("--tune-from", type=int, metavar="BATCH", help="tune batches from this size on")
    parser.add_argument("--keep", type=Path, help="folder for the trainings, to continue them")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for is_tuned in (False, True) if options.tune_from is not None else (False,):
            found = {
                name: compare(options.task, name, options, folder, is_tuned) for name in options.optimizers
            }
            heading = f"accuracy {options.accuracy:g} in {options.epochs:g} epochs, learning rate"
            print_table(found, f"{heading} {'tuned at each batch' if is_tuned else 'scaled by rule'}")


if __name__ == "__main__":
    main()
