"""One batch through the stages of a pipeline, one after the other and without gradients: to evaluate, or to try something out."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import Error
from paceline.parallel.forward import ELSEWHERE
from paceline.parallel.pipeline.stage import Stage, ranks_of
from paceline.parallel.pipeline.tracer import ForwardTrace
from paceline.plan.plan import MeshCoordinate, Plan

NO_INDEX = torch.zeros((), dtype=torch.long)


class SequentialStageRunner:
    """The stages of this rank, and who has the next ones."""

    def __init__(
        self,
        stages: Sequence[Stage],
        plan: Plan,
        place: MeshCoordinate,
        device: torch.device,
        group: dist.ProcessGroup,
    ):
        self.stages, self.plan, self.place, self.device, self.group = stages, plan, place, device, group
        self.ranks = ranks_of(plan)
        self.kept: Any = ()  # for the next stage, where it is on this rank as well

    def run(self, recording: ForwardTrace) -> Any:
        """What the last stage makes of a batch; ELSEWHERE on the ranks that have it not."""
        result: Any = ELSEWHERE
        with _unfused_attention():
            for stage in self.stages:
                received = () if stage.is_first else self._receive(stage, recording)
                result = stage(*received, index=NO_INDEX)
                if not stage.is_last:
                    self._send(stage.index + 1, result)
        return result if self.stages[-1].is_last else ELSEWHERE

    def attempt(self) -> tuple[Any, dict[int, list[torch.Size]]]:
        """The same before it is known how large that is which crosses the cuts, with these sizes by cut. What goes wrong in one stage
        is raised on all ranks of the pipeline."""
        result: Any = ELSEWHERE
        wrong: Exception | None = None
        sizes: dict[int, list[torch.Size]] = {}
        with _unfused_attention():
            for stage in self.stages:
                received, wrong = ((), None) if stage.is_first else self._take(stage)
                sizes[stage.first] = [value.shape for value in received]
                if wrong is None:
                    try:
                        result = stage(*(value.to(self.device) for value in received), index=NO_INDEX)
                    except (Error, RuntimeError) as raised:
                        result, wrong = (), raised
                if not stage.is_last:
                    self._give(stage.index + 1, (result, wrong))
        for error in self.gather([wrong]):
            if error is not None:
                raise error
        return (result if self.stages[-1].is_last else ELSEWHERE), sizes

    def gather(self, found: list[Any]) -> list[Any]:
        """What all ranks of the pipeline have found."""
        everywhere: list[list[Any]] = [[]] * self.plan.pp
        dist.all_gather_object(everywhere, found, group=self.group)
        return [one for there in everywhere for one in there]

    def _peer(self, stage: int) -> int:
        return self.ranks[stage] * self.plan.copies + self.plan.copy(self.place)

    def _send(self, stage: int, values: Sequence[Tensor]) -> None:
        self.kept = values
        if self.ranks[stage] != self.place.pp:
            for value in values:
                dist.send(value, self._peer(stage))

    def _receive(self, stage: Stage, recording: ForwardTrace) -> Sequence[Tensor]:
        if self.ranks[stage.index - 1] == self.place.pp:
            return self.kept
        received = [
            torch.empty(like.shape, dtype=like.dtype, device=self.device)
            for like in recording.calls[stage.first].likes
        ]
        for value in received:
            dist.recv(value, self._peer(stage.index - 1))
        return received

    def _give(self, stage: int, message: tuple[Sequence[Tensor], Exception | None]) -> None:
        self.kept = message
        if self.ranks[stage] != self.place.pp:
            values, wrong = message
            dist.send_object_list([[value.cpu() for value in values], wrong], self._peer(stage))

    def _take(self, stage: Stage) -> tuple[Sequence[Tensor], Exception | None]:
        if self.ranks[stage.index - 1] == self.place.pp:
            return self.kept
        message: list[Any] = [None, None]
        dist.recv_object_list(message, self._peer(stage.index - 1))
        return message[0], message[1]


@contextlib.contextmanager
def _unfused_attention() -> Iterator[None]:
    """torch's fused layers pack what is not masked, and the stages must agree on shapes."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
