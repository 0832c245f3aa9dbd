"""Seven plans, one training: the digits task under each plan, compared with one process.

    python benchmarks/same_training.py [--picture docs/same-training.svg] [--steps 120]

Prints the largest relative difference of loss and gradient norm over all steps, in float64 and float32.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.events import Step, read

PLANS = {"single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 2, "hsdp": 4, "zero3,microbatches=2": 4}


def run_training(plan: str, ranks: int, precision: str, steps: int, folder: Path) -> list[Step]:
    run = folder / f"{plan}-{precision}"
    options = {"plan": plan, "ranks": ranks, "precision": precision, "steps": steps, "run-dir": run}
    command = [sys.executable, "-m", "paceline", "train", "digits", "--device", "cpu"]
    command += [f"--{name}={value}" for name, value in options.items()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [event for event in read(run / "events.jsonl") if isinstance(event, Step)]


def max_difference(reference: list[Step], steps: list[Step], field: str) -> float:
    """Return the largest relative difference of a field over all steps."""
    return max(
        abs(getattr(step, field) - getattr(expected, field)) / abs(getattr(expected, field))
        for step, expected in zip(steps, reference, strict=True)
    )


def draw(curves: dict[str, list[Step]], file: Path) -> None:
    """Draw the losses, and their relative differences to one process."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "paceline",
    }
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 5.2), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    single = curves["single"]
    widths = [9, 7, 5.6, 4.4, 3.2, 2, 1]
    for (plan, steps), width in zip(curves.items(), widths, strict=True):
        x, label = [step.step for step in steps], f"{plan}, {PLANS[plan]} rank{'s' * (PLANS[plan] > 1)}"
        (line,) = above.plot(
            x, [step.loss for step in steps], linewidth=width, label=label, solid_capstyle="round"
        )
        if plan != "single":
            gap = [max(abs(a.loss - b.loss) / b.loss, 1e-17) for a, b in zip(steps, single, strict=True)]
            below.semilogy(x, gap, ".", markersize=3, color=line.get_color())
    above.set(ylabel="loss", title="One task, seven layouts, one training (handwritten digits, float64)")
    above.legend(frameon=False, fontsize=9.5)
    below.axhline(1e-12, color="grey", linewidth=0.8, linestyle=":")
    below.text(
        len(single), 1.3e-12, "tolerance of the tests", ha="right", va="bottom", fontsize=9, color="grey"
    )
    below.set(xlabel="step", ylabel="relative difference\nto one process", ylim=(1e-17, 1e-10))
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    print(
        f"{'plan':16}{'ranks':>6}"
        + "".join(f"{name:>18}" for name in ("loss fp64", "norm fp64", "loss fp32", "norm fp32"))
    )
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            p: {
                plan: run_training(plan, ranks, p, options.steps, Path(folder))
                for plan, ranks in PLANS.items()
            }
            for p in ("fp64", "fp32")
        }
    for plan, ranks in PLANS.items():
        gaps = [
            max_difference(runs[p]["single"], runs[p][plan], field)
            for p in ("fp64", "fp32")
            for field in ("loss", "grad_norm")
        ]
        print(f"{plan:16}{ranks:6}" + "".join(f"{gap:18.1e}" for gap in gaps))
    if options.picture is not None:
        draw(runs["fp64"], options.picture)


if __name__ == "__main__":
    main()
