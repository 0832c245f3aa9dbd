"""Expected tables of the lessons about training, computed in one process."""

import hashlib
import math

import numpy as np
import torch
from torch.nn.functional import gelu


def _draw(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).numpy() for shape in shapes]


def expect_data_parallel(n: int) -> dict:
    a, c, b, e, x = _draw(0, (4, 3), (4,), (1, 4), (1,), (24, 3))
    weights = [value / 2 for value in (a, c, b, e)]
    y = np.sin(x.sum(1, keepdims=True))

    def gradient(x, y):
        a, c, b, e = weights
        hidden = np.tanh(x @ a.T + c)
        error = hidden @ b.T + e - y
        outer = 2 * error / len(x)
        inner = (outer @ b) * (1 - hidden**2)
        return float((error**2).mean()), [inner.T @ x, inner.sum(0), outer.T @ hidden, outer.sum(0)]

    local = [gradient(x[r::n], y[r::n]) for r in range(n)]
    whole = gradient(x, y)[1]
    one_step = [[r, loss, g[0][0].tolist(), whole[0][0].tolist()] for r, (loss, g) in enumerate(local)]
    losses = []
    for _ in range(5):
        loss, gradients = gradient(x, y)
        losses.append(loss)
        weights = [value - 0.1 * g for value, g in zip(weights, gradients, strict=True)]
    return {
        "One step (the first row of the first weight)": one_step,
        "By hand: the loss of the batch in each step": [
            [r, losses, float(weights[0][0, 0])] for r in range(n)
        ],
    }


def expect_mistakes(n: int) -> dict:
    lines, right, wrong, sum_of_gradients = [], 1.0, 1.0, 0.0
    for _ in range(12):
        lines.append([right**2, wrong**2])
        right *= 0.8
        sum_of_gradients += 2 * wrong
        wrong -= 0.1 * sum_of_gradients
    orders = [torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).tolist() for epoch in (0, 1)]
    dealt = [
        order + order[: -8 % n] for order in orders
    ]  # a sampler repeats samples until all ranks have equally many
    starts = []
    for r in range(n):
        torch.manual_seed(r)
        starts.append(torch.randn(1).item())
    mean = sum(starts) / n
    moved = mean * (0.8**3 - 1)
    padded = [*range(10), *range(-10 % n)]
    count = len(padded)
    accuracy = sum(sample != 0 for sample in padded) / count
    return {
        "The weight after one step from 1": [[r, 0.8, 1 - 0.2 * n] for r in range(n)],
        "Losses of 12 steps": lines,
        "Samples without set_epoch": [[r, dealt[0][r::n], dealt[0][r::n]] for r in range(n)],
        "Samples with set_epoch": [[r, dealt[0][r::n], dealt[1][r::n]] for r in range(n)],
        "A seed for each rank": [
            [r, [start], [start + moved], max(starts) - min(starts)] for r, start in enumerate(starts)
        ],
        "With repeated samples": [[r, padded[r::n], count, accuracy] for r in range(n)],
        "Without": [[r, list(range(r, 10, n)), 10, 0.9] for r in range(n)],
    }


def expect_zero(n: int) -> dict:
    size, layers = 12, 3
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(size, size, generator=generator, dtype=torch.float64).div(size**0.5).requires_grad_()
        for _ in range(layers)
    ]
    x, y = torch.randn(2, 24, size, generator=generator, dtype=torch.float64)
    optimizer = torch.optim.Adam(weights, lr=0.05, betas=(0.9, 0.99), eps=1e-8)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        h = x
        for weight in weights:
            h = (h @ weight).tanh()
        loss = (h - y.tanh()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    whole, part = layers * size**2, layers * math.ceil(size**2 / n)
    kept = [
        [whole, whole, 2 * whole],
        [whole, whole, 2 * part],
        [whole, part, 2 * part],
        [part, part, 2 * part],
    ]
    sent = [2 * whole, 3 * whole, 2 * whole, 3 * whole]
    title = f"Elements that rank 0 keeps for {whole} parameters, and elements in collectives in a step"
    formulas = {
        "ddp": lambda n: 16,
        "stage 1": lambda n: 4 + 12 / n,
        "stage 2": lambda n: 2 + 14 / n,
        "stage 3": lambda n: 16 / n,
    }
    return {
        title: [[stage, *kept[stage], sum(kept[stage]), sent[stage]] for stage in range(4)],
        "Losses": [[stage, losses] for stage in range(4)],
        "Bytes for each parameter": [
            [name, *(formula(size) for size in (1, 2, 4, 8, 64))] for name, formula in formulas.items()
        ],
    }


def expect_tensor_parallel(n: int) -> dict:
    def draw(name, *shape):
        seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
        return torch.from_numpy(_draw(seed, shape)[0])

    x, a, b = draw("x", 3, 4).requires_grad_(), draw("A", 4, 12), draw("B", 12, 4)
    columns = np.array_split(np.arange(12), n)
    partial = [gelu(x @ a[:, mine]) @ b[mine] for mine in columns]
    z = sum(partial).detach()
    gradients = [torch.autograd.grad((part * 2 * z).sum(), x)[0] for part in partial]
    return {
        "First row of the output: each rank has a partial sum, and then the whole": [
            [r, len(columns[r]), partial[r][0].tolist(), z[0].tolist()] for r in range(n)
        ],
        "First row of the gradient of X": [
            [r, sum(gradients)[0].tolist(), gradients[r][0].tolist()] for r in range(n)
        ],
    }


def expect_pipeline(n: int) -> dict:
    weights = [_draw(stage, (3, 3))[0] for stage in range(n)]
    states = [_draw(99, (8, 2, 3))[0].reshape(-1, 3)]
    for weight in weights:
        states.append(np.tanh(states[-1] @ weight))
    gradient, gradients = 2 * states[-1] / states[-1].size, []
    for stage in reversed(range(n)):
        inner = gradient * (1 - states[stage + 1] ** 2)
        gradients.insert(0, (states[stage].T @ inner)[0].tolist())
        gradient = inner @ weights[stage].T
    return {
        "First row of each gradient": [[r, *[gradients[r]] * 3] for r in range(n)],
        "Micro-batches kept": [[r, 8, min(n - r, 8)] for r in range(n)],
        "The formula": [[p, *((p - 1) / (m + p - 1) for m in (1, 4, 8, 32))] for p in (2, 4, 8)],
    }


def expect_context_parallel(n: int) -> dict:
    length = 24
    q, k, v = _draw(0, (3, length, 4))[0]
    scores = q @ k.T / 2
    parts = np.array_split(np.arange(length), n)
    allowed = {"full": np.ones((length, length), bool), "causal": np.tri(length, dtype=bool)}
    outputs = {}
    for name, mask in allowed.items():
        shares = np.where(mask, np.exp(scores), 0)
        outputs[name] = (shares / shares.sum(1, keepdims=True)) @ v
    wrong = np.empty_like(q)
    for rank, mine in enumerate(parts):
        for query in mine:
            top, below, above = -math.inf, 0.0, np.zeros(4)
            for step in range(n):
                piece = parts[(rank - step) % n]
                top = max(top, scores[query, piece].max())
                shares = np.exp(scores[query, piece] - top)
                below, above = below + shares.sum(), above + shares @ v[piece]
            wrong[query] = above / below
    counts = [[int(mask[mine].sum()) for mine in parts] for mask in allowed.values()]
    pieces = np.array_split(np.arange(length), 2 * n)
    zigzag = [int(allowed["causal"][np.r_[pieces[r], pieces[2 * n - 1 - r]]].sum()) for r in range(n)]
    rings = [[(r - step) % n for step in range(n)] for r in range(n)]
    return {
        "full attention": [
            [r, outputs["full"][parts[r][0]].tolist(), rings[r], counts[0][r]] for r in range(n)
        ],
        "causal attention": [
            [r, outputs["causal"][parts[r][0]].tolist(), [o for o in rings[r] if o <= r], counts[1][r]]
            for r in range(n)
        ],
        "Largest error without scaling": [[n, float(np.abs(wrong - outputs["full"]).max())]],
        "Scores that each rank computes": [[r, counts[1][r], zigzag[r]] for r in range(n)],
    }


def expect_mesh(n: int) -> dict:
    shape = {1: (1, 1, 1), 2: (1, 1, 2), 3: (3, 1, 1), 4: (2, 1, 2), 8: (2, 2, 2)}[n]
    grid = np.arange(n).reshape(shape)
    coordinates = [list(map(int, np.argwhere(grid == r)[0])) for r in range(n)]
    groups = [
        [grid[:, p, t].tolist(), grid[d, :, t].tolist(), grid[d, p].tolist()] for d, p, t in coordinates
    ]
    w, x = _draw(0, (4, 4), (4 * shape[0], 4))
    whole = (2 * x.T @ (x @ w) / len(x))[0]
    columns = np.split(whole, shape[2])
    return {
        "A mesh of {} x {} x {}: coordinates".format(*shape): [[r, *c] for r, c in enumerate(coordinates)],
        "The group of each axis, and the sum of its ranks": [
            [r, *(value for group in groups[r] for value in (group, sum(group)))] for r in range(n)
        ],
        "First row of the gradient": [
            [r, columns[coordinates[r][2]].tolist(), np.mean(columns, 0).tolist()] for r in range(n)
        ],
        "A rule of thumb": None,
    }
