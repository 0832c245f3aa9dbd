"""How workers and servers talk: calls that carry tensors, answered when there is an answer; here over torch's RPC."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


@dataclass(frozen=True)
class Message:
    """Tensors lie on the CPU."""

    what: str
    tensors: dict[Any, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


Answer = Callable[
    [Message], "Future[Message]"
]  # called in threads of the transport, several at a time; must not wait


class Transport(Protocol):
    """Connects all ranks of a training. A call to a rank that is gone, or goes before it has answered, raises ConnectionError."""

    def serve(self, answer: Answer) -> None:
        """From now on calls to this rank are answered; those that came before have waited."""

    def call(self, rank: int, message: Message) -> Callable[[], Message]:
        """Send a message; what is returned waits for the answer."""

    def watch(self, rank: int, lost: Callable[[], None]) -> None:
        """Call `lost`, in a thread of the transport, when a rank is gone."""

    def close(self) -> None:
        """Waits for nobody."""


def answered(message: Message) -> "Future[Message]":
    future: Future[Message] = Future()
    future.set_result(message)
    return future


class Rpc:
    """torch.distributed.rpc on TensorPipe; one at a time in a process.

    Its own end is not used: `shutdown` waits for all ranks, and for ever for one that was killed (torch 2.13).
    """

    def __init__(self, rank: int, ranks: int, timeout_s: float):
        from torch.distributed import rpc

        self._rpc = rpc
        _serving.clear()
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=_use_our_store(), rpc_timeout=timeout_s, num_worker_threads=ranks + 4
        )
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "You are using a Backend", UserWarning
            )  # torch's own doing (2.13)
            rpc.init_rpc(_name(rank), rank=rank, world_size=ranks, rpc_backend_options=options)

    def serve(self, answer: Answer) -> None:
        _serving.start(answer)

    def call(self, rank: int, message: Message) -> Callable[[], Message]:
        try:
            future = self._rpc.rpc_async(_name(rank), _answer, (message,))
        except RuntimeError as error:
            raise _gone(rank, error) from error

        def wait() -> Message:
            try:
                return future.wait()
            except RuntimeError as error:
                raise _gone(rank, error) from error

        return wait

    def watch(self, rank: int, lost: Callable[[], None]) -> None:
        # A call that is never answered ends with the connection.
        self._rpc.rpc_async(_name(rank), _never, timeout=0).add_done_callback(lambda _: lost())

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._rpc.shutdown(graceful=False)


def _name(rank: int) -> str:
    return f"rank{rank}"


def _gone(rank: int, error: RuntimeError) -> ConnectionError:
    return ConnectionError(f"connection to rank {rank} closed: {str(error).splitlines()[0]}")


def _use_our_store() -> str:
    """An address under which torch's RPC finds the store that the ranks have met by already. Under torchrun it would connect to
    another port, where nobody listens, since TORCHELASTIC_USE_AGENT_STORE makes every rank a client (torch 2.13)."""
    with contextlib.suppress(RuntimeError):  # registered before
        dist.register_rendezvous_handler("paceline", _meet)
    return "paceline://"


def _meet(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    yield (
        dist.PrefixStore("rpc", dist.distributed_c10d._get_default_store()),
        dist.get_rank(),
        dist.get_world_size(),
    )


class _Serving:
    """What RPC's functions of this process answer with; they are found by name, so it is global."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.started, self.unanswered = threading.Event(), list[Future[None]]()

    def start(self, answer: Answer) -> None:
        self.answer = answer
        self.started.set()


_serving = _Serving()


def _answer(message: Message) -> "Future[Message]":
    _serving.started.wait()
    return _serving.answer(message)


def _never() -> "Future[None]":
    _serving.unanswered.append(Future())
    return _serving.unanswered[-1]


# What `rpc.functions.async_execution` does, without importing RPC.
_answer._wrapped_async_rpc_function = _answer  # type: ignore[attr-defined]
_never._wrapped_async_rpc_function = _never  # type: ignore[attr-defined]
