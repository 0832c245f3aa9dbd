"""paceline monitor: samples of a node, alone and while a command of another program runs."""

import contextlib
import functools
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import PACELINE, TORCHRUN, paceline, start, succeed
from mounts import mount_tmpfs
from paceline.launch.foreign_command import rank_of
from paceline.monitor.columns import throttle_reasons
from paceline.monitor.gpus.nvidia_smi import known_fields
from paceline.monitor.gpus.nvidia_smi_writer import HEADER, NvidiaSmiWriter
from paceline.monitor.hang import HangDetector
from paceline.monitor.sample_writer import lock_to_append
from paceline.monitor.samples import read_samples
from paceline.monitor.step_pattern import StepClock
from pages import read_blocks

SIMULATED = Path(__file__).parents[1] / "support/simulated_nvml"
EVERY = ("--every", "0.2")
STEPS = """
import sys, time
for step in range(int(sys.argv[1])):
    time.sleep(0.1)
    print(f"step {step} loss 0.5", end=sys.argv[2].encode().decode("unicode_escape"))
time.sleep(float(sys.argv[3]))
print("done", file=sys.stderr)
"""
RANKS = """
import os, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
Path(f"pid{dist.get_rank()}").write_text(str(os.getpid()))
end = time.monotonic() + 4
while time.monotonic() < end:
    sum(range(100_000))
dist.barrier()
"""


def test_exit_status_and_output_of_the_command(tmp_path):
    command = ("sh", "-c", "echo out; echo err >&2; exit 7")
    result = paceline("monitor", *EVERY, "--", *command, at=tmp_path)
    assert result.status == 7
    assert result.out == "out\n", "the results are on standard error"
    assert result.err.startswith("err\n")
    assert f"{platform.node()}: " in result.err


def test_status_of_a_command_that_a_signal_ends(tmp_path):
    assert paceline("monitor", *EVERY, "--", "sh", "-c", "kill -9 $$", at=tmp_path).status == 128 + 9


def test_standard_input_and_options_reach_the_command(tmp_path):
    code = "import sys; print(sys.argv[1:], sys.stdin.read())"
    words = [*PACELINE, "monitor", "--", sys.executable, "-c", code, "--debug", "--every", "x", "--", "y"]
    result = subprocess.run(words, cwd=tmp_path, input="given", capture_output=True, text=True)
    assert result.stdout == "['--debug', '--every', 'x', '--', 'y'] given\n"


def test_samples_of_a_command(tmp_path):
    """A command that computes for two seconds is rank 0, and its processor time is that of the samples."""
    code = (
        "import os, time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: sum(range(10_000))\n"
        "print(sum(os.times()[:2]))"
    )
    result = succeed(
        "monitor",
        *EVERY,
        "--csv",
        "a.csv",
        "--",
        "sh",
        "-c",
        f"{sys.executable} -c '{code}'; true",
        at=tmp_path,
    )
    samples = read_samples(tmp_path / "a.csv")
    begin = next(row for row, value in enumerate(samples["rank0 cpu"]) if value > 0)
    seconds = sum(
        (samples.time[row] - samples.time[row - 1]) * samples["rank0 cpu"][row] / 100
        for row in range(max(1, begin), len(samples))
        if samples["rank0 cpu"][row] == samples["rank0 cpu"][row]
    )
    assert seconds == pytest.approx(float(result.out), rel=0.4)
    assert samples.interval_s == pytest.approx(0.2, abs=0.1)
    assert (samples.node, samples.damaged) == (platform.node(), 0)
    assert re.search(r"rank0 cpu \[%\] +[\d.]+ +[\d.]+ +[\d.]+", result.err)
    assert f"{len(samples)} samples in " in result.err


def test_second_command_appends_a_section(tmp_path):
    for _ in range(2):
        succeed("monitor", *EVERY, "--csv", "a.csv", "--", "sleep", "1", at=tmp_path)
    samples = read_samples(tmp_path / "a.csv")
    assert len(samples.sections) == 2


@pytest.mark.processes
def test_ranks_of_torchrun(tmp_path):
    (tmp_path / "theirs.py").write_text(RANKS)
    program = [*PACELINE, "monitor", *EVERY, "--csv", "a.csv", "--", *TORCHRUN[:6], "theirs.py"]
    result = succeed(at=tmp_path, program=program)
    samples = read_samples(tmp_path / "a.csv")
    assert samples.numbers("rank") == [0, 1]
    for rank in (0, 1):
        assert samples.comments[f"rank{rank}"] == f"process {(tmp_path / f'pid{rank}').read_text()}"
        assert max(samples.values(f"rank{rank} cpu")) > 10
    assert "rank1 cpu [%]" in result.err


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("block", ["training", "foreign"])
def test_commands_of_the_page(tmp_path, block):
    (tmp_path / "theirs.py").write_text(RANKS + 'print("step 1", flush=True)\n')
    [line] = read_blocks("docs/monitor.md")[block].strip().splitlines()
    program, *words = shlex.split(line)
    assert program == "paceline"
    succeed(at=tmp_path, program=[*PACELINE, *words])
    path = tmp_path / "samples.csv"
    if block == "training":
        [path] = (tmp_path / "runs/a/monitor").iterdir()
    assert read_samples(path).numbers("rank") == [0, 1]


@pytest.mark.parametrize("end", [r"\n", r"\r"])
def test_steps_of_the_output(tmp_path, end):
    command = (sys.executable, "-c", STEPS, "20", end, "0")
    result = succeed(
        "monitor", *EVERY, "--csv", "a.csv", "--step-pattern", r"step (\d+)", "--", *command, at=tmp_path
    )
    assert [int(number) for number in re.findall(r"step (\d+)", result.out)] == list(range(20))
    assert result.err.startswith("done\n")
    samples = read_samples(tmp_path / "a.csv")
    times = samples.values("step time")
    assert sorted(times)[len(times) // 2] == pytest.approx(0.1, rel=0.5)
    assert "step time [s]" in result.err


def test_step_times_by_pattern(monkeypatch):
    """Numbers may skip steps, and several ranks may report one step."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = StepClock(re.compile(r"it (?P<step>\d+)"))
    for at, data in (
        (100, b"it 10\nit 10\nnothing\n"),
        (104, b"it 2"),
        (105, b"0\nit 20\n"),
        (106, b"it 21\r"),
    ):
        now = at
        clock.feed("stdout", data)
    assert clock.times == [0.5, 1.0]
    assert clock.read(0.0) == [21, 0.75]
    assert clock.read(0.0) == [21, None]
    counted = StepClock(re.compile("loss"))
    for at in (1.0, 2.0, 4.0):
        now = at
        counted.feed("stdout", b"loss 1\n")
    assert (counted.times, counted.step) == ([1, 2], 3)


def test_hang_of_a_command_with_steps(tmp_path):
    command = (sys.executable, "-c", STEPS, "10", r"\n", "3")
    options = ("--step-pattern", r"step (\d+)", "--hang-after", "1")
    result = succeed("monitor", *EVERY, *options, "--", *command, at=tmp_path, PATH=os.environ["PATH"])
    assert result.err.count("paceline: no step after step 9 for ") == 1
    if shutil.which("py-spy") is None:
        assert "stacks are missing: py-spy is not installed (pip install py-spy)" in result.err


def test_stacks_of_a_hang(tmp_path):
    """A program in the place of py-spy shows how it is called; its failure is reported."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/py-spy"
    program.write_text('#!/bin/sh\necho "arguments $*"\necho "    forward (theirs.py:12)"\n')
    program.chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    options = (*EVERY, "--hang-after", "1")
    result = succeed("monitor", *options, "--", "sleep", "3", at=tmp_path, PATH=path)
    pid = re.search(r"rank 0 \(process (\d+)\):", result.err)[1]
    assert f"arguments dump --nonblocking --pid {pid}" in result.err
    assert "forward (theirs.py:12)" in result.err
    assert result.err.count("all ranks and GPUs were idle for ") == 1
    program.write_text("#!/bin/sh\necho 'Permission Denied: try sudo' >&2\nexit 1\n")
    result = succeed("monitor", *options, "--", "sleep", "3", at=tmp_path, PATH=path)
    assert "stack is missing: Permission Denied: try sudo" in result.err


HUNG = """
import os, sys, time

def wait_for_the_others(seconds):
    time.sleep(seconds)

def main():
    wait_for_the_others(float(sys.argv[1]))

main()
"""


@functools.cache
def why_no_py_spy() -> str | None:
    """Return why py-spy cannot read another process of this machine, or None."""
    if shutil.which("py-spy") is None:
        return "py-spy is not installed"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        time.sleep(0.5)
        words = ["py-spy", "dump", "--nonblocking", "--pid", str(process.pid)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        process.kill()
    return f"py-spy is not permitted here: {done.stderr.strip()[:200]}" if done.returncode else None


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_stacks_by_py_spy(tmp_path, ranks):
    """The real program names the functions in which each rank of a foreign command waits."""
    if (reason := why_no_py_spy()) is not None:
        pytest.skip(reason)
    (tmp_path / "theirs.py").write_text(HUNG)
    program = [sys.executable] if ranks == 1 else TORCHRUN[:6]
    words = [*PACELINE, "monitor", *EVERY, "--hang-after", "1.5", "--", *program, "theirs.py", "6"]
    result = succeed(at=tmp_path, program=words, PATH=os.environ["PATH"])
    assert result.err.count("all ranks and GPUs were idle for ") == 1, result.err
    blocks = re.split(r"(?m)^rank (\d) \(process \d+\):\n", result.err)[1:]
    assert blocks[::2] == [str(rank) for rank in range(ranks)]
    for block in blocks[1::2]:
        names = [line.split()[0] for line in block.splitlines() if "theirs.py:" in line]
        assert names == ["wait_for_the_others", "main", "<module>"], block
        assert "stack is missing" not in block


def test_idle_ranks_and_busy_gpus():
    detector = HangDetector(0.0, None)
    columns = ["rank0 cpu", "rank1 cpu", "gpu0 utilization"]
    assert detector.check(columns, [99.0, 0.0, 0.0]) is None
    assert detector.check(columns, [1.0, 0.0, 100.0]) is None
    assert detector.check(columns, [None, None, 0.0]) is None, "not known yet"
    assert detector.check(columns, [1.0, 0.0, 0.0]) == "all ranks and GPUs were idle for 0.0 ms"
    assert detector.check(columns, [1.0, 0.0, 0.0]) is None, "reported once"
    assert detector.check(columns, [99.0, 0.0, 0.0]) is None
    assert detector.check(columns, [1.0, 0.0, None]) is not None, "a second hang"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_recording_ends_with_a_signal(tmp_path, number):
    with start("monitor", *EVERY, "--csv", "a.csv", at=tmp_path) as running:
        running.wait_until(
            lambda: (tmp_path / "a.csv").exists() and len(read_samples(tmp_path / "a.csv")) >= 3, "samples"
        )
        running.process.send_signal(number)
        result = running.wait()
    assert (result.status, result.err) == (0, "")
    samples = read_samples(tmp_path / "a.csv")
    assert samples.numbers("cpu")
    assert f"{len(samples)} samples in" in result.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_to_the_command(tmp_path, number):
    code = (
        "import signal, sys, time\n"
        "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, lambda n, _: sys.exit(100 + n))\n"
        "open('ready', 'w').close()\n"
        "while True: time.sleep(0.1)"  # Python sees a signal that comes just before a call after the call
    )
    with start("monitor", *EVERY, "--", sys.executable, "-c", code, at=tmp_path) as running:
        running.wait_until((tmp_path / "ready").exists, "ready")
        running.process.send_signal(number)
        assert running.wait().status == 100 + number


def test_killed_monitor_leaves_a_complete_file(tmp_path):
    with start("monitor", *EVERY, "--csv", "a.csv", at=tmp_path) as running:
        running.wait_until(
            lambda: (tmp_path / "a.csv").exists() and len(read_samples(tmp_path / "a.csv")) >= 2, "samples"
        )
        running.process.send_signal(signal.SIGKILL)
        running.wait()
    assert (tmp_path / "a.csv").read_bytes().endswith(b"\n")


def test_lost_samples_are_reported_with_a_status(tmp_path):
    with mount_tmpfs(tmp_path, "size=64k") as folder:
        path = folder / "a.csv"
        with start("monitor", "--every", "0.1", "--csv", str(path), at=folder) as running:
            running.wait_until(lambda: path.exists() and len(read_samples(path)) >= 2, "samples")
            with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
            running.wait_until(lambda: has_stopped_growing(path), "full")
            running.process.send_signal(signal.SIGINT)
            result = running.wait()
        samples = read_samples(path)
    assert (result.status, samples.damaged) == (1, 0)
    assert re.fullmatch(
        rf"paceline: \d+ samples? lost: cannot write {re.escape(str(path))}: no space left on the device\n",
        result.err,
    )
    assert f"{len(samples)} samples in" in result.out


def has_stopped_growing(path):
    before = path.stat().st_size
    time.sleep(0.5)
    return path.stat().st_size == before


def test_recording_in_the_format_of_nvidia_smi(tmp_path):
    """Simulated GPUs; the file is read again by the reader of nvidia-smi's recordings."""
    program = [
        *PACELINE,
        "monitor",
        *EVERY,
        "--format",
        "nvidia-smi",
        "--csv",
        "gpu.csv",
        "--",
        "sleep",
        "1.5",
    ]
    result = succeed(at=tmp_path, program=program, PYTHONPATH=str(SIMULATED))
    lines = (tmp_path / "gpu.csv").read_text().splitlines()
    assert re.fullmatch(
        r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{3}, 0, NVIDIA H100 80GB HBM3, GPU-0c8d7a5b-[-\w]+, 90 %, 45 %,"
        r" 39101 MiB, 81559 MiB, 523\.40 W, 700\.00 W, 61, 1755 MHz, 2619 MHz, 0x0000000000000004, 5, 16",
        lines[1],
    )
    samples = read_samples(tmp_path / "gpu.csv")
    assert (samples.source, samples.numbers("gpu"), samples.damaged) == ("nvidia-smi", list(range(8)), 0)
    assert samples.ignored == ()
    assert len(samples) * 8 == len(lines) - 1
    assert samples["gpu3 utilization"][0] == 90
    assert throttle_reasons(samples["gpu3 throttle"][0]) == ["power cap"]
    assert abs(samples.time[0] - (tmp_path / "gpu.csv").stat().st_mtime) < 60
    assert "gpu7 utilization [%]" in result.err
    first = {name.partition(" ")[0] for name in HEADER.split(", ")}
    assert first - {"timestamp", "index", "name", "uuid"} <= {*known_fields()}


def test_missing_values_in_the_format_of_nvidia_smi(tmp_path):
    path = tmp_path / "a.csv"
    writer = NvidiaSmiWriter(lock_to_append(path, HEADER), path)
    writer.set_columns(["gpu0 power", "gpu2 utilization", "cpu"])
    writer.write(1000.25, [None, 5.0, 3.0])
    writer.close()
    samples = read_samples(path)
    assert samples.numbers("gpu") == [0, 2]
    assert (samples.values("gpu0 power"), samples.values("gpu2 utilization")) == ([], [5])
    assert list(samples.time) == [1000.25]


def test_idle_gpu_is_found(tmp_path):
    """The findings of a command while one of eight simulated GPUs has no work."""
    (tmp_path / "nvml.json").write_text('{"busy": {"1": 0}}')
    program = [*PACELINE, "monitor", "--every", "0.1", "--", "sleep", "4"]
    variables = {"PYTHONPATH": str(SIMULATED), "SIMULATED_NVML": str(tmp_path / "nvml.json")}
    result = succeed(at=tmp_path, program=program, **variables)
    assert re.search(r"gpu1 utilization \[%\] +0 +0 +0\b", result.err)
    assert re.search(r"gpu2 utilization \[%\] +90 +90 +90\b", result.err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--every", "0"], "--every must be from 0.1 to 3600 seconds, got 0"),
        (["--every", "nan"], "--every must be from 0.1 to 3600 seconds, got nan"),
        (["--format", "json"], "--format must be paceline or nvidia-smi, got 'json'"),
        (["--step-pattern", "(", "--", "true"], "--step-pattern is not a regular expression: missing )"),
        (["--step-pattern", "x"], "--step-pattern requires a command; write it after --"),
        (["--hang-after", "5"], "--hang-after requires a command"),
        (["--hang-after", "-5", "--", "true"], "--hang-after must be above 0, got -5"),
        (["--", "no-such-command"], "cannot run no-such-command: No such file or directory"),
        (["--csv", "no/folder.csv"], "no such folder: no; create it first"),
        (["--csv", "."], "it is a folder"),
        (["--csv", "link"], "it is a link"),
        (["--csv", "notes.txt"], "it begins with 'my notes"),
        (["--format", "nvidia-smi"], "--format nvidia-smi requires a GPU: "),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, words, message):
    (tmp_path / "notes.txt").write_text("my notes are longer than a header of samples\n")
    (tmp_path / "link").symlink_to("notes.txt")
    result = paceline("monitor", *words, at=tmp_path)
    assert result.status == 2, result.all
    assert message in result.err
    assert len(result.err.splitlines()) == 1
    assert (tmp_path / "notes.txt").read_text().startswith("my notes are")


def test_two_recordings_do_not_share_a_file(tmp_path):
    with start("monitor", *EVERY, "--csv", "a.csv", at=tmp_path) as running:
        running.wait_until((tmp_path / "a.csv").exists, "recording")
        result = paceline("monitor", "--csv", "a.csv", "--", "true", at=tmp_path)
        running.process.send_signal(signal.SIGINT)
        running.wait()
    assert result.status == 2
    assert "another process appends to it" in result.err


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4"}, 3),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, 5),
        ({"RANK": "3"}, None),
        ({"RANK": "x", "WORLD_SIZE": "4"}, None),
        ({}, None),
    ],
)
def test_rank_of_a_process(environ, rank):
    assert rank_of(environ) == rank
