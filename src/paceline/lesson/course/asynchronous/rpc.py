"""Remote calls by hand: RRef and distributed autograd.

In a collective, all ranks do the same at the same time. With a **remote procedure call** (RPC), a rank
lets another one compute something, and the other need not know when. Parameter servers and models that
live on several machines can be built this way.
"""

# %%
# ## Ask another rank
#
# `rpc_sync` runs a function on another rank and waits for its result. `rpc_async` returns a future at
# once, so that several ranks can work at the same time. Arguments and results are copied.
import os
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch.distributed import autograd, rpc

from paceline.lesson import ask, check, column, num_ranks, rows, run, table

n = num_ranks()
folder = tempfile.TemporaryDirectory()


def connected(function, name):
    """Call a function on this rank between the start and the end of RPC."""
    warnings.simplefilter("ignore")  # of torch about its own back end
    rank, size = dist.get_rank(), dist.get_world_size()
    meeting = f"file://{os.path.join(folder.name, name)}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting, rpc_timeout=60)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    result = function(rank, size)
    rpc.shutdown()  # waits until no rank needs another rank
    return result


def ask_the_next(rank, size):
    neighbour = f"rank{(rank + 1) % size}"
    sum_there = rpc.rpc_sync(neighbour, torch.add, (torch.tensor(rank), 10))
    futures = [rpc.rpc_async(f"rank{other}", dist.get_rank) for other in range(size)]
    return {"asks": neighbour, "rank + 10": sum_there.item(), "all ranks": [f.wait() for f in futures]}


calls = run(connected, ask_the_next, "calls")
table("Each rank asks the next rank for a sum, and all for their rank", calls)
check("every rank answered every rank", column(calls, "all ranks"), [list(range(n))] * n)

# %%
# ## A reference instead of a copy
#
# `remote` also runs a function on another rank, but the result stays there. The caller gets an **RRef**,
# a remote reference, and can pass it on. `to_here()` copies the value. The owner deletes the value when
# no rank has a reference any more: RRefs are counted over all ranks.


def keep_there(rank, size):
    owner = f"rank{(rank + 1) % size}"
    reference = rpc.remote(owner, torch.full, ((2,), float(rank)))
    doubled = rpc.remote(owner, torch.Tensor.mul, (reference.to_here(), 2))
    return {"owner": reference.owner_name(), "value": reference.to_here(), "doubled": doubled.to_here()}


references = run(connected, keep_there, "references")
table("Values that live on the next rank", references)
check(
    "the values came back", [v[0].item() for v in column(references, "value")], [float(r) for r in range(n)]
)

# %%
# ## A model on two ranks, with distributed autograd
#
# Rank 0 trains a model whose second layer lives on the last rank: y = w2 · tanh(w1 · x). The forward
# pass calls the layer there. The graph of autograd then has parts on both ranks, and RPC has noted where
# they are connected. `autograd.backward` follows the graph over the ranks. The gradients are not written
# to `.grad`, because several ranks may train at the same time: each **context** keeps its own.
#
# `DistributedOptimizer` gets an RRef for each parameter, and steps on the rank that owns it.
X = torch.tensor([[1.0, 2.0, -1.0, 0.5]], dtype=torch.float64)
TARGET = torch.tensor([[1.0, -1.0]], dtype=torch.float64)


def first_weights():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) / 2 for shape in ((4, 4), (2, 4))]


def train_over_ranks(rank, size):
    if rank:
        return {"role": "owner of w2" if rank == size - 1 else "idle", "losses": None}
    from torch.distributed.optim import DistributedOptimizer

    w1, w2 = first_weights()
    w1.requires_grad_()
    layer = rpc.remote(f"rank{size - 1}", torch.nn.Linear, (4, 2, False), {"dtype": torch.float64})
    layer.rpc_sync().load_state_dict({"weight": w2})
    weights = [rpc.RRef(w1), layer.remote().get_parameter("weight")]
    optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.1)
    losses = []
    for _ in range(5):
        with autograd.context() as context:
            output = layer.rpc_sync().forward(torch.tanh(X @ w1.T))
            loss = (output - TARGET).square().sum()
            autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    return {"role": "trains" if size > 1 else "trains, and owns w2", "losses": losses}


trained = run(connected, train_over_ranks, "training")
table("A training over two ranks", trained)


def train_alone():
    w1, w2 = (weight.requires_grad_() for weight in first_weights())
    optimizer, losses = torch.optim.SGD([w1, w2], lr=0.1), []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (torch.tanh(X @ w1.T) @ w2.T - TARGET).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


alone = train_alone()
check("the losses are those of one process", trained[0]["losses"], alone, 1e-12)
check("the loss falls", alone[-1] < alone[0])

# %%
# ## What it costs
#
# A call moves its arguments and its result, and the caller waits for both ways. The step above moves the
# 4 numbers of the hidden layer forward and their gradients back, and no weights. Ranks work one after
# another: this is a pipeline without micro-batches, and half of the machine is idle.
lines = [("hidden values, to the owner", 4), ("outputs, back", 2), ("gradients of outputs", 2)]
lines.append(("gradients of hidden values", 4))
rows("Numbers that a step sends", ("what", "numbers"), lines)
ask(
    "Why do most trainings use collectives, and not RPC?",
    "In a collective all ranks work at the same time, and all links of a ring are busy. A server that all "
    "ranks call is a bottleneck, and a lost rank leaves calls without an answer. RPC fits programs whose "
    "ranks do different things: parameter servers (`--plan parameter-server` uses it), reinforcement "
    "learning with actors and a learner, or very large embeddings on machines of their own.",
)
folder.cleanup()
