"""Checkpoint, kill, resume: the same training.

A long training will be interrupted: a time limit, a broken node, a spot machine. A **checkpoint** has
all that the next step depends on. The test is simple: kill it, resume it, and compare every number with
a training that was never interrupted.
"""

# %%
# ## What belongs to a checkpoint
#
# Weights, the state of the optimizer, the position in the data, and the state of random numbers. The
# file is written under another name and renamed at the end: a reader sees the old checkpoint or the new
# one, but never a half.
import os
import signal
import tempfile

import torch
import torch.distributed as dist

from paceline import RankError
from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

STEPS, EVERY = 8, 3
n = num_ranks()
folder = tempfile.TemporaryDirectory()
PATH = os.path.join(folder.name, "checkpoint.pt")


def save(step, model, optimizer):
    if dist.get_rank() == 0:  # all ranks have the same weights
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, f"{PATH}.new")
        os.replace(f"{PATH}.new", PATH)
    dist.barrier()


def batch_of(step, rank, size):
    """Depends on the step only, so that no sampler has to be stored."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(24, 3, generator=draw, dtype=torch.float64)[rank::size]


def train(resumes=False, dies_at=None, keeps_optimizer=True, saves=True):
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first, losses = 0, {}
    if resumes:
        state = torch.load(PATH, weights_only=True)
        first = state["step"]
        model.load_state_dict(state["model"])
        if keeps_optimizer:
            optimizer.load_state_dict(state["optimizer"])
    for step in range(first, STEPS):
        if step == dies_at and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when the memory is full
        x = batch_of(step, rank, size)
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        dist.all_reduce(mean := loss.detach().clone(), op=dist.ReduceOp.AVG)
        losses[step] = mean.item()
        if saves and (step + 1) % EVERY == 0:
            save(step + 1, model, optimizer)
    return {"first step": first, "losses": list(losses.values()), "weight": model.weight[0, 0].item()}


# %%
# ## Kill a rank
#
# The last rank is killed in step 5. The others notice it at once in the next all-reduce, because the
# connection closes. The launcher ends all of them: ranks cannot continue without one another.
straight = run(train, False, None, True, False)
try:
    run(train, False, 5)
    message = "nothing was killed"
except RankError as error:
    message = str(error).splitlines()[0]
check("the training ended with an error that names the signal", "SIGKILL" in message)
check("a whole checkpoint is there", sorted(os.listdir(folder.name)), ["checkpoint.pt"])

# %%
# ## Resume
#
# The checkpoint is from step 3, because the training died before it had saved again. Steps 3 and 4 are
# computed once more: the price of a failure is up to one interval.
resumed = run(train, True, None, True, False)
table("The uninterrupted training", straight)
table("The resumed training", resumed)
check("it starts at step 3", column(resumed, "first step"), [3] * n)
check("all losses are equal, bit for bit", resumed[0]["losses"], straight[0]["losses"][3:])
check("and so are the weights", column(resumed, "weight"), column(straight, "weight"))

# %%
# ## Without the state of the optimizer
#
# A popular mistake: only the weights are saved. The training continues and the loss falls, but Adam
# starts with empty moments. Its steps are different from here on.
partial = run(train, True, None, False, False)
table("Resumed without the state of Adam", partial)
check("the first loss is equal", partial[0]["losses"][0], straight[0]["losses"][3])
check("the weights are not", partial[0]["weight"] != straight[0]["weight"])


@picture("The loss: uninterrupted, resumed, and resumed without the state of Adam")
def draw(figure):
    axes = figure.subplots()
    axes.plot(straight[0]["losses"], "-", linewidth=4, alpha=0.3, label="uninterrupted")
    for name, line in (("resumed", resumed[0]), ("without Adam's state", partial[0])):
        axes.plot(range(3, STEPS), line["losses"], ".-", label=name)
    axes.legend()


# %%
# ## How often?
#
# Young's rule: with c seconds for a checkpoint and a failure every m seconds on average, the best
# interval is √(2·c·m).
lines = [(c, hours, (2 * c * hours * 3600) ** 0.5 / 60) for c, hours in ((10, 24), (60, 24), (60, 4))]
rows("The best interval", ("seconds to save", "hours between failures", "minutes"), lines)
ask(
    "1,000 nodes fail once in 5 years each. How often does a training on all of them fail?",
    "Every 5 · 365 · 24 / 1,000 = 44 hours. `paceline drill` injects such faults, and checks that "
    "nothing is lost.",
)
folder.cleanup()
