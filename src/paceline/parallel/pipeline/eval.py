"""One batch through the stages of a pipeline in order, without gradients: for evaluation and trials."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import Error
from paceline.parallel.loss.forward import ELSEWHERE
from paceline.parallel.pipeline.forward_trace import ForwardTrace
from paceline.parallel.pipeline.stage import PipelineRank, Stage
from paceline.torch_compat import fused_layers_disabled

NO_INDEX = torch.zeros((), dtype=torch.long)


class SequentialStageRunner:
    """Runs the stages of this rank, receives their inputs and sends their outputs."""

    def __init__(self, stages: Sequence[Stage], rank: PipelineRank):
        self.stages, self.rank = stages, rank
        self.kept: Any = ()  # for the next stage, if it is on this rank too

    def run(self, trace: ForwardTrace) -> Any:
        """Return the output of the last stage; ELSEWHERE on ranks that do not have it."""
        result: Any = ELSEWHERE
        with fused_layers_disabled():
            for stage in self.stages:
                received = () if stage.is_first else self._receive(stage, trace)
                result = stage(*received, index=NO_INDEX)
                if not stage.is_last:
                    self._send(stage.index + 1, result)
        return result if self.stages[-1].is_last else ELSEWHERE

    def try_run(self) -> tuple[Any, dict[int, list[torch.Size]]]:
        """Run without known shapes. Return the output as `run` does, and the shapes that cross each cut.

        An error in one stage is raised on all ranks of the pipeline.
        """
        result: Any = ELSEWHERE
        error: Exception | None = None
        shapes: dict[int, list[torch.Size]] = {}
        with fused_layers_disabled():
            for stage in self.stages:
                received, error = ((), None) if stage.is_first else self._receive_objects(stage)
                shapes[stage.first] = [value.shape for value in received]
                if error is None:
                    try:
                        result = stage(*(value.to(self.rank.device) for value in received), index=NO_INDEX)
                    except (Error, RuntimeError) as raised:
                        result, error = (), raised
                if not stage.is_last:
                    self._send_objects(stage.index + 1, (result, error))
        for any_error in self.gather([error]):
            if any_error is not None:
                raise any_error
        return (result if self.stages[-1].is_last else ELSEWHERE), shapes

    def gather(self, values: list[Any]) -> list[Any]:
        """Return the values of all ranks of the pipeline, in their order."""
        by_rank: list[list[Any]] = [[]] * self.rank.plan.pp
        dist.all_gather_object(by_rank, values, group=self.rank.group)
        return [value for values in by_rank for value in values]

    def _send(self, stage: int, values: Sequence[Tensor]) -> None:
        self.kept = values
        if not self.rank.has(stage):
            for value in values:
                dist.send(value, self.rank.peer(stage))

    def _receive(self, stage: Stage, trace: ForwardTrace) -> Sequence[Tensor]:
        if self.rank.has(stage.index - 1):
            return self.kept
        received = [
            torch.empty(meta.shape, dtype=meta.dtype, device=self.rank.device)
            for meta in trace.calls[stage.first].crossing_metas
        ]
        for value in received:
            dist.recv(value, self.rank.peer(stage.index - 1))
        return received

    def _send_objects(self, stage: int, message: tuple[Sequence[Tensor], Exception | None]) -> None:
        self.kept = message
        if not self.rank.has(stage):
            values, error = message
            dist.send_object_list([[value.cpu() for value in values], error], self.rank.peer(stage))

    def _receive_objects(self, stage: Stage) -> tuple[Sequence[Tensor], Exception | None]:
        if self.rank.has(stage.index - 1):
            return self.kept
        message: list[Any] = [None, None]
        dist.recv_object_list(message, self.rank.peer(stage.index - 1))
        return message[0], message[1]
