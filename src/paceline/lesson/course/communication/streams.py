"""Streams: queues of work that run side by side.

A GPU gets its work through **streams**. The program puts an operation into a stream and continues at
once. The operations of one stream run in order; those of different streams may run at the same time.
This lesson needs no GPU: a thread works off each stream, and the rules are the same.
"""

# %%
# ## A stream and an event
#
# An **event** is a mark in a stream. Another stream can wait for it. There is no other order between them.
import queue
import threading
import time

import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

n = num_ranks()


class ThreadStream:
    def __init__(self, name):
        self.name, self.work, self.spans = name, queue.Queue(), []
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        while True:
            label, function = self.work.get()
            start = time.perf_counter()
            function()
            if label:
                self.spans.append((label, start, time.perf_counter()))

    def launch(self, label, function):
        self.work.put((label, function))  # returns at once

    def record(self):
        event = threading.Event()
        self.launch("", event.set)
        return event

    def wait(self, event):
        self.launch("", event.wait)


# %%
# ## Copy, compute, copy back
#
# A batch is copied to the device (4 ms), computed (6 ms), and its result is copied back (4 ms). In one
# stream, a step takes the sum. In three, it takes as long as the slowest part. Events make each part wait
# for its input.
PARTS, BATCHES = {"copy in": 0.004, "compute": 0.006, "copy out": 0.004}, 5


def process(streams):
    values = [float(batch) for batch in range(BATCHES)]

    def act(part, batch):
        time.sleep(PARTS[part])
        if part == "compute":
            values[batch] = 2 * values[batch] + 1

    for batch in range(BATCHES):
        arrived = None
        for part, stream in zip(PARTS, streams, strict=True):
            if arrived is not None:
                stream.wait(arrived)
            stream.launch(f"{part} {batch}", lambda part=part, batch=batch: act(part, batch))
            arrived = stream.record()
    streams[-1].record().wait()
    return values


one, three = [ThreadStream("one stream")] * 3, [ThreadStream(part) for part in PARTS]
rows("2 x + 1 of five batches", ("streams", "results"), [(1, process(one)), (3, results := process(three))])
check("the results do not depend on the streams", results, [2.0 * batch + 1 for batch in range(BATCHES)])
check("each stream works in order", all(s.spans == sorted(s.spans) for s in three))
copies, computations = three[0].spans, three[1].spans
early = sum(computed[1] < copied[2] for copied, computed in zip(copies, computations, strict=True))
check("no computation begins before its copy ends", early, 0)


lengths = [1e3 * (streams[-1].spans[-1][2] - streams[0].spans[0][1]) for streams in (one, three)]
lines = [(1, BATCHES * 14, lengths[0]), (3, 4 + BATCHES * 6 + 4, lengths[1])]
rows("Milliseconds", ("streams", "expected", "measured"), lines, is_measured=True)


@picture("One stream, and three streams, drawn from this run", height=4.0)
def draw(figure):
    colors = {"copy in": "#8cc4f0", "compute": "#f4b183", "copy out": "#a9d18e"}
    for axes, streams in zip(figure.subplots(2, 1), (one[:1], three), strict=True):
        first = streams[0].spans[0][1]
        for row, stream in enumerate(streams):
            for label, start, end in stream.spans:
                bar = axes.barh(
                    row, (end - start) * 1e3, left=(start - first) * 1e3, color=colors[label[:-2]]
                )
                axes.bar_label(bar, [label[-1]], label_type="center", fontsize=7)
        axes.set(yticks=range(len(streams)), yticklabels=[s.name for s in streams], xlabel="milliseconds")
        axes.invert_yaxis()


# %%
# ## A stream for communication
#
# DDP computes the backward pass in one stream and sends gradients in another. Without an event, it may
# send a gradient that is not computed yet. Here this is made certain; on a GPU it happens at random.


def reduce_in_a_stream(waits):
    compute, communicate = ThreadStream("compute"), ThreadStream("communicate")
    gradient, sent = torch.zeros(2), threading.Event()
    if not waits:
        compute.wait(sent)  # the computation is late
    compute.launch("backward", lambda: gradient.fill_(dist.get_rank() + 1.0))
    if waits:
        communicate.wait(compute.record())
    total = torch.zeros(2)
    communicate.launch("all-reduce", lambda: dist.all_reduce(total.copy_(gradient)))
    communicate.launch("", sent.set)
    communicate.record().wait()
    return total


sums = run(lambda: {"with an event": reduce_in_a_stream(True), "without": reduce_in_a_stream(False)})
table("The sum of the gradients of all ranks", sums)
check("with an event, the sum is right", column(sums, "with an event"), [[n * (n + 1) / 2] * 2] * n)
check("without, nothing was computed yet", column(sums, "without"), [[0.0, 0.0]] * n)

# %%
# ## Time what you mean
#
# A program that reads the clock right after a launch measures the launch. Wait for the stream first. On a
# GPU: `torch.cuda.Stream()`, `with torch.cuda.stream(s):` to launch, `s.record_event()`,
# `s.wait_event(event)`, and `torch.cuda.synchronize()` before the clock is read.
lazy, gate = ThreadStream("lazy"), threading.Event()
lazy.wait(gate)
done = lazy.record()
check("launch() has returned, and the work is not done", not done.is_set())
gate.set()
check("it is done when the program has waited for it", done.wait())
ask(
    "Three streams, and the copies take 10 ms each way instead of 4. How long does a step take?",
    "10 ms: the slowest stream decides, and the computation waits. On a GPU, this also takes memory from "
    "which it can copy at any time: `pin_memory=True`.",
)
