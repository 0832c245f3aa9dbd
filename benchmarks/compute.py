"""What `paceline bench compute` says a matrix product reaches, beside a plain timing loop; they take turns."""

import argparse
import statistics
import time

import torch

import machine
from paceline.bench.compute.matmul import KINDS
from paceline.bench.timer import Budget, measure


def plainly(dtype: str, size: int, seconds: float) -> float:
    """FLOP/s of a loop over torch.mm, written down without any of Paceline. Into one output: glibc maps each new one of 32 MiB afresh,
    and the page faults of one in fp64 take a sixth as long as the product."""
    kind = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
        dtype
    ]
    a, b = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
    out = torch.mm(a, b)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        torch.mm(a, b, out=out)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.6, help="each time")
    parser.add_argument("--size", type=int, default=2048, help="of the square matrices")
    options = parser.parse_args()
    size = options.size
    threads = torch.get_num_threads()
    print(
        f"{machine.description()}, torch {torch.__version__}, {threads} threads, {options.rounds} rounds, {size}×{size}×{size}"
    )
    for kind in KINDS:
        if kind.dtype not in ("fp64", "fp32", "bf16", "fp16") or kind.sparse:
            continue
        ours, plain = [], []
        for _ in range(options.rounds):
            run = kind.make((size, size, size), torch.device("cpu"))
            ours.append(
                2 * size**3 / measure(run, Budget(options.seconds, options.seconds / 5, least=3)).median_s
            )
            plain.append(plainly(kind.dtype, size, options.seconds))
        low, middle, high = statistics.quantiles(
            (one / other for one, other in zip(ours, plain, strict=True)), n=4
        )
        rates = f"paceline {statistics.median(ours) / 1e9:8.1f} GFLOP/s   plain loop {statistics.median(plain) / 1e9:8.1f}"
        print(f"{kind.dtype:5} {rates}   ratio {middle:.3f} ({low:.3f}–{high:.3f})")


if __name__ == "__main__":
    main()
