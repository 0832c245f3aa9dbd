"""The coordinator of a parameter server, on the first server.

The servers keep the weights, and workers compute gradients on the weights that they pull (Li et al.,
Scaling distributed machine learning with the parameter server, 2014), with bounded staleness (Ho et al.,
More effective distributed ML via a stale synchronous parallel parameter server, 2013).

Ranks 0 … servers - 1 are servers, the others workers. A step is one update, with the gradients of all
workers on their parts of its batch, for any staleness. The staleness limits only how many updates may be
missing from the weights on which a gradient is computed. The coordinator counts the steps: it runs the
training loop of a single process, whose updates are made by the servers.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.futures import Future

from paceline.distributed.process_group import start_timeout_s
from paceline.errors import RankError
from paceline.events import Ended, Event, Failed, Started, Step
from paceline.parallel.loss.named_losses import check_same_names
from paceline.plan.plan import ResolvedPlan
from paceline.training.checkpoint.state import collect_model_tensors
from paceline.training.parameter_server.partition import ParameterSlice, join_state
from paceline.training.parameter_server.rpc import Message, Transport, make_completed_future
from paceline.training.parameter_server.server_shard import ServerShard, make_load_message
from paceline.training.step.step_metrics import LocalStepStats

STALENESS = 4  # default
GOODBYE_TIMEOUT_S = 30.0  # for workers to confirm the end


@dataclass(frozen=True)
class _LostWorker:
    worker: int
    step: int  # the first step without its part
    why: str


class Coordinator:
    """Replaces the training step in the loop of the first server."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shard: ServerShard,
        slices: list[list[ParameterSlice]],
        plan: ResolvedPlan,
        transport: Transport,
        clip: float | None,
        timeout_s: float,
    ):
        self.model, self.optimizer, self.shard = model, optimizer, shard
        self.slices, self.transport = slices, transport  # `slices`: of each server
        self.clip, self.timeout_s, self.servers, self.workers = clip, timeout_s, plan.num_servers, plan.dp
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.loss_scale = None
        self.step = self.first = 0  # updates made; updates made when the workers started
        self.alive = set(range(self.workers))
        self.finished: set[int] = set()  # workers that said goodbye
        self.pushed: dict[int, dict[int, Message]] = {}  # step -> worker -> losses and items
        self.changed = threading.Condition()
        self.stop_requested = False
        self.lead = 0  # the most steps that a worker was ahead of the slowest worker
        self.lost: list[_LostWorker] = []
        self.parts: dict[int, int] = {}  # step -> parts of its batch that arrived

    def begin(self, step: int) -> None:
        """Send all servers their share of the model, after `step` steps, and let the workers start."""
        self.step = self.first = step
        params = dict(self.model.named_parameters())
        self._call_all(lambda server: make_load_message(self.optimizer, params, self.slices[server], step))
        self.optimizer.state.clear()
        for worker in range(self.workers):
            self.transport.watch(
                self.servers + worker, partial(self._drop, worker, "its connection was lost")
            )
        self.transport.serve(self.answer)

    def answer(self, message: Message) -> "Future[Message]":
        """Answer a worker, in a thread of the transport."""
        with self.changed:
            if message.kind == "hello":
                return make_completed_future(Message("hello", fields={"step": self.step}))
            worker: int = message.fields["worker"]
            if message.kind == "goodbye":
                self.finished.add(worker)
                self.changed.notify_all()
                return make_completed_future(Message("goodbye"))
            if worker not in self.alive:
                return make_completed_future(Message("dropped", fields={"over": True, "version": self.step}))
        if message.kind == "pull":
            return self.shard.answer(message)
        # The other servers already have these gradients, so the worker counts on all servers or on none.
        kept = self.shard.answer(message)
        with self.changed:
            self.stop_requested |= message.fields["stop"]
            self.lead = max(self.lead, message.fields["step"] - self.shard.version)
            if message.fields["step"] >= self.step:
                self.pushed.setdefault(message.fields["step"], {})[worker] = message
            self.changed.notify_all()
        return kept

    def _drop(self, worker: int, why: str) -> None:
        with self.changed:
            if worker not in self.alive or worker in self.finished:
                return
            self.alive.discard(worker)
            steps = [step for step, by_worker in self.pushed.items() if worker in by_worker]
            self.lost.append(_LostWorker(worker, max([self.step - 1, *steps]) + 1, why))
            self.changed.notify_all()

    def __call__(self, batches: object, step: int, lr_factor: float) -> LocalStepStats:
        """Wait until all workers have pushed this step, and make its update."""
        pushed = self._wait_for_pushes(step)
        self.parts[step + 1] = len(pushed)
        items = {worker: message.fields["items"] for worker, message in pushed.items()}
        squares = sum(
            answer.fields["squares"]
            for answer in self._call_all(lambda _: Message("sum", fields={"step": step, "items": items}))
        )
        norm = math.sqrt(squares)
        grad_factor = min(1.0, self.clip / (norm + 1e-6)) if self.clip is not None else 1.0
        self._call_all(
            lambda _: Message("update", fields={"grad_factor": grad_factor, "lr_factor": lr_factor})
        )
        with self.changed:
            self.step = step + 1
            self.pushed.pop(step, None)
        expected = sum(message.fields["expected"] or 0.0 for message in pushed.values())
        loss = math.fsum(message.fields["loss"] for _, message in sorted(pushed.items()))
        return LocalStepStats(
            loss,
            sum(items.values()),
            torch.tensor(norm, dtype=torch.float64),
            expected or None,
            _sum_named_losses([message.fields["named"] for _, message in sorted(pushed.items())]),
        )

    def _wait_for_pushes(self, step: int) -> dict[int, Message]:
        """Return the messages of all workers for a step. Drop workers that time out."""
        with self.changed:
            timeout_s = start_timeout_s(self.timeout_s) if step == self.first else self.timeout_s
            in_time = self.changed.wait_for(lambda: self.alive <= self.pushed.get(step, {}).keys(), timeout_s)
            pushed = dict(self.pushed.get(step, {}))
            late = self.alive - pushed.keys()
        if not in_time:
            for worker in sorted(late):
                self._drop(worker, f"it pushed no gradients for {timeout_s:.0f} s")
        if not pushed:
            self._call_all(lambda _: Message("ping"))  # raises if a server is gone: that ends all workers
            raise RankError(f"all {self.workers} workers are gone; resume from the last checkpoint")
        return pushed

    def _call_all(self, message: Callable[[int], Message]) -> list[Message]:
        """Return the answers of all servers. This server answers last, while the others work."""
        waits = [self.transport.call(server, message(server)) for server in range(1, self.servers)]
        own = self.shard.answer(message(0)).wait()
        return [own, *(wait() for wait in waits)]

    def gather_(self) -> dict[str, Tensor]:
        """Copy all weights into this rank's model. Return the optimizer's state, by name in a checkpoint."""
        params = dict(self.model.named_parameters())
        states: dict[str, dict[ParameterSlice, dict[str, Tensor]]] = {}
        with torch.no_grad():
            for answer in self._call_all(lambda _: Message("state")):
                for key, value in answer.tensors.items():
                    if isinstance(key, ParameterSlice):
                        key.of(params[key.name].data).copy_(value)
                        states.setdefault(key.name, {}).setdefault(key, {})
                    else:
                        slice_, name = key
                        states.setdefault(slice_.name, {}).setdefault(slice_, {})[name] = value
        return {
            f"optimizer/{name}/{key}": value
            for name, parts in states.items()
            for key, value in join_state(params[name].shape, parts).items()
        }

    def state(self) -> dict[str, Tensor]:
        """Return model and optimizer state, by name in a checkpoint."""
        optimizer_state = self.gather_()
        return {
            f"model/{name}": tensor for name, tensor in collect_model_tensors(self.model).items()
        } | optimizer_state

    def complete_events(self, events: Iterator[Event], ranks: int) -> Iterator[Event]:
        """Yield the events of the loop, completed by what only the coordinator knows."""
        for event in events:
            while self.lost:
                yield self._make_failed_event(self.lost.pop(0))
            if isinstance(event, Started):
                event = replace(event, ranks=ranks)
            elif isinstance(event, Step):
                event = replace(
                    event, samples_per_s=event.samples_per_s * self.parts.pop(event.step) / self.workers
                )
            elif isinstance(event, Ended):
                # The loop counts the communication of this process alone, which is 0.
                event = replace(event, lead=self.lead, communication=None)
                self.end(event.reason == "done")
            yield event

    def _make_failed_event(self, lost: _LostWorker) -> Failed:
        rank, left = self.servers + lost.worker, len(self.alive)
        others = (
            f"the other {left} workers continue"
            if left > 1
            else "the other worker continues"
            if left
            else "no worker is left"
        )
        message = f"worker rank {rank} was dropped ({lost.why}); {others}; "
        message += f"its part of each batch is left out from step {lost.step + 1} on"
        return Failed(what="worker", rank=rank, step=self.step, message=message)

    def end(self, is_done: bool) -> None:
        """Tell all ranks that the training is over, and wait until they have received it.

        is_done: because it is complete, not stopped.
        """
        self._call_all(lambda _: Message("over", fields={"done": is_done}))
        deadline = time.monotonic() + GOODBYE_TIMEOUT_S
        with self.changed:
            self.changed.wait_for(lambda: self.alive <= self.finished, max(0.0, deadline - time.monotonic()))
        for server in range(1, self.servers):
            with contextlib.suppress(ConnectionError):  # the server has received it, and ended
                self.transport.call(server, Message("end"))()


def _sum_named_losses(by_worker: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums over the workers. Raises TaskError if the names differ."""
    for named in by_worker[1:]:
        check_same_names(frozenset(by_worker[0]), frozenset(named))
    return {name: math.fsum(named[name] for named in by_worker) for name in by_worker[0]}


def serve_until_end(shard: ServerShard, transport: Transport) -> None:
    """Answer messages until the training ends, on a server other than the first.

    Raises ConnectionError if the first server is lost.
    """
    lost = threading.Event()

    def leave() -> None:
        lost.set()
        shard.ended.set()

    transport.serve(shard.answer)
    transport.watch(0, leave)
    shard.ended.wait()
    if lost.is_set() and not shard.is_over:
        raise ConnectionError("connection to rank 0 closed, which counts the steps")
