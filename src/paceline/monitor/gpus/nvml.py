"""NVIDIA's GPUs, by NVML (the package nvidia-ml-py), with handles that stay open.

`nvmlDeviceGetPcieThroughput` is not used: each call blocks for 20 ms. GPUs of the Hopper generation and later
have counters of PCIe, NVLink and Tensor Cores that do not block (GPM).
"""

import importlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.monitor.sensor import AbsentSensorError, Sensor
from paceline.units import several

MIB = 2**20
DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
LOST_EVERY = 60  # samples between two tries to read a GPU that is lost


@dataclass(frozen=True)
class NvmlQuery:
    """A call of NVML: the columns that it fills, and at which samples it is made.

    read: takes the module and a handle
    """

    columns: tuple[str, ...]
    read: Callable[[Any, Any], Sequence[float]]
    every: int = 1


def _clock(name: str) -> Callable[[Any, Any], Sequence[float]]:
    return lambda nvml, gpu: [nvml.nvmlDeviceGetClockInfo(gpu, getattr(nvml, name))]


def _utilization(nvml: Any, gpu: Any) -> Sequence[float]:
    rates = nvml.nvmlDeviceGetUtilizationRates(gpu)
    return [rates.gpu, rates.memory]


def _memory(nvml: Any, gpu: Any) -> Sequence[float]:
    try:  # as nvidia-smi: the first version counts what the driver reserves as used
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
    except (nvml.NVMLError, AttributeError, TypeError):
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    return [memory.used / MIB, memory.total / MIB]


def _throttle(nvml: Any, gpu: Any) -> Sequence[float]:
    read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    try:
        return [(read or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(gpu)]
    except nvml.NVMLError_FunctionNotFound:  # a driver before 535
        return [nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)]


def _ecc(nvml: Any, gpu: Any) -> Sequence[float]:
    return [
        nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC)
        for kind in (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    ]


def _power_limit(nvml: Any, gpu: Any) -> Sequence[float]:
    return [nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3]


QUERIES = (
    NvmlQuery(("utilization", "memory utilization"), _utilization),
    NvmlQuery(("memory used", "memory total"), _memory),
    NvmlQuery(("power",), lambda nvml, gpu: [nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3]),
    NvmlQuery(
        ("power limit",), lambda nvml, gpu: [nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3], every=10
    ),
    NvmlQuery(("energy",), lambda nvml, gpu: [nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3]),
    NvmlQuery(("clock sm",), _clock("NVML_CLOCK_SM")),
    NvmlQuery(
        ("clock sm limit",),
        lambda nvml, gpu: [nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)],
        every=60,
    ),
    NvmlQuery(("clock memory",), _clock("NVML_CLOCK_MEM"), every=10),
    NvmlQuery(
        ("temperature",), lambda nvml, gpu: [nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)]
    ),
    NvmlQuery(("throttle",), _throttle),
    NvmlQuery(("encoder",), lambda nvml, gpu: nvml.nvmlDeviceGetEncoderUtilization(gpu)[:1], every=10),
    NvmlQuery(("decoder",), lambda nvml, gpu: nvml.nvmlDeviceGetDecoderUtilization(gpu)[:1], every=10),
    NvmlQuery(("ecc corrected", "ecc uncorrected"), _ecc, every=10),
    NvmlQuery(
        ("pcie generation",), lambda nvml, gpu: [nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)], every=10
    ),
    NvmlQuery(("pcie lanes",), lambda nvml, gpu: [nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)], every=10),
)
# Columns of GPM: the name of the metric, and the factor to the unit of the column. NVML has MiB/s.
GPM_METRICS = {
    "sm active": ("NVML_GPM_METRIC_SM_UTIL", 1.0),
    "sm occupancy": ("NVML_GPM_METRIC_SM_OCCUPANCY", 1.0),
    "tensor active": ("NVML_GPM_METRIC_ANY_TENSOR_UTIL", 1.0),
    "pcie in": ("NVML_GPM_METRIC_PCIE_RX_PER_SEC", MIB / 1e6),
    "pcie out": ("NVML_GPM_METRIC_PCIE_TX_PER_SEC", MIB / 1e6),
    "nvlink in": ("NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC", MIB / 1e6),
    "nvlink out": ("NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC", MIB / 1e6),
}
PROCESSES_EVERY = 10
MIG_COLUMNS = ("memory used", "memory total")


class GpmCounters:
    """The GPM counters of a GPU, or of a part of it. Raises an error of NVML if it has none.

    instance: the number of the GPU instance of a MIG device
    """

    def __init__(self, nvml: Any, gpu: Any, instance: int | None = None):
        self._nvml, self._gpu, self._instance = nvml, gpu, instance
        if not nvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice:
            raise AbsentSensorError("not supported before the Hopper generation")
        self._before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._request.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(GPM_METRICS)
        self._factors = []
        for position, (metric, factor) in enumerate(GPM_METRICS.values()):
            self._request.metrics[position].metricId = getattr(nvml, metric)
            self._factors.append(factor)
        self._take(self._after)

    def _take(self, sample: Any) -> None:
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._gpu, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._gpu, self._instance, sample)

    def read(self) -> list[float | None]:
        """Return the metrics since the last call."""
        self._before, self._after = self._after, self._before
        self._take(self._after)
        self._request.sample1, self._request.sample2 = self._before, self._after
        self._nvml.nvmlGpmMetricsGet(self._request)
        metrics = self._request.metrics
        return [
            metrics[position].value * factor if metrics[position].nvmlReturn == 0 else None
            for position, factor in enumerate(self._factors)
        ]


@dataclass
class NvmlDevice:
    """A GPU, or a MIG device, and what can be read from it."""

    number: int
    uuid: str
    handle: Any
    description: str
    parent: "NvmlDevice | None" = None
    queries: list[NvmlQuery] = field(default_factory=list)
    gpm: GpmCounters | None = None
    has_processes: bool = False
    values: dict[str, float | None] = field(default_factory=dict)
    lost_until: int = 0  # the sample at which to try again

    @property
    def columns(self) -> list[str]:
        """The names of its columns, without `gpuN`."""
        names = [name for query in self.queries for name in query.columns]
        names += GPM_METRICS if self.gpm is not None else []
        return names + (["processes", "other processes"] if self.has_processes else [])


class NvmlSensor(Sensor):
    """NVIDIA's GPUs. Raises AbsentSensorError if there are none, or NVML is missing.

    own_pids: returns the processes that belong to the run
    """

    def __init__(self, own_pids: Callable[[], Collection[int]] = frozenset):
        self._nvml = _load()
        self._own_pids = own_pids
        self._has_seen_own = False
        super().__init__()
        self._count = 0
        reasons: dict[str, dict[int, str]] = {}
        self.devices = [device for device in self._list() if self._probe(device, reasons)]
        if not self.devices:
            raise AbsentSensorError("NVML finds no GPU")
        for column, by_device in reasons.items():
            for number, why in by_device.items():
                if len(by_device) == len(self.devices) and len({*by_device.values()}) == 1:
                    self.absent[f"gpuN {column}"] = why
                else:
                    self.absent[f"gpu{number} {column}"] = why
        self._selected = self.devices
        self.select([])

    def _list(self) -> list[NvmlDevice]:
        nvml = self._nvml
        devices: list[NvmlDevice] = []
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise AbsentSensorError(f"NVML: {error}") from error
        for number in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(number)
                uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
            except nvml.NVMLError as error:
                self.absent[f"gpu{number}"] = str(error)
                continue
            devices.append(NvmlDevice(number, uuid, handle, f"{name}, {uuid}"))
        parts = [part for device in devices for part in self._list_parts(device)]
        for position, part in enumerate(parts):
            part.number = count + position
        return devices + parts

    def _list_parts(self, device: NvmlDevice) -> Iterable[NvmlDevice]:
        """Yield the MIG devices of a GPU."""
        nvml = self._nvml
        try:
            if nvml.nvmlDeviceGetMigMode(device.handle)[0] != 1:
                return
            count = nvml.nvmlDeviceGetMaxMigDeviceCount(device.handle)
        except (nvml.NVMLError, AttributeError):
            return
        for position in range(count):
            try:
                handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device.handle, position)
                uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
            except nvml.NVMLError:  # there are fewer than the maximum
                continue
            yield NvmlDevice(0, uuid, handle, f"{name}, {uuid}, part of GPU {device.number}", parent=device)

    def _probe(self, device: NvmlDevice, reasons: dict[str, dict[int, str]]) -> bool:
        """Find out what can be read from a device. Return whether that is anything."""
        nvml = self._nvml

        def works(columns: Iterable[str], call: Callable[[], object]) -> bool:
            try:
                call()
            except (nvml.NVMLError, AttributeError, AbsentSensorError) as error:
                why = "nvidia-ml-py is too old" if isinstance(error, AttributeError) else str(error)
                for column in columns:
                    reasons.setdefault(column, {})[device.number] = why
                return False
            return True

        def open_gpm() -> None:
            whole = device.parent or device
            instance = nvml.nvmlDeviceGetGpuInstanceId(device.handle) if device.parent else None
            device.gpm = GpmCounters(nvml, whole.handle, instance)

        queries = (
            QUERIES if device.parent is None else [query for query in QUERIES if query.columns == MIG_COLUMNS]
        )
        for query in queries:
            if works(query.columns, lambda query=query: query.read(nvml, device.handle)):  # type: ignore[misc]
                device.queries.append(query)
        works(GPM_METRICS, open_gpm)
        device.has_processes = device.parent is None and works(
            ("processes",), lambda: nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)
        )
        return bool(device.columns)

    def select(self, visible: Collection[str | None]) -> None:
        """Choose the GPUs that ranks may use; all if nothing restricts them.

        visible: values of CUDA_VISIBLE_DEVICES of the ranks; None if it is not set
        """
        chosen = {device.number for text in visible for device in find_visible_devices(self.devices, text)}
        is_whole = not visible or None in visible
        self._selected = [device for device in self.devices if is_whole or device.number in chosen]
        self.columns = [f"gpu{device.number} {name}" for device in self._selected for name in device.columns]
        self.comments = {f"gpu{device.number}": device.description for device in self._selected}
        hidden = len(self.devices) - len(self._selected)
        if hidden:
            self.comments["gpu"] = f"CUDA_VISIBLE_DEVICES hides {several(hidden, 'more GPU')}"

    def read(self, now: float) -> Sequence[float | None]:
        own = self._own_pids() if self._count % PROCESSES_EVERY == 0 else ()
        row: list[float | None] = []
        for device in self._selected:
            if self._count >= device.lost_until:
                self._read_device(device, own)
            row += [device.values.get(name) for name in device.columns]
        self._count += 1
        return row

    def _read_device(self, device: NvmlDevice, own: Collection[int]) -> None:
        nvml, values = self._nvml, device.values
        for query in device.queries:
            if self._count % query.every:
                continue
            try:
                values |= dict(zip(query.columns, query.read(nvml, device.handle), strict=True))
            except nvml.NVMLError as error:
                values |= dict.fromkeys(query.columns)
                if isinstance(error, nvml.NVMLError_GpuIsLost):
                    self.absent[f"gpu{device.number}"] = str(error)
                    device.lost_until = self._count + LOST_EVERY
                    values.clear()
                    return
        if device.gpm is not None:
            try:
                values |= dict(zip(GPM_METRICS, device.gpm.read(), strict=True))
            except nvml.NVMLError:
                values |= dict.fromkeys(GPM_METRICS)
        if device.has_processes and self._count % PROCESSES_EVERY == 0:
            self._count_processes(device, own)

    def _count_processes(self, device: NvmlDevice, own: Collection[int]) -> None:
        nvml, values = self._nvml, device.values
        try:
            pids = [process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)]
        except nvml.NVMLError:
            values |= {"processes": None, "other processes": None}
            return
        others = [pid for pid in pids if pid not in own]
        self._has_seen_own = self._has_seen_own or len(others) < len(pids)
        # In a container NVML has the process ids of the host, which tell nothing here.
        values |= {
            "processes": float(len(pids)),
            "other processes": float(len(others)) if self._has_seen_own else None,
        }


def _load() -> Any:
    """Return the module pynvml, initialized. Raises AbsentSensorError."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        if not any(map(os.path.exists, DEVICE_FILES)):
            raise AbsentSensorError("this machine has no NVIDIA GPU") from None
        raise AbsentSensorError("nvidia-ml-py is not installed (pip install paceline[gpu])") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise AbsentSensorError(
            f"NVML: {error}" if any(map(os.path.exists, DEVICE_FILES)) else "this machine has no NVIDIA GPU"
        ) from error
    return nvml


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def find_visible_devices(devices: Sequence[NvmlDevice], text: str | None) -> list[NvmlDevice]:
    """Return the devices that a value of CUDA_VISIBLE_DEVICES names, by index, UUID or start of a UUID.

    As CUDA does, it ends at the first name that does not exist. An index of a GPU that is divided by MIG
    stands for all its parts.
    """
    if text is None:
        return list(devices)
    found: list[NvmlDevice] = []
    for word in (word.strip() for word in text.split(",")):
        if word.isdecimal():
            whole = [device for device in devices if device.parent is None and device.number == int(word)]
            matches = [device for device in devices if device.parent in whole] or whole
        else:
            matches = [device for device in devices if len(word) > 4 and device.uuid.startswith(word)]
        if not matches:
            break
        found += [device for device in matches if device not in found]
    return found
