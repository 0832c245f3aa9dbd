"""A worker of a parameter server: pulls weights, computes the gradient of its part of the batch, pushes it."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.loader import RankBatchSlice, Samples, batches, training_parts
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.spec import Spec
from paceline.training.first_loss import FirstLoss
from paceline.training.parameter_server.coordinator import STALENESS
from paceline.training.parameter_server.partition import ParameterSlice
from paceline.training.parameter_server.rpc import Message, Transport
from paceline.training.step import TrainingStep


class Worker:
    """`dealt`: the pieces of each server. `statistics`: buffers that travel with the weights of the first."""

    def __init__(
        self,
        model: nn.Module,
        update: TrainingStep,
        dealt: list[list[ParameterSlice]],
        statistics: dict[str, Tensor],
        plan: ResolvedPlan,
        rank: int,
        transport: Transport,
    ):
        self.update, self.dealt, self.statistics, self.plan, self.transport = (
            update,
            dealt,
            statistics,
            plan,
            transport,
        )
        self.params = dict(model.named_parameters())
        self.number = rank - plan.num_servers
        self.staleness = plan.staleness if plan.staleness is not None else STALENESS
        self.have = [-1] * plan.num_servers  # updates in the weights of each server that are here
        update.alone, update.place = True, MeshCoordinate(pp=0, dp=self.number, cp=0, tp=0)

    def first(self) -> int:
        """The step to begin with, once the servers are ready."""
        step: int = self.transport.call(0, Message("hello"))().facts["step"]
        return step

    def steps(
        self,
        first: int,
        total: int,
        spec: Spec,
        training: Samples,
        samples: int,
        device: torch.device,
        readers: int,
        stop: Callable[[], bool],
    ) -> Iterator[int]:
        """Work until it is over; yields the number of each step."""
        part = RankBatchSlice(spec.batch, self.plan.microbatches, self.number, self.plan.dp)
        parts = training_parts(part, samples, spec.seed, first, total)
        first_loss = FirstLoss(
            self.update,
            part.share,
            self.plan.dp * self.plan.microbatches > 1,
            spec.allow_local_loss,
            of_worker=self.plan,
        )
        self.update.examine = first_loss
        pushing = None
        # Gradients travel while the next ones are computed; where the next weights need them, `pull` waits anyway.
        with (
            contextlib.closing(batches(training, parts, device, readers, spec.data.prefetch)) as source,
            ThreadPoolExecutor(1) as sender,
        ):
            for step in range(first, total):
                if self._pull(step, first):
                    break
                micro_batches = [next(source) for _ in range(self.plan.microbatches)]
                losses, items, expected = self.update.backward(micro_batches, step)
                if step == first:
                    first_loss.finish()
                if pushing is not None:
                    pushing.result()
                facts = {
                    "worker": self.number,
                    "step": step,
                    "loss": float(sum(float(loss) for loss in losses)),
                    "items": float(sum(items)),
                    "expected": expected,
                    "stop": stop(),
                }
                pushing = sender.submit(self._push, self._gradients(), facts)
                yield step + 1
            if pushing is not None:
                pushing.result()
        with contextlib.suppress(ConnectionError):  # it has heard it, and left
            self.transport.call(0, Message("goodbye", facts={"worker": self.number}))()

    @torch.no_grad()
    def _pull(self, step: int, first: int) -> bool:
        """Weights that lack `staleness` updates at the most. Returns whether the training is over."""
        need = max(first, step - self.staleness)
        waits = [
            self.transport.call(
                server, Message("pull", facts={"need": need, "have": have, "worker": self.number})
            )
            for server, have in enumerate(self.have)
        ]
        over = False
        for server, wait in enumerate(waits):
            answer = wait()
            over |= answer.facts["over"]
            self.have[server] = answer.facts["version"]
            for key, value in answer.tensors.items():
                (
                    key.of(self.params[key.name].data)
                    if isinstance(key, ParameterSlice)
                    else self.statistics[key]
                ).copy_(value)
        return over

    def _gradients(self) -> list[dict[Any, Tensor]]:
        """By server; they are dropped here."""
        found: list[dict[Any, Tensor]] = [
            {
                piece: piece.of(grad).cpu()
                for piece in pieces
                if (grad := self.params[piece.name].grad) is not None
            }
            for pieces in self.dealt
        ]
        found[0] |= {name: buffer.clone().cpu() for name, buffer in self.statistics.items()}
        for parameter in self.params.values():
            parameter.grad = None
        return found

    def _push(self, gradients: list[dict[Any, Tensor]], facts: dict[str, Any]) -> None:
        """To the first server last: it is the one that says whose gradients count, and by then all have them."""
        waits = [
            self.transport.call(server, Message("push", gradients[server], facts))
            for server in range(1, len(self.dealt))
        ]
        for wait in waits:
            wait()
        self.transport.call(0, Message("push", gradients[0], facts))()
