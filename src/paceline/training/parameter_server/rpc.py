"""Messages with tensors between workers and servers, and their transport over torch's RPC."""

import contextlib
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor
from torch.futures import Future

from paceline.torch_compat import register_store_for_rpc


@dataclass(frozen=True)
class Message:
    """A request or an answer. Its tensors are on the CPU."""

    kind: str
    tensors: dict[Any, Tensor] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


# Called in threads of the transport, several at a time. It must not block.
Answer = Callable[[Message], "Future[Message]"]


class Transport(Protocol):
    """A connection between all ranks of a training.

    A call raises ConnectionError if the called rank has ended, or ends before it answers.
    """

    def serve(self, answer: Answer) -> None:
        """Answer calls to this rank from now on, including those that have waited."""

    def call(self, rank: int, message: Message) -> Callable[[], Message]:
        """Send a message. Return a function that waits for the answer."""

    def watch(self, rank: int, lost: Callable[[], None]) -> None:
        """Call `lost`, in a thread of the transport, when a rank has ended."""

    def close(self) -> None:
        """Close the connection without waiting for other ranks."""


def make_completed_future(message: Message) -> "Future[Message]":
    future: Future[Message] = Future()
    future.set_result(message)
    return future


class Rpc:
    """A transport over torch.distributed.rpc with TensorPipe; at most one per process.

    torch 2.13: RPC's graceful shutdown waits for all ranks, and forever for a rank that was killed, so it is
    not used.
    """

    def __init__(self, rank: int, ranks: int, timeout_s: float):
        from torch.distributed import rpc

        self._rpc = rpc
        _server.clear()
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=register_store_for_rpc(), rpc_timeout=timeout_s, num_worker_threads=ranks + 4
        )
        with warnings.catch_warnings():
            # torch 2.13 causes this warning itself.
            warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
            rpc.init_rpc(_rank_name(rank), rank=rank, world_size=ranks, rpc_backend_options=options)

    def serve(self, answer: Answer) -> None:
        _server.start(answer)

    def call(self, rank: int, message: Message) -> Callable[[], Message]:
        try:
            future = self._rpc.rpc_async(_rank_name(rank), _answer, (message,))
        except RuntimeError as error:
            raise _make_connection_error(rank, error) from error

        def wait() -> Message:
            try:
                return future.wait()
            except RuntimeError as error:
                raise _make_connection_error(rank, error) from error

        return wait

    def watch(self, rank: int, lost: Callable[[], None]) -> None:
        # A call that is never answered ends with the connection.
        self._rpc.rpc_async(_rank_name(rank), _never_answer, timeout=0).add_done_callback(lambda _: lost())

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._rpc.shutdown(graceful=False)


def _rank_name(rank: int) -> str:
    return f"rank{rank}"


def _make_connection_error(rank: int, error: RuntimeError) -> ConnectionError:
    return ConnectionError(f"connection to rank {rank} closed: {str(error).splitlines()[0]}")


class _Server:
    """The function that answers calls to this process. It is global because RPC finds functions by name."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.started, self.unanswered = threading.Event(), list[Future[None]]()

    def start(self, answer: Answer) -> None:
        self.answer = answer
        self.started.set()


_server = _Server()


def _answer(message: Message) -> "Future[Message]":
    _server.started.wait()
    return _server.answer(message)


def _never_answer() -> "Future[None]":
    _server.unanswered.append(Future())
    return _server.unanswered[-1]


# As `rpc.functions.async_execution` does, without importing RPC.
_answer._wrapped_async_rpc_function = _answer  # type: ignore[attr-defined]
_never_answer._wrapped_async_rpc_function = _never_answer  # type: ignore[attr-defined]
