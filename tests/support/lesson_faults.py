"""Expected tables of the lessons about streams and mistakes, computed in one process."""

import torch


def expect_streams(n: int) -> dict:
    results = [1, 3, 5, 7, 9]
    return {
        "2 x + 1 of five batches": [[1, results], [3, results]],
        "The sum of the gradients of all ranks": [[r, [sum(range(1, n + 1))] * 2, [0, 0]] for r in range(n)],
    }


def expect_start_mistakes(n: int) -> dict:
    gpus = [
        [0, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 1, 0],
        [2, 2, 0, 2, 0, 1],
        [3, 3, 0, 3, 1, 1],
        [4, 0, 1, 0, 0, 2],
        [5, 1, 1, 1, 1, 2],
        [6, 2, 1, 2, 0, 3],
        [7, 3, 1, 3, 1, 3],
    ]
    mean = (n - 1) / 2
    return {
        "The rank that each process reads": [[r, 0 if r < n / 2 else 1, r] for r in range(n)],
        "8 ranks on 2 machines with 4 GPUs each": gpus,
        "The weight after a step": [[r, 1 - 0.1 * mean, 1 - 0.1 * r] for r in range(n)],
        "With the prefix, and strict=False": [[r, "module.weight module.bias", False] for r in range(n)],
        "Of model.module": [[r, None, True] for r in range(n)],
        "1,000 samples, evaluated by all": [
            [r, len(range(r, 1000, n)), "accuracy 0.900" if r == 0 else None] for r in range(n)
        ],
    }


def train_layers(trained: int) -> list[float]:
    """Return how far each of 4 layers moves in a training of the last `trained`, by autograd."""
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(4, 4, generator=draw, dtype=torch.float64) / 2 for _ in range(4)]
    x, y = torch.randn(2, 24, 4, generator=draw, dtype=torch.float64)
    model = torch.nn.ParameterList([weight.clone() for weight in weights])
    optimizer = torch.optim.SGD(list(model)[4 - trained :], lr=0.5)
    for _ in range(20):
        hidden = x
        for weight in model:
            hidden = torch.tanh(hidden @ weight)
        model.zero_grad()
        torch.nn.functional.mse_loss(hidden, y).backward()
        optimizer.step()
    return [(after - before).norm().item() for after, before in zip(model, weights, strict=True)]


def expect_split_mistakes(n: int) -> dict:
    moved = zip(train_layers(4), train_layers(3), strict=True)
    return {
        "Does a test pass with a reversed order?": [[r, True, n == 1, True] for r in range(n)],
        "How far each layer has moved": [[layer, *both] for layer, both in enumerate(moved)],
        "Parameters with a gradient, of 4": [[True, 2], [False, 4]],
        "The model as a whole": [[r, 1, 1024] for r in range(n)],
        "Block by block": [[r, 5, 256] for r in range(n)],
    }
