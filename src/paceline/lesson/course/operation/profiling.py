"""Profiling: read a trace, and find who is idle.

A training is slow, and the loss does not say why. A **trace** has the begin and the length of every
operation. Two questions find most problems: when is the device idle, and what does a rank wait for?
"""

# %%
# ## Record
#
# Each rank works and then averages its gradients. The last rank is slower: it gets 40 ms of work instead
# of 3 ms. The work is a sleep, so that the trace does not depend on the number of cores.
# `record_function` names a part of the program in the trace.
import json
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

STEPS, FAST_S, SLOW_S = 6, 0.003, 0.040
n = num_ranks()
folder = tempfile.TemporaryDirectory()


def train(step_s):
    rank = dist.get_rank()
    gradient = torch.full((1000,), float(rank))
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for _ in range(STEPS):
            with record_function("my work"):
                time.sleep(step_s[rank])
            with record_function("my all-reduce"):
                dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
    path = os.path.join(folder.name, f"rank{rank}.json")
    recorded.export_chrome_trace(path)
    return {"trace": os.path.basename(path), "gradient": gradient[0].item()}


works = [FAST_S] * (n - 1) + [SLOW_S]
table("What each rank wrote", run(train, works))

# %%
# ## Read
#
# A trace is a JSON file with a list of events. `ts` is the begin and `dur` the length, in microseconds.
# Open such a file in https://ui.perfetto.dev, or count, as here. The sum of the lengths by name shows
# where the time goes. The fast ranks seem to spend it in the all-reduce: they *wait* in it.


def read_events(rank):
    with open(os.path.join(folder.name, f"rank{rank}.json"), encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    mine = [e for e in events if e.get("ph") == "X" and e["name"].startswith("my ")]
    return sorted((e["name"].removeprefix("my "), e["ts"], e["dur"]) for e in mine if e["cat"] != "gpu")


def seconds_of(events, name):
    return sum(length for kind, _, length in events if kind == name) / 1e6


traces = [read_events(rank) for rank in range(n)]
measured = [{name: seconds_of(trace, name) for name in ("work", "all-reduce")} for trace in traces]
table("Seconds by name", measured, is_measured=True)
check("every step is in the trace", [len(trace) for trace in traces], [2 * STEPS] * n)
waits = column(measured, "all-reduce")
check("the slow rank waits least", waits.index(min(waits)), n - 1)
check(
    "the fast ranks wait for more than half of its extra work",
    all(wait > 0.5 * STEPS * (SLOW_S - FAST_S) for wait in waits[:-1]),
)


@picture("The trace of every rank: the fast ranks wait in the all-reduce")
def draw(figure):
    axes = figure.subplots()
    for name, color in (("work", "tab:blue"), ("all-reduce", "tab:orange")):
        for rank, trace in enumerate(traces):
            begin = min(ts for _, ts, _ in trace)
            bars = [((ts - begin) / 1e3, length / 1e3) for kind, ts, length in trace if kind == name]
            axes.broken_barh(bars, (rank - 0.4, 0.8), color=color, label=name if rank == 0 else None)
    axes.set(xlabel="ms", ylabel="rank", yticks=range(n))
    axes.legend()


# %%
# ## Find the idle device
#
# A GPU has a row of its own in a trace: its kernels. The program that starts them is another row. Here is
# such a trace, shortened to a step: begin and length in milliseconds. The device is **idle** whenever no
# kernel runs. What the CPU does during a gap is the reason for it.
KERNELS = [(12, 6, "forward"), (18, 12, "backward"), (37, 2, "optimizer"), (39, 1, "copy of the loss")]
CPU = [(0, 11, "read samples"), (11, 8, "start kernels"), (30, 7, "all-reduce on the CPU"), (40, 4, "log")]
END = 44


def find_gaps(kernels, end):
    """Return begin and length of the times without a kernel. Kernels may overlap."""
    gaps, busy_until = [], 0
    for begin, length, _ in sorted(kernels):
        if begin > busy_until:
            gaps.append((busy_until, begin - busy_until))
        busy_until = max(busy_until, begin + length)
    return gaps + ([(busy_until, end - busy_until)] if busy_until < end else [])


def find_reason(begin, length):
    """Return what the CPU does for most of a gap."""
    return max(CPU, key=lambda e: min(e[0] + e[1], begin + length) - max(e[0], begin))[2]


gaps = [(begin, length, find_reason(begin, length)) for begin, length in find_gaps(KERNELS, END)]
rows("When the device is idle", ("from ms", "ms", "the CPU does"), gaps)
idle = sum(length for _, length, _ in gaps)
rows("The step", ("ms", "busy", "idle", "idle share"), [(END, END - idle, idle, idle / END)])
check("the device is idle for 52 % of the step", round(idle / END, 2), 0.52)
check("most of it because of the samples", max(gaps, key=lambda gap: gap[1])[2], "read samples")

# %%
# ## What a trace costs
#
# Recording slows a program down, and files grow by megabytes a second: record a few steps, after the
# first ones, which build caches. Compare ranks before you look into one of them. Samples of the machine,
# such as the utilization of a GPU, cost almost nothing and run all the time, but "100 % utilized" only
# means that some kernel ran.
ask(
    "The trace of rank 0 shows 80 % of the time in the all-reduce. Is the network too slow?",
    "Look at the other ranks first. If one of them spends little time in it, all wait for this rank, and "
    "a faster network changes nothing. If all of them spend 80 %, it is the network. In Paceline: "
    "`paceline train … --profile` divides each step into computation, communication, waiting and input, "
    "`paceline doctor RUN` names a straggler, and `paceline report RUN` shows the findings.",
)
folder.cleanup()
