"""A worker of a parameter server: it pulls weights, computes gradients and pushes them."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.loader import batches
from paceline.data.order import Order
from paceline.data.samples import Samples
from paceline.plan.plan import MeshCoordinate, ResolvedPlan
from paceline.spec import Spec
from paceline.training.checks.first_loss import FirstLossCheck
from paceline.training.parameter_server.coordinator import STALENESS
from paceline.training.parameter_server.partition import ParameterSlice
from paceline.training.parameter_server.rpc import Message, Transport
from paceline.training.step.step import TrainingStep


class Worker:
    """One worker.

    `slices`: of each server. `statistics`: buffers that travel with the weights of the first server.
    """

    def __init__(
        self,
        model: nn.Module,
        update: TrainingStep,
        slices: list[list[ParameterSlice]],
        statistics: dict[str, Tensor],
        plan: ResolvedPlan,
        rank: int,
        transport: Transport,
    ):
        self.update, self.slices, self.statistics = update, slices, statistics
        self.plan, self.transport = plan, transport
        self.params = dict(model.named_parameters())
        self.number = rank - plan.num_servers
        self.staleness = plan.staleness if plan.staleness is not None else STALENESS
        self.versions = [-1] * plan.num_servers  # of the pulled weights of each server, in updates
        self.is_done = False  # the training is complete, maybe before its length
        update.is_local, update.place = True, MeshCoordinate(pp=0, dp=self.number, cp=0, tp=0)

    def wait_for_start(self) -> int:
        """Return the first step, when the servers are ready."""
        step: int = self.transport.call(0, Message("hello"))().fields["step"]
        return step

    def steps(
        self,
        first: int,
        total: int,
        spec: Spec,
        training: Samples,
        order: Order,
        device: torch.device,
        readers: int,
        stop: Callable[[], bool],
    ) -> Iterator[int]:
        """Train until the servers end the training. Yield the number of each step."""
        part = RankBatchSlice(spec.batch, self.plan.microbatches, self.number, self.plan.dp)
        parts = training_parts(part, order, first, total)
        self.update.batch_slice = part
        first_loss = FirstLossCheck(
            self.update,
            part.share,
            self.plan.dp * self.plan.microbatches > 1,
            spec.allow_local_loss,
            of_worker=self.plan,
        )
        self.update.on_first_loss = first_loss
        pushing = None
        # Gradients are sent while the next are computed. If the next weights depend on them, `_pull` waits.
        with (
            contextlib.closing(
                batches(training, parts, device, readers, spec.data.prefetch, self.plan.microbatches)
            ) as source,
            ThreadPoolExecutor(1) as sender,
        ):
            for step in range(first, total):
                if self._pull(step, first):
                    break
                microbatches = [next(source) for _ in range(self.plan.microbatches)]
                with self.update.number_samples(microbatches, step):
                    losses, items, expected = self.update.backward(microbatches, step)
                if step == first:
                    first_loss.finish()
                if pushing is not None:
                    pushing.result()
                fields = {
                    "worker": self.number,
                    "step": step,
                    "loss": float(sum(float(loss) for loss in losses)),
                    "items": float(sum(items)),
                    "expected": expected,
                    "named": {name: float(total) for name, total in self.update.named.sums.items()},
                    "stop": stop(),
                }
                pushing = sender.submit(self._push, self._take_gradients(), fields)
                yield step + 1
            if pushing is not None:
                pushing.result()
        with contextlib.suppress(ConnectionError):  # the server has received it, and ended
            self.transport.call(0, Message("goodbye", fields={"worker": self.number}))()

    @torch.no_grad()
    def _pull(self, step: int, first: int) -> bool:
        """Update the weights, so that they lack at most `staleness` updates.

        Return whether the training is over.
        """
        need = max(first, step - self.staleness)
        waits = [
            self.transport.call(
                server, Message("pull", fields={"need": need, "have": version, "worker": self.number})
            )
            for server, version in enumerate(self.versions)
        ]
        is_over = False
        for server, wait in enumerate(waits):
            answer = wait()
            is_over |= answer.fields["over"]
            self.is_done |= answer.fields.get("done", False)
            self.versions[server] = answer.fields["version"]
            for key, value in answer.tensors.items():
                target = (
                    key.of(self.params[key.name].data)
                    if isinstance(key, ParameterSlice)
                    else self.statistics[key]
                )
                target.copy_(value)
        return is_over

    def _take_gradients(self) -> list[dict[Any, Tensor]]:
        """Return the gradients and statistics for each server, and drop the gradients of the parameters."""
        by_server: list[dict[Any, Tensor]] = [
            {
                slice_: slice_.of(grad).cpu()
                for slice_ in slices
                if (grad := self.params[slice_.name].grad) is not None
            }
            for slices in self.slices
        ]
        by_server[0] |= {name: buffer.clone().cpu() for name, buffer in self.statistics.items()}
        for parameter in self.params.values():
            parameter.grad = None
        return by_server

    def _push(self, gradients: list[dict[Any, Tensor]], fields: dict[str, Any]) -> None:
        """Send gradients to all servers, to the first server last.

        The first server decides whose gradients count. By then all servers have these.
        """
        waits = [
            self.transport.call(server, Message("push", gradients[server], fields))
            for server in range(1, len(self.slices))
        ]
        for wait in waits:
            wait()
        self.transport.call(0, Message("push", gradients[0], fields))()
