"""Large batches: fewer steps, and what they cost.

More ranks usually mean a larger batch, and fewer steps for an epoch. With the same learning rate the
model then learns less. This lesson trains on 1,797 handwritten digits, and repairs it in two ways.
"""

# %%
# ## The training
#
# A small network in float64, trained by data parallelism with SGD and momentum. The first 1,536 digits
# are for training, the others for the test. Every batch is divided over the ranks, so the result does
# not depend on their number.
from importlib.resources import files

import numpy as np
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

TRAIN, EPOCHS, MOMENTUM = 1536, 4, 0.9
n = num_ranks()


def digits():
    with np.load(str(files("paceline.tasks").joinpath("digits.npz"))) as data:
        images, labels = (data[name] for name in data.files[:2])
    x = torch.from_numpy(images.reshape(len(images), -1)).double()
    return x / x.max(), torch.from_numpy(labels).long()


def start():
    draw = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(64, 32, generator=draw).double() / 8,
        torch.randn(32, 10, generator=draw).double() / 6,
    ]
    return [weight.requires_grad_() for weight in weights]


def logits(weights, x):
    return torch.tanh(x @ weights[0]) @ weights[1]


def train(batch, lr, warmup_steps=0, lars=False):
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = digits()
    weights = start()
    speeds = [torch.zeros_like(weight) for weight in weights]
    steps, losses = TRAIN // batch * EPOCHS, []
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
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item())
    right = (logits(weights, x[TRAIN:]).argmax(1) == y[TRAIN:]).double().mean().item()
    return {"steps": steps, "last loss": losses[-1], "test accuracy": right, "losses": losses}


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
results = {name: run(train, *arguments) for name, arguments in RUNS.items()}
lines = [
    (name, *(line[0][key] for key in ("steps", "last loss", "test accuracy")))
    for name, line in results.items()
]
rows(f"After {EPOCHS} epochs", ("training", "steps", "last loss", "test accuracy"), lines)
table(
    "Every rank has the same result: last loss of batch 32",
    {"last loss": column(results["batch 32"], "last loss")},
)
accuracy = {line[0]: line[3] for line in lines}
check("the large batch with the same rate is worse", accuracy["batch 512"] < accuracy["batch 32"] - 0.05)
check("the linear rule repairs most of it", accuracy["batch 512, linear rule"] > accuracy["batch 512"] + 0.05)


@picture("The loss by samples seen")
def draw(figure):
    axes = figure.subplots()
    for name, line in results.items():
        losses = line[0]["losses"]
        axes.plot([(step + 1) * RUNS[name][0] for step in range(len(losses))], losses, label=name)
    axes.legend()


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
check(
    "the steps times the batch are 64 to 92 epochs",
    min(line[3] for line in lines) > 63 and max(line[3] for line in lines) < 93,
)

# %%
# ## Question
ask(
    "A recipe has batch 256 and rate 0.1. You train on 16 ranks with 64 samples each. Which rate does "
    "the linear rule give, and what do you check first?",
    "The batch is 1,024, four times larger: 0.4, with a warm-up of a few epochs. First compare the "
    "validation metric after equal epochs. In Paceline: `--set schedule.base_batch=256` scales the "
    "rate, and the start reports it.",
)
