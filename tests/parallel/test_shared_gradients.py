"""Gradients averaged through memory that ranks share, compared with the arithmetic and with plain DDP."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from faults import replaced
from harness import ranks
from paceline.distributed import shared_memory
from paceline.distributed.shared_barrier import SharedMemoryBarrier
from paceline.distributed.shared_exchange import (
    BARRIER_BYTES,
    SLOT_BYTES,
    SLOTS,
    SharedMemoryExchange,
)
from paceline.parallel.data_parallel import ddp
from paceline.parallel.data_parallel.shared_gradients import WARM_UP_PASSES, measure_exchange_s

pytestmark = pytest.mark.processes
SIZES = (1, 1000, SLOT_BYTES // 4, 2 * SLOT_BYTES // 4 + 3)  # of float32: within a slot, and over several


def draw(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng((rank, size)).standard_normal(size, dtype=np.float32)


def open_exchange(slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> SharedMemoryExchange:
    memory = shared_memory.open_shared_memory(SLOTS * slot_bytes + BARRIER_BYTES)
    assert memory is not None
    exchange = SharedMemoryExchange(memory)
    exchange._slots = [exchange._slots[number % slots] for number in range(SLOTS)]
    return exchange


def average_draws() -> list[np.ndarray]:
    exchange, found = open_exchange(), []
    for size in SIZES:
        values = torch.from_numpy(draw(dist.get_rank(), size))
        exchange.average_(values)
        found.append(values.numpy())
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_average_is_that_of_all_ranks(size: int) -> None:
    by_rank = ranks(size)(average_draws)
    for position, length in enumerate(SIZES):
        exact = np.mean([draw(rank, length).astype(np.float64) for rank in range(size)], axis=0)
        np.testing.assert_allclose(by_rank[0][position], exact, rtol=0, atol=4e-7)
        for other in by_rank[1:]:  # all ranks must take the same step
            np.testing.assert_array_equal(other[position], by_rank[0][position])


def average_types() -> list[torch.Tensor]:
    exchange, found = open_exchange(slot_bytes=64), []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        values = torch.arange(50, dtype=dtype) * (4 * dist.get_rank())
        exchange.average_(values)
        found.append(values)
    return found


def test_every_type_is_averaged() -> None:
    for values in ranks(2)(average_types)[1]:
        assert values.tolist() == [2.0 * number for number in range(50)]


def gather_draws(size: int) -> list[np.ndarray]:
    """Return what two gathers of `size` bytes of each rank received."""
    exchange, found = open_exchange(slot_bytes=64), []
    for shift in (0, 1):
        sent = torch.from_numpy(draw_bytes(dist.get_rank() + shift, size))
        received = torch.zeros(dist.get_world_size(), size, dtype=torch.uint8)
        exchange.gather_(received, sent)
        found.append(received.numpy())
    return found


def draw_bytes(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng((rank, size)).integers(256, size=size, dtype=np.uint8)


@pytest.mark.parametrize("size", [0, 1, 64, 200])  # of slots of 64 bytes
def test_bytes_of_all_ranks_are_gathered(size: int) -> None:
    for found in ranks(2)(gather_draws, size):
        for shift in (0, 1):
            expected = [draw_bytes(rank + shift, size) for rank in range(2)]
            np.testing.assert_array_equal(found[shift], expected)


@contextmanager
def read_late() -> Iterator[None]:
    """Let rank 1 read long after all ranks have arrived."""

    def patch(wait: Any) -> Any:
        def wait_long(barrier: SharedMemoryBarrier) -> None:
            wait(barrier)
            if dist.get_rank() == 1:
                time.sleep(0.05)

        return wait_long

    with replaced(SharedMemoryBarrier, "__call__", patch):
        yield


def average_with_a_late_reader(slots: int) -> list[float]:
    exchange = open_exchange(slots)
    found = []
    with read_late():
        for number in range(6):
            values = torch.full((1000,), float(number * (dist.get_rank() + 1)))
            exchange.average_(values)
            found.append(values[0].item())
    return found


def test_a_late_reader_reads_what_was_sent() -> None:
    expected = [1.5 * number for number in range(6)]
    assert ranks(2)(average_with_a_late_reader, SLOTS) == [expected, expected]
    assert ranks(2)(average_with_a_late_reader, 1)[1] != expected  # negative control: no second slot


class Deep(nn.Module):
    """Two branches, of which `unused` gets no gradients, with a bucket that exceeds a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Linear(8, 16), nn.Linear(16, SLOT_BYTES // 4 // 16)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.wide(self.first(inputs).relu()).pow(2).mean()


def compute_gradients(shares: bool) -> tuple[bool, list[np.ndarray]]:
    torch.manual_seed(0)
    model = Deep()
    if shares:
        replica: DistributedDataParallel = ddp.replicate(model, find_unused=True)
    else:
        replica = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=True)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):  # torch rebuilds its buckets after the first
        with replica.no_sync():
            replica(torch.randn(4, 8)).backward()
        replica(torch.randn(4, 8)).backward()
    has_hook = bool(replica._get_ddp_logging_data().get("comm_hook"))
    gradients = [p.grad.numpy().copy() for p in model.parameters() if p.grad is not None]
    ddp.release(replica)
    return has_hook, gradients


def test_gradients_equal_those_of_plain_ddp() -> None:
    for (shares, gradients), (plain_shares, expected) in zip(
        ranks(2)(compute_gradients, True), ranks(2)(compute_gradients, False), strict=True
    ):
        assert shares
        assert not plain_shares
        for own, other in zip(gradients, expected, strict=True):
            np.testing.assert_array_equal(own, other)


def open_on_unlike_machines(fault: str) -> tuple[bool, list[np.ndarray]]:
    """Compute gradients on ranks of which rank 1 has a fault; returns whether they shared memory."""
    originals = shared_memory.MACHINE, os.memfd_create, shared_memory._as_number
    if dist.get_rank() == 1:
        if fault == "network":
            shared_memory.MACHINE = (*originals[0][:2], "/proc/self/ns/uts")
        if fault == "unknown":
            shared_memory.MACHINE = (*originals[0][:2], "/proc/self/ns/absent")
        if fault == "memory":
            os.memfd_create = refuse
        if fault == "token":
            shared_memory._as_number = lambda token: 1 + originals[2](token)
    try:
        return compute_gradients(True)
    finally:
        shared_memory.MACHINE, os.memfd_create, shared_memory._as_number = originals


def refuse(*arguments: Any) -> int:
    raise OSError("no memory")


def test_ranks_that_share_no_memory_average_through_gloo() -> None:
    expected = ranks(2)(compute_gradients, False)
    for fault in ("network", "unknown", "memory", "token"):
        for (shares, gradients), (_, plain) in zip(
            ranks(2)(open_on_unlike_machines, fault), expected, strict=True
        ):
            assert not shares, fault
            for own, other in zip(gradients, plain, strict=True):
                np.testing.assert_array_equal(own, other)


def count_open_files() -> list[int]:
    counts = []
    for _ in range(3):
        memory = shared_memory.open_shared_memory(4096)
        assert memory is not None
        counts.append(len(os.listdir("/proc/self/fd")))
        del memory
    return counts


def wait_for_a_late_rank(late_s: float) -> float | None:
    """Return the time of averaging per pass on this rank, where the last rank comes late."""
    model = ddp.replicate(nn.Linear(8, 8))
    before = measure_exchange_s(model)
    assert before is None, "nothing is known before the first passes"
    for _ in range(WARM_UP_PASSES + 10):
        loss = model(torch.ones(4, 8)).sum()
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(late_s)
        loss.backward()
    found = measure_exchange_s(model)
    ddp.release(model)
    return found


def test_the_time_of_averaging_contains_the_wait_for_other_ranks() -> None:
    """Rank 1 is 50 ms late in each pass: rank 0 waits at least nearly as long, and rank 1 much less."""
    waiting, late = ranks(2)(wait_for_a_late_rank, 0.05)
    assert waiting > 0.045
    assert late < waiting


def test_no_file_stays_open() -> None:
    for first, *others in ranks(2)(count_open_files):
        assert others == [first, first]
