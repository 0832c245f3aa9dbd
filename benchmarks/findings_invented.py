"""Cases that were invented after the rules: other models, magnitudes, lengths and kinds of runs."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from findings_case import LIMIT_S, Case
from findings_planted import DDP, EVALUATED

FOLDER = Path(__file__).parent
SLEEPS: dict[str, object] = {"forward_s": 0.02, "slow_in": "forward", "width": 64}


def run_own_loop(steps: int, leak_MB: float) -> Callable[[str], Sequence[str]]:
    words = [str(FOLDER / "findings_own_loop.py")]
    return lambda run: [sys.executable, *words, run, str(steps), str(leak_MB)]


def run_foreign(steps: int, leak_MB: float) -> Callable[[str], Sequence[str]]:
    monitor = [sys.executable, "-m", "paceline", "monitor", "--every", "0.2"]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(FOLDER / "findings_foreign.py"), str(steps), str(leak_MB)]
    return lambda recording: [*monitor, "--csv", recording, "--", *ranks, *script]


def resume_on_two_ranks(run: Path) -> None:
    words = [sys.executable, "-m", "paceline", "resume", str(run), "--steps", "300", "--ranks", "2"]
    subprocess.run(words, capture_output=True, timeout=LIMIT_S, check=True)


INVENTED_FAULTS = [
    Case(
        "rank 1 takes 1.3 times as long",
        ("straggler",),
        DDP,
        fields={"forward_s": 0.052, "others_s": 0.04, "slow_in": "forward", "slow_rank": 1},
        steps=200,
    ),
    Case(
        "rank 0 takes 1.5 times as long under zero1",
        ("straggler",),
        ("--ranks", "2", "--plan", "zero1"),
        fields={"forward_s": 0.06, "others_s": 0.04, "slow_in": "forward", "slow_rank": 0},
        steps=100,
    ),
    Case(
        "rank 2 of 4 is slow",
        ("straggler",),
        ("--ranks", "4", "--set", "spec.threads=1"),
        fields={"forward_s": 0.06, "slow_in": "forward", "slow_rank": 2, "width": 64},
        steps=80,
    ),
    Case(
        "input waits 0.4 s now and then",
        ("slow-input",),
        fields={"sleep_s": 0.4, "slow_every": 800},
        steps=300,
    ),
    Case(
        "input waits 1 s twice in 300 steps, with workers",
        ("slow-input",),
        ("--workers", "1"),
        fields={"sleep_s": 0.7, "slow_every": 1200, "width": 64},
        steps=300,
    ),
    Case(
        "samples of rank 0 sleep, with workers",
        ("straggler",),
        (*DDP, "--workers", "1"),
        also=("slow-input",),
        fields={"sleep_s": 0.004, "slow_rank": 0},
        steps=100,
    ),
    Case("samples are slow for 30 %", ("slow-input",), fields={"sleep_s": 0.0004, **SLEEPS}),
    Case("own loop leaks", ("memory-growth",), command=run_own_loop(500, 1.0)),
    Case("script of others leaks", ("memory-growth",), command=run_foreign(500, 1.0)),
    Case(
        "leak of 0.3 MB a step",
        ("memory-growth",),
        ("--monitor", "0.5"),
        fields={"leak_MB": 0.3, **SLEEPS},
        steps=900,
    ),
    Case(
        "gradient with the wrong sign",
        ("plateau",),
        also=("loss-spike", "not-finite"),
        fields={"is_reversed": True},
        options=("--lr", "1e-4"),
        steps=300,
    ),
    Case(
        "gradient is lost after 150 steps",
        ("plateau",),
        EVALUATED,
        fields={"falls_in": 150, "width": 64},
        steps=900,
    ),
    Case("learning rate of 1e-7", ("plateau",), ("--lr", "1e-7", "--optimizer", "sgd"), steps=400),
    Case(
        "digits with 8 threads",
        ("threads",),
        ("--set", "spec.threads=8", "--epochs", "3"),
        task="digits",
        steps=None,
        batch=None,
    ),
    Case(
        "text evaluated after every 2 steps",
        ("evaluation",),
        ("--set", "spec.evaluate_every=2"),
        also=("checkpoint",),
        task="text",
        steps=30,
        batch=8,
    ),
    Case(
        "checkpoint of 30 million weights every 5 steps",
        ("checkpoint",),
        ("--save-every", "5"),
        fields={"width": 2700, "depth": 2, "samples": 400},
        steps=40,
        batch=8,
    ),
    Case("learning rate of 0.3", ("loss-spike",), ("--lr", "0.3"), also=("plateau",), steps=400),
]

INVENTED_HEALTHY = [
    Case("small model with large batches", fields={"width": 64, "depth": 2, "samples": 20_000}, batch=512),
    Case("validation as large as training", fields={"validation": 1600}, steps=500),
    Case("three steps", steps=3),
    Case("3000 small steps", fields={"width": 32, "depth": 1}, batch=4, steps=3000),
    Case("text in bf16 on two ranks", options=(*DDP, "--precision", "bf16"), task="text", steps=40, batch=16),
    Case("noisy targets", fields={"noise": 3.0}, steps=400),
    Case("first epoch is slow", fields={"sleep_s": 0.001, "is_cached": True, **SLEEPS}, steps=500),
    Case("two workers hide slow samples", options=("--workers", "2"), fields={"sleep_s": 0.0005, **SLEEPS}),
    Case("own loop", command=run_own_loop(500, 0.0)),
    Case("script of others", command=run_foreign(500, 0.0)),
    Case("resumed on two ranks", edit=resume_on_two_ranks),
    Case("dropout and clipping", options=("--clip", "1.0"), fields={"dropout": 0.3}, steps=400),
    Case(
        "high learning rate with momentum",
        options=("--optimizer", "sgd", "--lr", "0.1", "--set", "optimizer.momentum=0.9"),
        steps=400,
    ),
    Case(
        "cosine with restarts",
        options=("--schedule", "cosine-restarts", "--set", "schedule.every=100 steps", "--lr", "3e-3"),
        steps=400,
    ),
    Case("one thread", options=("--set", "spec.threads=1")),
    Case(
        "two equally slow ranks",
        options=DDP,
        fields={"forward_s": 0.04, "slow_in": "forward"},
        steps=200,
    ),
    Case(
        "four equally slow ranks",
        options=("--ranks", "4", "--set", "spec.threads=1"),
        fields={"forward_s": 0.06, "slow_in": "forward", "width": 64},
        steps=80,
    ),
    Case("patience and best checkpoints", options=(*EVALUATED, "--patience", "5"), steps=600),
    Case("zero2 with workers", options=("--ranks", "2", "--plan", "zero2", "--workers", "1"), steps=120),
]
