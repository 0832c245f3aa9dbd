"""paceline bench collectives."""

import contextlib
import os
import sys
from collections.abc import Iterator
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
from paceline.distributed.world import World, read_world
from paceline.errors import BenchError, Error, LaunchError, PlanError

if TYPE_CHECKING:
    from paceline.bench.collectives.request import CollectiveRequest
    from paceline.bench.result import Row


def collectives(
    ranks: Annotated[
        str | None,
        Option(
            metavar="N,N",
            help="Number of ranks on this machine, or several: 2,4,8 [default: one per GPU, or 2]",
        ),
    ] = None,
    backends: Annotated[
        str | None,
        Option(metavar="A,B", help="Back ends: gloo, nccl, mpi [default: nccl if there is a GPU, else gloo]"),
    ] = None,
    sizes: Annotated[
        str,
        Option(
            metavar="A:B",
            help="Sizes: a range A:B in steps of 4 times, 1KiB:1MiB:2 in steps of 2 times, or a list A,B.",
        ),
    ] = "1KiB:64MiB",
    operations: Annotated[
        str | None, Option(metavar="A,B", help="Operations, e.g. all-reduce,send-recv [default: all]")
    ] = None,
    dtypes: Annotated[
        str, Option(metavar="A,B", help="Types: fp64, fp32, bf16, fp16, int64, int32, int8, uint8.")
    ] = "fp32",
    place: Annotated[
        str, Option(metavar="A,B", help="Out of place (out), in place (in), or both.")
    ] = "out,in",
    axes: Annotated[
        str | None,
        Option(metavar="A,B", help="Axes: world, node (within nodes), across (nodes), or axes of --plan."),
    ] = None,
    nccl: Annotated[
        str | None,
        Option(
            metavar="A,B",
            help="Algorithms of nccl, with a protocol if you like: ring,tree/LL [default: nccl chooses]",
        ),
    ] = None,
    device: Annotated[
        str, Option(help="Where gloo and mpi have their tensors: cpu, or cuda with an MPI that accepts them.")
    ] = "cpu",
    plan: Annotated[str | None, Option(help="Measure along the axes of this plan's mesh, e.g. tp=2.")] = None,
    seconds: Annotated[float, Option(help="Time to measure each row, without its warm-up.", min=0.001)] = 0.2,
    timeout: Annotated[float, Option(help="Seconds after which an unfinished call fails.", min=1)] = 300.0,
    json: Json = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """Time collectives as nccl-tests does, check their results, and fit the time per call and per byte.

    Under torchrun, mpirun or srun this process becomes a rank.

    Exit status: 0 success, 1 wrong results, 2 bad input.
    """
    me = read_world()
    with _report_once(me):
        begin("collectives", compare, json, plot)
        request, counts = _request(
            me, ranks, backends, sizes, operations, dtypes, place, axes, plan, seconds, timeout, nccl, device
        )
        raise typer.Exit(_measure(request, me, counts, json, plot))


@contextlib.contextmanager
def _report_once(me: World) -> "Iterator[None]":
    """Report errors of a request on rank 0 only: all ranks have the same."""
    try:
        yield
    except (BenchError, PlanError):
        if me.rank == 0:
            raise
        sys.exit(2)


def _request(
    me: World,
    ranks: str | None,
    backends: str | None,
    sizes: str,
    operations: str | None,
    dtypes: str,
    place: str,
    axes: str | None,
    plan: str | None,
    seconds: float,
    timeout_s: float,
    nccl: str | None,
    device: str,
) -> "tuple[CollectiveRequest, tuple[int, ...]]":
    """Return the request and the numbers of ranks, checked as far as possible before ranks are started."""
    from paceline.bench.collectives.operations import ALL_OPERATIONS
    from paceline.bench.collectives.request import (
        DTYPES,
        CollectiveRequest,
        parse_algorithms,
        parse_names,
        parse_rank_counts,
        parse_sizes,
    )

    if device not in ("cpu", "cuda"):
        raise BenchError(f"--device must be cpu or cuda, got {device!r}")
    chosen: dict[str, tuple[str, ...]] = {}
    if operations is not None:
        chosen["operations"] = parse_names(operations, (*ALL_OPERATIONS,), "operation")
    counts = parse_rank_counts(ranks) if ranks is not None else None
    algorithms = parse_algorithms(nccl) if nccl is not None else ()
    sizes_bytes = parse_sizes(sizes)
    chosen_dtypes = parse_names(dtypes, (*DTYPES,), "type")
    places = parse_names(place, ("out", "in"), "place")

    from paceline.bench.collectives import backends as available  # imports torch
    from paceline.bench.collectives.rank_groups import check_axes

    if me.launcher is not None and algorithms:
        raise LaunchError(
            f"--nccl starts ranks for each algorithm, but {me.launcher} started this rank; set NCCL_ALGO and "
            "NCCL_PROTO for all of them"
        )
    if me.launcher is not None and counts not in (None, (me.size,)):
        raise LaunchError(f"--ranks {ranks}, but {me.launcher} started {me.size} ranks; remove --ranks")
    request = CollectiveRequest(
        backends=parse_names(backends, (*available.MISSING,), "back end")
        if backends is not None
        else (available.default_backend(),),
        sizes_bytes=sizes_bytes,
        dtypes=chosen_dtypes,
        places=places,
        axes=tuple(axes.split(",")) if axes else (),
        plan=plan,
        seconds=seconds,
        timeout_s=timeout_s,
        algorithms=algorithms,
        device="cuda" if device == "cuda" else "cpu",
        **chosen,
    )
    if algorithms and request.backends != ("nccl",):
        raise BenchError(
            f"--nccl selects algorithms of nccl, got back ends {', '.join(request.backends)}; "
            "add --backends nccl"
        )
    if me.launcher is not None:
        counts = (me.size,)
    counts = counts or (available.default_ranks(),)
    for count in counts:
        available.check_backends(request.backends, me, count, request.device)
        check_axes(request.axes, request.plan, count)
    return request, counts


def _measure(
    request: "CollectiveRequest", me: World, counts: tuple[int, ...], json: Path | None, plot: Path | None
) -> int:
    """Measure, save and print, also the rows before an error or interrupt; return the exit status."""
    import signal

    from paceline.bench.collect import INTERRUPTED_NOTE
    from paceline.bench.collectives.workers import build_result, iterate_in_thread, run_all_workers
    from paceline.bench.report.busbw import draw
    from paceline.bench.report.collectives import show

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if me.launcher is None:
        items, ended = _collect(run_all_workers(request, counts), me)
    else:
        from paceline.bench.collectives.measure import measure_on_rank

        items, ended = _collect(iterate_in_thread(measure_on_rank(request, me, Path())), me)
    rows = [item for item in items if not isinstance(item, str)]
    if isinstance(ended, KeyboardInterrupt):
        items.append(INTERRUPTED_NOTE)
    if me.rank == 0 and rows:
        local_ranks = me.local_size if me.launcher is not None else max(counts)
        save_and_print(build_result(request, counts, local_ranks, items), json, plot, show, draw, me)
    if isinstance(ended, KeyboardInterrupt) and me.launcher is not None:
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # the thread that measures may wait for ranks that are gone
    if ended is not None:
        raise ended
    if not rows and me.rank == 0:
        raise BenchError(f"nothing was measured: {'; '.join(map(str, items)) or 'no operation is possible'}")
    return 1 if any(row["wrong"] for row in rows) else 0


def _collect(
    source: "Iterator[Row | str]", me: World
) -> "tuple[list[Row | str], Error | RuntimeError | KeyboardInterrupt | None]":
    """Return the rows and notes, and the error or interrupt that ended them early."""
    items: list[Row | str] = []
    try:
        with contextlib.closing(source), progress("starting ranks", me) as report:  # type: ignore[type-var]
            for item in source:
                items.append(item)
                if not isinstance(item, str):
                    report(item)
    except (
        Error,
        RuntimeError,
        KeyboardInterrupt,
    ) as error:  # RuntimeError: torch and MPI, if ranks are gone
        return items, error
    return items, None
