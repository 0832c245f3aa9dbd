"""Expected tables of the lessons about precision, dependencies and rare communication, without ranks."""

import numpy as np
import torch

PERIODS = (1, 2, 4, 8)


def expect_bandwidth(n: int) -> dict:
    shares = {
        "all-reduce": lambda p: 2 - 2 / p,
        "all-gather": lambda p: 1 - 1 / p,
        "reduce-scatter": lambda p: 1 - 1 / p,
        "all-to-all": lambda p: 1 - 1 / p,
        "broadcast": lambda p: 1,
        "reduce": lambda p: 1,
    }
    return {
        "Bus bandwidth / algorithm bandwidth": [
            [name, *(share(p) for p in (2, 4, 8, 64))] for name, share in shares.items()
        ],
        "A reduce-scatter": [[r, 4800, 4800 // n, n] for r in range(n)],
    }


def expect_local_sgd(n: int) -> dict:
    """Each rank descends (1 + r)/2 · (w - r)² with learning rate 0.2/n, from 4."""
    steepness, rate = np.arange(1, n + 1), 0.2 / n

    def descend(period: int, steps: int = 8) -> np.ndarray:
        w, path = np.full(n, 4.0), []
        for step in range(1, steps + 1):
            w = w - rate * steepness * (w - np.arange(n))
            if step % period == 0:
                w = np.full(n, w.mean())
            path.append(w)
        return np.array(path).T

    paths = {period: descend(period) for period in PERIODS}
    best = np.average(np.arange(n), weights=steepness)
    alone = 4.0 - np.array([4 - (r + (4 - r) * (1 - rate * (r + 1)) ** 4) for r in range(n)])
    return {
        "Averaged gradients: the weight after each step": [[r, paths[1][r].tolist(), 8] for r in range(n)],
        "Local SGD with H = 4: the weight after each step": [[r, paths[4][r].tolist(), 2] for r in range(n)],
        "After 128 steps, and the distance to the minimum of the mean loss": [
            [period, end, end - best]
            for period in (1, 4, 16, 64)
            for end in [float(descend(period, 128)[0, -1])]
        ],
        "The first outer step, with learning rate 1": [
            [r, float(4 - alone.mean()), float(alone.mean())] for r in range(n)
        ],
    }


def expect_mixed_precision(n: int) -> dict:
    with np.errstate(over="ignore"):
        factor = np.float16(1e-4)
        gradients = [
            float(np.float32(np.float16(np.float32(1e-4) * np.float32(scale)) * factor) / np.float32(scale))
            for scale in (1.0, 1024.0, 65536.0, 2.0**40)
        ]
    own = [256.0] + [1.0] * (n - 1)
    factors = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(0)).numpy()
    errors = []
    for name, bits in (("float32", 23), ("TF32", 10), ("bfloat16", 7)):
        fractions, exponents = np.frexp(factors.astype(float))
        a, b = np.ldexp(np.rint(fractions * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponents)
        exact = factors[0].astype(float) @ factors[1].astype(float)
        errors.append([name, bits, float(np.abs((a @ b - exact) / exact).max())])
    return {
        "Largest relative error of a product of 64 terms": errors,
        "Formats": [
            ["float32", 32, 2.0**-23, float(np.finfo(np.float32).max), 2.0**-126],
            ["bfloat16", 16, 2.0**-7, float((2 - 2.0**-7) * 2.0**127), 2.0**-126],
            ["float16", 16, 2.0**-10, 65504.0, 2.0**-14],
        ],
        "A weight after 100 updates of 0.001": [[1.0, float(np.float32(0.001) * 100 + 1), 1.1015625]],
        "A gradient of 1e-8 in float16": [
            [scale, gradient]
            for scale, gradient in zip((1.0, 1024.0, 65536.0, 2.0**40), gradients, strict=True)
        ],
        "A sum on rank 0": [[r, own[r], *((sum(own), 256.0) if r == 0 else (None, None))] for r in range(n)],
    }


def expect_products(n: int) -> dict:
    draw = torch.Generator().manual_seed(0)
    b, c, e, f = torch.randint(-3, 4, (4, 8, 8), generator=draw).numpy().astype(float)
    g = b @ c @ e @ f
    helper = min(1, n - 1)
    tasks = [
        [r, 2 * (r == 0) + (r == helper), 64 * (r == 0 and n > 1), g[0, 0] if r == 0 else None]
        for r in range(n)
    ]
    owned = [[row for row in range(8) if r * 8 // n <= row < (r + 1) * 8 // n] for r in range(n)]
    parts = [(b[0] @ c[:, mine]) @ (e[mine] @ f[:, 0]) for mine in owned]
    return {
        "A task for each rank": tasks,
        "Rows for each rank": [
            [r, len(mine), 3 * len(mine) / 8, 64 - 8 * len(mine)] for r, mine in enumerate(owned)
        ],
        "A part of each sum for each rank": [[r, float(parts[r]), float(g[0, 0])] for r in range(n)],
        "Products in the longest chain, and N² elements received": [
            [p, 2, 3 / p, 1 - 1 / p, 2 - 2 / p] for p in (2, 4, 8)
        ],
    }


def expect_recurrent(n: int) -> dict:
    draw = torch.Generator().manual_seed(0)
    w, u = (torch.randn(2, 3, 3, generator=draw, dtype=torch.float64) / 2).numpy()
    x = torch.randn(24, 3, generator=draw, dtype=torch.float64).numpy()
    h, states, line, lines = np.zeros(3), [], 0.0, []
    for t in range(24):
        h = np.tanh(h @ w + x[t] @ u)
        line = line / 2 + t + 1
        states.append(h.tolist())
        lines.append(line)
    size = 24 // n
    first = []
    for r in range(n):
        shares = np.exp(x[r * size] @ u @ x.T)
        first.append((shares @ x / shares.sum()).tolist())
    inner = [
        sum(t * 0.5 ** ((r + 1) * size - t) for t in range(r * size + 1, (r + 1) * size + 1))
        for r in range(n)
    ]
    return {
        "A recurrent network, split over time": [
            [r, r * size, (r + 1) * size, states[(r + 1) * size - 1]] for r in range(n)
        ],
        "Attention, split over time": [[r, 0, 1, first[r]] for r in range(n)],
        "Dependent steps of a layer": [
            [1_000, 1_000, 10, 1],
            [8_192, 8_192, 13, 1],
            [131_072, 131_072, 17, 1],
        ],
        "h[t] = h[t-1]/2 + t, computed in parts": [
            [r, 0.5**size, inner[r], lines[(r + 1) * size - 1]] for r in range(n)
        ],
    }
