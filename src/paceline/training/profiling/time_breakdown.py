"""Breakdown of the time of a step, from the events of a profiler on one rank.

A thread that waits for a collective continues when the collective ends. So if a collective ends in a pause
between operations, the pause up to that end was spent waiting. If none ends in it, the thread did not wait.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

STEP, GRADIENTS, UPDATED, END = MARKS = tuple(
    f"paceline: {what}" for what in ("step", "gradients", "updated", "end")
)
COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc):")
# Calls that start a collective, and those through shared memory, which copy and wait until all is done.
ENQUEUED = re.compile(r"_?c10d(_functional)?::|paceline::(average|gather)_through_memory_")
NEIGHBOURS = re.compile(r"send|recv", re.I)
# Operations and compiled blocks, not what calls them.
COMPUTED = re.compile(r"(?!autograd::|torch::autograd::)\w+::|Torch-Compiled|CompiledF")

LATE_SHARE = 0.05  # of a wait, by which the end of a collective may be recorded after the wait

Span = tuple[int, int]  # begin and end, ns


class Op(NamedTuple):
    """An event of the profiler.

    `thread`: None for collectives, which run beside the threads, and for work on a device.
    `launched_ns`: of work on a device, when the host launched it.
    """

    name: str
    begin_ns: int
    end_ns: int
    thread: int | None
    launched_ns: int | None = None


class StepSeconds(NamedTuple):
    """Seconds of a step on one rank, by part.

    `neighbours`: in sends and receives while nothing computes, in `waits` pauses. `transfer`: the shortest of
    these calls, which is the time without waiting for the other rank.
    """

    step: float
    compute: float
    communication: float
    neighbours: float
    input: float
    optimizer: float
    other: float
    waits: float = 0.0
    transfer: float = float("inf")


def measure_on_host(ops: Sequence[Op], data_ns: Sequence[int]) -> StepSeconds:
    """Return the parts of the steps from each STEP to its END, if the CPU computes.

    `data_ns`: wait of each step for its batch. All time in forward and backward that is not spent waiting
    counts as computing, including Python's.
    """
    steps, gradients, updated, ends = find_marks(ops)
    [thread] = {op.thread for op in ops if op.name == STEP}
    own = sorted(
        (op for op in ops if op.thread == thread and op.name not in MARKS),
        key=lambda op: (op.begin_ns, -op.end_ns),
    )
    enqueued = [op for op in own if ENQUEUED.match(op.name)]
    pauses = subtract_spans([(steps[0], ends[-1])], merge_spans(_find_innermost(own)))
    near, far = _separate_neighbours(op for op in ops if op.thread is None and COLLECTIVE.match(op.name))
    waiting = merge_spans([*_find_waits(pauses, enqueued, far), *_spans(enqueued)])
    beside = subtract_spans(merge_spans(_find_waits(pauses, enqueued, near)), waiting)
    all_waiting = merge_spans([*waiting, *beside])
    total_ns = dict.fromkeys(
        ("step", "compute", "communication", "neighbours", "input", "optimizer", "other"), 0
    )
    updates = list(zip(gradients, updated, strict=True))
    for begin, data, end in zip(steps, data_ns, ends, strict=True):
        since = begin + data
        total_ns["step"] += data
        total_ns["input"] += data
        spans = []  # of the step, by part
        for (grads_begin, grads_end), update_end in updates:  # of each pass
            if begin <= grads_begin < end:
                spans += [("compute", since, grads_begin), ("optimizer", grads_end, update_end)]
                since = update_end
        for part, first, last in [*spans, ("other", since, end)]:
            total_ns["step"] += last - first
            total_ns["communication"] += sum_spans(waiting, first, last)
            total_ns["neighbours"] += sum_spans(beside, first, last)
            total_ns[part] += last - first - sum_spans(all_waiting, first, last)
    return _average_steps(total_ns, len(steps), beside, near)


def measure_on_device(ops: Sequence[Op], data_ns: Sequence[int]) -> StepSeconds:
    """Return the same as `measure_on_host` if a device computes.

    The device is idle at the first STEP and at the last END. Its work counts; the host runs ahead of it.
    """
    steps, gradients, updated, ends = find_marks(ops)
    kernels = [op for op in ops if op.launched_ns is not None]
    near, far = _separate_neighbours(op for op in kernels if op.name.startswith("nccl"))
    work = merge_spans(_spans(op for op in kernels if not op.name.startswith("nccl")))
    waiting = subtract_spans(merge_spans(_spans(far)), work)
    beside = subtract_spans(subtract_spans(merge_spans(_spans(near)), work), waiting)
    update_spans = [(begin, last) for (begin, _), last in zip(gradients, updated, strict=True)]
    updates = merge_spans(
        _spans(
            op
            for op in kernels
            if any(first <= (op.launched_ns or 0) <= last for first, last in update_spans)
        )
    )
    step, communication, neighbours = ends[-1] - steps[0], sum_spans(waiting), sum_spans(beside)
    idle = step - sum_spans(work) - communication - neighbours
    optimizer = sum_spans(subtract_spans(subtract_spans(updates, waiting), beside))
    input_ = min(idle, sum(data_ns))
    other = max(0, min(idle - input_, ends[-1] - max((op.end_ns for op in kernels), default=ends[-1])))
    total_ns = {
        "step": step,
        "compute": step - communication - neighbours - input_ - optimizer - other,
        "communication": communication,
        "neighbours": neighbours,
        "input": input_,
        "optimizer": optimizer,
        "other": other,
    }
    return _average_steps(total_ns, len(steps), beside, near)


def find_marks(ops: Sequence[Op]) -> tuple[list[int], list[Span], list[int], list[int]]:
    """Return the times of each of MARKS.

    GRADIENTS is a span: it takes time that belongs to no part. A step has one and UPDATED for each pass.
    """
    spans_of_marks = [sorted(_spans(op for op in ops if op.name == mark)) for mark in MARKS]
    steps, _, updated, ends = ([begin for begin, _ in spans] for spans in spans_of_marks)
    return steps, spans_of_marks[1], updated, ends


def _average_steps(
    total_ns: Mapping[str, int], steps: int, beside: Sequence[Span], near: Sequence[Op]
) -> StepSeconds:
    parts = {name: ns / steps / 1e9 for name, ns in total_ns.items()}
    transfer = min((op.end_ns - op.begin_ns for op in near), default=float("inf")) / 1e9
    return StepSeconds(**parts, waits=len(beside) / steps, transfer=transfer)


def _separate_neighbours(collectives: Iterable[Op]) -> tuple[list[Op], list[Op]]:
    """Return sends and receives, and the other collectives."""
    separated: tuple[list[Op], list[Op]] = [], []
    for op in collectives:
        separated[NEIGHBOURS.search(op.name) is None].append(op)
    return separated


def _find_innermost(ops: Sequence[Op]) -> Iterator[Span]:
    """Yield the spans of operations that call no other; `ops` are those of one thread, in order."""
    for op, following in zip(ops, [*ops[1:], None], strict=True):
        calls = following is not None and following.begin_ns < op.end_ns
        if not calls and COMPUTED.match(op.name) and not ENQUEUED.match(op.name):
            yield op.begin_ns, op.end_ns


def _find_waits(pauses: Sequence[Span], enqueued: Sequence[Op], collectives: Iterable[Op]) -> Iterator[Span]:
    """Yield the wait for each collective that ends in a pause or shortly after it.

    The wait begins when the collective is enqueued or the pause begins. The end may come after the pause: on
    busy cores, the waiting thread may continue before the other thread has recorded the end.
    """
    begins, enqueued_ns = [begin for begin, _ in pauses], [op.begin_ns for op in enqueued]
    for op in collectives:
        before = bisect_right(enqueued_ns, op.begin_ns) - 1
        requested = enqueued_ns[before] if before >= 0 else op.begin_ns
        waits = []
        for at in range(bisect_right(begins, op.end_ns) - 1, -1, -1):
            begin, end = pauses[at]
            if end <= op.begin_ns or op.end_ns - end > LATE_SHARE * (op.end_ns - op.begin_ns):
                break
            first, last = max(begin, op.begin_ns), min(op.end_ns, end)
            if op.end_ns - end <= LATE_SHARE * (end - first):
                waits.append((last - first, requested if requested >= begin else first, last))
        if waits:  # else it ended during computing, so the thread did not wait
            _, first, last = max(waits)
            yield first, last


def _spans(ops: Iterable[Op]) -> Iterator[Span]:
    return ((op.begin_ns, op.end_ns) for op in ops)


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the union of `spans`, as disjoint spans in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def subtract_spans(spans: Iterable[Span], holes: Sequence[Span]) -> list[Span]:
    """Return `spans` without `holes`. Both are as `merge_spans` returns them."""
    remaining, ends = [], [end for _, end in holes]
    for begin, end in spans:
        at = bisect_right(ends, begin)
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > begin:
                remaining.append((begin, holes[at][0]))
            begin = holes[at][1]
            at += 1
        if begin < end:
            remaining.append((begin, end))
    return remaining


def sum_spans(spans: Iterable[Span], begin: int = 0, end: int = 2**63) -> int:
    """Return the total length of `spans` between `begin` and `end`, in ns."""
    return sum(max(0, min(last, end) - max(first, begin)) for first, last in spans)
