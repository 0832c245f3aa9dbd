"""Recordings of samples of GPUs that are written here: faults and healthy ones."""

import random
import time
from collections.abc import Callable, Sequence

from findings_case import Case


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
