"""Operations of a rank, as torch's profiler recorded them."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from paceline.training.tracing.ranges import parse_range

OP = "op"


class ProfiledOp(NamedTuple):
    """A range of time on a thread or a device, by the clock of this node.

    thread: number of the thread that began it, from 1, which is the training thread. stream: of a device.
    kind: OP, or a kind of `tracing.ranges`.
    is_async: whether it runs beside its thread.
    sequence: number of the operation in the autograd graph, the same in both passes; -1: none.
    forward_thread: of an operation of the backward pass, the thread of its forward pass; else 0.
    correlation: number that a kernel and its launch share; 0: none.
    """

    name: str
    kind: str
    begin_ns: int
    end_ns: int
    thread: int
    is_async: bool = False
    sequence: int = -1
    forward_thread: int = 0
    stream: int | None = None
    correlation: int = 0


def read_profiled_ops(events: Sequence[Any], is_cuda: bool) -> list[ProfiledOp]:
    """Return the operations of a profile, in order of time, the outer ones first.

    events: of kineto. is_cuda: whether the profile has events of a device.
    """
    ops = list(_convert_device_events(events) if is_cuda else map(_convert_host_event, events))
    return sorted(ops, key=lambda op: (op.begin_ns, -op.end_ns))


def _convert_host_event(event: Any) -> ProfiledOp:
    begin_ns, text = event.start_ns(), event.name()
    kind, name = parse_range(text) or (OP, text)
    return ProfiledOp(
        name,
        kind,
        begin_ns,
        begin_ns + event.duration_ns(),
        event.start_thread_id(),
        event.is_async(),
        event.sequence_nr(),
        event.fwd_thread_id(),
    )


def _convert_device_events(events: Sequence[Any]) -> Iterator[ProfiledOp]:
    from torch.autograd import DeviceType

    on_host = [event.device_type() == DeviceType.CPU for event in events]
    # Annotations of the host, which the device repeats.
    host_names = {event.name() for event, is_host in zip(events, on_host, strict=True) if is_host}
    for event, is_host in zip(events, on_host, strict=True):
        op = _convert_host_event(event)
        if is_host:
            is_launch = event.name().startswith(("cuda", "cuLaunch"))
            yield op._replace(correlation=event.correlation_id()) if is_launch else op
        elif event.name() not in host_names:
            yield op._replace(stream=event.device_resource_id(), correlation=event.correlation_id())
