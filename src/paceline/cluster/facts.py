"""Cluster: the machines as numbers, each with its source."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from paceline.spec import Value

FORMAT: Literal["paceline.cluster"] = "paceline.cluster"
VERSION: Literal[1] = 1  # of the file format; increased when an older Paceline would misread a newer file
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8", "int4")
Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8", "int4"]
Axis = Literal["node", "across"]


class Fact(Value):
    """A number with its source. The name of the field that holds it has the unit.

    In cluster.json, a plain number stands for a fact with the source "declared".

    value   the number, at least 0
    source  "measured" by `paceline bench` or read from the machine, "declared" by a person, or "published"
    spread  standard deviation or error of the fit, as a fraction of the value
    note    how it was measured, or where it is published
    """

    value: float = Field(ge=0)
    source: Literal["measured", "declared", "published"] = "declared"
    spread: float | None = Field(None, ge=0)
    note: str = ""

    @model_validator(mode="before")
    @classmethod
    def _a_number_is_declared(cls, value: Any) -> Any:
        return {"value": value} if isinstance(value, int | float) and not isinstance(value, bool) else value


def _above_zero(fact: Fact) -> Fact:
    if not fact.value:
        raise ValueError("a size or a rate must be above 0, got 0; leave it out if it is unknown")
    return fact


Positive = Annotated[Fact, AfterValidator(_above_zero)]


class Device(Value):
    """A device on which ranks compute. A device of kind "cpu" is a whole node, which its ranks share.

    A device without published peaks has none here; the rates that it reaches are in `Cluster.rates`.

    name           the manufacturer's name
    kind           "cuda", "rocm", "mps", "cpu", or "tpu" and "neuron", which can be planned only
    memory_bytes   memory of the device
    peaks_flops    peak FLOP/s (int8: operations/s) of dense matrix products, on tensor or matrix cores
    sparse_flops   the same with 2:4 sparsity
    vector_flops   the same without tensor or matrix cores
    memory_Bps     memory bandwidth in bytes/s
    to_device_Bps  bandwidth of copies from host memory, pinned or pageable
    to_host_Bps    bandwidth of copies to host memory
    power_W        maximum power
    clock_Hz       clock rate of a CPU
    vector_bits    width of the widest vectors of a CPU
    """

    name: str
    kind: Literal["cuda", "rocm", "mps", "cpu", "tpu", "neuron"] = "cuda"
    memory_bytes: Positive
    peaks_flops: dict[Dtype, Positive] = Field({})
    sparse_flops: dict[Dtype, Positive] = Field({})
    vector_flops: dict[Dtype, Positive] = Field({})
    memory_Bps: Positive | None = None
    to_device_Bps: dict[Literal["pinned", "pageable"], Positive] = Field({})
    to_host_Bps: dict[Literal["pinned", "pageable"], Positive] = Field({})
    power_W: Positive | None = None
    clock_Hz: Positive | None = None
    vector_bits: int | None = Field(None, ge=64)


class Rate(Value):
    """The measured rate of an operation. Divided by the peak, it is the efficiency of this shape.

    operation  matmul, matmul 2:4, attention …
    dtype      data type of the inputs
    shape      m, n, k for matmul
    flops      FLOP/s of one device
    """

    operation: str
    dtype: Dtype
    shape: tuple[int, ...]
    flops: Positive


class Link(Value):
    """The time of a collective: alpha_s + factor · S / beta_Bps for a call of S bytes.

    S and factor are those of nccl-tests: 2(n-1)/n for all-reduce; (n-1)/n for all-gather, reduce-scatter,
    all-to-all, gather and scatter, with S the whole tensor; 1 for the others. So beta is a bus bandwidth: the
    bytes per second that each device sends in one direction while all devices send. None in `backend`,
    `collective` or `ranks` means any, for example if only the manufacturer's bandwidth is known.

    axis        node: among the devices of a node; across: between nodes, with all devices of a node at once
    backend     gloo, nccl or mpi
    collective  all-reduce, all-gather …, send
    ranks       number of ranks in the group
    alpha_s     time of an empty message; None: unknown
    beta_Bps    bus bandwidth in bytes/s
    """

    axis: Axis
    backend: str | None = None
    collective: str | None = None
    ranks: int | None = Field(None, ge=2)
    alpha_s: Fact | None = None
    beta_Bps: Positive


class Pace(Value):
    """The time of one kind of operation on a CPU, by its size: small operations dominate small models.

    The size counts multiplications (products and attention), weights (an update), or else the elements read
    and written.

    operation  linear, linear backward, function … (paceline.plan.cost_model.op_times)
    threads    number of threads that compute
    sizes      sizes of the operation, ascending
    seconds    time for each size
    """

    operation: str
    threads: int = Field(ge=1)
    sizes: tuple[float, ...] = Field(min_length=1)
    seconds: tuple[float, ...] = Field(min_length=1)
    source: Literal["measured", "declared"] = "declared"
    note: str = ""

    @model_validator(mode="after")
    def _sizes_match_seconds(self) -> Self:
        if len(self.sizes) != len(self.seconds):
            raise ValueError(
                f"{self.operation} must have as many seconds as sizes,"
                f" got {len(self.sizes)} sizes and {len(self.seconds)} seconds"
            )
        if list(self.sizes) != sorted({*self.sizes}) or min(*self.sizes, *self.seconds) <= 0:
            raise ValueError(f"sizes of {self.operation} must be ascending, and all values above 0")
        return self


class Engine(Value):
    """The overhead of an engine in a step, apart from computation and communication: hooks, copies and calls.

    name      ddp, zero1 … (paceline.plan.cost_model.engine_overhead)
    ranks     number of ranks
    step_s    overhead of each step
    unit_s    overhead of each unit that the engine counts
    tensor_s  overhead of each of its tensors
    """

    name: str
    ranks: int = Field(ge=1)
    step_s: Fact
    unit_s: Fact
    tensor_s: Fact = Fact(value=0.0)


class Overlap(Value):
    """The fraction of an operation that is hidden behind computation, from 0 to 1.

    hidden = (alone + compute - both) / min(alone, compute), where each term is a time in seconds.

    operation  copy, or a collective
    backend    gloo, nccl or mpi
    hidden     the fraction
    """

    operation: str
    backend: str | None = None
    hidden: Fact


class Disk(Value):
    """A directory and its speed.

    path                path of the directory
    filesystem          ext4, lustre, tmpfs …
    write_Bps           writing large blocks, each synced before the next
    read_Bps            reading large blocks that are not in the page cache
    sync_writes_per_s   writing 512 bytes, each synced before the next
    random_reads_per_s  reading 4 KiB
    creates_per_s       creating small files
    opens_per_s         opening files
    stats_per_s         reading the status of files
    deletes_per_s       deleting files
    checkpoint_Bps      writing checkpoints from all ranks at once
    """

    path: str
    filesystem: str | None = None
    write_Bps: Positive | None = None
    read_Bps: Positive | None = None
    sync_writes_per_s: Positive | None = None
    random_reads_per_s: Positive | None = None
    creates_per_s: Positive | None = None
    opens_per_s: Positive | None = None
    stats_per_s: Positive | None = None
    deletes_per_s: Positive | None = None
    checkpoint_Bps: Positive | None = None


class CalibrationRecord(Value):
    """Measured divided by predicted seconds of a run, by part of a step. The predictions used these facts.

    run     start of the run, so that no run counts twice
    plan    plan of the run
    ranks   number of ranks
    parts   parts of the cost model that the prediction had (plan/cost_model/compare.py)
    ratios  ratio of each part
    """

    run: str
    plan: str
    ranks: int = Field(ge=1)
    parts: tuple[str, ...]
    ratios: dict[str, Positive]


class Cluster(Value):
    """The machines that a plan is chosen for: equal nodes with equal devices. Unknown values are left out.

        from paceline.cluster.published import find
        cluster = find("a100-80g:8x128@25")  # or find("cluster.json")
        plans = paceline.find_plans(spec, 1024, cluster)

    A wrong value raises pydantic's ValidationError, which is a ValueError. `find` raises ClusterError.

    name                   name of the cluster
    nodes                  number of nodes
    devices_per_node       number of devices of a node
    device                 the Device
    cores_per_node         CPU cores of a node that may be used
    host_memory_bytes      memory of a node that may be used
    price_per_device_hour  price in any currency; plan and scale name it by --currency
    links                  times of collectives
    rates                  rates of single operations
    paces                  times of small operations on a CPU
    engines                overheads of engines
    overlaps               fractions of communication and copies behind computation
    disks                  speeds of directories
    calibrations           corrections from measured runs
    software               versions with which it was measured
    """

    format: Literal["paceline.cluster"] = FORMAT
    version: Literal[1] = VERSION
    name: str = ""
    nodes: int = Field(1, ge=1)
    devices_per_node: int = Field(1, ge=1)
    device: Device
    cores_per_node: int | None = Field(None, ge=1)
    host_memory_bytes: Positive | None = None
    price_per_device_hour: Fact | None = None
    links: tuple[Link, ...] = ()
    rates: tuple[Rate, ...] = ()
    paces: tuple[Pace, ...] = ()
    engines: tuple[Engine, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    disks: tuple[Disk, ...] = ()
    calibrations: tuple[CalibrationRecord, ...] = ()
    software: dict[str, str] = Field({})

    @property
    def devices(self) -> int:
        """The number of devices of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks that fill a node: one per device, or one per core if the device is a CPU."""
        return (self.cores_per_node or 1) if self.device.kind == "cpu" else self.devices_per_node

    def updated(
        self,
        links: Iterable[Link] = (),
        rates: Iterable[Rate] = (),
        overlaps: Iterable[Overlap] = (),
        disks: Iterable[Disk] = (),
        calibrations: Iterable[CalibrationRecord] = (),
        paces: Iterable[Pace] = (),
        engines: Iterable[Engine] = (),
    ) -> Self:
        """Return the cluster with new rows. A new row replaces the old row with the same key."""
        rows = {
            "links": _merged(
                self.links, links, lambda link: (link.axis, link.backend, link.collective, link.ranks)
            ),
            "rates": _merged(self.rates, rates, lambda rate: (rate.operation, rate.dtype, rate.shape)),
            "overlaps": _merged(
                self.overlaps, overlaps, lambda overlap: (overlap.operation, overlap.backend)
            ),
            "disks": _merged(self.disks, disks, lambda disk: disk.path),
            "calibrations": _merged(self.calibrations, calibrations, lambda record: record.run),
            "paces": _merged(self.paces, paces, lambda pace: (pace.operation, pace.threads)),
            "engines": _merged(self.engines, engines, lambda engine: (engine.name, engine.ranks)),
        }
        return self.model_copy(update=rows)


Row = TypeVar("Row", bound=Value)


def _merged(old: Iterable[Row], new: Iterable[Row], key: Callable[[Row], Any]) -> tuple[Row, ...]:
    return tuple(({key(row): row for row in old} | {key(row): row for row in new}).values())
