"""Ranks that call a model different numbers of times stay at the same call."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import ranks
from paceline.parallel.data_parallel.lockstep import in_lockstep

pytestmark = pytest.mark.processes


class SumOverRanks(nn.Module):
    """Its call is a collective, so that a missing call would hang or meet a call of the next context."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[float, float]] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        total = value.clone()
        dist.all_reduce(total)
        self.calls.append((value.item(), total.item()))
        return total


def call_model(counts: list[list[int]]) -> list[tuple[float, float]]:
    model = SumOverRanks()
    for by_rank in counts:
        with in_lockstep(model, torch.device("cpu"), lambda last: {"value": last["value"] * 0}):
            for number in range(by_rank[dist.get_rank()]):
                model(value=torch.tensor(10.0**number))
    return model.calls


def test_a_rank_that_is_done_repeats_short_calls() -> None:
    first, second = ranks(2)(call_model, [[3, 1], [1, 2], [1, 1]])
    assert first == [(1, 2), (10, 10), (100, 100), (1, 2), (0, 10), (1, 2)]
    assert second == [(1, 2), (0, 10), (0, 100), (1, 2), (10, 10), (1, 2)]
