"""ZeRO by hand: shard moments, gradients and weights.

Data parallel training keeps everything n times: weights, gradients and the two moments of Adam. ZeRO
keeps each number on one rank only, and sends it when it is needed. Stage 1 shards the optimizer state,
stage 2 also the gradients, stage 3 also the weights. The updates stay the same.
"""

# %%
# ## Shards
#
# A tensor is flattened, padded and cut into n equal parts. `gather` joins the parts of all ranks. Its
# gradient is the opposite: the gradients of all ranks are averaged, and each rank keeps its part.
import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from paceline.lesson import ask, check, num_ranks, picture, rows, run

D, LAYERS, STEPS, LR = 12, 3, 4, 0.05
n = num_ranks()
traffic = [0]  # elements in collectives; an all-reduce counts twice: reduce-scatter and all-gather


def shard(whole):
    size = dist.get_world_size()
    return pad(whole.flatten(), (0, -whole.numel() % size)).chunk(size)[dist.get_rank()].clone()


def join(part):
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    traffic[0] += D * D
    return torch.cat(parts)[: D * D].view(D, D)


def average_and_shard(gradient):
    size = dist.get_world_size()
    part = torch.empty_like(shard(gradient))
    dist.reduce_scatter(part, list(pad(gradient.flatten(), (0, -gradient.numel() % size)).chunk(size)))
    traffic[0] += D * D
    return part / size


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(context, part):
        return join(part)

    @staticmethod
    def backward(context, gradient):
        return average_and_shard(gradient)


# %%
# ## Training with each stage
#
# In stage 3, a layer joins its weights just before it uses them, and `checkpoint` makes it join them
# again in the backward pass instead of keeping them. The backward pass must reach layer 0: if it ends
# early, the first weights silently never change.


def forward(x, weights, stage):
    for weight in weights:
        if stage == 3:
            x = checkpoint(lambda x, part: torch.tanh(x @ Gather.apply(part)), x, weight, use_reentrant=False)
        else:
            x = torch.tanh(x @ weight)
    return x


def reduce_gradients(weights, stage):
    """Return the gradients that the optimizer of this rank needs."""
    if stage == 3:
        return [weight.grad for weight in weights]  # Gather has averaged and sharded them
    if stage == 2:
        return [average_and_shard(weight.grad) for weight in weights]
    for weight in weights:
        dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
        traffic[0] += 2 * D * D
    return [shard(weight.grad) if stage == 1 else weight.grad for weight in weights]


def train(stage):
    rank, size = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(0)
    wholes = [torch.randn(D, D, generator=draw, dtype=torch.float64) / D**0.5 for _ in range(LAYERS)]
    x, y = torch.randn(2, 24, D, generator=draw, dtype=torch.float64)
    x, y = x[rank::size], y.tanh()[rank::size]  # equal parts on 1, 2, 3, 4, 6 or 8 ranks
    owned = [shard(whole) if stage else whole for whole in wholes]  # what this rank updates
    moments = [(torch.zeros_like(part), torch.zeros_like(part)) for part in owned]
    losses = []
    for step in range(1, STEPS + 1):
        traffic[0] = 0
        weights = [join(part) if stage in (1, 2) else part.clone() for part in owned]
        for weight in weights:
            weight.requires_grad_()
        loss = (forward(x, weights, stage) - y).square().mean()
        loss.backward()
        gradients = reduce_gradients(weights, stage)
        for part, gradient, (m, v) in zip(owned, gradients, moments, strict=True):
            m += 0.1 * (gradient - m)
            v += 0.01 * (gradient**2 - v)
            part -= LR * (m / (1 - 0.9**step)) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)
        dist.all_reduce(loss := loss.detach(), op=dist.ReduceOp.AVG)
        losses.append(loss.item())
    kept = gradients if stage >= 2 else [weight.grad for weight in weights]
    elements = [sum(t.numel() for t in tensors) for tensors in (weights, kept, sum(moments, ()))]
    return {"losses": losses, "elements": elements, "traffic": traffic[0]}


results = {stage: run(train, stage) for stage in range(4)}
P = LAYERS * D * D
headers = ("stage", "weights", "gradients", "Adam", "sum", "in collectives")
lines = [(s, *r[0]["elements"], sum(r[0]["elements"]), r[0]["traffic"]) for s, r in results.items()]
rows(f"Elements that rank 0 keeps for {P} parameters, and elements in collectives in a step", headers, lines)
rows("Losses", ("stage", "by step"), [(stage, result[0]["losses"]) for stage, result in results.items()])
part = LAYERS * -(-D * D // n)
for stage, whole in enumerate(([P, P, 2 * P], [P, P, 2 * part], [P, part, 2 * part], [part, part, 2 * part])):
    check(f"stage {stage} keeps what it should", results[stage][0]["elements"], whole)
    check(f"stage {stage} computes the same", results[stage][0]["losses"], results[0][0]["losses"], 1e-12)
[alone] = run(train, 0, ranks=1)
check("one process computes the same", results[3][0]["losses"], alone["losses"], 1e-12)

# %%
# ## Bytes for each parameter in mixed precision
#
# With 16-bit weights and gradients, and 32-bit main weights and moments, a parameter takes 2 + 2 + 12 =
# 16 bytes. On N ranks, stage 1 leaves 4 + 12/N, stage 2 leaves 2 + 14/N, and stage 3 leaves 16/N.
BYTES, worlds = {"ddp": (16, 0), "stage 1": (4, 12), "stage 2": (2, 14), "stage 3": (0, 16)}, (1, 2, 4, 8, 64)
lines = [(name, *(kept + split / size for size in worlds)) for name, (kept, split) in BYTES.items()]
rows("Bytes for each parameter", ("stage", *(f"{size} ranks" for size in worlds)), lines)


@picture("Bytes for each parameter, by the number of ranks")
def draw(figure):
    axes = figure.subplots()
    for name, *values in lines:
        axes.semilogx(worlds, values, "o-", base=2, label=name)
    axes.legend()


# %%
# ## Question
ask(
    "Why does stage 1 cost no extra communication in practice, although the table shows 3 P elements here?",
    "This program averages all gradients by an all-reduce (2 P) and then gathers the weights (P). Each "
    "rank needs only its part of the gradients: a reduce-scatter (P) is enough, and the sum is 2 P as "
    "in plain data parallel training. Stage 2 does this. Stage 3 gathers weights twice, and needs 3 P.",
)
