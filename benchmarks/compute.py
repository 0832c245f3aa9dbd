"""Matrix products timed by `paceline bench compute` and by a plain loop, in turns."""

import argparse
import statistics
import time

import torch

import machine
from paceline.bench.compute.matmul import KINDS
from paceline.bench.timer import Budget, measure

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plain_flops(dtype: str, size: int, seconds: float) -> float:
    """Return the FLOP/s of a loop over torch.mm, without any code of Paceline.

    All products write to the same output: glibc maps each new output of 32 MiB again, and in fp64 its page
    faults take a sixth of the time of the product.
    """
    a, b = (torch.randn(size, size).to(DTYPES[dtype]) for _ in range(2))
    out = torch.mm(a, b)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        torch.mm(a, b, out=out)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.6, help="of each measurement")
    parser.add_argument("--size", type=int, default=2048, help="of the square matrices")
    options = parser.parse_args()
    size = options.size
    threads = torch.get_num_threads()
    print(
        f"{machine.description()}, torch {torch.__version__}, {threads} threads, "
        f"{options.rounds} rounds, {size}×{size}×{size}"
    )
    for kind in KINDS:
        if kind.dtype not in DTYPES or kind.sparse:
            continue
        ours, plain = [], []
        for _ in range(options.rounds):
            run = kind.make((size, size, size), torch.device("cpu"))
            budget = Budget(options.seconds, options.seconds / 5, min_count=3)
            ours.append(2 * size**3 / measure(run, budget).median_s)
            plain.append(plain_flops(kind.dtype, size, options.seconds))
        ratios = [own / other for own, other in zip(ours, plain, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        rates = (
            f"paceline {statistics.median(ours) / 1e9:8.1f} GFLOP/s   "
            f"plain loop {statistics.median(plain) / 1e9:8.1f}"
        )
        print(f"{kind.dtype:5} {rates}   ratio {median:.3f} ({low:.3f}–{high:.3f})")


if __name__ == "__main__":
    main()
