"""The Cluster of this machine: from cluster.json, or from a probe without measurements."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from paceline.cluster import file
from paceline.cluster.facts import Cluster, Device, Fact, Link
from paceline.cluster.machine import Accelerator, Machine
from paceline.cluster.published import sheets
from paceline.cluster.topology import count_gpu_links
from paceline.errors import ClusterError

VECTOR_BITS = {"AVX-512": 512, "AVX2": 256, "AVX": 256, "SSE": 128, "NEON": 128, "SVE": 256}
PLACES = (Path("cluster.json"), Path("bench/cluster.json"))


def find_file() -> Path | None:
    """Return the path of the cluster.json in the working directory, if it exists."""
    return next((path for path in PLACES if path.exists()), None)


def load_cluster(device: str | None = None) -> Cluster:
    """Return the cluster of cluster.json, or else of a probe of this machine. Raises ClusterError.

    device: "cpu" ignores accelerators, and a cluster.json that describes them.
    """
    path = find_file()
    if path is not None and ((cluster := file.read(path)).device.kind == "cpu" or device != "cpu"):
        return cluster
    from paceline.cluster.probe import probe

    machine = probe()
    return build_cluster(machine.model_copy(update={"accelerators": ()}) if device == "cpu" else machine)


def build_cluster(machine: Machine) -> Cluster:
    """Return the cluster of equal nodes like `machine`: those of the current Slurm job, or else one node."""
    host = min(machine.memory.total_bytes, machine.memory.limit_bytes or machine.memory.total_bytes)
    count, device, links = _accelerators(machine) or (1, _cpu(machine, host), ())
    return Cluster(
        name=machine.host,
        nodes=(machine.slurm.nodes if machine.slurm else None) or 1,
        devices_per_node=count,
        device=device,
        cores_per_node=machine.cpu.usable_cores,
        host_memory_bytes=Fact(value=host, source="measured"),
        links=links,
        software=_software(machine),
    )


def _accelerators(machine: Machine) -> tuple[int, Device, tuple[Link, ...]] | None:
    """Return number, device and links of the usable accelerators of the most common kind, if any."""
    rows = [row for row in machine.accelerators if row.memory_bytes]
    if not rows or machine.visible == ():
        return None
    if (instance := _find_mig_device(rows, machine.visible)) is not None:
        return instance
    rows = [row for row in rows if row.mig is None]  # beside these, CUDA does not show divided GPUs
    name, count = Counter(row.name for row in rows).most_common(1)[0]
    if machine.visible is not None:
        count = min(count, len(machine.visible))
    first = next(row for row in rows if row.name == name)
    return count, _device(first), _links(first, machine)


def _find_mig_device(
    rows: Sequence[Accelerator], visible: Sequence[str] | None
) -> tuple[int, Device, tuple[Link, ...]] | None:
    """Return the instance of a divided GPU that a process sees; None if it sees whole GPUs.

    CUDA shows a process one instance, whatever the number of names. Its peaks are not published. Raises
    ClusterError if its memory is unknown.
    """
    divided = [row for row in rows if row.mig is not None]
    names = [name for name in visible or () if name.startswith("MIG-")]
    if not names and len(divided) < len(rows):
        return None
    if not names and not any(row.mig for row in divided):
        raise ClusterError(
            f"MIG is on, and {divided[0].name} has no instance that a program could use; create instances by "
            "nvidia-smi mig, switch MIG off, or describe the device in cluster.json"
        )
    found = [
        (row, instance)
        for row in divided
        for instance in row.mig or ()
        if not names or any(instance.uuid.startswith(name) for name in names[:1])
    ]
    row, instance = found[0] if found else (divided[0] if divided else rows[0], None)
    if instance is None or instance.memory_bytes is None:
        raise ClusterError(
            f"{names[0] if names else row.name} is a part of a GPU (MIG) of unknown memory: nvidia-smi "
            "-L does not list it; describe it in cluster.json"
        )
    memory = Fact(value=instance.memory_bytes, source="declared", note=f"MIG profile {instance.profile}")
    return 1, Device(name=f"{row.name}, MIG {instance.profile}", kind="cuda", memory_bytes=memory), ()


def _device(row: Accelerator) -> Device:
    assert row.memory_bytes is not None
    memory = Fact(
        value=row.memory_bytes, source="measured", note="nvidia-smi" if row.kind == "cuda" else "rocm-smi"
    )
    if row.sheet is None:
        return Device(name=row.name, kind=row.kind, memory_bytes=memory)
    return sheets()[row.sheet].device().model_copy(update={"memory_bytes": memory})


def _links(row: Accelerator, machine: Machine) -> tuple[Link, ...]:
    """Return the published NVLink or xGMI, if every pair of GPUs has it."""
    if row.sheet is None or machine.topology is None:
        return ()
    sheet = sheets()[row.sheet]
    start = {"NVLink": "NV", "xGMI,": "XGMI"}.get((sheet.link or "").split(" ")[0])
    pairs = count_gpu_links(machine.topology)
    return sheet.links() if start and pairs and all(link.startswith(start) for link in pairs) else ()


def _cpu(machine: Machine, memory_bytes: int) -> Device:
    clock = machine.cpu.clock_Hz
    widths = [
        bits
        for name, bits in VECTOR_BITS.items()
        if any(extension.startswith(name) for extension in machine.cpu.vector)
    ]
    return Device(
        name=machine.cpu.name or machine.cpu.architecture,
        kind="cpu",
        memory_bytes=Fact(value=memory_bytes, source="measured"),
        clock_Hz=Fact(value=clock, source="measured", note="reported by the system") if clock else None,
        vector_bits=max(widths, default=None),
    )


def _software(machine: Machine) -> dict[str, str]:
    versions = {"torch": machine.torch.version if machine.torch else None}
    versions |= {
        row.name: row.version
        for row in (machine.torch.communication if machine.torch else ())
        if row.available
    }
    versions["driver"] = next((row.driver for row in machine.accelerators if row.driver), None)
    return {name: version for name, version in versions.items() if version}
