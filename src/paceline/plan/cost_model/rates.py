"""DeviceRates: what devices and links of a cluster reach, as plain numbers for predictions."""

import math
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.cluster.facts import Axis, Cluster
from paceline.errors import PlanError
from paceline.plan.comm_volume import RING_FACTORS
from paceline.plan.cost_model.calibration import Calibration, fit_calibration
from paceline.plan.cost_model.constants import (
    CONSTANTS,
    MAX_SHARED_RANKS,
    Architecture,
    Constants,
    OverheadCosts,
    find_architecture,
)
from paceline.plan.cost_model.cpu import build_engine_costs, build_op_times, describe_host
from paceline.plan.cost_model.framework_profiles import LOW_DTYPES, WIDE_DTYPES
from paceline.plan.cost_model.op_times import OpTimeTable

SUBSTITUTE_DTYPES = {
    "fp16": ("fp16", "bf16"),
    "bf16": ("bf16", "fp16"),
    "fp32": ("fp32",),
    "tf32": ("tf32", "fp32"),
    "fp8": ("fp8",),
    "mxfp8": ("mxfp8", "fp8"),
    "fp4": ("fp4",),
}
# Nodes that a message passes one after another, by number of nodes.
SERIAL_HOPS: Mapping[str, Callable[[int], float]] = {
    "all-reduce": lambda nodes: math.log2(nodes),
    "send": lambda nodes: 1.0,
}

BASIS_SENTENCES = {
    "published": "from single measurements of others, and not fitted to trainings",
    "guessed": "a guess",
}


@dataclass(frozen=True)
class LinkModel:
    """Time of a collective: alpha_s + factor · bytes / beta_Bps, while all ranks communicate.

    measured: for this collective, so that no efficiency is applied.
    """

    alpha_s: float | None
    beta_Bps: float
    measured: bool


@dataclass(frozen=True, eq=False)
class DeviceRates:
    """Rates of one rank.

    flops: of large matrix products, by dtype; rates: measured, by m·n·k. peaks: published, by dtype.
    clock: relative to a device with its maximum power; applied to `flops`, not to `peaks`.
    hidden: measured share of a collective that overlaps with computing, or None.
    op_times: of a CPU. crowd: ranks that share a core. engines: overheads in seconds, by number of connected
    ranks.
    guesses: sentences about what is neither measured nor fitted.
    """

    name: str
    ranks: int
    per_node: int
    memory_bytes: float
    memory_Bps: float
    flops: Mapping[str, float]
    peaks: Mapping[str, float]
    device: Architecture
    node: Mapping[str | None, LinkModel]
    across: Mapping[str | None, LinkModel]
    constants: Constants
    clock: float = 1.0
    hidden: float | None = None
    rates: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    op_times: OpTimeTable | None = None
    crowd: float = 1.0
    engines: Mapping[str, Mapping[int, OverheadCosts]] = field(default_factory=dict)
    power_W: float | None = None
    price_per_hour: float | None = None
    guesses: tuple[str, ...] = ()
    calibration: Calibration | None = None

    def product_flops(self, dtype: str) -> float:
        """Return the rate of large matrix products in `dtype` or its substitute.

        Raises PlanError if it is unknown.
        """
        substitutes = SUBSTITUTE_DTYPES.get(dtype, (dtype,))
        known = next((substitute for substitute in substitutes if substitute in self.flops), None)
        if known is None:
            fix = "give its peak with --peak, or measure it"
            if dtype in LOW_DTYPES:
                wide = ", ".join(name for name in WIDE_DTYPES if name in self.flops)
                fix = f"use --precision {wide}, or another device"
            raise PlanError(f"the rate of {self.name} in {dtype} is unknown; {fix}")
        return self.flops[known]

    def measured_flops(self, dtype: str, volume: float) -> float | None:
        """Return the rate of a product of `volume` multiplications, interpolated on a logarithmic scale.

        Returns None without measurements.
        """
        table = self.rates.get(dtype)
        if not table:
            return None
        at = bisect(table, (volume, 0.0))
        if at in (0, len(table)):
            return table[min(at, len(table) - 1)][1]
        (low, slow), (high, fast) = table[at - 1], table[at]
        share = math.log(volume / low) / math.log(high / low)
        return slow ** (1 - share) * fast**share

    def exposed_share(self, together: int) -> float:
        """Return the share of a collective that is exposed even if enough computing could overlap with it.

        Without a measurement: links inside a node take multiprocessors and memory bandwidth from the
        computing, the network takes little. together: ranks of the collective in one node.
        """
        return (
            1 - self.hidden
            if self.hidden is not None
            else (1 - self.constants.hidden) * (together - 1) / together
        )

    def collective_s(self, kind: str, size: float, ranks: int, together: int, rails: bool = True) -> float:
        """Return the seconds of one call with S = `size` bytes.

        ranks: of the group, `together` of them in each node. rails: see `Recipe`.
        """
        if ranks < 2 or size <= 0:
            return 0.0
        inside = self._link(self.node, kind, "in a node") if together > 1 else None
        factor = RING_FACTORS[kind](ranks)
        if inside is not None and together >= ranks:
            return self._alpha(inside) + factor * size / self._beta(
                inside, self.device.node or self.constants.node
            )
        outside = self._link(self.across, kind, "between nodes")
        nodes = -(-ranks // together)
        share = self.constants.across if rails else self.constants.one_rail
        beta = self._beta(outside, share) * (together if rails else 1)
        if inside is not None:  # the ring also runs inside the nodes
            beta = min(beta, self._beta(inside, self.device.node or self.constants.node))
        hops = SERIAL_HOPS.get(kind, lambda nodes: 0.0)(nodes) * self.constants.hop_s
        rings = 0.0 if kind in SERIAL_HOPS else nodes * self.constants.step_s
        start = outside.alpha_s if outside.alpha_s is not None else self.constants.node_s + hops + rings
        return start + factor * size / beta

    def shared_mean_s(self, size: float, ranks: int) -> float:
        """Return the seconds in which ranks of one machine average S = `size` bytes through shared memory.

        The shared memory is small and stays in the cache (`distributed/shared_exchange.py`), so that each
        rank mainly reads its bytes and writes the mean. 0.25 to 16 MB on two ranks took 1.6 to 2.9 times
        the time of `size` bytes at the bandwidth of a copy, mostly 2.0. Each further rank is read once.
        """
        return ranks * size / self.memory_Bps

    def shares_memory(self, ranks: int, together: int) -> bool:
        """Return whether these ranks, `together` of them in a node, exchange through shared memory."""
        return self.op_times is not None and 2 <= ranks <= min(together, MAX_SHARED_RANKS)

    @property
    def across_Bps(self) -> float:
        """Rate at which one rank sends to other nodes while all ranks do."""
        return self._beta(self._link(self.across, "all-to-all", "between nodes"), self.constants.across)

    def _link(self, links: Mapping[str | None, LinkModel], kind: str, where: str) -> LinkModel:
        link = links.get(kind) or links.get(None) or next(iter(links.values()), None)
        if link is None:
            hint = (
                "append @GB/s to the cluster"
                if where == "between nodes"
                else "add a link of axis node to cluster.json"
            )
            raise PlanError(
                f"the bandwidth of {self.name} {where} is unknown; measure it with paceline bench, or {hint}"
            )
        return link

    def _alpha(self, link: LinkModel) -> float:
        if self.engines:  # their measurement includes it
            return 0.0
        return self.constants.node_s if link.alpha_s is None else link.alpha_s

    def _beta(self, link: LinkModel, share: float) -> float:
        return link.beta_Bps if link.measured else link.beta_Bps * share


def device_rates(cluster: Cluster, constants: Constants = CONSTANTS, ranks: int | None = None) -> DeviceRates:
    """Return the rates of one of `ranks` ranks, or of one rank per device.

    Ranks fill the GPUs node by node; any number of ranks share a CPU. Raises PlanError if the device's peak
    is unknown and nothing is measured.
    """
    device, guesses = cluster.device, []
    family = find_architecture(device.name, constants)
    count = ranks or cluster.devices
    per_node = -(-count // cluster.nodes) if device.kind == "cpu" else min(count, cluster.devices_per_node)
    part = 1 / per_node if device.kind == "cpu" else 1.0  # ranks share the node's cores and memory
    peaks: dict[str, float] = {dtype: fact.value * part for dtype, fact in device.peaks_flops.items()}
    wanted_W = family.W_for_flops * max(
        (peaks[dtype] for dtype in ("bf16", "fp16") if dtype in peaks), default=0.0
    )
    clock = min(1.0, device.power_W.value / wanted_W) ** (1 / 3) if device.power_W and wanted_W else 1.0
    flops: dict[str, float] = {dtype: clock * peak * family.share(dtype) for dtype, peak in peaks.items()}
    rates = _measured_rates(cluster, part)
    flops |= {dtype: max(speed for _, speed in table) for dtype, table in rates.items()}
    host = describe_host(cluster, per_node) if device.kind == "cpu" else None
    if host is not None and not flops:
        flops["fp32"] = host.flops
        guesses.append(
            f"the rate of {device.name} is guessed from its cores, clock and vectors; paceline bench "
            f"measures it"
        )
    if not flops:
        raise PlanError(
            f"the peak of {device.name} is unknown; give it with --peak, or measure the device with "
            f"paceline bench"
        )
    if family.basis != "fitted" and not cluster.rates and (host is None or peaks):
        guesses.append(f"the share of its peak that {device.name} reaches is {BASIS_SENTENCES[family.basis]}")
    memory_Bps = (
        device.memory_Bps.value * family.memory * part
        if device.memory_Bps
        else next(iter(flops.values())) / 100
    )
    if device.memory_Bps is None:
        guesses.append(f"the memory bandwidth of {device.name} is guessed")
    return DeviceRates(
        name=cluster.name or device.name,
        ranks=count,
        per_node=per_node,
        memory_bytes=device.memory_bytes.value * part,
        memory_Bps=memory_Bps,
        flops=flops,
        peaks=peaks,
        device=family,
        node=_link_models(cluster, "node"),
        across=_link_models(cluster, "across"),
        constants=constants,
        clock=clock,
        hidden=next(
            (overlap.hidden.value for overlap in cluster.overlaps if overlap.operation == "all-reduce"), None
        ),
        rates=rates,
        op_times=build_op_times(cluster, host, next(iter(flops.values())), memory_Bps)
        if host is not None
        else None,
        crowd=host.crowd if host is not None else 1.0,
        engines=build_engine_costs(cluster, host) if host is not None else {},
        power_W=device.power_W.value if device.power_W else None,
        price_per_hour=cluster.price_per_device_hour.value if cluster.price_per_device_hour else None,
        guesses=tuple(guesses),
        calibration=fit_calibration(cluster.calibrations),
    )


def _measured_rates(cluster: Cluster, part: float) -> dict[str, tuple[tuple[float, float], ...]]:
    found: dict[str, dict[float, float]] = {}
    for rate in cluster.rates:
        if rate.operation == "matmul" and rate.flops.source == "measured":
            volume = float(math.prod(rate.shape))
            table = found.setdefault(rate.dtype, {})
            table[volume] = max(table.get(volume, 0.0), rate.flops.value * part)
    return {dtype: tuple(sorted(table.items())) for dtype, table in found.items()}


def _link_models(cluster: Cluster, axis: Axis) -> dict[str | None, LinkModel]:
    """Return links by collective; of several, that of the device's back end and of the most ranks."""
    backend = "gloo" if cluster.device.kind == "cpu" else "nccl"
    links = [link for link in cluster.links if link.axis == axis]
    links.sort(key=lambda link: (link.backend == backend, link.backend is None, link.ranks or 0))
    return {
        link.collective: LinkModel(
            link.alpha_s.value if link.alpha_s else None,
            link.beta_Bps.value,
            link.beta_Bps.source == "measured",
        )
        for link in links
    }
