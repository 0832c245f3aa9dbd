"""Expected tables of the lessons about remote calls, traces and planning, without ranks."""

import numpy as np
import torch


def expect_rpc(n: int) -> dict:
    owners = [f"rank{(r + 1) % n}" for r in range(n)]
    draw = torch.Generator().manual_seed(0)
    w1, w2 = (torch.randn(s, generator=draw, dtype=torch.float64).numpy() / 2 for s in ((4, 4), (2, 4)))
    x, target, losses = np.array([1.0, 2.0, -1.0, 0.5]), np.array([1.0, -1.0]), []
    for _ in range(5):
        hidden = np.tanh(w1 @ x)
        error = w2 @ hidden - target
        losses.append(float((error**2).sum()))
        of_hidden = 2 * w2.T @ error * (1 - hidden**2)
        w2 = w2 - 0.1 * np.outer(2 * error, hidden)
        w1 = w1 - 0.1 * np.outer(of_hidden, x)
    roles = [["trains" if n > 1 else "trains, and owns w2", losses]]
    roles += [["owner of w2" if r == n - 1 else "idle", None] for r in range(1, n)]
    return {
        "Each rank asks the next rank for a sum, and all for their rank": [
            [r, owners[r], r + 10, list(range(n))] for r in range(n)
        ],
        "Values that live on the next rank": [
            [r, owners[r], [float(r)] * 2, [2.0 * r] * 2] for r in range(n)
        ],
        "A training over two ranks": [[r, *role] for r, role in enumerate(roles)],
        "Numbers that a step sends": [
            ["hidden values, to the owner", 4],
            ["outputs, back", 2],
            ["gradients of outputs", 2],
            ["gradients of hidden values", 4],
        ],
    }


def expect_profiling(n: int) -> dict:
    return {
        "What each rank wrote": [[r, f"rank{r}.json", (n - 1) / 2] for r in range(n)],
        "When the device is idle": [
            [0, 12, "read samples"],
            [30, 7, "all-reduce on the CPU"],
            [40, 4, "log"],
        ],
        "The step": [[44, 21, 23, 23 / 44]],
    }


def expect_planning(n: int) -> dict:
    weights = 4 * 256 * 256 * 4  # bytes
    shares = {"single": (1, 1), "ddp": (1, 1), "zero1": (1, n), "zero2": (n, n), "zero3": (n, n)}
    plans = ("ddp", "zero1", "zero2", "zero3") if n > 1 else ("single",)
    lines = []
    for plan in plans:
        gradients, moments = (weights / shares[plan][0], 2 * weights / shares[plan][1])
        lines.append([plan, gradients, moments, gradients, moments])
    return {
        "Bytes on a rank (mean): predicted and counted": lines,
        "70 billion parameters under ZeRO-3, on GPUs of 80 GB": [
            [8, 140.0, "no"],
            [16, 70.0, "no"],
            [32, 35.0, "yes"],
            [64, 17.5, "yes"],
        ],
    }
