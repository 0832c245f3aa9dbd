"""paceline bench collectives: how fast the ranks talk to one another."""

import contextlib
import os
import sys
from collections.abc import Iterator
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
from paceline.distributed.world import World, read_world
from paceline.errors import BenchError, Error, LaunchError, PlanError

if TYPE_CHECKING:
    from paceline.bench.collectives.request import CollectiveRequest
    from paceline.bench.result import Row


def collectives(
    ranks: Annotated[
        int | None, Option(help="Processes on this machine. Default: one for each GPU, or 2.", min=1)
    ] = None,
    backends: Annotated[
        str | None,
        Option(metavar="A,B", help="Of gloo, nccl, mpi. Default: nccl where there are GPUs, else gloo."),
    ] = None,
    sizes: Annotated[
        str, Option(metavar="A:B", help="1KiB:64MiB, each 4 times the one before; 1KiB:64MiB:2; or a list.")
    ] = "1KiB:64MiB",
    operations: Annotated[
        str | None, Option(metavar="A,B", help="Such as all-reduce,send-recv. Default: all ten.")
    ] = None,
    dtypes: Annotated[
        str, Option(metavar="A,B", help="fp64, fp32, bf16, fp16, int64, int32, int8, uint8.")
    ] = "fp32",
    place: Annotated[
        str, Option(metavar="A,B", help="out, in, or both: the result beside the input, or in its place.")
    ] = "out,in",
    axes: Annotated[
        str | None,
        Option(metavar="A,B", help="world, node (inside of nodes), across (nodes), or those of --plan."),
    ] = None,
    plan: Annotated[str | None, Option(help="Measure along the axes of its mesh, such as tp=2.")] = None,
    seconds: Annotated[float, Option(help="To measure each row for, its warm-up apart.", min=0.001)] = 0.2,
    timeout: Annotated[
        float, Option(help="Seconds after which a call that does not end counts as failed.", min=1)
    ] = 300.0,
    json: Json = None,
    plot: Plot = None,
    compare: Compare = None,
) -> None:
    """Time collectives as nccl-tests does, check what they compute, and fit what a call and a byte cost.

    Under torchrun, mpirun or srun this process becomes a rank. Exit status: 0 all right, 1 something came out wrong, 2 bad input.
    """
    if compare is not None:
        return compare_results("collectives", compare)
    me = read_world()
    with _said_once(me):
        request, count = _request(
            me, ranks, backends, sizes, operations, dtypes, place, axes, plan, seconds, timeout
        )
        check(json, plot)
        raise typer.Exit(_measured(request, me, count, json, plot))


@contextlib.contextmanager
def _said_once(me: World) -> "Iterator[None]":
    """What is wrong with a request is wrong on all ranks: the first one says it."""
    try:
        yield
    except (BenchError, PlanError):
        if me.rank == 0:
            raise
        sys.exit(2)


def _request(
    me: World,
    ranks: int | None,
    backends: str | None,
    sizes: str,
    operations: str | None,
    dtypes: str,
    place: str,
    axes: str | None,
    plan: str | None,
    seconds: float,
    timeout_s: float,
) -> "tuple[CollectiveRequest, int]":
    """What is asked for, and of how many ranks; checked as far as it can be before any are there."""
    from paceline.bench.collectives.operations import OPERATIONS
    from paceline.bench.collectives.request import DTYPES, CollectiveRequest, names
    from paceline.bench.collectives.request import sizes as parse_sizes

    asked = {"operations": names(operations, (*OPERATIONS,), "operation")} if operations is not None else {}
    sizes_bytes, asked_dtypes, places = (
        parse_sizes(sizes),
        names(dtypes, (*DTYPES,), "type"),
        names(place, ("out", "in"), "place"),
    )

    from paceline.bench.collectives import backends as known
    from paceline.bench.collectives.rank_groups import check as check_axes

    if me.launcher is not None and ranks not in (None, me.size):
        raise LaunchError(f"--ranks {ranks}, but {me.launcher} started {me.size}; leave --ranks out")
    request = CollectiveRequest(
        backends=names(backends, (*known.MISSING,), "back end")
        if backends is not None
        else (known.default(),),
        sizes_bytes=sizes_bytes,
        dtypes=asked_dtypes,
        places=places,
        axes=tuple(axes.split(",")) if axes else (),
        plan=plan,
        seconds=seconds,
        timeout_s=timeout_s,
        **asked,
    )
    count = me.size if me.launcher is not None else ranks or known.devices()
    known.check(request.backends, me, count)
    check_axes(request.axes, request.plan, count)
    return request, count


def _measured(
    request: "CollectiveRequest", me: World, ranks: int, json: Path | None, plot: Path | None
) -> int:
    """Returns the exit status. Whatever ends it, what was measured until then is shown and kept."""
    import signal

    from paceline.bench.collectives.workers import in_thread, measured, result
    from paceline.bench.report.busbw import busbw
    from paceline.bench.report.collectives import show

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if me.launcher is None:
        found, ended = _collected(measured(request, ranks), me)
    else:
        from paceline.bench.collectives.measure import on_rank

        found, ended = _collected(in_thread(on_rank(request, me, Path())), me)
    rows = [item for item in found if not isinstance(item, str)]
    if isinstance(ended, KeyboardInterrupt):
        found.append("stopped before the end")
    if me.rank == 0 and rows:
        keep(
            result(request, ranks, me.local_size if me.launcher is not None else ranks, found),
            json,
            plot,
            show,
            busbw,
            me,
        )
    if isinstance(ended, KeyboardInterrupt) and me.launcher is not None:
        sys.stdout.flush()
        os._exit(INTERRUPTED)  # the thread that measures may wait for ranks that are gone
    if ended is not None:
        raise ended
    return 1 if any(row["wrong"] for row in rows) else 0


def _collected(
    items: "Iterator[Row | str]", me: World
) -> "tuple[list[Row | str], Error | RuntimeError | KeyboardInterrupt | None]":
    found: list[Row | str] = []
    try:
        with contextlib.closing(items), progress("ranks start", me) as tell:  # type: ignore[type-var]
            for item in items:
                found.append(item)
                if not isinstance(item, str):
                    tell(item)
    except (
        Error,
        RuntimeError,
        KeyboardInterrupt,
    ) as error:  # RuntimeError: what torch and MPI say of ranks that are gone
        return found, error
    return found, None
