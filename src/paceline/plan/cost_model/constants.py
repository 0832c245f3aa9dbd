"""Constants of the time model, each with its source.

They say what devices and networks reach of their published peaks.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

# fitted: to trainings; published: read from publications of others; guessed: nothing is known
Basis = Literal["fitted", "published", "guessed"]
MAX_SHARED_RANKS = 8  # of one machine without GPUs, which exchange gradients through shared memory
MAX_FITTED_RANKS = 6144  # of the trainings that the constants are fitted to


@dataclass(frozen=True)
class Architecture:
    """Shares of a device's peak.

    product: large matrix products in a long training; product_fp8, product_fp4: the same relative to
    the peaks in 8 and 4 bits.
    forward, backward: fused attention; backward counts 5 products for 2 of the forward pass. native: speed of
    kernels that were written for this architecture, relative to those; 0 if there are none. units:
    multiprocessors.
    memory: share of the peak bandwidth that elementwise kernels reach.
    node: share of the links inside a node that large collectives reach, if it differs from that of others.
    W_for_flops: power / peak at which the shares were measured. With less power a device is slower by the
    third root, because power is f·V².
    """

    product: float
    forward: float
    backward: float
    units: int
    product_fp8: float = 0.5
    product_fp4: float = 0.4
    memory: float = 0.84
    W_for_flops: float = 0.0
    node: float | None = None
    native: float = 0.0
    basis: Basis = "published"

    def share(self, dtype: str) -> float:
        """Return the share of the peak in `dtype` that large products reach."""
        return {"fp8": self.product_fp8, "fp4": self.product_fp4}.get(dtype, self.product)


@dataclass(frozen=True)
class Constants:
    """All fitted or published constants in one value.

    node, across: share of a link's rate that large collectives reach, inside a node and between nodes.
    node_s, hop_s, step_s: start of a collective inside a node, per doubling of the nodes (trees: all-reduce),
    and per node (rings: gather, scatter).
    hidden: share of a collective inside a node that overlaps with computing, if overlap is possible.
    launch_s: between two kernels. host_s: for the host to launch a kernel.
    jitter: share of a step in which ranks wait for the slowest.
    """

    architectures: Mapping[str, Architecture]
    node: float = 0.78
    across: float = 0.741
    node_s: float = 30e-6
    hop_s: float = 40e-6
    step_s: float = 6e-6
    hidden: float = 0.586
    one_rail: float = 0.65
    launch_s: float = 3e-6
    host_s: float = 6e-6
    jitter: float = 0.02


# Fitted, and only for A100, Hopper and Blackwell: product, forward and backward by one factor, memory, across
# and hidden, to the published measurements of docs/planning.md by benchmarks/published.py --fit. The values
# before the fit, in docs/planning.md, rest on these sources:
# product: A100 0.80 of sweeps at 0.87 (stas00/ml-engineering, MAMF), 241 to 255 of 312 TFLOP/s in the shapes
# of a transformer (EleutherAI/cookbook); H100 0.80 of the best shape only, and less if power is the limit.
# forward, backward: FlashAttention-2 (Dao 2023, arXiv 2307.08691, figures 4 and 5; on H100 35 %, Shah et al.
# 2024, arXiv 2407.08608). native: cuDNN 9 and FlashAttention-3 (the latter, figures 5 and 6).
AMPERE = Architecture(0.775, 0.508, 0.462, 108, basis="fitted")
HOPPER = Architecture(
    0.606, 0.323, 0.277, 132, product_fp8=0.513, W_for_flops=700 / 989.4e12, native=1.515, basis="fitted"
)
BLACKWELL = Architecture(
    0.52, 0.50, 0.425, 148, product_fp8=0.446, product_fp4=0.363, node=0.58, basis="fitted"
)
ARCHITECTURES: Mapping[str, Architecture] = {
    "V100": Architecture(0.75, 0.35, 0.30, 80),
    "A100": AMPERE,
    "A800": AMPERE,
    "H100": HOPPER,
    "H800": HOPPER,
    "H200": HOPPER,
    "H20": replace(HOPPER, units=78, basis="guessed"),  # its power allows more of its low peak
    "GH200": replace(HOPPER, W_for_flops=0.0),  # it may draw more, together with its processor
    "B200": BLACKWELL,
    "B300": BLACKWELL,
    "GB200": BLACKWELL,
    "GB300": BLACKWELL,
    "MI250": Architecture(0.50, 0.25, 0.20, 110),
    "MI300": Architecture(0.45, 0.30, 0.25, 304),
    "MI325": Architecture(0.50, 0.30, 0.25, 304),
    "MI350": Architecture(0.60, 0.35, 0.30, 256),
    "MI355": Architecture(0.60, 0.35, 0.30, 256),
}
UNKNOWN = Architecture(0.60, 0.35, 0.30, 100, basis="guessed")
CONSTANTS = Constants(ARCHITECTURES)


def find_architecture(name: str, constants: Constants) -> Architecture:
    """Return the constants of a device by the longest family name that its name contains.

    A device of no known family gets a guess, which is marked.
    """
    flat = re.sub(r"[^A-Z0-9]", "", name.upper())
    found = max((family for family in constants.architectures if family in flat), key=len, default=None)
    return constants.architectures[found] if found else UNKNOWN


class OverheadCosts(NamedTuple):
    """Overhead of an engine per step, per unit and per tensor, in cycles or seconds."""

    step: float
    unit: float
    tensor: float = 0.0

    def scaled(self, factor: float) -> "OverheadCosts":
        """Return the overhead multiplied by `factor`."""
        return OverheadCosts(self.step * factor, self.unit * factor, self.tensor * factor)


# Cycles of an engine per step, per unit and per tensor (engine_overhead.py), including gloo's collectives, in
# round figures.
ENGINES: Mapping[str, OverheadCosts] = {
    "step": OverheadCosts(5e5, 0.0),
    "ddp": OverheadCosts(1e6, 2e4),
    "zero1": OverheadCosts(1e6, 4e5),
    "zero2": OverheadCosts(1e6, 2e6, 1e5),
    "zero3": OverheadCosts(1e6, 3e6, 1e5),
    "tp": OverheadCosts(5e5, 1e6, 1e5),
    "cp": OverheadCosts(5e5, 5e6),
    "pp": OverheadCosts(5e5, 4e6),
    "selective": OverheadCosts(0.0, 1e6),
}


@dataclass(frozen=True)
class Processor:
    """A CPU core without measurements, right to the order of magnitude.

    Values that the system reports take precedence.
    operations: per lane and cycle; two units that multiply and add. product: share of that rate that products
    reach.
    start_cycles: to start an operation from Python and record it for the backward pass.
    turns: slowdown of ranks that share a core, in addition to the share of time that each gets
    (benchmarks/crowd.py).
    engines: cycles per step, unit and tensor.
    """

    clock_Hz: float = 2.5e9
    vector_bits: int = 256
    operations: int = 4
    product: float = 0.5
    start_cycles: float = 1e4
    turns: float = 1.07
    engines: Mapping[str, OverheadCosts] = field(default_factory=lambda: ENGINES)
    basis: Basis = "guessed"


CPU = Processor()
