"""`paceline.spawn`: calls a function on processes of this machine that are connected by gloo."""

from __future__ import annotations

import contextlib
import gc
import io
import math
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from paceline import task as tasks
from paceline.distributed.world import read_world
from paceline.errors import LaunchError, RankError, SpecError
from paceline.launch.interrupt import shorten_interrupt
from paceline.user_code import UserCode

if TYPE_CHECKING:
    from paceline.launch.rank_pool import Ranks

T = TypeVar("T")
MAX_S = 14 * 86400.0
POLL_S = 0.1


def spawn(function: Callable[..., T], ranks: int, *args: Any, timeout_s: float | None = None) -> list[T]:
    """Call `function(*args)` on `ranks` processes of this machine, and return the results by rank.

        def total(x):
            tensor = torch.tensor([x * (1 + dist.get_rank())])
            dist.all_reduce(tensor)
            return tensor.item()

        paceline.spawn(total, 4, 10.0)   # [100.0, 100.0, 100.0, 100.0]

    The processes have a gloo process group, so `torch.distributed` and `paceline.setup` work in the function.
    It may be defined in a script or in a cell of a notebook; the processes do not run the script. What they
    print appears here. They end with this call, and with this process.

    function: it and its arguments are copied to the processes, also a function that cannot be imported.
    ranks: number of processes.
    timeout_s: seconds after which the function has failed, and that a rank waits for others [default: none].

    Raises LaunchError if this process is a rank already, or the machine is too small, SpecError for arguments
    that cannot be copied, and RankError if the function raises on a rank, or a rank dies or takes too long.
    An Error of Paceline that the function raises on all ranks is raised here.
    """
    tasks.check_not_importing("paceline.spawn")
    content = _pack(function, ranks, args, timeout_s)
    from paceline.launch.rank_pool import Ranks, keep_server

    with shorten_interrupt(), Ranks(ranks) as pool:
        pool.start()
        keep_server()
        with _show_output(pool):
            results = pool(_call, content, timeout_s=timeout_s if timeout_s is not None else MAX_S)
    return [pickle.loads(result) for result in results]


def _pack(function: Callable[..., Any], ranks: int, args: Any, timeout_s: float | None) -> bytes:
    """Return the function and its arguments as a pickle, after a check of the arguments of `spawn`."""
    if not callable(function):
        raise SpecError(f"function must be callable, got {type(function).__name__}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise SpecError(f"ranks must be an integer of at least 1, got {ranks!r:.40}")
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise SpecError(f"timeout_s must be above 0, got {timeout_s}")
    world = read_world()
    if world.launcher is not None:
        raise LaunchError(
            f"paceline.spawn starts processes, but {world.launcher} started this process as rank "
            f"{world.rank} of {world.size}; call the function itself"
        )
    return _dump((function, args), "the function or its arguments", SpecError)


def _dump(value: Any, what: str, kind: type[SpecError] | type[RankError]) -> bytes:
    from paceline.launch.by_value import dumps

    try:
        content = dumps(value)
    except Exception as error:  # of the user's objects
        raise kind(f"{what} cannot be sent to another process: {type(error).__name__}: {error}") from error
    return content


def _call(content: bytes) -> bytes:
    """Call the function on this rank, and return its result as a pickle."""
    import torch
    import torch.distributed as dist

    from paceline.distributed.process_group import threads_per_rank

    torch.set_num_threads(threads_per_rank(dist.get_world_size(), None))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the caller shows each line
    rank = f"rank {dist.get_rank()}"
    with UserCode(f"{rank}: reading the function", _call, RankError):
        function, args = pickle.loads(content)
    name = getattr(function, "__name__", type(function).__name__)
    try:
        with UserCode(f"{rank}: {name}()", function, RankError):
            result = function(*args)
    finally:
        sys.stdout.flush()
        gc.collect()  # DistributedDataParallel must not hold the last reference to the process group
    return _dump(result, f"{rank}: the result of {name}()", RankError)


@contextlib.contextmanager
def _show_output(pool: Ranks) -> Iterator[None]:
    """Print what the ranks print, line by line, until the context ends."""
    is_over = threading.Event()

    def show() -> None:
        while not is_over.wait(POLL_S):
            _print(pool.read_new_output(whole_lines=True))

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        _print(pool.read_new_output(whole_lines=False))


def _print(text: str) -> None:
    if text:
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
