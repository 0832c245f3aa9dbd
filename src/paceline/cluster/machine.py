"""Machine: what was found here, without any load on it. What is not there is None or empty, never guessed."""

from typing import Literal

from pydantic import Field

from paceline.spec import Value

FORMAT: Literal["paceline.probe"] = "paceline.probe"
VERSION: Literal[1] = 1


class Cpu(Value):
    name: str | None = None
    architecture: str
    sockets: int | None = None
    cores: int | None = None  # physical
    threads: int | None = None  # that the system shows as CPUs
    usable_cores: int  # affinity and the quota of the control group; counted as the system counts CPUs
    numa: tuple[str, ...] = ()  # CPUs of each NUMA node, as 0-15,128-143
    vector: tuple[str, ...] = ()  # extensions
    matrix: tuple[str, ...] = ()
    clock_Hz: float | None = None  # at most, or as it is now
    virtual: str | None = None  # the hypervisor


class MemoryFacts(Value):
    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None  # of the control group


class Accelerator(Value):
    index: int
    name: str
    kind: Literal["cuda", "rocm", "mps"]
    memory_bytes: int | None = None
    driver: str | None = None
    power_W: float | None = None  # limit
    bus: str | None = None  # PCI
    sheet: str | None = None  # the published device that it is


class Topology(Value):
    """Who is connected to whom, and how: NV18, PIX, PXB, PHB, NODE, SYS as nvidia-smi has them; XGMI, PCIE as rocm-smi has them."""

    links: dict[str, dict[str, str]]  # links["GPU0"]["NIC3"]
    nics: dict[str, str] = Field({})  # NIC3 -> mlx5_3
    cpus: dict[str, str] = Field({})  # GPU0 -> 0-31
    numa: dict[str, str] = Field({})  # GPU0 -> 0


class Interface(Value):
    name: str
    kind: str  # ethernet, infiniband, …
    up: bool
    Mbps: int | None = None  # 10⁶ bit/s
    addresses: tuple[str, ...] = ()
    numa: int | None = None
    ports: str | None = None  # of an RDMA device: the network interfaces on it


class BackendFacts(Value):
    name: str
    available: bool
    version: str | None = None
    flags: dict[str, bool | int | float | str | None] = Field({})
    note: str = ""  # what is missing, and how to get it


class Torch(Value):
    version: str
    cuda: str | None = None
    rocm: str | None = None
    backends: tuple[BackendFacts, ...]
    communication: tuple[BackendFacts, ...]


class Slurm(Value):
    job: str
    nodes: int | None = None
    node_list: str | None = None
    tasks: int | None = None
    cpus_per_task: int | None = None
    gpus_per_node: str | None = None
    partition: str | None = None
    ends: int | None = None  # seconds since 1970


class Quota(Value):
    """Limits of None are none. The soft limit is what one is warned at, or may exceed for a while."""

    used_bytes: int
    soft_bytes: int | None = None
    limit_bytes: int | None = None
    used_files: int | None = None
    soft_files: int | None = None
    limit_files: int | None = None
    source: str = ""  # the command


class Directory(Value):
    path: str
    names: tuple[str, ...] = ()  # HOME, SCRATCH …
    filesystem: str | None = None
    mount: str | None = None
    size_bytes: int | None = None
    free_bytes: int | None = None
    free_files: int | None = None
    quota: Quota | None = None
    note: str = ""


class Machine(Value):
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
    modules: tuple[str, ...] = ()
    directories: tuple[Directory, ...] = ()
    silent: tuple[str, ...] = ()  # sources that are there and did not answer, each with the reason
