"""paceline bench compute, overlap, host, hierarchy, storage and data."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.measure.bench.options import (
    INTERRUPTED,
    Compare,
    Json,
    Option,
    Plot,
    begin,
    progress,
    save_and_print,
)
from paceline.cli.options.request_options import Target
from paceline.errors import BenchError

if TYPE_CHECKING:
    from rich.console import Console

    from paceline.bench.collect import CollectedResult
    from paceline.bench.result import Result
    from paceline.bench.suites import Watch

Seconds = Annotated[float, Option(min=0.5, metavar="SECONDS", help="Approximate time to measure.")]
Device = Annotated[str | None, Option(help="cpu or cuda [default: cuda if available]")]
Fields = Annotated[
    list[str] | None,
    Option(metavar="NAME=VALUE", help="Set a field of the task, or a dotted key such as optimizer.lr."),
]
Batch = Annotated[int | None, Option(help="Samples per step.")]
Precision = Annotated[str | None, Option(help="fp64, fp32, bf16 or fp16.")]


def compute(
    task: Annotated[
        str | None,
        Option(help="Also time the step of this task and its blocks: my.py:Class, or a built-in task."),
    ] = None,
    set: Fields = None,
    batch: Batch = None,
    precision: Precision = None,
    device: Device = None,
    seconds: Seconds = 30.0,
    json: Json = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """Measure matrix products, memory and attention; with --task, also the step of your model's blocks."""
    begin("compute", compare, json, plot)
    if task is None and (set or batch is not None or precision is not None):
        raise BenchError(
            "--set, --batch and --precision apply to the step of a task; add --task, e.g. --task digits"
        )
    from paceline.cli.options.launching import read_request
    from paceline.task import load_task

    spec = (
        read_request(task, {"batch": batch, "precision": precision}, set or [])[0]
        if task is not None
        else None
    )
    loaded = load_task(spec.task, spec.set) if spec is not None else None
    from paceline.bench import suites
    from paceline.bench.device import choose_bench_device
    from paceline.bench.report.compute import draw, show

    device_used = choose_bench_device(device)
    collected = with_progress(lambda watch: suites.run_compute(device_used, seconds, spec, loaded, watch))
    finish(collected, json, plot, show, draw)


def overlap(
    ranks: Annotated[int, Option(min=2, help="Number of ranks for the collective.")] = 2,
    device: Device = None,
    seconds: Seconds = 10.0,
    json: Json = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """Measure the overlap of computation with copies to and from a GPU and with a collective."""
    begin("overlap", compare, json, plot)
    from paceline.bench import suites
    from paceline.bench.device import choose_bench_device
    from paceline.bench.report.overlap import draw, show

    device_used = choose_bench_device(device)
    collected = with_progress(lambda watch: suites.run_overlap(device_used, ranks, seconds, watch))
    finish(collected, json, plot, show, draw)


def host(
    ranks: Annotated[int, Option(min=2, help="Number of ranks for the overhead of engines.")] = 2,
    seconds: Seconds = 30.0,
    json: Json = None,
    compare: Compare = None,
) -> None:
    """Measure the CPU time of single operations, and the overhead that torch's engines add to a step."""
    begin("host", compare, json)
    from paceline.launch.launchers import check_count

    check_count(ranks)
    from paceline.bench import suites
    from paceline.bench.report.host import show

    collected = with_progress(lambda watch: suites.run_host(ranks, seconds, watch))
    finish(collected, json, None, show, lambda result, path: None)


def hierarchy(
    directory: Annotated[
        Path, Option(metavar="DIR", help="Directory of the disk to measure; nothing is left in it.")
    ] = Path(),
    device: Device = None,
    seconds: Seconds = 20.0,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Measure the levels of memory and network: caches, memory, messages, disk and GPUs, in one table."""
    begin("hierarchy", None, json, plot)
    from paceline.bench import suites
    from paceline.bench.device import choose_bench_device
    from paceline.bench.report.hierarchy import draw, show
    from paceline.bench.storage.suite import check_directories

    [checked] = check_directories([directory])
    device_used = choose_bench_device(device)
    collected = with_progress(lambda watch: suites.run_hierarchy(device_used, checked, seconds, watch))
    finish(collected, json, plot, show, draw)


def storage(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR…", help="Directories to measure; nothing is left in them."),
    ] = None,
    writers: Annotated[
        int, Option(min=1, help="Files of a checkpoint that are written at the same time.")
    ] = 4,
    seconds: Annotated[
        float, Option(min=0.5, metavar="SECONDS", help="Approximate time to measure each directory.")
    ] = 20.0,
    json: Json = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """Measure writing and reading in directories, in large and small files, and advise what to keep where."""
    begin("storage", compare, json, plot)
    from paceline.bench import suites
    from paceline.bench.report.storage import draw, show
    from paceline.bench.storage.suite import check_directories

    if not directories:
        raise BenchError(
            "no directory to measure; specify at least one, e.g. paceline bench storage . /dev/shm"
        )
    checked = check_directories(directories)
    collected = with_progress(lambda watch: suites.run_storage(checked, seconds, writers, watch))
    finish(collected, json, plot, show, draw)


def data(
    target: Target = "digits",
    set: Fields = None,
    batch: Batch = None,
    precision: Precision = None,
    workers: Annotated[
        str | None,
        Option(metavar="0,1,2", help="Numbers of loader processes [default: 0, 1, 2, 4, … up to the cores]"),
    ] = None,
    prefetch: Annotated[str, Option(metavar="2,4", help="Batches that each process reads ahead.")] = "2,4",
    device: Device = None,
    seconds: Seconds = 30.0,
    json: Json = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """Measure how fast a task's samples are read, and whether its training step waits for them."""
    begin("data", compare, json, plot)
    from paceline.cli.options.launching import read_request
    from paceline.task import load_task

    spec = read_request(target, {"batch": batch, "precision": precision}, set or [])[0]
    task = load_task(spec.task, spec.set)
    counts, prefetches = parse_numbers("--workers", workers, 0), parse_numbers("--prefetch", prefetch, 1)
    from paceline.bench import suites
    from paceline.bench.data_loading import default_worker_counts, loader_settings
    from paceline.bench.device import choose_bench_device
    from paceline.bench.report.data import draw, show

    device_used = choose_bench_device(device)
    settings = loader_settings(counts or default_worker_counts(), prefetches or [2])
    collected = with_progress(
        lambda watch: suites.run_data(spec, task, device_used, seconds, settings, watch)
    )
    finish(collected, json, plot, show, draw)


def parse_numbers(flag: str, text: str | None, minimum: int) -> list[int]:
    """Return the numbers of a list, without duplicates: `"0,2,4"` -> [0, 2, 4]. Raises SpecError."""
    from paceline.errors import SpecError
    from paceline.units import is_whole_number

    words = text.split(",") if text is not None else []
    if not all(is_whole_number(word.strip()) and int(word) >= minimum for word in words):
        raise SpecError(f"{flag} must be a list of numbers of at least {minimum}, e.g. 1,2,4; got {text!r}")
    return list(dict.fromkeys(int(word) for word in words))


def with_progress(measure: "Callable[[Watch], CollectedResult]") -> "CollectedResult":
    """Run a bench, reporting its progress on standard error."""
    with progress("measuring") as report:
        return measure(report)


def finish(
    collected: "CollectedResult",
    json: Path | None,
    plot: Path | None,
    show: "Callable[[Console, Result], None]",
    draw: "Callable[[Result, Path], None]",
) -> None:
    """Save and print a result. If the bench was interrupted, exit with the status of Ctrl-C afterwards."""
    save_and_print(collected.result, json, plot if collected.result.rows else None, show, draw)
    if collected.interrupted:
        raise typer.Exit(INTERRUPTED)
