"""Large batches: fewer steps, and what they cost.

More ranks usually mean a larger batch, and fewer steps for an epoch. With the same learning rate the
model then learns less. This lesson trains on 1,797 handwritten digits and on as many generated images,
and repairs it in two ways.
"""

# %%
# ## The training
#
# A small network in float64, trained by data parallelism with SGD and momentum. The first 1,536 samples
# are for training, the others for the test. Every batch is divided over the ranks, so the result does
# not depend on their number. The **generalization gap** is the accuracy on samples of the training minus
# that on samples of the test: what the model has memorized, and not learned.
from importlib.resources import files

import numpy as np
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, num_ranks, picture, rows, run, table

TRAIN, EPOCHS, MOMENTUM, NOISE = 1536, 4, 0.9, 1.5
n = num_ranks()


def digits():
    with np.load(str(files("paceline.tasks").joinpath("digits.npz"))) as data:
        images, labels = (data[name] for name in data.files[:2])
    x = torch.from_numpy(images.reshape(len(images), -1)).double()
    return x / x.max(), torch.from_numpy(labels).long()


def generated():
    """10 kinds of images, each a smooth pattern with noise."""
    draw = torch.Generator().manual_seed(1)
    patterns, y = torch.randn(10, 1, 4, 4, generator=draw), torch.randint(10, (1797,), generator=draw)
    whole = torch.nn.functional.interpolate(patterns, size=(8, 8), mode="bilinear")[y, 0]
    return (whole + NOISE * torch.randn(1797, 8, 8, generator=draw)).flatten(1).double() / 4, y


def start():
    draw = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(64, 32, generator=draw).double() / 8,
        torch.randn(32, 10, generator=draw).double() / 6,
    ]
    return [weight.requires_grad_() for weight in weights]


def logits(weights, x):
    return torch.tanh(x @ weights[0]) @ weights[1]


def train(samples, batch, lr, warmup_steps=0, lars=False):
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = SETS[samples]()
    weights = start()
    speeds = [torch.zeros_like(weight) for weight in weights]
    steps = TRAIN // batch * EPOCHS
    for step in range(steps):
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(step * batch // TRAIN))
        mine = order[step * batch % TRAIN :][:batch][rank::size]
        loss = torch.nn.functional.cross_entropy(logits(weights, x[mine]), y[mine], reduction="sum") / batch
        gradients = torch.autograd.grad(loss, weights)
        factor = lr * min(1.0, (step + 1) / warmup_steps) if warmup_steps else lr
        for weight, speed, gradient in zip(weights, speeds, gradients, strict=True):
            dist.all_reduce(gradient)
            trust = 0.02 * weight.norm() / gradient.norm() if lars else 1.0
            speed.mul_(MOMENTUM).add_(trust * gradient)
            weight.data -= factor * speed
    dist.all_reduce(last := loss.detach())
    is_right = (logits(weights, x).argmax(1) == y).double()
    trained, tested = is_right[:TRAIN].mean().item(), is_right[TRAIN:].mean().item()
    return {"steps": steps, "last loss": last.item(), "train": trained, "test": tested}


def train_all(samples):
    return [train(samples, *given) for given in RUNS.values()]


# %%
# ## The same learning rate for a batch of 16 times the size
#
# With 512 instead of 32 samples, there are 16 times fewer steps, and each is not longer than before. The
# model has seen the same samples and has learned less.
RUNS = {
    "batch 32": (32, 0.02),
    "batch 512": (512, 0.02),
    "batch 512, linear rule": (512, 0.32),
    "batch 512, linear rule, warm-up": (512, 0.32, 4),
    "batch 512, LARS": (512, 1.0, 0, True),
}
SETS = {"digits": digits, "generated images": generated}
results = {samples: run(train_all, samples) for samples in SETS}
for samples, by_rank in results.items():
    lines = [
        (name, r["steps"], r["last loss"], r["train"], r["test"], r["train"] - r["test"])
        for name, r in zip(RUNS, by_rank[0], strict=True)
    ]
    headers = ("training", "steps", "last loss", "train accuracy", "test accuracy", "gap")
    rows(f"{samples}, after {EPOCHS} epochs", headers, lines)
    small, large, linear = (line[4] for line in lines[:3])
    check(f"{samples}: the large batch with the same rate is worse", large < small - 0.05)
    check(f"{samples}: the linear rule repairs most of it", linear > large + 0.05)
losses = [line[0]["last loss"] for line in results["digits"]]
table("Every rank has the same result: last loss of batch 32", {"last loss": losses})


@picture("Accuracy on samples of the training (light) and of the test (dark)")
def draw(figure):
    for axes, (samples, by_rank) in zip(figure.subplots(1, 2, sharey=True), results.items(), strict=True):
        for row, result in enumerate(by_rank[0]):
            axes.barh([row - 0.2, row + 0.2], [result["train"], result["test"]], 0.4, color=["C9", "C0"])
        axes.set(title=samples, xlim=(0, 1), ylim=(4.5, -0.5), yticks=range(5), yticklabels=list(RUNS))


# %%
# ## The rules
#
# - **Linear rule** (Goyal et al. 2017): a batch that is k times larger gets a rate that is k times
#   larger, because k small steps are about one large step. With Adam, the root of k is used.
# - **Warm-up**: at the beginning the weights change quickly, and k small steps are not one large step.
#   The rate grows during the first steps.
# - **LARS** (You et al. 2017): each layer gets a rate in proportion to the norm of its weights divided
#   by that of its gradient.
#
# All have a limit. Beyond it, a larger batch only wastes samples, and models tend to end in sharper
# minima, which generalize worse. With ResNet-50 on ImageNet the linear rule works up to about 8,192;
# with LARS, 32,768 has been trained to 74.9 %.
PUBLISHED = (
    (8_192, 14_076, 76.3),
    (32_768, 3_519, 75.4),
    (32_768, 2_503, 74.9),
    (65_536, 1_800, 75.8),
    (81_920, 1_440, 75.1),
)
lines = [(batch, steps, percent, batch * steps / 1_281_167) for batch, steps, percent in PUBLISHED]
rows("ResNet-50 on ImageNet, published", ("batch", "steps", "accuracy in %", "epochs"), lines)
check("the steps times the batch are 64 to 92 epochs", all(63 < line[3] < 93 for line in lines))

# %%
# ## Question
ask(
    "A recipe has batch 256 and rate 0.1. You train on 16 ranks with 64 samples each. Which rate does "
    "the linear rule give, and what do you check first?",
    "The batch is 1,024, four times larger: 0.4, with a warm-up of a few epochs. First compare the "
    "validation metric after equal epochs. In Paceline: `--set schedule.base_batch=256` scales the "
    "rate, and the start reports it.",
)
