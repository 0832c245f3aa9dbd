"""The benches: each function runs one within a budget of seconds, and returns its result."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.collect import INTERRUPTED_NOTE, CollectedResult, OtherPrograms, collect
from paceline.bench.result import Row, machine

if TYPE_CHECKING:
    import torch

    from paceline.spec import Spec
    from paceline.task import Task

Watch = Callable[[Row], object]

TRAINING_COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "send-recv")
SIZES_BYTES = (2**10, 2**14, 2**18, 2**22, 2**25)
RANK_START_S = 5.0  # time to start the ranks


def run_collectives(ranks: int, device: "torch.device", budget_s: float, watch: Watch) -> CollectedResult:
    """Measure the collectives that trainings use, on ranks started on this machine."""
    from paceline.bench.collectives.request import CollectiveRequest
    from paceline.bench.collectives.workers import build_result, run_workers

    # 1.5: warm-up and check take about half as long as the measurement.
    each_s = max(0.02, (budget_s - RANK_START_S) / (2 * len(TRAINING_COLLECTIVES) * len(SIZES_BYTES)) / 1.5)
    backend = "nccl" if device.type == "cuda" else "gloo"
    request = CollectiveRequest(
        operations=TRAINING_COLLECTIVES, backends=(backend,), sizes_bytes=SIZES_BYTES, seconds=each_s
    )
    collected: list[Row | str] = []
    interrupted = False
    others = OtherPrograms()
    try:
        with contextlib.closing(run_workers(request, ranks)) as items:
            for item in items:
                collected.append(item)
                if not isinstance(item, str):
                    watch(item)
    except KeyboardInterrupt:
        interrupted = True
        collected.append(INTERRUPTED_NOTE)
    collected += others.notes()
    return CollectedResult(build_result(request, (ranks,), ranks, collected), interrupted)


def run_compute(
    device: "torch.device", budget_s: float, spec: "Spec | None", task: "Task | None", watch: Watch
) -> CollectedResult:
    """Measure matrix products, memory and attention; and the step of a task, if given."""
    import torch

    from paceline.bench.compute import kernels
    from paceline.bench.compute.step import measure_step, prepare_step

    sizes = kernels.sizes_for(device)
    settings: dict[str, Any] = {
        "device": device_name(device),
        "budget_s": budget_s,
        "layer": [kernels.format_shape(shape) for shape in sizes.layer],
    }

    def source() -> Iterator[Row | str]:
        share = budget_s * (0.8 if task is None else 0.6)
        yield from kernels.add_peak_share(kernels.measure_matmuls(device, share * 0.75, sizes), device)
        yield from kernels.measure_memory(device, share * 0.1)
        yield from kernels.measure_attention(device, share * 0.15, sizes)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the next measurement on this GPU
        if spec is not None and task is not None:
            with prepare_step(spec, task, device) as ready_step:
                yield from measure_step(ready_step, spec, budget_s - share)

    return collect(
        "compute",
        kernels.KEYS,
        settings | _task_settings(spec),
        source(),
        watch,
        lambda rows: kernels.summarize(rows, settings["layer"]),
    )


def run_storage(directories: Sequence[Path], budget_s: float, writers: int, watch: Watch) -> CollectedResult:
    """Measure each directory for `budget_s` seconds. `directories` must have passed `check_directories`."""
    from paceline.bench.storage import suite
    from paceline.bench.storage.advice import give_advice
    from paceline.launch.slurm.site import read_site

    site = read_site(None)
    rows = (row for directory in directories for row in suite.measure(directory, budget_s, writers))
    settings = {"directories": [str(path) for path in directories], "budget_s": budget_s, "writers": writers}
    return collect(
        "storage",
        suite.KEYS,
        settings,
        rows,
        watch,
        lambda measured: give_advice(measured, site.is_backed_up),
    )


def run_overlap(device: "torch.device", ranks: int, budget_s: float, watch: Watch) -> CollectedResult:
    """Measure how much of a copy (on a GPU) and of a collective is hidden behind computation."""
    from paceline.bench.compute import overlap

    def source() -> Iterator[Row | str]:
        yield from overlap.measure_copies(device, budget_s / 2)
        yield from overlap.measure_collectives(device, ranks, budget_s / (2 if device.type == "cuda" else 1))

    settings = {"device": device_name(device), "budget_s": budget_s, "ranks": ranks}
    return collect("overlap", overlap.KEYS, settings, source(), watch)


def run_host(ranks: int, budget_s: float, watch: Watch) -> CollectedResult:
    """Measure the CPU time of operations, and the overhead that torch's engines add to a step."""

    def source() -> Iterator[Row | str]:
        from paceline.bench.compute.engine_overhead import measure_engines
        from paceline.bench.compute.op_times import measure_op_times

        yield from measure_op_times(budget_s * 0.4)
        yield from measure_engines(ranks, budget_s * 0.6)

    keys = ("operation", "threads", "size", "engine", "ranks", "units")
    return collect("host", keys, {"budget_s": budget_s, "ranks": ranks}, source(), watch)


def run_hierarchy(device: "torch.device", directory: Path, budget_s: float, watch: Watch) -> CollectedResult:
    """Measure the levels of memory and network. `directory` must have passed `check_directories`."""
    from paceline.bench.hierarchy import levels

    settings = {"device": device_name(device), "directory": str(directory), "budget_s": budget_s}
    rows = levels.measure_levels(device, directory, budget_s)
    return collect("hierarchy", levels.KEYS, settings, rows, watch)


def run_data(
    spec: "Spec",
    task: "Task",
    device: "torch.device",
    budget_s: float,
    loader_settings: Sequence[tuple[int, int]],
    watch: Watch,
) -> CollectedResult:
    """Measure the rate of reading a task's samples, for each (workers, prefetch) of `loader_settings`."""
    from paceline.bench import data_loading

    ways = [list(setting) for setting in loader_settings]
    settings = {"device": device_name(device), "budget_s": budget_s, "ways": ways}
    return collect(
        "data",
        data_loading.KEYS,
        settings | _task_settings(spec),
        data_loading.measure(spec, task, device, budget_s, loader_settings),
        watch,
        data_loading.summarize,
    )


def device_name(device: "torch.device") -> str:
    """Return the name of a GPU, or of the processor with its number of threads."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{machine()['cpu']}, {torch.get_num_threads()} threads"


def _task_settings(spec: "Spec | None") -> dict[str, Any]:
    return (
        {"task": spec.task, "set": spec.set, "batch": spec.batch, "precision": spec.precision}
        if spec is not None
        else {}
    )
