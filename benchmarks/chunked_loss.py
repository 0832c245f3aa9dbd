"""Peak memory and time of the cross entropy of a linear layer, with whole logits and in chunks.

Each variant runs in a process of its own, because a peak of memory never falls again.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.chunked_loss import chunked_cross_entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")


LOSSES: dict[str, Loss] = {"whole logits": whole, "in chunks": chunked_cross_entropy}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, options: argparse.Namespace) -> None:
    """Print the bytes that a loss adds to the peak of this process, and the seconds of each repetition."""
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, requires_grad=True)
    weight = torch.randn(options.vocabulary, options.width, requires_grad=True)
    targets = torch.randint(options.vocabulary, (options.tokens,))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    (hidden[:8] @ weight[:8].T).sum().backward()  # allocates what every product needs
    before, times = peak_bytes(), []
    for _ in range(options.rounds + 1):
        began = time.perf_counter()
        LOSSES[name](hidden, weight, targets).mean().backward()
        times.append(time.perf_counter() - began)
    print(json.dumps({"bytes": peak_bytes() - before, "seconds": times[1:]}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(LOSSES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is not None:
        measure(options.only, options)
        return
    sizes = [f"--{name}={getattr(options, name)}" for name in ("tokens", "vocabulary", "width", "rounds")]
    found = {}
    for name in LOSSES:
        command = [sys.executable, __file__, *sizes, "--only", name]
        found[name] = json.loads(subprocess.run(command, text=True, capture_output=True, check=True).stdout)
        seconds = statistics.median(found[name]["seconds"])
        print(f"{name}: {found[name]['bytes'] / 2**20:,.0f} MiB, {seconds:.2f} s")
    first, second = found.values()
    speed = statistics.median(first["seconds"]) / statistics.median(second["seconds"])
    print(
        f"in chunks: {second['bytes'] / max(1, first['bytes']):.1%} of the memory, {speed:.2f} of the speed"
    )


if __name__ == "__main__":
    main()
