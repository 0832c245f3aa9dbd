"""Speeds: what the devices and links of a cluster reach, as plain numbers for the arithmetic of plans."""

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
    Architecture,
    Constants,
    OverheadCosts,
    find_architecture,
)
from paceline.plan.cost_model.cpu import build_engine_costs, build_op_times, describe_host
from paceline.plan.cost_model.op_times import OpTimeTable

SUBSTITUTE_DTYPES = {
    "fp16": ("fp16", "bf16"),
    "bf16": ("bf16", "fp16"),
    "fp32": ("fp32",),
    "tf32": ("tf32",),
    "fp8": ("fp8",),
}
SERIAL_HOPS: Mapping[str, Callable[[int], float]] = {  # of nodes that a message passes one after the other
    "all-reduce": lambda nodes: math.log2(nodes),
    "send": lambda nodes: 1.0,
}

BASIS_SENTENCES = {
    "published": "read off single measurements of others, and not fitted to trainings",
    "guessed": "a guess",
}


@dataclass(frozen=True)
class LinkModel:
    """alpha_s + factor · bytes / beta_Bps, of one rank while all do; `measured`: for this collective, so that nothing is taken off."""

    alpha_s: float | None
    beta_Bps: float
    measured: bool


@dataclass(frozen=True, eq=False)
class DeviceRates:
    """Of one rank. `flops`: matrix products that are large, by dtype; `rates`: measured ones by m·n·k.
    `clock`: against a device with all the power it may have; in `flops`, and not in `peaks`.
    `hidden`: measured share of a collective that goes on under computing, or None. `guesses`: in words, what is neither
    measured nor fitted."""

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
    op_times: OpTimeTable | None = None  # of a CPU
    crowd: float = 1.0  # ranks that share a core
    engines: Mapping[str, Mapping[int, OverheadCosts]] = field(
        default_factory=dict
    )  # by ranks that one joins; seconds
    power_W: float | None = None
    price_per_hour: float | None = None
    guesses: tuple[str, ...] = ()
    calibration: Calibration | None = None

    def product_flops(self, dtype: str) -> float:
        found = next((near for near in SUBSTITUTE_DTYPES.get(dtype, (dtype,)) if near in self.flops), None)
        if found is None:
            raise PlanError(
                f"how fast {self.name} computes in {dtype} is not known; give its peak with --peak, or measure it"
            )
        return self.flops[found]

    def measured_flops(self, dtype: str, volume: float) -> float | None:
        """Of a product of so many multiplications, between the measured ones on a logarithmic scale; None where none is measured."""
        table = self.rates.get(dtype)
        if not table:
            return None
        at = bisect(table, (volume, 0.0))
        if at in (0, len(table)):
            return table[min(at, len(table) - 1)][1]
        (low, slow), (high, fast) = table[at - 1], table[at]
        share = math.log(volume / low) / math.log(high / low)
        return slow ** (1 - share) * fast**share

    def shown(self, together: int) -> float:
        """Share of a collective that shows, though there is computing that it could go on under. Where it was not measured: what goes over
        links inside of a node takes multiprocessors and memory bandwidth from what computes, what the network does takes little."""
        return (
            1 - self.hidden
            if self.hidden is not None
            else (1 - self.constants.hidden) * (together - 1) / together
        )

    def collective_s(self, kind: str, size: float, ranks: int, together: int, rails: bool = True) -> float:
        """One call of S = `size` bytes among `ranks`, of which `together` are in each node."""
        if ranks < 2 or size <= 0:
            return 0.0
        inside = self._wire(self.node, kind, "in a node") if together > 1 else None
        factor = RING_FACTORS[kind](ranks)
        if inside is not None and together >= ranks:
            return self._alpha(inside) + factor * size / self._beta(inside, self.constants.node)
        outside = self._wire(self.across, kind, "between nodes")
        nodes = -(-ranks // together)
        share = self.constants.across if rails else self.constants.one_rail
        beta = self._beta(outside, share) * (together if rails else 1)
        if inside is not None:  # the ring goes through the nodes too
            beta = min(beta, self._beta(inside, self.constants.node))
        hops = SERIAL_HOPS.get(kind, lambda nodes: 0.0)(nodes) * self.constants.hop_s
        rings = 0.0 if kind in SERIAL_HOPS else nodes * self.constants.step_s
        start = outside.alpha_s if outside.alpha_s is not None else self.constants.node_s + hops + rings
        return start + factor * size / beta

    def _wire(self, wires: Mapping[str | None, LinkModel], kind: str, where: str) -> LinkModel:
        wire = wires.get(kind) or wires.get(None) or next(iter(wires.values()), None)
        if wire is None:
            said = "say @GB/s" if where == "between nodes" else "write a link of axis node into cluster.json"
            raise PlanError(
                f"how fast devices of {self.name} talk {where} is not known; measure it with paceline bench, or {said}"
            )
        return wire

    def _alpha(self, wire: LinkModel) -> float:
        if self.engines:  # they were measured with it
            return 0.0
        return self.constants.node_s if wire.alpha_s is None else wire.alpha_s

    def _beta(self, wire: LinkModel, share: float) -> float:
        return wire.beta_Bps if wire.measured else wire.beta_Bps * share


def device_rates(cluster: Cluster, constants: Constants = CONSTANTS, ranks: int | None = None) -> DeviceRates:
    """Of one of so many ranks, or of one on each device. GPUs are filled node by node; of CPUs any number share each. Raises PlanError
    where a device's peak is not known and nothing was measured."""
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
    flops: dict[str, float] = {
        dtype: clock * peak * (family.product_fp8 if dtype == "fp8" else family.product)
        for dtype, peak in peaks.items()
    }
    rates = _measured_rates(cluster, part)
    flops |= {dtype: max(speed for _, speed in table) for dtype, table in rates.items()}
    host = describe_host(cluster, per_node) if device.kind == "cpu" else None
    if host is not None and not flops:
        flops["fp32"] = host.flops
        guesses.append(
            f"what {device.name} computes a second is guessed from its cores, clock and vectors; paceline bench measures it"
        )
    if not flops:
        raise PlanError(
            f"the peak of {device.name} is not known; give it with --peak, or measure the device with paceline bench"
        )
    if family.basis != "fitted" and not cluster.rates and (host is None or peaks):
        guesses.append(f"what {device.name} reaches of its peak is {BASIS_SENTENCES[family.basis]}")
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
    """By collective: of the back end that the device takes, and of the most ranks, where several are known."""
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
