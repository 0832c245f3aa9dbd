"""Point-to-point messages: blocking or not.

A message goes from one rank to another. The sender names the receiver, the receiver names the sender,
and both must use tensors of the same shape and type. All other communication can be built from such
messages.
"""

# %%
# ## A chain of blocking messages
#
# `dist.recv` returns when the data has arrived, and `dist.send` when its tensor may be changed again.
# Each rank waits for the running sum of the previous rank, adds its own number, and sends it on. Only
# one rank works at a time: such a chain is correct, but nothing is parallel.
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, run, table

n = num_ranks()


def chain():
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(1)
    if rank > 0:
        dist.recv(total, src=rank - 1)
    received = total.clone()
    total += rank
    if rank < size - 1:
        dist.send(total, dst=rank + 1)
    return {"received": received, "after adding the rank": total}


sums = run(chain)
table("Running sums", sums)
check(
    "rank r has 0 + 1 + … + r",
    column(sums, "after adding the rank"),
    [[float(rank * (rank + 1) // 2)] for rank in range(n)],
)

# %%
# ## A ring without waiting in turn
#
# Now every rank sends to the next and receives from the previous, and the last rank sends to the first.
# If all ranks called `recv` first, each would wait for a message that nobody sends: a **deadlock**. If
# all called `send` first, it would depend on the back end whether the data fits into a buffer.
#
# `isend` and `irecv` return at once, with a handle. All messages are then under way at the same time. Do
# not read or change the tensors before `wait()`.


def ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.tensor([10.0 * rank, 10.0 * rank + 1])
    received = torch.zeros(2)
    if size == 1:  # a rank cannot send to itself
        received.copy_(mine)
    else:
        sending = dist.isend(mine, dst=(rank + 1) % size)
        receiving = dist.irecv(received, src=(rank - 1) % size)
        receiving.wait()
        sending.wait()
    return {"sent": mine, "received": received}


exchanged = run(ring)
table("Each rank sends to the next rank", exchanged)
check(
    "every rank has the values of the previous rank",
    column(exchanged, "received"),
    [[10.0 * ((rank - 1) % n), 10.0 * ((rank - 1) % n) + 1] for rank in range(n)],
)

# %%
# ## Tags, and an order that does not matter
#
# Messages between the same two ranks arrive in the order in which they were sent. With **tags**, the
# receiver can take them in another order. Rank 0 sends two messages to every other rank, which takes the
# second first.


def take_in_another_order():
    rank, size = dist.get_rank(), dist.get_world_size()
    first, second = torch.full((1,), -1.0), torch.full((1,), -1.0)
    if rank == 0:
        handles = []
        for other in range(1, size):
            for tag, value in ((1, 100.0 + other), (2, 200.0 + other)):
                handles.append(dist.isend(torch.tensor([value]), dst=other, tag=tag))
        for handle in handles:
            handle.wait()
    else:
        dist.recv(second, src=0, tag=2)
        dist.recv(first, src=0, tag=1)
    return {"tag 1": first, "tag 2": second}


taken = run(take_in_another_order)
table("Messages by tag (rank 0 only sends)", taken)
check(
    "each tag has its own message",
    [[line["tag 1"].item(), line["tag 2"].item()] for line in taken[1:]],
    [[100.0 + rank, 200.0 + rank] for rank in range(1, n)],
)

# %%
# ## Question
ask(
    "Even ranks call `send` and then `recv`, odd ranks call `recv` and then `send`. Can this ring "
    "deadlock with 4 ranks? And with 3?",
    "With 4 ranks every send meets a receive: no deadlock. With 3 ranks, rank 2 and rank 0 are "
    "neighbors and both are even. Both send first, which works only if the message fits into a buffer. "
    "Non-blocking messages are safe for any number.",
)
