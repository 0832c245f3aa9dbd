"""How the time of a step divides, from what a profiler saw of it on one rank. A thread that waits for a collective goes on when that
ends: so a pause in its computing in which one ends was a wait until then, and one in which none ends was not."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

STEP, GRADIENTS, UPDATED, END = MARKS = tuple(
    f"paceline: {what}" for what in ("step", "gradients", "updated", "end")
)
COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc):")
POSTED = re.compile(r"_?c10d(_functional)?::")
NEIGHBOURS = re.compile(r"send|recv", re.I)
COMPUTED = re.compile(
    r"(?!autograd::|torch::autograd::)\w+::|Torch-Compiled|CompiledF"
)  # operations and compiled blocks, not what calls them

LATE = 0.05  # of the pause

Span = tuple[int, int]


class Op(NamedTuple):
    """`thread`: None for a collective, which runs beside the threads, and on a device. `launched_ns`: of what runs on a device, when the
    host asked for it."""

    name: str
    begin_ns: int
    end_ns: int
    thread: int | None
    launched_ns: int | None = None


class StepSeconds(NamedTuple):
    """Of a step on one rank. `neighbours`: in sends and receives, with which nothing computes, in `waits` pauses; `transfer`: the
    shortest of those calls, which waited for nobody."""

    step: float
    compute: float
    communication: float
    neighbours: float
    input: float
    optimizer: float
    other: float
    waits: float = 0.0
    transfer: float = float("inf")


def on_host(ops: Sequence[Op], data_ns: Sequence[int]) -> StepSeconds:
    """Of the steps from each STEP to its END, each of which waited so long for its batch; what does not wait in forward and backward
    computes, Python's part of it included."""
    steps, gradients, updated, ends = marked(ops)
    [thread] = {op.thread for op in ops if op.name == STEP}
    own = sorted(
        (op for op in ops if op.thread == thread and op.name not in MARKS),
        key=lambda op: (op.begin_ns, -op.end_ns),
    )
    posts = [op for op in own if POSTED.match(op.name)]
    pauses = minus([(steps[0], ends[-1])], merged(_innermost(own)))
    near, far = _apart(op for op in ops if op.thread is None and COLLECTIVE.match(op.name))
    waiting = merged([*_waits(pauses, posts, far), *_spans(posts)])
    beside = minus(merged(_waits(pauses, posts, near)), waiting)
    both = merged([*waiting, *beside])
    found = dict.fromkeys(
        ("step", "compute", "communication", "neighbours", "input", "optimizer", "other"), 0
    )
    for begin, data, (middle, after), last, end in zip(steps, data_ns, gradients, updated, ends, strict=True):
        read = begin + data
        found["step"] += end - begin - (after - middle)
        found["input"] += data
        found["communication"] += length(waiting, read, middle) + length(waiting, after, end)
        found["neighbours"] += length(beside, read, middle) + length(beside, after, end)
        found["compute"] += middle - read - length(both, read, middle)
        found["optimizer"] += last - after - length(both, after, last)
        found["other"] += end - last - length(both, last, end)
    return _mean(found, len(steps), beside, near)


def on_device(ops: Sequence[Op], data_ns: Sequence[int]) -> StepSeconds:
    """The same where a device computes, which is idle at the first STEP and at the last END: what it does counts, not the host that runs
    ahead."""
    steps, gradients, updated, ends = marked(ops)
    kernels = [op for op in ops if op.launched_ns is not None]
    near, far = _apart(op for op in kernels if op.name.startswith("nccl"))
    work = merged(_spans(op for op in kernels if not op.name.startswith("nccl")))
    waiting = minus(merged(_spans(far)), work)
    beside = minus(minus(merged(_spans(near)), work), waiting)
    spans = [(begin, last) for (begin, _), last in zip(gradients, updated, strict=True)]
    updates = merged(
        _spans(op for op in kernels if any(first <= (op.launched_ns or 0) <= last for first, last in spans))
    )
    whole, talk, neighbours = ends[-1] - steps[0], length(waiting), length(beside)
    idle = whole - length(work) - talk - neighbours
    optimizer, input_ = length(minus(minus(updates, waiting), beside)), min(idle, sum(data_ns))
    other = max(0, min(idle - input_, ends[-1] - max((op.end_ns for op in kernels), default=ends[-1])))
    found = {
        "step": whole,
        "communication": talk,
        "neighbours": neighbours,
        "input": input_,
        "optimizer": optimizer,
        "other": other,
    }
    return _mean(
        found | {"compute": whole - talk - neighbours - input_ - optimizer - other}, len(steps), beside, near
    )


def marked(ops: Sequence[Op]) -> tuple[list[int], list[Span], list[int], list[int]]:
    """When MARKS were passed: GRADIENTS takes a while, which belongs to no part."""
    found = [sorted(_spans(op for op in ops if op.name == mark)) for mark in MARKS]
    steps, _, updated, ends = ([begin for begin, _ in spans] for spans in found)
    return steps, found[1], updated, ends


def _mean(found: Mapping[str, int], steps: int, beside: Sequence[Span], near: Sequence[Op]) -> StepSeconds:
    parts = {name: ns / steps / 1e9 for name, ns in found.items()}
    transfer = min((op.end_ns - op.begin_ns for op in near), default=float("inf")) / 1e9
    return StepSeconds(**parts, waits=len(beside) / steps, transfer=transfer)


def _apart(talks: Iterable[Op]) -> tuple[list[Op], list[Op]]:
    """Sends and receives, and collectives."""
    found: tuple[list[Op], list[Op]] = [], []
    for op in talks:
        found[NEIGHBOURS.search(op.name) is None].append(op)
    return found


def _innermost(ops: Sequence[Op]) -> Iterator[Span]:
    """Of what ran on a thread, in order, the operations that called no other."""
    for op, following in zip(ops, [*ops[1:], None], strict=True):
        calls = following is not None and following.begin_ns < op.end_ns
        if not calls and COMPUTED.match(op.name) and not POSTED.match(op.name):
            yield op.begin_ns, op.end_ns


def _waits(pauses: Sequence[Span], posts: Sequence[Op], talks: Iterable[Op]) -> Iterator[Span]:
    """From when it was asked for, or the pause began, to the end of each collective that ended in a pause, or a little after: on busy
    cores the thread that waited may go on before the one that wrote down the end."""
    begins, posted = [begin for begin, _ in pauses], [op.begin_ns for op in posts]
    for op in talks:
        at = bisect_right(begins, op.end_ns) - 1
        if at < 0:
            continue
        begin, end = pauses[at]
        if op.begin_ns >= end or op.end_ns - end > LATE * (end - begin):
            continue  # ended while something was computed: nobody waited
        before = bisect_right(posted, op.begin_ns) - 1
        asked = posted[before] if before >= 0 and posted[before] >= begin else op.begin_ns
        yield max(begin, min(asked, op.begin_ns)), min(op.end_ns, end)


def _spans(ops: Iterable[Op]) -> Iterator[Span]:
    return ((op.begin_ns, op.end_ns) for op in ops)


def merged(spans: Iterable[Span]) -> list[Span]:
    """In order, and none touches another."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def minus(spans: Iterable[Span], holes: Sequence[Span]) -> list[Span]:
    """Both as `merged` gives them."""
    found, ends = [], [end for _, end in holes]
    for begin, end in spans:
        at = bisect_right(ends, begin)
        while at < len(holes) and holes[at][0] < end:
            if holes[at][0] > begin:
                found.append((begin, holes[at][0]))
            begin = holes[at][1]
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span], begin: int = 0, end: int = 2**63) -> int:
    """Of what lies between two moments."""
    return sum(max(0, min(last, end) - max(first, begin)) for first, last in spans)
