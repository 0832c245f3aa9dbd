"""Share of a CPU that a rank has: cores, operation times, and overhead of engines."""

from dataclasses import dataclass

from paceline.cluster.facts import Cluster
from paceline.plan.cost_model.constants import CPU, OverheadCosts
from paceline.plan.cost_model.op_times import OpTimeTable, blend, guess_op_times, in_steps


@dataclass(frozen=True)
class CpuHost:
    """CPU of one rank. crowd: ranks that share a core. flops: in float32, guessed."""

    threads: int
    cores: int
    crowd: float
    clock_Hz: float
    flops: float


def describe_host(cluster: Cluster, per_node: int) -> CpuHost:
    """Return the CPU of one of `per_node` ranks.

    Threads are those of distributed.process_group.threads_per_rank.
    """
    device, cores = cluster.device, cluster.cores_per_node or per_node
    threads = max(1, cores // per_node)
    clock = device.clock_Hz.value if device.clock_Hz else CPU.clock_Hz
    lanes = (device.vector_bits or CPU.vector_bits) / 32
    return CpuHost(
        threads=threads,
        cores=cores,
        crowd=max(1.0, per_node * threads / cores),
        clock_Hz=clock,
        flops=clock * lanes * CPU.operations * CPU.product * threads,
    )


def build_op_times(cluster: Cluster, host: CpuHost, flops: float, memory_Bps: float) -> OpTimeTable:
    """Return operation times for the rank's threads, interpolated between measured numbers of threads.

    They are guessed if nothing is measured.
    """
    measured = {
        threads: _measured_op_times(cluster, threads) for threads in {pace.threads for pace in cluster.paces}
    }
    if not measured:
        return _on_shared_cores(
            guess_op_times(flops * host.crowd, memory_Bps * host.crowd, CPU.start_cycles / host.clock_Hz),
            host.crowd,
        )
    fewer, more = (
        max((t for t in measured if t <= host.threads), default=min(measured)),
        min((t for t in measured if t >= host.threads), default=max(measured)),
    )
    if fewer == more:
        return _on_shared_cores(measured[fewer], host.crowd)
    share = (host.threads - fewer) / (more - fewer)
    return _on_shared_cores(blend(measured[fewer], measured[more], share), host.crowd)


def _measured_op_times(cluster: Cluster, threads: int) -> OpTimeTable:
    rows = [pace for pace in cluster.paces if pace.threads == threads]
    return in_steps(
        OpTimeTable({pace.operation: tuple(zip(pace.sizes, pace.seconds, strict=True)) for pace in rows})
    )


def _on_shared_cores(op_times: OpTimeTable, crowd: float) -> OpTimeTable:
    """Return the times on a shared core: ranks take turns, and find the caches filled by others."""
    return op_times.slowed(crowd * CPU.turns if crowd > 1 else 1.0)


def build_engine_costs(cluster: Cluster, host: CpuHost) -> dict[str, dict[int, OverheadCosts]]:
    """Return the overhead of each engine by number of ranks, in seconds per step, unit and tensor.

    Measured values are scaled by the number of ranks that share a core; without any, a guess.
    """
    if not cluster.engines:
        second = host.crowd / host.clock_Hz
        return {name: {1: cycles.scaled(second)} for name, cycles in CPU.engines.items()}
    found: dict[str, dict[int, OverheadCosts]] = {}
    for engine in cluster.engines:
        crowding = host.crowd / max(1.0, engine.ranks / host.cores)
        measured = OverheadCosts(engine.step_s.value, engine.unit_s.value, engine.tensor_s.value)
        found.setdefault(engine.name, {})[engine.ranks] = measured.scaled(crowding)
    return found
