"""Choose the precision that a device computes well in, from what is measured or published of it."""

from collections.abc import Mapping
from typing import NamedTuple

from paceline.cluster.cpu import read_cpu
from paceline.cluster.facts import Cluster
from paceline.cluster.local_cluster import load_cluster
from paceline.errors import ClusterError

AUTO = "auto"
# How much faster products must be: casts, and operations that stay in float32, cost some of the gain.
MARGIN = 1.5
MATRIX_BF16 = {"AMX BF16", "SME", "SME2"}  # units of CPUs that multiply matrices in bf16
VECTOR_BF16 = {"AVX-512 BF16", "BF16"}  # that multiply vectors in it, at most twice as fast as float32


class PrecisionChoice(NamedTuple):
    """A precision, and the reason as a sentence."""

    precision: str
    why: str


def choose_precision(device: str | None = None) -> PrecisionChoice:
    """Return the precision for this machine. device: "cpu" or "cuda" [default: cuda if there is one].

    Uses the rates of cluster.json in this folder, which `paceline bench` measures, or else the published
    peaks of a GPU, or else the matrix units of the CPU.
    """
    cluster = load_cluster(device)
    if (choice := choose_by_rates(cluster)) is not None:
        return choice
    if cluster.device.kind != "cpu":
        return choose_by_peaks(cluster)
    try:
        cpu = read_cpu()
    except ClusterError:
        return PrecisionChoice(
            "fp32", "the units of this CPU are unknown; paceline bench compute measures it"
        )
    return choose_by_units({*cpu.matrix, *cpu.vector})


def choose_by_rates(cluster: Cluster) -> PrecisionChoice | None:
    """Return the choice by measured matrix products; None if fp32 or all others were not measured."""
    best: dict[str, float] = {}
    for rate in cluster.rates:
        if rate.operation == "matmul" and rate.flops.source == "measured":
            best[rate.dtype] = max(best.get(rate.dtype, 0.0), rate.flops.value)
    names = _candidates(cluster)
    if "fp32" not in best or not any(name in best for name in names):
        return None
    return _choose(best, names, "paceline bench compute measured")


def choose_by_peaks(cluster: Cluster) -> PrecisionChoice:
    """Return the choice by the published peaks of a GPU."""
    peaks: dict[str, float] = {name: peak.value for name, peak in cluster.device.peaks_flops.items()}
    peaks |= {name: peak.value for name, peak in cluster.device.vector_flops.items() if name == "fp32"}
    names = _candidates(cluster)
    if "fp32" not in peaks or not any(name in peaks for name in names):
        return PrecisionChoice(
            "fp32", f"the peaks of {cluster.device.name} are unknown; paceline bench compute measures them"
        )
    return _choose(peaks, names, f"published of {cluster.device.name}:")


def choose_by_units(units: set[str]) -> PrecisionChoice:
    """Return the choice for a CPU by its vector and matrix extensions."""
    if found := sorted(units & MATRIX_BF16):
        return PrecisionChoice("bf16", f"this CPU multiplies matrices in bf16 ({', '.join(found)})")
    if found := sorted(units & VECTOR_BF16):
        return PrecisionChoice(
            "fp32",
            f"this CPU has vector units for bf16 ({', '.join(found)}) but no matrix units; paceline bench "
            "compute measures whether bf16 is faster",
        )
    return PrecisionChoice(
        "fp32", "this CPU has no matrix units for bf16, and converts each value to float32 and back"
    )


def _candidates(cluster: Cluster) -> tuple[str, ...]:
    """Return the reduced precisions to consider, best first. bf16 has the range of fp32."""
    return ("bf16",) if cluster.device.kind == "cpu" else ("bf16", "fp16")


def _choose(flops: Mapping[str, float], names: tuple[str, ...], source: str) -> PrecisionChoice:
    found = [name for name in names if flops.get(name, 0.0) >= MARGIN * flops["fp32"]]
    known = [name for name in ("fp32", *names) if name in flops]
    rates = ", ".join(f"{name} {flops[name] / 1e12:.3g}" for name in known)
    return PrecisionChoice(found[0] if found else "fp32", f"{source} {rates} TFLOP/s")
