"""Expected tables of the lessons about scaling, overlap, input, checkpoints and cost, without ranks."""

import math

import numpy as np
import torch


def expect_growth(n: int) -> dict:
    models = {
        "AlexNet": (2012, 61e6),
        "ResNet-50": (2015, 25.6e6),
        "BERT-large": (2018, 340e6),
        "GPT-2": (2019, 1.5e9),
        "Megatron-LM": (2019, 8.3e9),
        "Turing-NLG": (2020, 17e9),
        "GPT-3": (2020, 175e9),
        "MT-NLG": (2021, 530e9),
    }
    published = [
        ("ZeRO-3", 174.6, 384, 144, 90),
        ("ZeRO-3", 174.6, 768, 88, 74),
        ("ZeRO-3", 174.6, 1536, 44, 74),
        ("tensor, pipeline, data", 174.6, 384, 153, 84),
        ("tensor, pipeline, data", 174.6, 768, 149, 43),
        ("tensor, pipeline, data", 174.6, 1536, 141, 23),
        ("tensor, pipeline, data", 529.6, 2240, 159, 42),
    ]
    flops = 6 * 174.6 * 300 * 1e18
    prices = {"on demand": 3.06, "1 year": 1.9492, "3 years": 0.9792, "spot": 0.306}
    return {
        "Models": [
            [name, year, p / 1e9, 16 * p / 1e9, math.ceil(16 * p / 80e9)]
            for name, (year, p) in models.items()
        ],
        "GPT-3 on one V100": [[flops, flops / (28e12 * 3.1536e7), 3045116.16]],
        "Days for 300 billion tokens (Narayanan et al. 2021)": [
            [*row[:4], 8 * 300 * row[1] * 1e6 / (row[2] * row[3] * 86400), row[4]] for row in published
        ],
        "355 years on one V100": [[name, hour, 3109800 * hour] for name, hour in prices.items()],
    }


def expect_scaling(n: int) -> dict:
    shares = (0.0, 0.01, 0.1, 0.2)
    size = max(power for power in (1, 2, 4, 8) if power <= n)  # the most ranks that the lesson measures
    return {
        "Units of work on the ranks": [[r, 10 * (r == 0) + len(range(r, 40, size))] for r in range(size)],
        "Amdahl's law: the speedup for serial shares": [
            [p, *(p / (p * s + 1 - s) for s in shares)] for p in (1, 2, 4, 8, 64, 1024)
        ],
        "A published measurement": [[2, 7.01, 1.0, 1.0], [8, 7.57, 7.01 / 7.57, 7.01 / 7.57 / 4]],
    }


def expect_overlap(n: int) -> dict:
    ranks = sum(range(n))
    return {
        "The sums, with overlap": [[r, [ranks + n * layer for layer in range(4)]] for r in range(n)],
        "A computation meanwhile, and the sum afterwards": [
            [r, [ranks + 2 * i for i in range(4)]] for r in range(n)
        ],
        "Milliseconds of a step": [[100, 20, 120, 100], [100, 100, 200, 100], [100, 300, 400, 300]],
    }


def expect_data_loading(n: int) -> dict:
    return {
        "The samples of each rank": [[r, *[list(range(r, 32, n))] * 2] for r in range(n)],
        "Milliseconds of a step": [
            [8, 10, 1, 18, 10],
            [40, 10, 1, 50, 40],
            [40, 10, 4, 50, 10],
            [40, 10, 8, 50, 10],
        ],
    }


def expect_checkpoint(n: int) -> dict:
    """Adam in numpy, on whole batches. `forgets`: a step at which the moments are set to zero."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1, dtype=torch.float64)
    start = np.r_[layer.weight.detach().numpy()[0], layer.bias.detach().numpy()]

    def train(forgets: int | None = None) -> tuple[list[float], float]:
        w, losses = start.copy(), []
        m, v, count = np.zeros(4), np.zeros(4), 0
        for step in range(8):
            if step == forgets:
                m, v, count = np.zeros(4), np.zeros(4), 0
            draw = torch.Generator().manual_seed(step)
            x = torch.randn(24, 3, generator=draw, dtype=torch.float64).numpy()
            rows = np.c_[x, np.ones(24)]
            error = rows @ w - x.sum(1)
            losses.append(float((error**2).mean()))
            gradient, count = 2 * rows.T @ error / 24, count + 1
            m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
            w -= 0.1 * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8)
        return losses, float(w[0])

    whole, partial = train(), train(forgets=3)
    return {
        "The uninterrupted training": [[r, 0, *whole] for r in range(n)],
        "The resumed training": [[r, 3, whole[0][3:], whole[1]] for r in range(n)],
        "Resumed without the state of Adam": [[r, 3, partial[0][3:], partial[1]] for r in range(n)],
        "The best interval": [
            [c, hours, math.sqrt(2 * c * hours * 3600) / 60] for c, hours in ((10, 24), (60, 24), (60, 4))
        ],
    }
