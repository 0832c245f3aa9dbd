"""Run folders from lines of JSON that no code of Paceline wrote."""

import json
import random
from pathlib import Path
from typing import Any

from paceline import spec as specs
from paceline.run import RunFolder
from paceline.spec import Launch, Spec


def started(step: int, time: float) -> dict[str, Any]:
    return {
        "time": time, "event": "started", "task": "my.py:T", "plan": "ddp", "ranks": 2, "batch": 8,
        "step": step, "steps": 10**6, "samples": 53, "parameters": 9, "device": "cpu",
        "precision": "fp32", "threads": 1,
    }  # fmt: skip


def step(number: int, time: float, draw: random.Random) -> dict[str, Any]:
    step_s = draw.uniform(0.01, 0.02)
    return {
        "time": time, "event": "step", "step": number, "samples": 8 * number,
        "loss": draw.choice([draw.random(), 10.0, float("nan")]) if not draw.randrange(9) else draw.random(),
        "grad_norm": None if not draw.randrange(11) else draw.random(), "lr": 1 / number, "step_s": step_s,
        "data_s": step_s / 4, "samples_per_s": 8 / step_s,
    }  # fmt: skip


def make_history(draw: random.Random, steps: int, starts: int) -> list[dict[str, Any]]:
    lines, at, time = [], 0, 1.7e9
    for _ in range(starts):
        at = draw.randint(0, at)
        time += 100.0
        lines.append(started(at, time))
        until = draw.randint(at + 1, steps)
        for number in range(at + 1, until + 1):
            time += draw.uniform(0.01, 0.03)
            lines.append(step(number, time, draw))
            if not draw.randrange(5):
                lines[-1]["losses"] = {"a": draw.random(), **({"b": 1.5} if draw.randrange(2) else {})}
            if not draw.randrange(20):
                metrics = {"accuracy": draw.random(), "f1": None}
                lines.append(
                    {"time": time, "event": "evaluated", "step": number, "metrics": metrics, "seconds": 0.1}
                )
        at = until
    return lines


def folder(at: Path, lines: list[dict[str, Any]]) -> RunFolder:
    at.mkdir()
    specs.save(at / "spec.toml", Spec(task="my.py:T"), Launch(ranks=2, plan="ddp"))
    (at / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RunFolder(at)
