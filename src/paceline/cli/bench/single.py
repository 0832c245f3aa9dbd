"""paceline bench compute, overlap, storage and input: what one process measures."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.bench.options import (
    INTERRUPTED,
    Compare,
    Json,
    Option,
    Plot,
    check,
    compare_results,
    keep,
    progress,
)
from paceline.cli.request_options import Target
from paceline.errors import BenchError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from paceline.bench.collect import CollectedResult
    from paceline.bench.result import Result
    from paceline.bench.suites import Watch

Seconds = Annotated[float, Option(min=0.5, metavar="SECONDS", help="About how long to measure.")]
Device = Annotated[str | None, Option(help="cpu or cuda; CUDA where there is some.")]
Fields = Annotated[
    list[str] | None,
    Option(metavar="NAME=VALUE", help="A field of the task, or a dotted key such as optimizer.lr."),
]
Batch = Annotated[int | None, Option(help="Samples of a step.")]
Precision = Annotated[str | None, Option(help="fp64, fp32, bf16 or fp16.")]


def compute(
    task: Annotated[
        str | None,
        Option(help="Time the step of this task and of its blocks, too: my.py:Class, or a built-in one."),
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
    """Matrix products by number type and shape, memory, attention; with --task the step of your own blocks."""
    if compare is not None:
        compare_results("compute", compare)
        return
    check(json, plot)
    if task is None and (set or batch is not None or precision is not None):
        raise BenchError(
            "--set, --batch and --precision apply to the step of a task; add --task, e.g. --task digits"
        )
    from paceline.cli.launching import read_request
    from paceline.task import load_task

    spec = (
        read_request(task, {"batch": batch, "precision": precision}, set or [])[0]
        if task is not None
        else None
    )
    work = load_task(spec.task, spec.set) if spec is not None else None
    from paceline.bench import suites
    from paceline.bench.report.compute import draw, show

    here = device_for(device)
    finish(watched(lambda watch: suites.compute(here, seconds, spec, work, watch)), json, plot, show, draw)


def overlap(
    ranks: Annotated[int, Option(min=2, help="For the collective.")] = 2,
    device: Device = None,
    seconds: Seconds = 10.0,
    json: Json = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """What goes on under computing: copies to and from a GPU, on one stream and on two, and a collective."""
    if compare is not None:
        compare_results("overlap", compare)
        return
    check(json, plot)
    from paceline.bench import suites
    from paceline.bench.report.overlap import draw, show

    here = device_for(device)
    finish(watched(lambda watch: suites.overlap(here, ranks, seconds, watch)), json, plot, show, draw)


def host(
    ranks: Annotated[int, Option(min=2, help="For what engines add to a step.")] = 2,
    seconds: Seconds = 30.0,
    json: Json = None,
    compare: Compare = None,
) -> None:
    """What a CPU takes for one operation of each kind, from small to large, and what torch's engines add to a step."""
    if compare is not None:
        compare_results("host", compare)
        return
    check(json, None)
    from paceline.launch.launchers import check_count

    check_count(ranks)
    from paceline.bench import suites
    from paceline.bench.report.host import show

    finish(
        watched(lambda watch: suites.host(ranks, seconds, watch)), json, None, show, lambda result, path: None
    )


def storage(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR…", help="Where to measure; nothing is left there.")
    ] = None,
    writers: Annotated[int, Option(min=1, help="Files of a checkpoint that are written at once.")] = 4,
    seconds: Annotated[
        float, Option(min=0.5, metavar="SECONDS", help="About how long to measure, in each directory.")
    ] = 20.0,
    json: Json = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """How fast directories are: large and small writes that are on the disk, reads, small files, a checkpoint; and what to keep where."""
    if compare is not None:
        compare_results("storage", compare)
        return
    from paceline.bench import suites
    from paceline.bench.report.storage import draw, show
    from paceline.bench.storage.suite import check as usable

    if not directories:
        raise BenchError("which directories? As in: paceline bench storage . /dev/shm")
    check(json, plot)
    found = usable(directories)
    finish(watched(lambda watch: suites.storage(found, seconds, writers, watch)), json, plot, show, draw)


def input_(
    target: Target = "digits",
    set: Fields = None,
    batch: Batch = None,
    precision: Precision = None,
    workers: Annotated[
        str | None, Option(metavar="0,1,2", help="Processes that read; from none to the cores there are.")
    ] = None,
    prefetch: Annotated[str, Option(metavar="2,4", help="Batches that each of them reads ahead.")] = "2,4",
    device: Device = None,
    seconds: Seconds = 30.0,
    json: Json = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """How many samples of a task can be read in a second, by workers and batches ahead, and when its step no longer waits for them."""
    if compare is not None:
        compare_results("input", compare)
        return
    check(json, plot)
    from paceline.cli.launching import read_request
    from paceline.task import load_task

    spec = read_request(target, {"batch": batch, "precision": precision}, set or [])[0]
    task = load_task(spec.task, spec.set)
    counts, ahead = numbers("--workers", workers, 0), numbers("--prefetch", prefetch, 1)
    from paceline.bench import suites
    from paceline.bench.data_loading import up_to_cores, ways
    from paceline.bench.report.input import draw, show

    here = device_for(device)
    found = ways(counts or up_to_cores(), ahead or [2])
    finish(
        watched(lambda watch: suites.read(spec, task, here, seconds, found, watch)), json, plot, show, draw
    )


def numbers(flag: str, text: str | None, least: int) -> list[int]:
    """`"0,2,4"` -> [0, 2, 4]. Raises SpecError."""
    from paceline.errors import SpecError
    from paceline.units import is_whole_number

    words = text.split(",") if text is not None else []
    if not all(is_whole_number(word.strip()) and int(word) >= least for word in words):
        raise SpecError(f"{flag} takes numbers from {least} on, such as 1,2,4; got {text!r}")
    return list(dict.fromkeys(int(word) for word in words))


def device_for(wish: str | None) -> "torch.device":
    """With all cores at work, if it is the CPU. Raises SpecError or LaunchError."""
    from paceline.errors import SpecError

    if wish not in (None, "cpu", "cuda"):
        raise SpecError(f"--device is cpu or cuda, got {wish!r}")
    import torch

    from paceline.cluster.limits import usable_cores
    from paceline.distributed.process_group import choose_device
    from paceline.distributed.world import World

    torch.set_num_threads(usable_cores())
    return choose_device(World(), wish)


def watched(measure: "Callable[[Watch], CollectedResult]") -> "CollectedResult":
    """Report on standard error what was just measured."""
    with progress("measuring") as tell:
        return measure(tell)


def finish(
    found: "CollectedResult",
    json: Path | None,
    plot: Path | None,
    show: "Callable[[Console, Result], None]",
    draw: "Callable[[Result, Path], None]",
) -> None:
    """Print and keep a result; what was interrupted ends as Ctrl-C does, with what was measured until then."""
    keep(found.result, json, plot if found.result.rows else None, show, draw)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)
