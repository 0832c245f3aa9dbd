"""Local SGD: communicate less often.

Data parallel training averages gradients in every step. In **local SGD**, each rank takes H steps on its
own, and then the weights are averaged. This needs 1/H of the communication, and computes something else.
"""

# %%
# ## Two equal beginnings
#
# With H = 1 and plain SGD, an average of the weights after a step equals a step with the average
# gradient, because the step is linear in the gradient. With H > 1, the ranks drift apart, and each
# gradient is computed at other weights.
#
# Each rank has other data here: rank r pulls the weight towards r, and more steeply than the ranks before
# it. The minimum of the mean loss is the mean of all r, in which steep ranks count more.
import torch
import torch.distributed as dist

from paceline.lesson import ask, check, column, num_ranks, picture, rows, run, table

STEPS, LR = 8, 0.2
n = num_ranks()


def curvature(rank):
    return 1.0 + rank  # ranks see loss surfaces of different steepness


def train(period, averages_gradients=False, steps=STEPS):
    rank = dist.get_rank()
    w, path, messages = torch.tensor([4.0], dtype=torch.float64), [], 0
    for step in range(1, steps + 1):
        gradient = curvature(rank) * (w - rank)
        if averages_gradients:
            dist.all_reduce(gradient, op=dist.ReduceOp.AVG)
            messages += 1
        w = w - LR / n * gradient
        if not averages_gradients and step % period == 0:
            dist.all_reduce(w, op=dist.ReduceOp.AVG)
            messages += 1
        path.append(w.item())
    return {"weights": path, "messages": messages}


gradients = run(train, 1, True)
paths = {period: run(train, period) for period in (1, 2, 4, 8)}
table("Averaged gradients: the weight after each step", gradients)
table("Local SGD with H = 4: the weight after each step", paths[4])
check("H = 1 equals averaged gradients", column(paths[1], "weights"), column(gradients, "weights"), 1e-12)
for period, results in paths.items():
    check(
        f"H = {period}: all ranks end with equal weights",
        column(results, "weights")[0][-1],
        column(results, "weights")[-1][-1],
        1e-12,
    )
    check(f"H = {period}: {STEPS // period} messages", column(results, "messages"), [STEPS // period] * n)


@picture("The weight of every rank with H = 4: ranks drift apart, and meet every 4 steps")
def draw(figure):
    axes = figure.subplots()
    for rank, path in enumerate(column(paths[4], "weights")):
        axes.plot(range(1, STEPS + 1), path, ".-", label=f"rank {rank}")
    axes.legend()


# %%
# ## What it costs in accuracy
#
# The average of minima is not the minimum of the average, if the ranks see different data. With a large
# H, each rank nearly reaches its own minimum, r, and the average of these is not where the mean loss is
# lowest: steep ranks count too little. It shows at the end of a training, after 128 steps here. With equal
# data on all ranks the difference is small.
best = sum(curvature(rank) * rank for rank in range(n)) / sum(curvature(rank) for rank in range(n))
ends = {period: run(train, period, False, 128)[0]["weights"][-1] for period in (1, 4, 16, 64)}
lines = [(period, end, end - best) for period, end in ends.items()]
rows("After 128 steps, and the distance to the minimum of the mean loss", ("H", "weight", "distance"), lines)
check("H = 1 finds the minimum", ends[1], best, 1e-5)
distances = [abs(end - best) for end in ends.values()]
check("a larger H ends farther away if n > 1", n == 1 or distances == sorted(distances))

# %%
# ## The idea of DiLoCo
#
# DiLoCo makes the average a step of its own: the change of the averaged weights during H steps is used
# as if it were a gradient, by an outer optimizer with Nesterov momentum. The inner optimizer is AdamW, H
# is 500 or more, and ranks can be in different places. An outer SGD with learning rate 1 is the plain
# average.


def outer_step(lr):
    rank = dist.get_rank()
    start = torch.tensor([4.0], dtype=torch.float64)
    w = start.clone()
    for _ in range(4):
        w -= LR / n * curvature(rank) * (w - rank)
    outer_gradient = start - w
    dist.all_reduce(outer_gradient, op=dist.ReduceOp.AVG)
    return {"outer gradient": outer_gradient.item(), "weight": (start - lr * outer_gradient).item()}


outer = run(outer_step, 1.0)
table("The first outer step, with learning rate 1", outer)
check("it equals local SGD after 4 steps", outer[0]["weight"], paths[4][0]["weights"][3], 1e-12)

# %%
# ## Question
ask(
    "A model of 1 GB is trained over a link of 125 MB/s (1 Gbit/s), with 0.5 s of computation in a "
    "step. Roughly what share of the time is communication on 2 ranks, with H = 1 and with H = 100?",
    "A ring all-reduce on 2 ranks moves 1 GB: 8 s. With H = 1, 8/8.5 = 94 % of the time. With H = 100, "
    "8/58 = 14 %. In Paceline: `--plan local-sgd,period=100`.",
)
