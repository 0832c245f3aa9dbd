"""The backward passes of blocks, which are found from those of their operations."""

from bisect import bisect_right
from collections.abc import Sequence

from paceline.training.tracing.profiled_ops import OP, ProfiledOp
from paceline.training.tracing.ranges import BLOCK

BACKWARD_OP = "autograd::engine::evaluate_function: "
SUFFIX = " backward"  # of the names of these ranges


def find_backward_blocks(ops: Sequence[ProfiledOp]) -> list[ProfiledOp]:
    """Return a range for each part of a backward pass that differentiates a call of a block.

    `ops`: in order of time, the outer ones first. An operation of the backward pass has the number of its
    operation in the forward pass. The gradients that follow it in the same range of time are accumulated for
    the same block.
    """
    blocks = _find_calls(ops)
    found: list[ProfiledOp] = []
    for thread in sorted({op.thread for op in ops if op.name.startswith(BACKWARD_OP)}):
        found += _find_on_thread([op for op in ops if op.thread == thread and not op.is_async], blocks)
    return found


def _find_calls(ops: Sequence[ProfiledOp]) -> dict[tuple[int, int], tuple[str, int]]:
    """Return the name and the begin of the block that contains each operation of a forward pass.

    The key is the thread and the number of the operation. Operations before it on the thread, which are no
    part of the graph, may have the same number: the last one counts.
    """
    found: dict[tuple[int, int], tuple[str, int]] = {}
    open_blocks: dict[int, list[ProfiledOp]] = {}
    for op in ops:
        if op.is_async or op.stream is not None:
            continue
        stack = open_blocks.setdefault(op.thread, [])
        while stack and stack[-1].end_ns <= op.begin_ns:
            stack.pop()
        if op.kind == BLOCK:
            stack.append(op)
        elif op.sequence >= 0 and not op.forward_thread:
            key = op.thread, op.sequence
            if stack:
                found[key] = stack[-1].name, stack[-1].begin_ns
            else:
                found.pop(key, None)
    return found


def _find_on_thread(
    ops: Sequence[ProfiledOp], blocks: dict[tuple[int, int], tuple[str, int]]
) -> list[ProfiledOp]:
    """Return the ranges on a thread, whose operations are `ops`."""
    found: list[ProfiledOp] = []
    boundaries = sorted(at for op in ops if op.kind != OP for at in (op.begin_ns, op.end_ns))
    last: tuple[str, int] | None = None  # block of the operation before
    until_ns = 0  # end of the operation before
    for op in ops:
        if not op.name.startswith(BACKWARD_OP) or op.begin_ns < until_ns:
            continue
        is_cut = bisect_right(boundaries, op.begin_ns) != bisect_right(boundaries, until_ns)
        block = blocks.get((op.forward_thread, op.sequence)) if op.forward_thread else None
        if block is None and op.sequence < 0 and not is_cut:
            block = last  # it accumulates a gradient
        if block is not None and block == last and not is_cut:
            found[-1] = found[-1]._replace(end_ns=op.end_ns)
        elif block is not None:
            found.append(ProfiledOp(block[0] + SUFFIX, BLOCK, op.begin_ns, op.end_ns, op.thread))
        last, until_ns = block, op.end_ns
    return found
