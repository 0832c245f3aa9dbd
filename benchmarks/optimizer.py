"""Time of an update: the optimizers beside torch's fused AdamW, and the share of whole norms in a step.

One process; the contenders alternate, so that a machine that drifts disturbs all equally. The model has 10.5
million parameters in an MLP, as in steps.py. Each step has a batch of its own: on a batch that the model
learns by heart, gradients become denormal numbers, which make a step several times as slow.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from paceline import Task
from paceline.optimizer_options import OPTIMIZERS
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Optimizer
from paceline.training.optimization.optimizer import compile_updates, make_optimizer
from paceline.training.optimization.optimizer_step import OptimizerStep
from paceline.training.optimizers.lamb import Lamb
from paceline.training.optimizers.lars import Lars

BATCH = 256
TORCH = "torch AdamW, fused"
# Optimizers whose update of an element needs no other element
ELEMENTWISE = ("adamw", "adam", "sgd", "lion", "adagrad", "rmsprop", "nadam", "radam", "adamax", "adadelta")
COMPILED = ("lion", "nadam", "adamax", "adadelta", "lamb")
WITH_NORMS = {"lamb": Lamb, "lars": Lars}


def build_model() -> nn.Module:
    sizes = (1024, 2048, 2048, 2048)
    hidden = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(sizes[-1], 10))


def build_update(name: str, is_compiled: bool = False) -> Callable[[], None]:
    """Return the update of an optimizer on a model of its own, with gradients."""
    torch.manual_seed(0)
    model = build_model()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    if name == TORCH:
        return torch.optim.AdamW(model.parameters(), fused=True).step  # type: ignore[return-value]
    optimizer = make_optimizer(Task(), Optimizer(name=name), ResolvedPlan(), model)
    if is_compiled:
        compile_updates(optimizer)
    step = OptimizerStep(optimizer)

    def update() -> None:
        with torch.no_grad():
            step()

    return update


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def time_alternately(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round; a first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for at in range(rounds + 1):
        for name, run in contenders.items():
            took = seconds(run)
            if at:
                times[name].append(took)
    return times


def describe(ratios: list[float]) -> str:
    """Return the median of the ratios, and their quartiles if there are enough."""
    median = f"{statistics.median(ratios):.3f}"
    if len(ratios) < 4:
        return median
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{median} ({low:.3f}–{high:.3f})"


def print_updates(names: list[str], rounds: int, with_compiled: bool) -> None:
    updates = {TORCH: build_update(TORCH)} | {name: build_update(name) for name in names}
    if with_compiled:
        compiled = {f"{name}, compiled": build_update(name, True) for name in names if name in COMPILED}
        updates, names = updates | compiled, [*names, *compiled]
    times = time_alternately(updates, rounds)
    base = times[TORCH]
    print(f"{TORCH}: {1e3 * statistics.median(base):.2f} ms an update")
    for name in names:
        ratios = [reference / own for reference, own in zip(base, times[name], strict=True)]
        print(f"{name:<19} {1e3 * statistics.median(times[name]):7.2f} ms, speed {describe(ratios)}")


def check_numbers(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """End the program if more than a thousandth of gradients and state are denormal numbers."""
    tensors = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    tiny = torch.finfo(torch.float32).tiny
    count = sum(int(((tensor != 0) & (tensor.abs() < tiny)).sum()) for tensor in floats)
    share = count / sum(tensor.numel() for tensor in floats)
    if share > 1e-3:
        raise SystemExit(f"{100 * share:.1f} % of the numbers are denormal, which slows the updates")


def print_norms(name: str, rounds: int) -> None:
    """Print the time that norms and trust ratios add to an update, as a share of a whole step."""
    torch.manual_seed(0)
    model = build_model()
    batches = iter([(torch.randn(BATCH, 1024), torch.randint(10, (BATCH,))) for _ in range(rounds + 1)])
    optimizer = make_optimizer(Task(), Optimizer(name=name), ResolvedPlan(), model)
    step = OptimizerStep(optimizer)
    without = WITH_NORMS[name](model.parameters(), trust=False)

    def train() -> None:
        inputs, targets = next(batches)
        model.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            step()

    def update() -> None:
        with torch.no_grad():
            step()

    times = time_alternately({"step": train, "update": update, "without": without.step}, rounds)
    check_numbers(optimizer, model)
    shares = [
        (own - less) / whole
        for own, less, whole in zip(times["update"], times["without"], times["step"], strict=True)
    ]
    print(f"a step with {name} at batch {BATCH}: {1e3 * statistics.median(times['step']):.1f} ms")
    print(f"its norms and trust ratios: {100 * statistics.median(shares):.1f} % of it")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--optimizers", nargs="*", default=[*ELEMENTWISE, "lars", "lamb", "novograd"])
    parser.add_argument(
        "--compile", action="store_true", help="also with the updates that --compile compiles"
    )
    options = parser.parse_args()
    if unknown := set(options.optimizers) - OPTIMIZERS.keys():
        parser.error(f"unknown optimizers: {', '.join(sorted(unknown))}; known: {', '.join(OPTIMIZERS)}")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print_updates(options.optimizers, options.rounds, options.compile)
    for name in WITH_NORMS:
        print_norms(name, options.rounds)


if __name__ == "__main__":
    main()
