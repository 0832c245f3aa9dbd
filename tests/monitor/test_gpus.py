"""GPUs: NVML with recorded answers of eight H100, and the files of AMD's driver."""

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.monitor.columns import COLUMNS, kind_of, throttle_reasons
from paceline.monitor.gpus import nvml
from paceline.monitor.gpus.amd import AmdSensor
from paceline.monitor.gpus.nvml import NvmlSensor, find_visible_devices
from paceline.monitor.processes import process_birth
from paceline.monitor.sample_writer import file_name_of
from paceline.monitor.sampler_process import SamplerProcess
from paceline.monitor.samples import read_samples
from paceline.monitor.sensor import AbsentSensorError

SIMULATED = Path(__file__).parents[1] / "support/simulated_nvml"
UUIDS = [f"GPU-{number}c8d7a5b-33aa-4f11-8e2d-00000000000{number}" for number in range(8)]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Put the simulated NVML in place of nvidia-ml-py. Return a function that changes its answers."""
    path = tmp_path / "nvml.json"
    count = 0

    def change(**values: object) -> None:
        nonlocal count
        count += 1
        new = tmp_path / "nvml.new"
        new.write_text(json.dumps(values))
        os.utime(new, ns=(count, count))  # so that two changes in one tick of the clock differ
        new.replace(path)

    change()
    monkeypatch.setenv("SIMULATED_NVML", str(path))
    monkeypatch.setenv("PYTHONPATH", str(SIMULATED), prepend=os.pathsep)
    monkeypatch.syspath_prepend(SIMULATED)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    yield change
    sys.modules.pop("pynvml", None)


def read(sensor: NvmlSensor | AmdSensor) -> dict[str, float | None]:
    return dict(zip(sensor.columns, sensor.read(0.0), strict=True))


def test_values_of_eight_gpus(settings):
    settings(busy={"1": 0})
    sensor = NvmlSensor()
    values = read(sensor)
    assert {name: values[f"gpu3 {name}"] for name in ("utilization", "memory utilization", "power")} == {
        "utilization": 90,
        "memory utilization": 45,
        "power": pytest.approx(523.403),
    }
    assert values["gpu1 utilization"] == 0
    assert values["gpu7 memory used"] == pytest.approx(41e9 / 2**20)
    assert values["gpu7 memory total"] == pytest.approx(81559, abs=1)
    assert throttle_reasons(values["gpu0 throttle"]) == ["power cap"]
    assert values["gpu0 nvlink in"] == pytest.approx(1000 * 2**20 / 1e6)
    assert values["gpu0 pcie in"] == pytest.approx(200 * 2**20 / 1e6)
    assert (values["gpu0 sm active"], values["gpu0 tensor active"]) == (71.5, 48.25)
    assert (values["gpu0 ecc corrected"], values["gpu0 ecc uncorrected"]) == (3, 0)
    assert {kind_of(name) for name in values} <= COLUMNS.keys()
    assert None not in [value for name, value in values.items() if "other processes" not in name]
    assert sensor.comments["gpu7"] == f"NVIDIA H100 80GB HBM3, {UUIDS[7]}"
    assert sensor.absent == {}


def test_handles_stay_open_and_slow_values_are_read_rarely(settings):
    sensor = NvmlSensor()
    simulated = importlib.import_module("pynvml")
    simulated.calls.clear()
    for _ in range(60):
        read(sensor)
    assert "nvmlDeviceGetUUID" not in simulated.calls
    assert simulated.calls["nvmlDeviceGetUtilizationRates"] == 60 * 8
    assert simulated.calls["nvmlDeviceGetEnforcedPowerLimit"] == 6 * 8
    assert simulated.calls["nvmlDeviceGetMaxClockInfo"] == 8


def test_functions_that_the_driver_lacks_are_absent_with_a_reason(settings):
    settings(without=["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors"], no_gpm=True)
    sensor = NvmlSensor()
    values = read(sensor)
    assert "gpu0 power" not in values
    assert values["gpu0 power limit"] == 700
    assert sensor.absent["gpuN power"] == "Not Supported"
    assert sensor.absent["gpuN ecc corrected"] == "Not Supported"
    assert sensor.absent["gpuN nvlink in"] == "not supported before the Hopper generation"


def test_older_package_without_a_function(settings, monkeypatch):
    simulated = importlib.import_module("pynvml")
    monkeypatch.delattr(simulated, "nvmlGpmQueryDeviceSupport")
    monkeypatch.delattr(simulated, "nvmlDeviceGetCurrentClocksEventReasons")
    monkeypatch.delattr(simulated, "nvmlMemory_v2")
    sensor = NvmlSensor()
    assert sensor.absent["gpuN sm active"] == "nvidia-ml-py is too old"
    assert read(sensor)["gpu0 throttle"] == 4
    assert read(sensor)["gpu0 memory used"] == pytest.approx(81559, abs=1)


def test_gpu_that_is_lost_and_comes_back(settings):
    sensor = NvmlSensor()
    columns = list(sensor.columns)
    settings(lost=[2])
    values = read(sensor)
    assert {value for name, value in values.items() if name.startswith("gpu2 ")} == {None}
    assert values["gpu3 utilization"] == 90
    assert sensor.absent["gpu2"] == "GPU is lost"
    settings()
    for _ in range(nvml.LOST_EVERY):
        values = read(sensor)
    assert values["gpu2 utilization"] == 90
    assert sensor.columns == columns


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (None, list(range(8))),
        ("2,0", [2, 0]),
        (f"{UUIDS[5]},{UUIDS[1]}", [5, 1]),
        ("GPU-5c8d", [5]),
        ("", []),
        ("-1", []),
        ("0,-1,3", [0]),
        ("1, 9, 2", [1]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices(settings, text, numbers):
    """As CUDA's documentation specifies: indices and starts of UUIDs, up to the first that does not exist."""
    assert [device.number for device in find_visible_devices(NvmlSensor().devices, text)] == numbers


def test_columns_of_visible_devices(settings):
    sensor = NvmlSensor()
    sensor.select(["3", UUIDS[6]])
    assert {name.partition(" ")[0] for name in read(sensor)} == {"gpu3", "gpu6"}
    assert sensor.comments["gpu"] == "CUDA_VISIBLE_DEVICES hides 6 more GPUs"
    sensor.select(["3", None])
    assert {name.partition(" ")[0] for name in read(sensor)} == {f"gpu{number}" for number in range(8)}


def test_mig_devices(settings):
    settings(gpus=2, mig={"1": 3})
    sensor = NvmlSensor()
    values = read(sensor)
    assert {name.partition(" ")[0] for name in values} == {"gpu0", "gpu1", "gpu2", "gpu3", "gpu4"}
    assert values["gpu2 memory used"] == pytest.approx(41e9 / 2**20)
    assert values["gpu4 sm active"] == 71.5
    assert "gpu2 power" not in values
    assert sensor.comments["gpu3"] == (
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb, MIG-114ad8ba2-1b6f-5d0e-9c4f-000000000000, part of GPU 1"
    )
    assert [device.number for device in find_visible_devices(sensor.devices, "1")] == [2, 3, 4]
    assert [device.number for device in find_visible_devices(sensor.devices, "MIG-124")] == [4]


def test_processes_of_others(settings):
    own = os.getpid()
    settings(gpus=3, pids={"0": [own], "1": [own, 77], "2": [78, 79]})
    values = read(NvmlSensor(lambda: {own}))
    assert [values[f"gpu{number} processes"] for number in range(3)] == [1, 2, 2]
    assert [values[f"gpu{number} other processes"] for number in range(3)] == [0, 1, 2]
    values = read(NvmlSensor(lambda: {1}))
    assert values["gpu2 other processes"] is None, "process ids of another name space tell nothing"


def test_machine_without_a_driver(settings, monkeypatch):
    settings(gpus=0)
    monkeypatch.setattr(nvml, "DEVICE_FILES", (__file__,))
    with pytest.raises(AbsentSensorError, match="NVML: NVML Shared Library Not Found"):
        NvmlSensor()
    monkeypatch.setattr(nvml, "DEVICE_FILES", ("/nothing",))
    with pytest.raises(AbsentSensorError, match="this machine has no NVIDIA GPU"):
        NvmlSensor()


def test_machine_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "DEVICE_FILES", (__file__,))
    with pytest.raises(
        AbsentSensorError, match=r"nvidia-ml-py is not installed \(pip install paceline\[gpu\]\)"
    ):
        NvmlSensor()


def test_simulated_functions_exist_in_the_package():
    """Names, constants and parameters of the simulated NVML are those of nvidia-ml-py."""
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    spec = importlib.util.spec_from_file_location("simulated", SIMULATED / "pynvml.py")
    simulated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(simulated)
    names = [name for name in vars(simulated) if name.startswith(("nvml", "NVML", "c_nvml"))]
    assert len(names) > 40
    for name in names:
        ours, theirs = getattr(simulated, name), getattr(real, name)
        if isinstance(ours, int):
            assert ours == theirs, name
        elif inspect.isfunction(ours):
            given = list(inspect.signature(ours).parameters)
            assert len(given) <= len(inspect.signature(theirs).parameters), name
    request = real.c_nvmlGpmMetricsGet_t()
    assert {"version", "numMetrics", "sample1", "sample2", "metrics"} <= set(dir(request))
    assert {"metricId", "nvmlReturn", "value"} <= set(dir(request.metrics[0]))


def test_sampler_with_gpus_that_its_ranks_see(settings, tmp_path):
    """The sampler process, a rank that sees GPUs 1 and 2, and one of them that is lost meanwhile."""
    run = tmp_path / "run"
    (run / "ranks").mkdir(parents=True)
    path = run / "monitor" / f"{file_name_of(platform.node())}.csv"

    def wait_for_samples(count: int) -> None:
        deadline = time.monotonic() + 60
        while not path.exists() or len(read_samples(path)) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "1,2"}
    with contextlib.ExitStack() as at_end:
        rank = at_end.enter_context(subprocess.Popen(["sleep", "600"], env=environ))
        at_end.callback(rank.kill)
        beat = {"rank": 0, "pid": rank.pid, "host": platform.node(), "birth": process_birth(rank.pid)}
        (run / "ranks/0.alive").write_text(json.dumps(beat))
        sampler = SamplerProcess(run, 0.1, 0, 1, 1)
        at_end.callback(sampler.stop)
        wait_for_samples(3)
        settings(lost=[2])
        wait_for_samples(6)
        assert sampler.new_notes() == []
    samples = read_samples(path)
    assert samples.numbers("gpu") == [1, 2]
    assert samples["gpu1 power"][-1] == pytest.approx(523.4)
    assert samples["gpu2 power"][0] == pytest.approx(523.4)
    assert samples["gpu2 power"][-1] != samples["gpu2 power"][-1]
    assert samples.absent["gpu2"] == "GPU is lost"
    assert samples.damaged == 0
    energy = samples.values("gpu1 energy")
    assert energy == sorted(energy)


def make_card(root: Path, number: int, vendor: str = "0x1002", **files: str) -> Path:
    folder = root / f"card{number}/device"
    (folder / "hwmon/hwmon4").mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    for name, text in files.items():
        is_of_hwmon = name.partition("_")[0][-1].isdigit()
        (folder / ("hwmon/hwmon4" if is_of_hwmon else "") / name).write_text(f"{text}\n")
    return folder


def test_amd_gpus(tmp_path):
    """Files as amdgpu of Linux 6.8 has them for an MI300X; a card of another vendor does not count."""
    make_card(tmp_path, 0, "0x1a03")
    files = {
        "gpu_busy_percent": "97",
        "mem_info_vram_used": str(100 * 2**30),
        "mem_info_vram_total": str(192 * 2**30),
        "power1_average": "612000000",
        "temp1_input": "54000",
        "freq1_input": "2100000000",
    }
    make_card(tmp_path, 1, **files)
    second = make_card(tmp_path, 10, **files)
    (tmp_path / "card1-DP-1").mkdir()
    sensor = AmdSensor(tmp_path)
    assert read(sensor) == {
        f"gpu{number} {name}": value
        for number in (0, 1)
        for name, value in {
            "utilization": 97,
            "memory used": 102400,
            "memory total": 196608,
            "power": 612,
            "clock sm": 2100,
            "temperature": 54,
        }.items()
    }
    assert "has no mem_busy_percent" in sensor.absent["gpu0 memory utilization"]
    (second / "gpu_busy_percent").unlink()
    assert read(sensor)["gpu1 utilization"] is None
    with pytest.raises(AbsentSensorError, match="this machine has no AMD GPU"):
        AmdSensor(tmp_path / "nothing")
