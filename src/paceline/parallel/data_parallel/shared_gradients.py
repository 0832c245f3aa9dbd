"""The mean of DistributedDataParallel's gradients, through memory that the ranks of one machine share."""

import time
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.shared_exchange import default_group_name, find_exchange

WARM_UP_PASSES = 5  # of which times are not counted


class ExchangeTimes:
    """The time in which a model averages gradients, without the first passes."""

    def __init__(self) -> None:
        self.seconds, self.passes = 0.0, -WARM_UP_PASSES

    def add(self, seconds: float, is_last: bool) -> None:
        """Add the time of a bucket."""
        self.seconds += seconds if self.passes >= 0 else 0.0
        self.passes += is_last


_times: WeakKeyDictionary[DistributedDataParallel, ExchangeTimes] = WeakKeyDictionary()


def measure_exchange_s(model: DistributedDataParallel) -> float | None:
    """Return the seconds of a backward pass in which a model averages gradients and waits for other ranks.

    DistributedDataParallel does not know it, since its hook returns when all is done. None: it is not known,
    or the model does not share memory."""
    times = _times.get(model)
    return times.seconds / times.passes if times is not None and times.passes > 0 else None


def share_gradients(model: DistributedDataParallel) -> None:
    """Let `model` average its gradients through shared memory, if all ranks are on one machine. A collective.

    Models on other devices, and those with many ranks, keep the collectives of their back end.
    """
    is_on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    if not is_on_cpu or find_exchange() is None:
        return
    group_name = default_group_name()

    _times[model] = times = ExchangeTimes()

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        began_s = time.perf_counter()
        averaged: torch.futures.Future[Tensor] = torch.futures.Future()
        gradients = bucket.buffer()
        if gradients.is_sparse:
            dist.all_reduce(gradients)
            gradients = gradients / dist.get_world_size()
        else:
            torch.ops.paceline.average_through_memory_(gradients, group_name)
        averaged.set_result(gradients)
        times.add(time.perf_counter() - began_s, bucket.is_last())
        return averaged

    model.register_comm_hook(None, hook)
