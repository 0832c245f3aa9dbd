"""Real ranks over gloo for the tests: processes that stay, and run one function after another.

    ranks(2)(function, *args)   -> what function(*args) returned on each rank, in a fresh process group

`function` and its arguments must be picklable. Run as a script, this file is one rank.
"""

import faulthandler
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paceline import Spec, Task, train
from paceline.distributed.dtensor import is_materialized
from paceline.distributed.network_interface import use_loopback
from paceline.distributed.store import open_store
from paceline.events import Evaluated, Step
from paceline.plan.plan import parse
from paceline.training.init.named_tensors import named_tensors

TIMEOUT_S = 120.0


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    pipe: Connection
    output: IO[bytes]

    def last_words(self) -> str:
        file = self.output.fileno()
        return os.pread(file, 4000, max(0, os.fstat(file).st_size - 4000)).decode(errors="replace")


@dataclass
class Ranks:
    """So many processes. They are started by the first call, and again by the one after a failure."""

    size: int
    _running: list[_Rank] = field(default_factory=list)
    _store: dist.TCPStore | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        if not self._running:
            self._start()
        for rank in self._running:
            rank.pipe.send_bytes(pickle.dumps((function, args)))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size:
            waiting = {rank.pipe: at for at, rank in enumerate(self._running) if at not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"no answer from ranks {sorted(waiting.values())} in {timeout_s:.0f} s")
            for pipe in ready:
                try:
                    answers[waiting[pipe]], wrong = pipe.recv()
                except EOFError:
                    wrong = "it died"
                if wrong:
                    self._fail(f"rank {waiting[pipe]} of {self.size}: {wrong}")
        return [answers[at] for at in range(self.size)]

    def _start(self) -> None:
        self._store = open_store()
        for at in range(self.size):
            here, there = Pipe()
            output = tempfile.TemporaryFile()  # noqa: SIM115
            environ = os.environ | {
                "RANK": str(at),
                "LOCAL_RANK": str(at),
                "WORLD_SIZE": str(self.size),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),  # where the tests' functions are found
            }
            process = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno())],
                env=environ,
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            there.close()
            self._running.append(_Rank(process, here, output))

    def _fail(self, reason: str) -> None:
        for rank in self._running:
            rank.process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)  # for the last words of the others
        shown = [f"--- rank {at} ---\n{rank.last_words()}" for at, rank in enumerate(self._running)]
        self.end()
        raise AssertionError("\n".join([reason, *shown]))

    def end(self) -> None:
        for rank in self._running:
            rank.pipe.close()
            rank.process.kill()
            rank.process.wait()
            rank.output.close()
        self._running, self._store = [], None


ranks = cache(Ranks)


def _be_a_rank(pipe: Connection) -> None:
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning, "torch")
    warnings.filterwarnings(
        "ignore", ".*torch.jit.* is deprecated", DeprecationWarning
    )  # by torch itself, for zero1
    warnings.filterwarnings(
        "ignore", "The .grad attribute of a Tensor", UserWarning
    )  # Dynamo hides it from users by other means
    warnings.filterwarnings(
        "ignore", ".*Function.> should not be instantiated", DeprecationWarning
    )  # by Dynamo, for tp
    warnings.filterwarnings(
        "ignore", ".*use of fork", DeprecationWarning
    )  # by the workers of a data loader, from Python 3.12 on
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    use_loopback()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    faulthandler.register(signal.SIGUSR1)  # says where it hangs
    gc.freeze()
    for call in itertools.count():
        try:
            asked = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, args = pickle.loads(asked)
            own = dist.PrefixStore(str(call), store)
            dist.init_process_group(
                "gloo", store=own, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
            )
            dist.barrier()  # all are connected, before one can be done
            answer = function(*args), None
            gc.collect()  # what is left of DistributedDataParallel must not be the last to hold the group
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            answer = None, traceback.format_exc()
        pipe.send(answer)


@dataclass(frozen=True)
class Trained:
    """What came of a training on one rank."""

    losses: list[float]
    grad_norms: list[float | None]
    lrs: list[float]
    metrics: list[dict[str, float]]
    weights: dict[
        str, np.ndarray
    ]  # whole, after the last step; buffers too; those of the stages that lie on the rank
    notes: tuple[str, ...]


def training(
    task: Task,
    spec: Spec,
    plan: str | None = None,
    plant: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Trained:
    """Train in this rank. `plant` may spoil something for as long as its context lasts."""
    built: list[nn.Module] = []
    trained_here: list[nn.Module] = []
    model = type(task).model

    def keep() -> nn.Module:
        built.append(model(task))
        return built[-1]

    def observe(model: nn.Module, what: str, step: int) -> None:
        trained_here[:] = [model]

    object.__setattr__(task, "model", keep)
    with plant():
        events = list(train(spec, parse(plan) if plan is not None else None, task=task, observe=observe))
        last = [*built, *trained_here][-1]  # rank 0 builds others to compare them
        weights = {
            name: _whole(tensor) for name, tensor in named_tensors(last).items() if is_materialized(tensor)
        }
    steps = [event for event in events if isinstance(event, Step)]
    return Trained(
        losses=[step.loss for step in steps],
        grad_norms=[step.grad_norm for step in steps],
        lrs=[step.lr for step in steps],
        metrics=[dict(event.metrics) for event in events if isinstance(event, Evaluated)],
        weights=weights,
        notes=events[0].notes,
    )


def _whole(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy()


def trained(size: int, task: Task, spec: Spec, plan: str | None = None, plant: Any = nullcontext) -> Trained:
    """Train on so many ranks, which must agree on every bit of what they share."""
    on_ranks = ranks(size)(training, task, spec, plan, plant)
    weights: dict[str, np.ndarray] = {}
    for each in on_ranks:
        weights = each.weights | weights
    first = replace(on_ranks[0], weights=weights)
    for rank, other in enumerate(on_ranks):
        here = replace(first, weights={name: weights[name] for name in other.weights})
        assert not (found := differences(other, here, 0.0)), f"rank {rank} differs from the others: {found}"
    return first


@cache
def _alone(task: Task, spec: str) -> Trained:
    return trained(1, task, Spec.model_validate_json(spec), "single")


def wrong(size: int, plan: str, task: Task, spec: Spec, plant: Any = nullcontext) -> list[str]:
    """Where a training on so many ranks differs from one process by more than 1e-10; [] where nowhere."""
    return differences(trained(size, task, spec, plan, plant), _alone(task, spec.model_dump_json()), 1e-10)


def differences(found: Trained, expected: Trained, rtol: float) -> list[str]:
    """Where two trainings differ by more than rtol, relative to the largest element of each series or tensor; [] where nowhere."""
    assert found.weights.keys() == expected.weights.keys()
    assert [each.keys() for each in found.metrics] == [each.keys() for each in expected.metrics]
    pairs = {
        "losses": (found.losses, expected.losses),
        "grad_norms": (found.grad_norms, expected.grad_norms),
        "lrs": (found.lrs, expected.lrs),
        **{
            name: ([each[name] for each in found.metrics], [each[name] for each in expected.metrics])
            for name in set().union(*expected.metrics)
        },
        **{name: (found.weights[name], expected.weights[name]) for name in expected.weights},
    }
    return [
        f"{name} by {by:.2g}"
        for name, (one, other) in pairs.items()
        if not (by := difference(one, other)) <= rtol
    ]


def difference(found: Any, expected: Any) -> float:
    """The largest difference, relative to the largest element."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    if not expected.size or np.array_equal(found, expected):
        return 0.0
    scale = np.abs(expected).max()
    return float(np.abs(found - expected).max() / scale) if scale else float("inf")


if __name__ == "__main__":
    import harness  # under its own name, which is what pickled functions know

    harness._be_a_rank(Connection(int(sys.argv[1])))
