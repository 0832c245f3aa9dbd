"""Machine: the facts of a probe, which does not load the machine.

Missing facts are None or empty, never guessed.
"""

import re
from typing import Literal

from pydantic import Field

from paceline.spec import Value

FORMAT: Literal["paceline.probe"] = "paceline.probe"
VERSION: Literal[1] = 1


class Cpu(Value):
    """The processors of the machine."""

    name: str | None = None
    architecture: str
    sockets: int | None = None
    cores: int | None = None  # physical cores
    threads: int | None = None  # logical CPUs
    usable_cores: int  # logical CPUs within the affinity and the quota of the control group
    numa: tuple[str, ...] = ()  # CPUs of each NUMA node, as 0-15,128-143
    vector: tuple[str, ...] = ()  # vector extensions
    matrix: tuple[str, ...] = ()  # matrix extensions
    clock_Hz: float | None = None  # maximum clock rate, or the current rate
    virtual: str | None = None  # hypervisor


class MemoryFacts(Value):
    """The memory of the machine."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None  # limit of the control group


class MigInstance(Value):
    """A part of a GPU of NVIDIA, which programs use like a GPU (multi-instance GPU)."""

    profile: str  # 1g.10gb: seventh parts of the processors, and memory
    uuid: str

    @property
    def memory_bytes(self) -> int | None:
        """The memory by the name of the profile, in 10⁹ bytes, which is less than the driver reports."""
        match = re.search(r"\.(\d+)gb", self.profile)
        return int(match[1]) * 10**9 if match is not None else None


class Accelerator(Value):
    """A GPU."""

    index: int
    name: str
    kind: Literal["cuda", "rocm", "mps"]
    memory_bytes: int | None = None
    driver: str | None = None
    power_W: float | None = None  # power limit
    compute_mode: str | None = None  # Default, Exclusive_Process, Prohibited
    sm_MHz: float | None = None  # highest clock of the processors
    memory_MHz: float | None = None  # highest clock of the memory
    uuid: str | None = None
    mig: tuple[MigInstance, ...] | None = None  # None: the GPU is not divided
    bus: str | None = None  # PCI address
    sheet: str | None = None  # name in the table of published devices


class Topology(Value):
    """The connections between GPUs and network cards.

    nvidia-smi names them NV18, PIX, PXB, PHB, NODE or SYS; rocm-smi names them XGMI or PCIE.
    """

    links: dict[str, dict[str, str]]  # links["GPU0"]["NIC3"]
    nics: dict[str, str] = Field({})  # NIC3 -> mlx5_3
    cpus: dict[str, str] = Field({})  # GPU0 -> 0-31
    numa: dict[str, str] = Field({})  # GPU0 -> 0


class Interface(Value):
    """A network interface or a port of an RDMA device."""

    name: str
    kind: str  # ethernet, infiniband, …
    up: bool
    Mbps: int | None = None  # 10⁶ bit/s
    addresses: tuple[str, ...] = ()  # IPv4
    numa: int | None = None  # NUMA node
    ports: str | None = None  # network interfaces of an RDMA device
    generation: str | None = None  # of InfiniBand, with the number of lanes: 4X NDR


class BackendFacts(Value):
    """A back end of PyTorch, or mpi4py."""

    name: str
    available: bool
    version: str | None = None
    flags: dict[str, bool | int | float | str | None] = Field({})
    note: str = ""  # what is missing, and how to install it


class Torch(Value):
    """The installed PyTorch."""

    version: str
    cuda: str | None = None
    rocm: str | None = None
    backends: tuple[BackendFacts, ...]
    communication: tuple[BackendFacts, ...]


class Slurm(Value):
    """The Slurm allocation of this process."""

    job: str
    nodes: int | None = None
    node_list: str | None = None
    tasks: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    partition: str | None = None
    ends: int | None = None  # seconds since the epoch


class Quota(Value):
    """A quota of a file system. A limit of None means no limit.

    Exceeding the soft limit is allowed for a while, or causes a warning.
    """

    used_bytes: int
    soft_bytes: int | None = None
    limit_bytes: int | None = None
    used_files: int | None = None
    soft_files: int | None = None
    limit_files: int | None = None
    source: str = ""  # the command that reported it


class Directory(Value):
    """A directory and its file system."""

    path: str
    names: tuple[str, ...] = ()  # variables that name it: HOME, SCRATCH …
    filesystem: str | None = None
    mount: str | None = None
    size_bytes: int | None = None
    free_bytes: int | None = None
    free_files: int | None = None
    stripes: int | None = None  # of a new file on Lustre; -1: on all targets
    stripe_bytes: int | None = None
    pool: str | None = None  # of the targets of Lustre on which new files are
    quota: Quota | None = None
    note: str = ""


class OfferedModule(Value):
    """A module that the module system of a site can load."""

    name: str
    is_default: bool = False


class Machine(Value):
    """The facts of a machine, as `paceline probe --json` writes them."""

    format: Literal["paceline.probe"] = FORMAT
    version: Literal[1] = VERSION
    host: str
    system: str
    cpu: Cpu
    memory: MemoryFacts
    accelerators: tuple[Accelerator, ...] = ()
    visible: tuple[str, ...] | None = None  # accelerators that this process may use; None: all of them
    topology: Topology | None = None
    interfaces: tuple[Interface, ...] = ()
    torch: Torch | None = None
    mpi: BackendFacts | None = None
    slurm: Slurm | None = None
    container: str | None = None
    modules: tuple[str, ...] = ()  # that are loaded
    offered_modules: dict[str, tuple[OfferedModule, ...]] = Field({})  # by what they contain: CUDA, MPI, …
    directories: tuple[Directory, ...] = ()
    silent: tuple[str, ...] = ()  # sources that failed or did not answer in time, each with the reason
