"""Trainings with planted faults, and healthy trainings."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from findings_case import LIMIT_S, Case
from paceline.drill.disk import SmallDisk


@contextlib.contextmanager
def use_small_disk(folder: Path) -> Iterator[Path]:
    with SmallDisk(folder / "small", 3 * 2**20) as disk:
        yield disk.path


@contextlib.contextmanager
def use_large_file(folder: Path) -> Iterator[Path]:
    """Write a file of 1 GiB, whose holes take no space on the disk."""
    with open(folder / "big", "wb") as file:
        file.truncate(2**30)
    yield folder


@contextlib.contextmanager
def use_busy_machine(folder: Path) -> Iterator[Path]:
    """Keep one core busy, as a browser does."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield folder
    finally:
        other.kill()
        other.wait()


def lack_bf16(run: Path) -> None:
    """Change what the run recorded of its CPU to a CPU without bf16."""
    lines = (run / "events.jsonl").read_text().splitlines()
    started = json.loads(lines[0])
    started["facts"]["native_precision"] = 0.0
    (run / "events.jsonl").write_text("\n".join([json.dumps(started), *lines[1:]]) + "\n")


def cut_off(run: Path) -> None:
    """Leave the events of a run that was killed: the last line is incomplete."""
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text[: int(len(text) * 0.7)])


def resume(run: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "paceline", "resume", str(run), "--steps", "250"],
        capture_output=True,
        timeout=LIMIT_S,
        check=True,
    )


DDP, ZERO3 = ("--ranks", "2"), ("--ranks", "2", "--plan", "zero3")
EVALUATED = ("--set", "spec.evaluate_every=30")
HUGE = {"width": 2000, "depth": 4, "samples": 400}

FAULTS = [
    Case("samples sleep", ("slow-input",), fields={"sleep_s": 0.001}),
    Case("samples sleep, one worker", ("slow-input",), ("--workers", "1"), fields={"sleep_s": 0.002}),
    Case("samples compute", ("slow-input",), fields={"compute_s": 0.0005}),
    Case("samples sleep on two ranks", ("slow-input",), DDP, fields={"sleep_s": 0.001}),
    Case("every 16th sample is slow", ("slow-input",), fields={"sleep_s": 0.02, "slow_every": 16}),
    Case("samples sleep under zero3", ("slow-input",), ZERO3, fields={"sleep_s": 0.003}),
    Case("rank 1 reads slowly", ("straggler",), DDP, fields={"sleep_s": 0.002, "slow_rank": 1}),
    Case(
        "rank 1 computes slowly",
        ("straggler",),
        DDP,
        fields={"forward_s": 0.03, "slow_rank": 1, "slow_in": "forward"},
    ),
    Case(
        "rank 0 computes slowly under zero1",
        ("straggler",),
        ("--ranks", "2", "--plan", "zero1"),
        fields={"forward_s": 0.03, "slow_rank": 0, "slow_in": "forward"},
    ),
    Case("rank 1 reads slowly under zero3", ("straggler",), ZERO3, fields={"sleep_s": 0.002, "slow_rank": 1}),
    Case(
        "rank 0 reads slowly under zero2",
        ("straggler",),
        ("--ranks", "2", "--plan", "zero2"),
        also=("slow-input",),
        fields={"sleep_s": 0.002, "slow_rank": 0},
    ),
    Case(
        "evaluation after every step",
        ("evaluation",),
        ("--set", "spec.evaluate_every=1"),
        also=("checkpoint",),
        steps=100,
    ),
    Case(
        "validation is larger than training",
        ("evaluation",),
        fields={"samples": 320, "validation": 30_000},
        also=("checkpoint",),
        steps=60,
    ),
    Case("checkpoint after every step", ("checkpoint",), ("--save-every", "1"), steps=60),
    Case(
        "large checkpoint every 3 steps",
        ("checkpoint",),
        ("--save-every", "3", *DDP),
        also=("communication",),
        fields=HUGE,
        steps=30,
    ),
    Case("16 threads", ("threads",), ("--set", "spec.threads=16")),
    Case("8 threads on two ranks", ("threads",), ("--set", "spec.threads=8", *DDP)),
    Case(
        "8 workers on each of two ranks",
        ("threads",),
        ("--workers", "8", "--monitor", "0.2", *DDP),
        also=("slow-input",),
        fields={"compute_s": 0.002},
        steps=100,
    ),
    Case("tf32 on a CPU", ("ineffective-option",), ("--tf32",)),
    Case("floor of a constant schedule", ("ineffective-option",), ("--set", "schedule.floor=0.1")),
    Case("loss spikes for 6 steps", ("loss-spike",), fields={"spike_at": 150}, steps=250),
    Case(
        "learning rate grows too large",
        ("not-finite",),
        ("--lr", "3.0", "--optimizer", "sgd", "--set", "schedule.warmup=300 steps"),
        also=("loss-spike",),
        steps=300,
    ),
    Case(
        "memory leak",
        ("memory-growth",),
        fields={"leak_MB": 2.0, "forward_s": 0.05, "slow_in": "forward", "width": 64},
        steps=500,
    ),
    Case(
        "memory leak in the workers",
        ("memory-growth",),
        ("--workers", "1", "--monitor", "0.2"),
        fields={"data_leak_MB": 0.03, "forward_s": 0.02, "slow_in": "forward", "width": 64},
        steps=400,
    ),
    Case("loss is not finite", ("not-finite",), ("--lr", "1e30"), also=("loss-spike",)),
    Case("loss jumps to another level", ("loss-spike",), fields={"jump_at": 150}, steps=300),
    Case(
        "learning rate is too large from the beginning",
        ("loss-spike",),
        ("--lr", "1.0"),
        also=("plateau",),
        steps=300,
    ),
    Case(
        "rank 1 computes slowly under zero3",
        ("straggler",),
        (*ZERO3, "--profile"),
        also=("communication",),
        fields={"forward_s": 0.03, "slow_rank": 1, "slow_in": "forward"},
        steps=200,
    ),
    Case(
        "many weights and few samples",
        ("communication",),
        ("--set", "spec.threads=1", "--profile", *ZERO3),
        batch=2,
        fields={"width": 1500, "depth": 4, "samples": 400},
        steps=60,
    ),
    Case("learning rate of 1e-9", ("plateau",), ("--lr", "1e-9"), steps=300),
    Case("no gradient", ("plateau",), fields={"dead": True}, steps=300),
    Case(
        "trained for too long",
        ("plateau",),
        (*EVALUATED, "--lr", "1e-2"),
        fields={"noise": 1.0, "width": 16, "depth": 1, "samples": 20_000, "validation": 320},
        steps=1500,
    ),
    Case(
        "unequal stages",
        ("pipeline",),
        ("--ranks", "2", "--plan", "pp=2", "--profile"),
        fields={"heavy_block": 0},
        steps=60,
    ),
    Case(
        "one micro-batch in a pipeline",
        ("pipeline",),
        ("--ranks", "2", "--plan", "pp=2,microbatches=1,pp_schedule=gpipe", "--profile"),
    ),
    Case(
        "two ranks are as fast as one",
        ("scaling",),
        ("--ranks", "2", "--set", "spec.threads=1"),
        also=("communication", "straggler"),
        fields=HUGE,
        steps=40,
        before=[Case("", options=("--set", "spec.threads=1"), fields=HUGE, steps=40)],
    ),
    Case("bf16 on a CPU without bf16", ("precision",), ("--precision", "bf16"), edit=lack_bf16),
    Case("full disk", ("disk",), ("--save-every", "20"), fields={"width": 512}, around=use_small_disk),
]

HEALTHY = [
    Case("small model"),
    Case("two ranks", options=DDP),
    *[
        Case(f"plan {plan}", options=("--ranks", "2", "--plan", plan), steps=100)
        for plan in ("zero1", "zero2", "zero3", "tp=2", "pp=2", "local-sgd,period=4")
    ],
    Case("four ranks", options=("--ranks", "4", "--plan", "dp=2,tp=2"), steps=60),
    Case("ten steps", steps=10),
    Case("profiled", options=(*DDP, "--profile")),
    Case("gradient accumulation", options=("--ranks", "2", "--plan", "ddp,microbatches=4"), batch=64),
    Case("batches of one sample", batch=1, fields={"noise": 1.0}, steps=400),
    Case("loss of zero", fields={"zero": True}, steps=300),
    Case("outliers", fields={"bad_samples": 30}, steps=400, batch=8),
    Case("two workers", options=("--workers", "2")),
    Case("samples take a little time", fields={"compute_s": 0.00002}),
    Case("bf16", options=("--precision", "bf16")),
    Case(
        "sgd with momentum", options=("--optimizer", "sgd", "--lr", "0.05", "--set", "optimizer.momentum=0.5")
    ),
    Case(
        "warm-up and cosine", options=("--schedule", "cosine", "--set", "schedule.warmup=50 steps"), steps=300
    ),
    Case("checkpoint every 50 steps", options=("--save-every", "50"), fields={"width": 1024}),
    Case("evaluation every 50 steps", options=("--set", "spec.evaluate_every=50"), fields={"width": 1024}),
    Case("resumed", edit=resume),
    Case("killed", edit=cut_off),
    Case("busy machine", options=DDP, around=use_busy_machine),
    Case(
        "samples in a mapped file",
        options=("--monitor", "0.2", "--set", "mapped=big", "--set", f"samples={HUGE['samples']}"),
        fields={"forward_s": 0.02, "slow_in": "forward", "width": 64},
        around=use_large_file,
        steps=400,
    ),
    Case("digits", task="digits", steps=None, batch=None),
    Case("digits on two ranks", task="digits", steps=None, batch=None, options=("--epochs", "8", *DDP)),
    Case("text", task="text", steps=30, batch=16),
    Case("converged", fields={"noise": 0.01, "samples": 400}, steps=400),
    Case("large model on two ranks", options=DDP, fields={"width": 1024}, steps=60),
]
