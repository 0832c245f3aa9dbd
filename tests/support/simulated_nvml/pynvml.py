"""Stands in for the package nvidia-ml-py: answers of eight H100, recorded, in the types of that package.

Put this folder on PYTHONPATH. The file $SIMULATED_NVML may change the answers at any time, as JSON:

    gpus    number of GPUs [default: 8]
    busy    utilization in percent, by number of the GPU [default: 90]
    lost    numbers of the GPUs that fell off the bus
    mig     number of MIG devices, by number of the GPU
    without names of functions that the driver does not support
    pids    process ids that compute, by number of the GPU
    no_gpm  whether the GPUs are older than Hopper
"""

import json
import os
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
NVML_TEMPERATURE_GPU = 0
NVML_VOLATILE_ECC = 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_SM_OCCUPANCY, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 2, 3, 5
NVML_GPM_METRIC_PCIE_TX_PER_SEC, NVML_GPM_METRIC_PCIE_RX_PER_SEC = 20, 21
NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC = 60, 61
NVML_GPM_METRICS_GET_VERSION = 1
nvmlMemory_v2 = 0x02000028

GPM_VALUES = {2: 71.5, 3: 34.0, 5: 48.25, 20: 100.0, 21: 200.0, 60: 1000.0, 61: 2000.0}
calls: dict[str, int] = {}  # by function, for tests


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    def __str__(self) -> str:
        return "Not Supported"


class NVMLError_GpuIsLost(NVMLError):
    def __str__(self) -> str:
        return "GPU is lost"


class NVMLError_FunctionNotFound(NVMLError):
    def __str__(self) -> str:
        return "Function Not Found"


class NVMLError_LibraryNotFound(NVMLError):
    def __str__(self) -> str:
        return "NVML Shared Library Not Found"


class c_nvmlGpmMetricsGet_t:
    def __init__(self) -> None:
        self.version = self.numMetrics = 0
        self.sample1 = self.sample2 = None
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(100)]


_cache: tuple[int, dict] = (-1, {})


def _settings() -> dict:
    global _cache
    path = os.environ.get("SIMULATED_NVML")
    if path is None:
        return {}
    changed = os.stat(path).st_mtime_ns
    if changed != _cache[0]:
        with open(path) as file:
            _cache = changed, json.load(file)
    return _cache[1]


def _check(name: str, gpu) -> None:
    calls[name] = calls.get(name, 0) + 1
    settings = _settings()
    if name in settings.get("without", ()):
        raise NVMLError_NotSupported
    if gpu is not None and gpu.number in settings.get("lost", ()):
        raise NVMLError_GpuIsLost
    if gpu is not None and gpu.part is not None and name not in OF_PARTS:
        raise NVMLError_NotSupported


OF_PARTS = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetGpuInstanceId")


def nvmlInit() -> None:
    if _settings().get("gpus") == 0:
        raise NVMLError_LibraryNotFound


def nvmlDeviceGetCount() -> int:
    return _settings().get("gpus", 8)


def nvmlDeviceGetHandleByIndex(number: int):
    return SimpleNamespace(number=number, part=None)


def nvmlDeviceGetUUID(gpu) -> str:
    _check("nvmlDeviceGetUUID", gpu)
    if gpu.part is not None:
        return f"MIG-{gpu.number}{gpu.part}4ad8ba2-1b6f-5d0e-9c4f-000000000000"
    return f"GPU-{gpu.number}c8d7a5b-33aa-4f11-8e2d-00000000000{gpu.number}"


def nvmlDeviceGetName(gpu) -> str:
    _check("nvmlDeviceGetName", gpu)
    return "NVIDIA H100 80GB HBM3" + (" MIG 1g.10gb" if gpu.part is not None else "")


def nvmlDeviceGetMigMode(gpu) -> list[int]:
    enabled = int(str(gpu.number) in _settings().get("mig", {}))
    return [enabled, enabled]


def nvmlDeviceGetMaxMigDeviceCount(gpu) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(gpu, part: int):
    if part >= _settings()["mig"][str(gpu.number)]:
        raise NVMLError_NotSupported
    return SimpleNamespace(number=gpu.number, part=part)


def nvmlDeviceGetGpuInstanceId(gpu) -> int:
    _check("nvmlDeviceGetGpuInstanceId", gpu)
    return gpu.part + 7


def nvmlDeviceGetUtilizationRates(gpu):
    _check("nvmlDeviceGetUtilizationRates", gpu)
    busy = _settings().get("busy", {}).get(str(gpu.number), 90)
    return SimpleNamespace(gpu=busy, memory=busy // 2)


def nvmlDeviceGetMemoryInfo(gpu, version=None):
    _check("nvmlDeviceGetMemoryInfo", gpu)
    if version is None:
        return SimpleNamespace(total=85520809984, free=0, used=85520809984)
    return SimpleNamespace(total=85520809984, free=43111152640, used=41 * 10**9, reserved=621346816)


def nvmlDeviceGetPowerUsage(gpu) -> int:
    _check("nvmlDeviceGetPowerUsage", gpu)
    return 523_400 + gpu.number


def nvmlDeviceGetEnforcedPowerLimit(gpu) -> int:
    _check("nvmlDeviceGetEnforcedPowerLimit", gpu)
    return 700_000


def nvmlDeviceGetTotalEnergyConsumption(gpu) -> int:
    _check("nvmlDeviceGetTotalEnergyConsumption", gpu)
    return 1_000_000_000 + 523_400 * calls["nvmlDeviceGetTotalEnergyConsumption"]


def nvmlDeviceGetClockInfo(gpu, kind: int) -> int:
    _check("nvmlDeviceGetClockInfo", gpu)
    return {NVML_CLOCK_SM: 1755, NVML_CLOCK_MEM: 2619}[kind]


def nvmlDeviceGetMaxClockInfo(gpu, kind: int) -> int:
    _check("nvmlDeviceGetMaxClockInfo", gpu)
    return 1980


def nvmlDeviceGetTemperature(gpu, sensor: int) -> int:
    _check("nvmlDeviceGetTemperature", gpu)
    return 61


def nvmlDeviceGetCurrentClocksEventReasons(gpu) -> int:
    _check("nvmlDeviceGetCurrentClocksEventReasons", gpu)
    return 0x4


def nvmlDeviceGetCurrentClocksThrottleReasons(gpu) -> int:
    _check("nvmlDeviceGetCurrentClocksThrottleReasons", gpu)
    return 0x4


def nvmlDeviceGetEncoderUtilization(gpu) -> list[int]:
    _check("nvmlDeviceGetEncoderUtilization", gpu)
    return [0, 167_000]


def nvmlDeviceGetDecoderUtilization(gpu) -> list[int]:
    _check("nvmlDeviceGetDecoderUtilization", gpu)
    return [0, 167_000]


def nvmlDeviceGetTotalEccErrors(gpu, kind: int, counter: int) -> int:
    _check("nvmlDeviceGetTotalEccErrors", gpu)
    return 3 if kind == NVML_MEMORY_ERROR_TYPE_CORRECTED else 0


def nvmlDeviceGetCurrPcieLinkGeneration(gpu) -> int:
    _check("nvmlDeviceGetCurrPcieLinkGeneration", gpu)
    return 5


def nvmlDeviceGetCurrPcieLinkWidth(gpu) -> int:
    _check("nvmlDeviceGetCurrPcieLinkWidth", gpu)
    return 16


def nvmlDeviceGetPcieThroughput(gpu, counter: int) -> int:
    raise AssertionError("this call blocks for 20 ms")


def nvmlDeviceGetComputeRunningProcesses(gpu) -> list:
    _check("nvmlDeviceGetComputeRunningProcesses", gpu)
    pids = _settings().get("pids", {}).get(str(gpu.number), [])
    return [SimpleNamespace(pid=pid, usedGpuMemory=10**9) for pid in pids]


def nvmlGpmQueryDeviceSupport(gpu):
    _check("nvmlGpmQueryDeviceSupport", None)
    return SimpleNamespace(isSupportedDevice=int(not _settings().get("no_gpm", False)))


def nvmlGpmSampleAlloc():
    return SimpleNamespace(taken=None)


def nvmlGpmSampleGet(gpu, sample):
    _check("nvmlGpmSampleGet", gpu)
    sample.taken = gpu.number, None, calls["nvmlGpmSampleGet"]
    return sample


def nvmlGpmMigSampleGet(gpu, instance: int, sample):
    calls["nvmlGpmSampleGet"] = calls.get("nvmlGpmSampleGet", 0) + 1
    sample.taken = gpu.number, instance, calls["nvmlGpmSampleGet"]
    return sample


def nvmlGpmMetricsGet(request):
    before, after = request.sample1.taken, request.sample2.taken
    if before is None or before[:2] != after[:2] or before[2] >= after[2]:
        raise NVMLError_NotSupported  # the real one needs two samples of one device, in their order
    for position in range(request.numMetrics):
        metric = request.metrics[position]
        metric.value, metric.nvmlReturn = GPM_VALUES[metric.metricId], 0
    return request
