"""Findings of planted faults and of healthy runs: which faults are found, and which alarms are false.

Each case is a real training, or a recording of samples that is written here. The rules and their limits
are in src/paceline/inspect and docs/findings.md; they are fixed before this script scores them.
"""

import argparse
import contextlib
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machine import description
from paceline.drill.disk import SmallDisk
from paceline.errors import Error
from paceline.inspect.facts import RunFacts
from paceline.inspect.find import find
from paceline.inspect.read_facts import read_facts, read_recording
from paceline.run import RunFolder

TASK = f"{Path(__file__).parent / 'findings_tasks.py'}:Planted"
LIMIT_S = 240.0


@dataclass(frozen=True)
class Case:
    """A training or a recording.

    expected  the rules that must find something; empty: healthy
    also      rules that may find something besides, because the fault has this effect, too
    options   of paceline train, with the fields of the task as NAME=VALUE
    """

    name: str
    expected: tuple[str, ...] = ()
    options: Sequence[str] = ()
    also: tuple[str, ...] = ()
    task: str = TASK
    steps: int | None = 150
    batch: int | None = 32
    around: Callable[[Path], "contextlib.AbstractContextManager[Path]"] | None = None
    edit: Callable[[Path], None] | None = None
    before: Sequence["Case"] = ()
    recording: Callable[[], str] | None = None
    fields: dict[str, object] = field(default_factory=dict)


def train(case: Case, folder: Path, name: str) -> Path:
    words = ["train", case.task, "--run-dir", str(folder / name), "--timeout", "60"]
    words += ["--steps", str(case.steps)] if case.steps is not None else []
    words += ["--batch", str(case.batch)] if case.batch is not None else []
    for key, value in case.fields.items():
        words += ["--set", f"{key}={json.dumps(value) if not isinstance(value, str) else value}"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words, *case.options],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    if done.returncode and not (folder / name / "events.jsonl").exists():
        raise RuntimeError(f"{case.name}: {done.stderr.strip()[-400:]}")
    return folder / name


def read_case(case: Case, folder: Path) -> RunFacts:
    if case.recording is not None:
        path = folder / "gpu.csv"
        path.write_text(case.recording())
        return read_recording(path)
    for number, other in enumerate(case.before):
        train(other, folder, f"before-{number}")
    with case.around(folder) if case.around is not None else contextlib.nullcontext(folder) as at:
        run = train(case, at, "run")
        if case.edit is not None:
            case.edit(run)
        return read_facts(RunFolder(run))


# Recordings


def write_csv(columns: dict[str, Sequence[object]], count: int) -> str:
    """Return a recording of nvidia-smi: a line for each GPU in each second."""
    gpus = sorted({int(name.split()[0]) for name in columns})
    names = list(dict.fromkeys(name.split(maxsplit=1)[1] for name in columns))
    lines = [", ".join(["timestamp", "index", *names])]
    for second in range(count):
        for gpu in gpus:
            values = [str(columns[f"{gpu} {name}"][second]) for name in names]
            stamp = time.strftime("%Y/%m/%d %H:%M:%S.000", time.gmtime(1_767_225_600 + second))
            lines.append(", ".join([stamp, str(gpu), *values]))
    return "\n".join(lines) + "\n"


def make_recording(
    seed: int = 0, gpus: int = 2, count: int = 180, **changes: Callable[[int, int], float]
) -> str:
    """Return a recording of a healthy training, with some columns changed: a function of GPU and second."""
    draw = random.Random(seed)
    columns: dict[str, Sequence[object]] = {}
    units = {
        "utilization": ("utilization.gpu [%]", "%"),
        "memory": ("memory.used [MiB]", "MiB"),
        "total": ("memory.total [MiB]", "MiB"),
        "power": ("power.draw [W]", "W"),
        "clock": ("clocks.current.sm [MHz]", "MHz"),
        "limit": ("clocks.max.sm [MHz]", "MHz"),
        "temperature": ("temperature.gpu", ""),
    }
    for gpu in range(gpus):

        def healthy(name: str, second: int) -> float:
            pause = second % 60 >= 54  # an evaluation and a checkpoint
            return {
                "utilization": draw.uniform(0, 30) if pause else draw.uniform(88, 100),
                "memory": 61_000 + draw.uniform(-200, 200),
                "total": 81_559,
                "power": 180.0 if pause else draw.uniform(520, 690),
                "clock": 1980 if pause else draw.uniform(1600, 1900),
                "limit": 1980,
                "temperature": draw.uniform(55, 70),
            }[name]

        for name, (title, unit) in units.items():
            change = changes.get(name)
            values = [
                change(gpu, second) if change is not None else healthy(name, second)
                for second in range(count)
            ]
            columns[f"{gpu} {title}"] = [f"{value:.0f} {unit}".strip() for value in values]
    if "reason" in changes:
        for gpu in range(gpus):
            values = [changes["reason"](gpu, second) for second in range(count)]
            columns[f"{gpu} clocks_throttle_reasons.active"] = [f"0x{int(value):016x}" for value in values]
    return write_csv(columns, count)


# Faults around and after a training


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
RECORDED_FAULTS = [
    Case(
        "GPU 1 idle",
        ("device-idle",),
        recording=lambda: make_recording(utilization=lambda gpu, second: 0 if gpu else 95 + second % 3),
    ),
    Case(
        "GPUs wait for input",
        ("device-idle",),
        recording=lambda: make_recording(utilization=lambda gpu, second: 100 if second % 4 == 0 else 3),
    ),
    Case(
        "hot GPU",
        ("throttling",),
        recording=lambda: make_recording(
            reason=lambda gpu, second: 0x20 if gpu and second > 60 else 0x4, clock=lambda gpu, second: 1100
        ),
    ),
    Case("low clocks", ("throttling",), recording=lambda: make_recording(clock=lambda gpu, second: 1000)),
    Case("full memory", ("gpu-memory",), recording=lambda: make_recording(memory=lambda gpu, second: 80_900)),
    Case(
        "small batch",
        ("batch-size",),
        recording=lambda: make_recording(
            memory=lambda gpu, second: 9_000, utilization=lambda gpu, second: 45 + second % 20
        ),
    ),
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
RECORDED_HEALTHY = [
    Case(f"GPUs at work {seed}", recording=lambda seed=seed: make_recording(seed, gpus=2 ** (seed % 4)))
    for seed in range(4)
] + [
    Case(
        "recording longer than the job",
        recording=lambda: make_recording(
            utilization=lambda gpu, second: 0 if second < 40 or second > 150 else 93 + second % 5
        ),
    ),
    Case(
        "power limit",
        recording=lambda: make_recording(reason=lambda gpu, second: 0x4, clock=lambda gpu, second: 1650),
    ),
]


def run_cases(cases: Sequence[Case], folder: Path) -> tuple[int, int]:
    """Print a line for each case. Return the cases as expected, and those with an unexpected finding."""
    good = alarms = 0
    for number, case in enumerate(cases):
        at = folder / f"{number}"
        at.mkdir()
        began = time.monotonic()
        try:
            result = find(read_case(case, at))
        except (RuntimeError, subprocess.SubprocessError, Error) as error:
            print(f"{'failed':12}{case.name:38}{error}", flush=True)
            continue
        rules = {finding.rule for finding in result.findings}
        missed = {*case.expected} - rules
        extra = rules - {*case.expected, *case.also}
        good += not missed and (bool(case.expected) or not extra)
        alarms += bool(extra)
        verdict = "missed" if missed else "false alarm" if extra else "ok"
        print(
            f"{verdict:12}{case.name:38}{', '.join(sorted(rules)) or '-':40}{time.monotonic() - began:5.0f} s"
        )
        for finding in result.findings:
            if finding.rule in extra:
                print(f"            {finding.sentence}")
        for name in missed:
            reasons = "; ".join(sorted({*result.missing.values()}))
            print(f"            {name} did not find it; not checked: {reasons}")
        sys.stdout.flush()
    return good, alarms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose names match this regular expression")
    parser.add_argument("--recorded", action="store_true", help="only recordings, no training")
    arguments = parser.parse_args()
    faults = [*([] if arguments.recorded else FAULTS), *RECORDED_FAULTS]
    healthy = [*([] if arguments.recorded else HEALTHY), *RECORDED_HEALTHY]
    print(description())
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name, cases in (("faults", faults), ("healthy", healthy)):
            chosen = [case for case in cases if re.search(arguments.only, case.name)]
            (Path(folder) / name).mkdir()
            good, alarms = run_cases(chosen, Path(folder) / name)
            rows.append((name, good, len(chosen), alarms))
    for name, good, count, alarms in rows:
        what = "found" if name == "faults" else "without a finding"
        print(f"{name}: {good} of {count} {what}; {alarms} with an unexpected finding")
    if any(good < count for _, good, count, _ in rows) or math.fsum(row[3] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
