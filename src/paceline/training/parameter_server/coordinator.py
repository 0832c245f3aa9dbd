"""A parameter server: the weights lie on servers, and workers compute gradients on what they pull (Li et al., Scaling distributed machine
learning with the parameter server, 2014), with a bounded staleness (Ho et al., More effective distributed ML via a stale synchronous
parallel parameter server, 2013).

Ranks 0 … servers - 1 are servers, the others workers. A step is one update, of the gradients of all workers on their parts of its batch,
whatever the staleness; that says only how many updates the weights may lack on which a gradient is computed. The first server counts
the steps: it is the loop of one process, whose update is made elsewhere.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.futures import Future

from paceline.distributed.process_group import start_timeout_s
from paceline.errors import RankError
from paceline.events import Ended, Event, Failed, Started, Step
from paceline.plan.plan import ResolvedPlan
from paceline.training.checkpoint import save as checkpoint
from paceline.training.parameter_server.partition import ParameterSlice, join_state
from paceline.training.parameter_server.rpc import Message, Transport, answered
from paceline.training.parameter_server.server_shard import Shard, load_message
from paceline.training.step_metrics import LocalStepStats

STALENESS = 4  # where a plan does not say it
GOODBYE_S = 30.0  # for workers to say that they have seen the end


@dataclass(frozen=True)
class _Lost:
    worker: int
    step: int  # the first one that its part is left out of
    why: str


class Coordinator:
    """Stands in the loop for a step of this process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shard: Shard,
        dealt: list[list[ParameterSlice]],
        plan: ResolvedPlan,
        transport: Transport,
        clip: float | None,
        timeout_s: float,
    ):
        self.model, self.optimizer, self.shard, self.dealt, self.transport = (
            model,
            optimizer,
            shard,
            dealt,
            transport,
        )
        self.clip, self.timeout_s, self.servers, self.workers = clip, timeout_s, plan.num_servers, plan.dp
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.loss_scale = None
        self.step = self.first = 0  # updates made; when the workers came in
        self.alive = set(range(self.workers))
        self.gone: set[int] = set()  # said goodbye
        self.pushed: dict[int, dict[int, Message]] = {}  # step -> worker -> what its gradients came to
        self.changed = threading.Condition()
        self.stop_wished = False
        self.lead = 0  # most steps that a worker was seen ahead of the slowest
        self.lost: list[_Lost] = []
        self.parts: dict[int, int] = {}  # step -> parts of its batch that came

    def begin(self, step: int) -> None:
        """Give all servers their share of the model as it is after `step` steps, and let the workers in."""
        self.step = self.first = step
        params = dict(self.model.named_parameters())
        self._ask_all(lambda server: load_message(self.optimizer, params, self.dealt[server], step))
        self.optimizer.state.clear()
        for worker in range(self.workers):
            self.transport.watch(
                self.servers + worker, partial(self._drop, worker, "its connection was lost")
            )
        self.transport.serve(self.answer)

    def answer(self, message: Message) -> "Future[Message]":
        """In threads of the transport."""
        with self.changed:
            if message.what == "hello":
                return answered(Message("hello", facts={"step": self.step}))
            worker: int = message.facts["worker"]
            if message.what == "goodbye":
                self.gone.add(worker)
                self.changed.notify_all()
                return answered(Message("goodbye"))
            if worker not in self.alive:
                return answered(Message("dropped", facts={"over": True, "version": self.step}))
        if message.what == "pull":
            return self.shard.answer(message)
        # The other servers have this worker's gradients already, so that it counts on all of them or on none.
        kept = self.shard.answer(message)
        with self.changed:
            self.stop_wished |= message.facts["stop"]
            self.lead = max(self.lead, message.facts["step"] - self.shard.version)
            if message.facts["step"] >= self.step:
                self.pushed.setdefault(message.facts["step"], {})[worker] = message
            self.changed.notify_all()
        return kept

    def _drop(self, worker: int, why: str) -> None:
        with self.changed:
            if worker not in self.alive or worker in self.gone:
                return
            self.alive.discard(worker)
            steps = [step for step, of in self.pushed.items() if worker in of]
            self.lost.append(_Lost(worker, max([self.step - 1, *steps]) + 1, why))
            self.changed.notify_all()

    def __call__(self, batches: object, step: int, lr_factor: float) -> LocalStepStats:
        """Wait until all workers have pushed this step, and make its update."""
        came = self._all_of(step)
        self.parts[step + 1] = len(came)
        items = {worker: message.facts["items"] for worker, message in came.items()}
        squares = sum(
            answer.facts["squares"]
            for answer in self._ask_all(lambda _: Message("sum", facts={"step": step, "items": items}))
        )
        norm = math.sqrt(squares)
        by = min(1.0, self.clip / (norm + 1e-6)) if self.clip is not None else 1.0
        self._ask_all(lambda _: Message("update", facts={"by": by, "lr_factor": lr_factor}))
        with self.changed:
            self.step = step + 1
            self.pushed.pop(step, None)
        expected = sum(message.facts["expected"] or 0.0 for message in came.values())
        loss = math.fsum(message.facts["loss"] for _, message in sorted(came.items()))
        return LocalStepStats(
            loss, sum(items.values()), torch.tensor(norm, dtype=torch.float64), expected or None
        )

    def _all_of(self, step: int) -> dict[int, Message]:
        with self.changed:
            timeout_s = start_timeout_s(self.timeout_s) if step == self.first else self.timeout_s
            here = self.changed.wait_for(lambda: self.alive <= self.pushed.get(step, {}).keys(), timeout_s)
            came = dict(self.pushed.get(step, {}))
            late = self.alive - came.keys()
        if not here:
            for worker in sorted(late):
                self._drop(worker, f"it pushed nothing for {timeout_s:.0f} s")
        if not came:
            raise RankError(
                f"all {self.workers} workers are gone; the last good weights are in the checkpoints"
            )
        return came

    def _ask_all(self, message: Callable[[int], Message]) -> list[Message]:
        """Of all servers; this one last, while the others work."""
        waits = [self.transport.call(server, message(server)) for server in range(1, self.servers)]
        own = self.shard.answer(message(0)).wait()
        return [own, *(wait() for wait in waits)]

    def gather_(self) -> dict[str, Tensor]:
        """Bring all weights into this rank's model; returns the optimizer's state, by its name in a checkpoint."""
        params = dict(self.model.named_parameters())
        states: dict[str, dict[ParameterSlice, dict[str, Tensor]]] = {}
        with torch.no_grad():
            for answer in self._ask_all(lambda _: Message("state")):
                for key, value in answer.tensors.items():
                    if isinstance(key, ParameterSlice):
                        key.of(params[key.name].data).copy_(value)
                        states.setdefault(key.name, {}).setdefault(key, {})
                    else:
                        piece, name = key
                        states.setdefault(piece.name, {}).setdefault(piece, {})[name] = value
        return {
            f"optimizer/{name}/{key}": value
            for name, parts in states.items()
            for key, value in join_state(params[name].shape, parts).items()
        }

    def state(self) -> dict[str, Tensor]:
        """All there is, by its name in a checkpoint."""
        found = self.gather_()
        return {
            f"model/{name}": tensor for name, tensor in checkpoint.model_tensors(self.model).items()
        } | found

    def followed(self, events: Iterator[Event], ranks: int) -> Iterator[Event]:
        """What the loop tells, with what it does not know."""
        for event in events:
            while self.lost:
                yield self._told(self.lost.pop(0))
            if isinstance(event, Started):
                event = replace(event, ranks=ranks)
            elif isinstance(event, Step):
                event = replace(
                    event, samples_per_s=event.samples_per_s * self.parts.pop(event.step) / self.workers
                )
            elif isinstance(event, Ended):
                event = replace(event, lead=self.lead, communication=None)  # of its own process it would be 0
                self.end()
            yield event

    def _told(self, lost: _Lost) -> Failed:
        rank, left = self.servers + lost.worker, len(self.alive)
        others = (
            f"the other {left} go on" if left > 1 else "the other goes on" if left else "no other is left"
        )
        message = f"rank {rank}, a worker, was dropped ({lost.why}); {others}; "
        message += f"its part of each batch is left out from step {lost.step + 1} on"
        return Failed(what="worker", rank=rank, step=self.step, message=message)

    def end(self) -> None:
        """Tell all that it is over, and wait until they have heard it."""
        self._ask_all(lambda _: Message("over"))
        deadline = time.monotonic() + GOODBYE_S
        with self.changed:
            self.changed.wait_for(lambda: self.alive <= self.gone, max(0.0, deadline - time.monotonic()))
        for server in range(1, self.servers):
            with contextlib.suppress(ConnectionError):  # it has heard it, and left
                self.transport.call(server, Message("end"))()


def stand_by(shard: Shard, transport: Transport) -> None:
    """A server other than the first: it only answers. Raises ConnectionError when the first is lost."""
    lost = threading.Event()

    def leave() -> None:
        lost.set()
        shard.ended.set()

    transport.serve(shard.answer)
    transport.watch(0, leave)
    shard.ended.wait()
    if lost.is_set() and not shard.is_over:
        raise ConnectionError("connection to rank 0 closed: it keeps the count of the steps")
