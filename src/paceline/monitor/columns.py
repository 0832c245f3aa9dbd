"""The columns of sample files: names, units and meanings. N is the number of a core, a rank or a GPU."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleColumn:
    """A kind of column: its name without the unit, its unit, and what it contains."""

    name: str
    unit: str
    meaning: str


COLUMNS = {
    name: SampleColumn(name, unit, meaning)
    for name, unit, meaning in (
        ("time", "s", "seconds since the epoch"),
        ("cpu", "%", "busy share of the cores that the processes may use"),
        ("cpuN", "%", "busy share of core N, if the processes may use it"),
        (
            "load",
            "processes",
            "processes that run, or wait for a core or a disk: mean over 1 minute",
        ),
        ("memory used", "MiB", "memory of the node that is not available for new programs"),
        ("memory total", "MiB", "memory of the node"),
        ("job memory used", "MiB", "memory of the control group, without the file cache that it can free"),
        ("job memory limit", "MiB", "limit of the control group"),
        ("swap used", "MiB", "swap space in use"),
        ("swap in", "MB/s", "read from swap space"),
        ("swap out", "MB/s", "written to swap space"),
        ("disk read", "MB/s", "read from all disks of the node"),
        ("disk write", "MB/s", "written to all disks of the node"),
        ("disk free", "MiB", "free space of the file system that contains this file"),
        ("network in", "MB/s", "received by all network interfaces except loopback"),
        ("network out", "MB/s", "sent by all network interfaces except loopback"),
        ("cpu energy", "J", "energy of all processors since an arbitrary time (RAPL)"),
        ("step", "steps", "the last step that the output of a command reports (`--step-pattern`)"),
        ("step time", "s", "median time of its steps since the previous sample"),
        ("rankN cpu", "%", "processor time of the rank; 100 is one core"),
        ("rankN memory", "MiB", "resident memory of the rank"),
        ("rankN file memory", "MiB", "part of it that files occupy, which the system can free"),
        ("rankN read", "MB/s", "read from disks by the rank and its worker processes"),
        ("rankN write", "MB/s", "written to disks by the rank and its worker processes"),
        ("rankN workers", "processes", "child processes of the rank"),
        ("rankN workers cpu", "%", "processor time of its child processes; 100 is one core"),
        ("rankN workers memory", "MiB", "resident memory of its child processes, with what they share"),
        ("rankN workers file memory", "MiB", "part of it that files occupy"),
        ("gpuN utilization", "%", "share of time in which a kernel ran"),
        ("gpuN memory utilization", "%", "share of time in which memory was read or written"),
        ("gpuN encoder", "%", "utilization of the video encoder"),
        ("gpuN decoder", "%", "utilization of the video decoder"),
        ("gpuN memory used", "MiB", "memory in use"),
        ("gpuN memory total", "MiB", "memory of the GPU"),
        ("gpuN power", "W", "power draw"),
        ("gpuN power limit", "W", "power limit"),
        ("gpuN energy", "J", "energy since the driver was loaded"),
        ("gpuN clock sm", "MHz", "clock of the multiprocessors"),
        ("gpuN clock sm limit", "MHz", "highest clock of the multiprocessors"),
        ("gpuN clock memory", "MHz", "clock of the memory"),
        ("gpuN temperature", "C", "temperature of the GPU"),
        ("gpuN memory temperature", "C", "temperature of the memory"),
        ("gpuN throttle", "bits", "sum of the reasons for which the clock is lowered"),
        ("gpuN ecc corrected", "errors", "corrected memory errors since the driver was loaded"),
        ("gpuN ecc uncorrected", "errors", "uncorrected memory errors since the driver was loaded"),
        ("gpuN pcie generation", "", "generation of the PCIe link at present"),
        ("gpuN pcie lanes", "", "width of the PCIe link at present"),
        ("gpuN pcie in", "MB/s", "received over PCIe"),
        ("gpuN pcie out", "MB/s", "sent over PCIe"),
        ("gpuN nvlink in", "MB/s", "received over NVLink"),
        ("gpuN nvlink out", "MB/s", "sent over NVLink"),
        ("gpuN sm active", "%", "share of time in which a multiprocessor had work, mean over all"),
        ("gpuN sm occupancy", "%", "resident warps, relative to the maximum"),
        ("gpuN tensor active", "%", "share of time in which Tensor Cores were busy"),
        ("gpuN fan", "%", "speed of the fan"),
        ("gpuN state", "", "performance state: 0 is the fastest"),
        ("gpuN processes", "processes", "processes that compute on the GPU"),
        ("gpuN other processes", "processes", "those that do not belong to the run"),
    )
}
# The columns that describe a machine best, in the order of tables and figures.
MAIN_COLUMNS = (
    "cpu",
    "memory used",
    "job memory used",
    "swap used",
    "disk read",
    "disk write",
    "network in",
    "network out",
    "rankN cpu",
    "rankN memory",
    "gpuN utilization",
    "gpuN memory used",
    "gpuN power",
    "gpuN temperature",
)
# The bits of `gpuN throttle`, as NVML numbers them. An idle GPU, and clocks that somebody set, are no faults.
THROTTLE_REASONS = {
    "idle": 0x1,
    "clocks set": 0x2,
    "power cap": 0x4,
    "hardware slowdown": 0x8,
    "sync boost": 0x10,
    "software thermal slowdown": 0x20,
    "hardware thermal slowdown": 0x40,
    "power brake": 0x80,
    "display clocks": 0x100,
}

_NUMBERED = re.compile(r"(cpu|rank|gpu)(\d{1,6})(?: (.+))?", re.ASCII)


def kind_of(name: str) -> str:
    """Return the kind of a column: "gpu0 power" -> "gpuN power"; a name without a number is its own kind."""
    match = _NUMBERED.fullmatch(name)
    return f"{match[1]}N" + (f" {match[3]}" if match[3] else "") if match else name


def number_of(name: str, what: str) -> int | None:
    """Return the number of the core, rank or GPU of a column; None if it does not belong to a `what`."""
    match = _NUMBERED.fullmatch(name)
    return int(match[2]) if match and match[1] == what else None


def unit_of(name: str) -> str:
    """Return the unit of a column; empty for a column that this version does not know."""
    column = COLUMNS.get(kind_of(name))
    return column.unit if column else ""


def throttle_reasons(bits: float) -> list[str]:
    """Return the names of the reasons in a value of `gpuN throttle`; none for NaN."""
    return [name for name, bit in THROTTLE_REASONS.items() if bits == bits and int(bits) & bit]
