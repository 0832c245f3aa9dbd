"""The benches of one process, each from what was asked for to what was measured."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.collect import CollectedResult, OtherPrograms, gather
from paceline.bench.result import Row, machine

if TYPE_CHECKING:
    import torch

    from paceline.spec import Spec
    from paceline.task import Task

Watch = Callable[[Row], object]


COLLECTED = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "send-recv")
SIZES_BYTES = (2**10, 2**14, 2**18, 2**22, 2**25)
START_S = 5.0  # of ranks


def collectives(ranks: int, device: "torch.device", budget_s: float, watch: Watch) -> CollectedResult:
    """Those that trainings use, among ranks that are started here."""
    from paceline.bench.collectives.request import CollectiveRequest
    from paceline.bench.collectives.workers import measured, result

    each_s = max(
        0.02, (budget_s - START_S) / (2 * len(COLLECTED) * len(SIZES_BYTES)) / 1.5
    )  # warm-up and check included
    backend = "nccl" if device.type == "cuda" else "gloo"
    request = CollectiveRequest(
        operations=COLLECTED, backends=(backend,), sizes_bytes=SIZES_BYTES, seconds=each_s
    )
    found: list[Row | str] = []
    interrupted = False
    others = OtherPrograms()
    try:
        with contextlib.closing(measured(request, ranks)) as items:  # type: ignore[type-var]
            for item in items:
                found.append(item)
                if not isinstance(item, str):
                    watch(item)
    except KeyboardInterrupt:
        interrupted = True
        found.append("interrupted: this is what was measured until then")
    found += others.remark()
    return CollectedResult(result(request, ranks, ranks, found), interrupted)


def compute(
    device: "torch.device", budget_s: float, spec: "Spec | None", task: "Task | None", watch: Watch
) -> CollectedResult:
    """Products, memory and attention; and the step of a task, if there is one."""
    import torch

    from paceline.bench.compute import kernels as compute
    from paceline.bench.compute.step import measure_step, ready

    of = compute.sizes(device)
    settings: dict[str, Any] = {
        "device": device_name(device),
        "budget_s": budget_s,
        "layer": [compute.text(shape) for shape in of.layer],
    }

    def source() -> Iterator[Row | str]:
        share = budget_s * (0.8 if task is None else 0.6)
        yield from compute.with_peaks(compute.products(device, share * 0.75, of), device)
        yield from compute.memory(device, share * 0.1)
        yield from compute.attention(device, share * 0.15, of)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for whoever measures next on this GPU
        if spec is not None and task is not None:
            with ready(spec, task, device) as stepping:
                yield from measure_step(stepping, spec, budget_s - share)

    return gather(
        "compute",
        compute.KEYS,
        settings | _of_task(spec),
        source(),
        watch,
        lambda rows: compute.summary(rows, settings["layer"]),
    )


def storage(directories: Sequence[Path], budget_s: float, writers: int, watch: Watch) -> CollectedResult:
    """`directories` have passed `check`; so much time each."""
    from paceline.bench.storage import suite as storage
    from paceline.bench.storage.advice import advice

    rows = (row for directory in directories for row in storage.measure(directory, budget_s, writers))
    settings = {"directories": [str(path) for path in directories], "budget_s": budget_s, "writers": writers}
    return gather("storage", storage.KEYS, settings, rows, watch, advice)


def overlap(device: "torch.device", ranks: int, budget_s: float, watch: Watch) -> CollectedResult:
    """Copies under computing, where there is a GPU, and a collective under computing."""
    from paceline.bench.compute import overlap

    def source() -> Iterator[Row | str]:
        yield from overlap.copies(device, budget_s / 2)
        yield from overlap.collectives(device, ranks, budget_s / (2 if device.type == "cuda" else 1))

    settings = {"device": device_name(device), "budget_s": budget_s, "ranks": ranks}
    return gather("overlap", overlap.KEYS, settings, source(), watch)


def host(ranks: int, budget_s: float, watch: Watch) -> CollectedResult:
    """What operations and engines take of a CPU, whatever they work on."""

    def source() -> Iterator[Row | str]:
        from paceline.bench.compute.engine_overhead import engines
        from paceline.bench.compute.op_times import paces

        yield from paces(budget_s * 0.4)
        yield from engines(ranks, budget_s * 0.6)

    keys = ("operation", "threads", "size", "engine", "ranks", "units")
    return gather("host", keys, {"budget_s": budget_s, "ranks": ranks}, source(), watch)


def read(
    spec: "Spec",
    task: "Task",
    device: "torch.device",
    budget_s: float,
    ways: Sequence[tuple[int, int]],
    watch: Watch,
) -> CollectedResult:
    """The input of a task: bench input."""
    from paceline.bench import data_loading

    settings = {"device": device_name(device), "budget_s": budget_s, "ways": [list(way) for way in ways]}
    return gather(
        "input",
        data_loading.KEYS,
        settings | _of_task(spec),
        data_loading.measure(spec, task, device, budget_s, ways),
        watch,
        data_loading.summary,
    )


def device_name(device: "torch.device") -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{machine()['cpu']}, {torch.get_num_threads()} threads"


def _of_task(spec: "Spec | None") -> dict[str, Any]:
    return (
        {"task": spec.task, "set": spec.set, "batch": spec.batch, "precision": spec.precision}
        if spec is not None
        else {}
    )
