"""Cluster: what the machines are, as numbers that each say where they are from."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from paceline.spec import Value

FORMAT: Literal["paceline.cluster"] = "paceline.cluster"
VERSION: Literal[1] = 1  # of the file; one more when an older Paceline would read a newer file wrongly
DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8")
Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp6", "fp4", "int8"]
Axis = Literal["node", "across"]


class Fact(Value):
    """A number with its source; the unit is in the name of the field that holds it. In a file, a plain number is a declared one.

    measured: by `paceline bench`, or read from the machine. declared: somebody says so. published: its maker says so.
    """

    value: float = Field(ge=0)
    source: Literal["measured", "declared", "published"] = "declared"
    spread: float | None = Field(
        None, ge=0
    )  # standard deviation or error of the fit, as a share of the value
    note: str = ""  # how it was measured, or where it is published

    @model_validator(mode="before")
    @classmethod
    def _a_number_is_declared(cls, found: Any) -> Any:
        return {"value": found} if isinstance(found, int | float) and not isinstance(found, bool) else found


def _above_zero(fact: Fact) -> Fact:
    if not fact.value:
        raise ValueError("a size or a rate must be above 0, got 0; leave it out where it is not known")
    return fact


Positive = Annotated[Fact, AfterValidator(_above_zero)]


class Device(Value):
    """One of the devices that ranks compute on; with kind `cpu` it is the whole node, which its ranks share.

    Peaks are what its maker promises, in FLOP/s (operations/s for int8). Of a device whose peaks are not published there are none: what it
    does reach is in the cluster's rates.
    """

    name: str
    kind: Literal["cuda", "rocm", "mps", "cpu"] = "cuda"
    memory_bytes: Positive
    peaks_flops: dict[Dtype, Positive] = Field(
        {}
    )  # of dense matrix products, on tensor or matrix cores where it has them
    sparse_flops: dict[Dtype, Positive] = Field({})  # the same with 2:4 sparsity
    vector_flops: dict[Dtype, Positive] = Field({})  # without tensor or matrix cores
    memory_Bps: Positive | None = None
    to_device_Bps: dict[Literal["pinned", "pageable"], Positive] = Field({})  # copies from the host's memory
    to_host_Bps: dict[Literal["pinned", "pageable"], Positive] = Field({})
    power_W: Positive | None = None  # at most
    clock_Hz: Positive | None = None  # of a CPU
    vector_bits: int | None = Field(None, ge=64)  # of a CPU, the widest that it computes with


class Rate(Value):
    """How fast the devices did one kind of work: over the peak, it is the efficiency of this shape."""

    operation: str  # matmul, matmul 2:4, attention …
    dtype: Dtype
    shape: tuple[int, ...]  # matmul: m, n, k
    flops: Positive  # FLOP/s of one device


class Link(Value):
    """How long a collective takes: alpha_s + factor · S / beta_Bps for a call of S bytes.

    S and factor are those of nccl-tests: 2(n-1)/n for all-reduce; (n-1)/n for all-gather, reduce-scatter, all-to-all, gather and scatter,
    with S the whole tensor; 1 for the others. So beta is a bus bandwidth: what each device sends in one direction, while all of them do.
    None in `backend`, `collective` and `ranks` stands for any of them, as where only a maker's bandwidth is known.
    """

    axis: Axis  # node: among devices of one node; across: one device of each node, all of a node's devices at once
    backend: str | None = None  # gloo, nccl, mpi
    collective: str | None = None  # all-reduce, all-gather …, send
    ranks: int | None = Field(None, ge=2)
    alpha_s: Fact | None = None  # None: not known
    beta_Bps: Positive


class Pace(Value):
    """How long a CPU takes for one operation of a kind, by its size, with so many threads: small operations are what small models wait
    for. A size counts multiplications of products and attention, weights of an update, else elements that are read and written.
    """

    operation: str  # linear, linear backward, function … (paceline.plan.cost_model.op_times)
    threads: int = Field(ge=1)
    sizes: tuple[float, ...] = Field(min_length=1)
    seconds: tuple[float, ...] = Field(min_length=1)
    source: Literal["measured", "declared"] = "declared"
    note: str = ""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if len(self.sizes) != len(self.seconds):
            raise ValueError(
                f"{len(self.sizes)} sizes and {len(self.seconds)} seconds of {self.operation}; each size has its seconds"
            )
        if list(self.sizes) != sorted({*self.sizes}) or min(*self.sizes, *self.seconds) <= 0:
            raise ValueError(f"sizes of {self.operation} must rise, and be above 0 as their seconds")
        return self


class Engine(Value):
    """What an engine adds to a step by itself, however little there is to compute and to send: its hooks, its copies, its calls."""

    name: str  # ddp, zero1 … (paceline.plan.cost_model.engine_overhead)
    ranks: int = Field(ge=1)
    step_s: Fact  # of each step
    unit_s: Fact  # of each of the units that it counts
    tensor_s: Fact = Fact(value=0.0)  # of each of its tensors


class Overlap(Value):
    """What goes on under computing: hidden = (alone + compute - both) / min(alone, compute), in seconds; 1 is all, 0 is nothing."""

    operation: str  # copy, or a collective
    backend: str | None = None
    hidden: Fact


class Disk(Value):
    """A directory, and how fast it is."""

    path: str
    filesystem: str | None = None  # ext4, lustre, tmpfs …
    write_Bps: Positive | None = None  # large blocks, each on the disk before the next
    read_Bps: Positive | None = None  # large blocks, not from the page cache
    sync_writes_per_s: Positive | None = None  # of 512 bytes, each on the disk before the next
    random_reads_per_s: Positive | None = None  # of 4 KiB
    creates_per_s: Positive | None = None  # small files
    opens_per_s: Positive | None = None
    stats_per_s: Positive | None = None
    deletes_per_s: Positive | None = None
    checkpoint_Bps: Positive | None = None  # from all ranks at once


class CalibrationRecord(Value):
    """What a run showed of predictions made from these facts: measured seconds over predicted ones, by part of a step."""

    run: str  # when it was started: no run counts twice
    plan: str
    ranks: int = Field(ge=1)
    parts: tuple[str, ...]  # of the planner, that the prediction had (plan/cost_model/compare.py)
    ratios: dict[str, Positive]


class Cluster(Value):
    """Nodes that are alike. What is not known is left out, never guessed."""

    format: Literal["paceline.cluster"] = FORMAT
    version: Literal[1] = VERSION
    name: str = ""
    nodes: int = Field(1, ge=1)
    devices_per_node: int = Field(1, ge=1)
    device: Device
    cores_per_node: int | None = Field(None, ge=1)  # that may be used
    host_memory_bytes: Positive | None = None  # of a node, that may be used
    price_per_device_hour: Fact | None = None  # in whatever currency
    links: tuple[Link, ...] = ()
    rates: tuple[Rate, ...] = ()
    paces: tuple[Pace, ...] = ()
    engines: tuple[Engine, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    disks: tuple[Disk, ...] = ()
    calibrations: tuple[CalibrationRecord, ...] = ()
    software: dict[str, str] = Field({})  # versions with which it was measured

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def ranks_per_node(self) -> int:
        """That fill a node: one a device, or one a core where the processors are the device."""
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
        """The same with new rows, each in the place of the one about the same thing, if there is one."""
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
