"""The sampler of a node: values compared with /proc, ranks, faults. It never disturbs a training."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from command import MPIRUN, TORCHRUN, events_of_kind, paceline, set_sample_delay, start, succeed, write_task
from mounts import mount_tmpfs
from paceline.errors import RunError
from paceline.events import Ended, Noted
from paceline.monitor.node import CpuEnergySensor
from paceline.monitor.processes import RankSensor, find_descendants, find_run_ranks, process_birth
from paceline.monitor.sample_writer import file_name_of, open_sample_file
from paceline.monitor.sampler_main import guess_ranks
from paceline.monitor.sampler_process import SamplerProcess
from paceline.monitor.samples import read_samples
from paceline.monitor.sensor import AbsentSensorError

TICKS = os.sysconf("SC_CLK_TCK")
NAME = f"{file_name_of(platform.node())}.csv"
# A process that computes, holds 60 MB, and has a child that computes.
BUSY = """
import os, sys, time
data = bytearray(os.urandom(60_000_000))
if not os.fork():
    data = None
while os.getppid() != 1:
    sum(range(10_000))
"""


def rank_file(run: Path, number: int, of: int, **changes: object) -> None:
    """Write a heartbeat as a rank does."""
    (run / "ranks").mkdir(exist_ok=True)
    beat = {"rank": number, "pid": of, "host": platform.node(), "birth": process_birth(of)} | changes
    (run / "ranks" / f"{number}.alive").write_text(json.dumps(beat))


def wait_for(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.05)


def num_samples(run: Path) -> int:
    path = run / "monitor" / NAME
    return len(read_samples(path)) if path.exists() else 0


def processor_s(pid: int) -> float:
    """Return the processor time of a process, from /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def written_bytes(pid: int) -> int:
    """Return the bytes that a process wrote to disks, from /proc."""
    return int(Path(f"/proc/{pid}/io").read_text().partition("\nwrite_bytes:")[2].split()[0])


@pytest.fixture
def start_sampler():
    """Return a function that starts a sampler, which ends with the test."""
    with contextlib.ExitStack() as at_end:

        def start_one(run: Path, every_s: float = 0.1, rank=0, local_size=1, size=1) -> SamplerProcess:
            sampler = SamplerProcess(run, every_s, rank, local_size, size)
            at_end.callback(sampler.stop)
            return sampler

        yield start_one


@pytest.fixture
def busy():
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        wait_for(lambda: psutil.Process(process.pid).children())
        yield process
        process.kill()


MAPPED = """
import mmap, sys, time
file = open(sys.argv[1], "r+b")
pages = mmap.mmap(file.fileno(), 0)
own = bytearray(b"x" * 2**25)
read = sum(pages[at] for at in range(0, len(pages), 4096))
print(read, flush=True)
time.sleep(600)
"""


def test_memory_of_mapped_files_is_known(tmp_path):
    """A process maps 64 MiB of a file, and has 32 MiB of its own besides Python."""
    (tmp_path / "samples").write_bytes(bytes(2**26))
    command = [sys.executable, "-c", MAPPED, str(tmp_path / "samples")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        sensor = RankSensor(lambda: {0: process.pid})
        sensor.search()
        values = dict(zip(sensor.columns, sensor.read(time.monotonic()), strict=True))
        process.kill()
    assert 64 <= values["rank0 file memory"] <= 64 + 24, "and Python's libraries"
    assert 32 <= values["rank0 memory"] - values["rank0 file memory"] <= 32 + 32
    assert values["rank0 workers file memory"] == 0


def test_values_equal_those_of_proc(tmp_path, busy, start_sampler):
    """Processor time, memory, workers and the node's memory, read from /proc before and after."""
    [worker] = psutil.Process(busy.pid).children()
    rank_file(tmp_path, 0, busy.pid)
    sampler = start_sampler(tmp_path, 0.2, 0, 1, 1)
    wait_for(lambda: num_samples(tmp_path) >= 2)
    first = read_samples(tmp_path / "monitor" / NAME)
    begin, begin_s, worker_s = time.time(), processor_s(busy.pid), processor_s(worker.pid)
    wait_for(lambda: num_samples(tmp_path) >= len(first) + 10)
    end, end_s, worker_end_s = time.time(), processor_s(busy.pid), processor_s(worker.pid)
    sampler.stop()
    samples = read_samples(tmp_path / "monitor" / NAME)
    rows = [row for row, at in enumerate(samples.time) if begin < at < end]
    mean = sum(samples["rank0 cpu"][row] for row in rows) / len(rows)
    assert mean / 100 == pytest.approx((end_s - begin_s) / (end - begin), rel=0.25)
    mean = sum(samples["rank0 workers cpu"][row] for row in rows) / len(rows)
    assert mean / 100 == pytest.approx((worker_end_s - worker_s) / (end - begin), rel=0.25)
    status = Path(f"/proc/{busy.pid}/status").read_text()
    resident_kib = int(status.partition("VmRSS:")[2].split()[0])
    assert samples["rank0 memory"][-1] == pytest.approx(resident_kib / 1024, rel=0.05)
    assert set(samples.values("rank0 workers")) == {1}
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total_kib = int(meminfo["MemTotal"].split()[0])
    assert samples["memory total"][-1] == pytest.approx(total_kib / 1024, abs=0.1)
    assert 0 < samples["memory used"][-1] < total_kib / 1024
    allowed = Path(f"/proc/{busy.pid}/status").read_text().partition("Cpus_allowed_list:")[2].split()[0]
    assert samples.comments["cpu"].endswith(f": {allowed}")
    assert all(0 <= value <= 100 for value in samples.values("cpu"))
    assert samples.node == platform.node()


def test_busy_share_of_a_core(tmp_path, busy, start_sampler):
    """Two processes bound to one core keep it busy; compare with the ticks of /proc/stat."""
    core = max(os.sched_getaffinity(0))
    for process in (psutil.Process(busy.pid), *psutil.Process(busy.pid).children()):
        process.cpu_affinity([core])
    rank_file(tmp_path, 0, busy.pid)
    sampler = start_sampler(tmp_path, 0.2, 0, 1, 1)
    wait_for(lambda: num_samples(tmp_path) >= 5)
    sampler.stop()
    samples = read_samples(tmp_path / "monitor" / NAME)
    assert samples.numbers("cpu") == [core], "only the cores of the ranks count"
    assert min(samples.values(f"cpu{core}")[1:]) > 90
    assert min(samples.values("cpu")[1:]) > 90


def test_disk_writes_of_a_rank(tmp_path, start_sampler):
    """A process that writes 40 MB to a disk: the counter of the kernel, summed over samples."""
    code = (
        "import os, sys, time; sys.stdin.readline(); f = open(sys.argv[1], 'wb')\n"
        "for _ in range(40): f.write(os.urandom(10**6)); f.flush(); os.fsync(f.fileno())\n"
        "print('done', flush=True); sys.stdin.readline()"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "data")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        rank_file(tmp_path, 0, process.pid)
        sampler = start_sampler(tmp_path, 0.1, 0, 1, 1)
        wait_for(lambda: num_samples(tmp_path) >= 2)
        before = written_bytes(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        after = written_bytes(process.pid)
        count = num_samples(tmp_path)
        wait_for(lambda: num_samples(tmp_path) >= count + 2)
        sampler.stop()
        process.kill()
    if after == before:
        pytest.skip("the folder of temporary files is not on a disk")
    samples = read_samples(tmp_path / "monitor" / NAME)
    gaps = [now - then for then, now in zip(samples.time, list(samples.time)[1:], strict=False)]
    rates = list(samples["rank0 write"])[1:]
    written = sum(gap * rate for gap, rate in zip(gaps, rates, strict=True) if rate == rate)
    assert written == pytest.approx((after - before) / 1e6, rel=0.15)


def test_only_ranks_of_this_node_and_of_this_start_count(tmp_path, busy):
    for rank, changes in enumerate(
        [{}, {"host": "another"}, {"birth": 1}, {"pid": "1"}, {"pid": -1}, {"rank": 7}, {"birth": None}]
    ):
        rank_file(tmp_path, rank, busy.pid, **changes)
    (tmp_path / "ranks/7.alive").write_text("[" * 100_000)
    (tmp_path / "ranks/8.alive").write_text('{"rank": 8')
    os.mkfifo(tmp_path / "ranks/9.alive")
    assert find_run_ranks(tmp_path / "ranks", range(20), platform.node()) == {0: busy.pid}


def test_ranks_of_a_node_are_guessed():
    """Blocks of ranks, ranks dealt out in turn, and any placement of few ranks."""
    assert {4, 5, 6, 7} == {*guess_ranks(4, 4, 16)[0]}
    assert {1, 5, 9, 13} == {*guess_ranks(1, 4, 16)[1]}
    assert {*range(16)} == {*guess_ranks(1, 4, 16)[2]}
    assert sum(map(len, guess_ranks(8, 8, 100_000))) <= 16


def test_rank_that_starts_late_and_rank_that_ends(tmp_path, busy, start_sampler):
    """A new header has the columns of a rank that is found later; values of one that ended are missing."""
    rank_file(tmp_path, 0, busy.pid)
    sampler = start_sampler(tmp_path, 0.1, 0, 2, 2)
    with subprocess.Popen([sys.executable, "-c", BUSY]) as late:
        wait_for(lambda: num_samples(tmp_path) >= 2)
        rank_file(tmp_path, 1, late.pid)
        wait_for(lambda: "rank1 cpu" in read_samples(tmp_path / "monitor" / NAME))
        for child in psutil.Process(late.pid).children():
            child.kill()
        late.kill()
        late.wait()
        count = num_samples(tmp_path)
        wait_for(lambda: num_samples(tmp_path) >= count + 3)
        sampler.stop()
        late.kill()
    samples = read_samples(tmp_path / "monitor" / NAME)
    assert samples.sections == [0]
    assert samples["rank1 memory"][0] != samples["rank1 memory"][0], "before it was found"
    assert samples.values("rank1 memory")
    assert samples["rank1 memory"][-1] != samples["rank1 memory"][-1], "after its end"
    assert samples["rank0 memory"][-1] > 60


def test_descendants_of_a_process(busy):
    [child] = psutil.Process(busy.pid).children()
    assert find_descendants(busy.pid) == [child.pid]
    assert find_descendants(2**22 + 1) == []


def test_sampler_does_not_count_itself(tmp_path):
    sensor = RankSensor(lambda: {0: os.getpid()}, 1)
    sensor.search()
    sensor.read(1.0)
    values = dict(zip(sensor.columns, sensor.read(2.0), strict=True))
    assert values["rank0 workers"] == len(find_descendants(os.getpid()))


PARENT = """
import sys, time
from pathlib import Path
from paceline.monitor.sampler_process import SamplerProcess
sampler = SamplerProcess(Path(sys.argv[1]), 0.1, 0, 1, 1)
print(sampler.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_sampler_ends_with_its_parent(tmp_path, number):
    words = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        wait_for(lambda: num_samples(tmp_path) >= 2)
        parent.send_signal(number)
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
    assert (tmp_path / "monitor" / NAME).read_bytes().endswith(b"\n")


def test_sampler_survives_signals_that_stop_a_training(tmp_path, start_sampler):
    sampler = start_sampler(tmp_path, 0.1, 0, 1, 1)
    wait_for(lambda: num_samples(tmp_path) >= 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(sampler.pid, number)
    count = num_samples(tmp_path)
    wait_for(lambda: num_samples(tmp_path) >= count + 2)
    assert sampler.new_notes() == []
    sampler.stop()
    assert sampler.pid is None


def test_each_start_begins_a_section(tmp_path, start_sampler):
    for _ in range(2):
        sampler = start_sampler(tmp_path, 0.1, 0, 1, 1)
        count = num_samples(tmp_path)
        wait_for(lambda: num_samples(tmp_path) >= count + 2)  # noqa: B023 (called at once)
        sampler.stop()
    samples = read_samples(tmp_path / "monitor" / NAME)
    assert len(samples.sections) == 2
    assert samples.damaged == 0
    assert [path.name for path in (tmp_path / "monitor").iterdir()] == [NAME]


def test_two_nodes_of_one_name_have_two_files(tmp_path):
    first = open_sample_file(tmp_path / "monitor", "node", 0.0)
    second = open_sample_file(tmp_path / "monitor", "node", 0.0)
    assert (first.path.name, second.path.name) == ("node.csv", "node-2.csv")
    first.close()
    assert open_sample_file(tmp_path / "monitor", "node", 0.0).path.name == "node.csv"
    second.close()


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("node17.cluster", "node17.cluster"),
        ("../../etc/x", "etc-x"),
        ("", "node"),
        ("..", "node"),
        ("a\nb c;$(x)", "a-b-c---x-"),
        ("x" * 300, "x" * 100),
    ],
)
def test_file_names_of_nodes(node, name):
    assert file_name_of(node) == name


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_written(tmp_path, kind):
    folder = tmp_path / "monitor"
    folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("kept")
    path = folder / "node.csv"
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(RunError, match=r"cannot write .*node\.csv"):
        open_sample_file(folder, "node", 0.0)
    assert victim.read_text() == "kept"


def test_half_written_line_of_a_killed_sampler_is_removed(tmp_path):
    (tmp_path / "monitor").mkdir()
    (tmp_path / "monitor/node.csv").write_text("# paceline samples 1\ntime [s],cpu [%]\n1,2\n3,")
    writer = open_sample_file(tmp_path / "monitor", "node", 0.0)
    writer.begin("node", [("cpu", "x\n# node: forged")])
    writer.set_columns(["cpu"])
    writer.write(5.0, [6.0])
    writer.close()
    samples = read_samples(tmp_path / "monitor/node.csv")
    assert (list(samples.time), list(samples["cpu"]), samples.damaged, samples.node) == (
        [1, 5],
        [2, 6],
        0,
        "node",
    )


def test_full_disk_is_noted_and_sampling_continues(tmp_path, start_sampler):
    with mount_tmpfs(tmp_path, "size=64k") as folder:
        sampler = start_sampler(folder, 0.1, 0, 1, 1)
        wait_for(lambda: num_samples(folder) >= 2)
        filler = folder / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        notes: list[str] = []
        wait_for(lambda: notes.extend(sampler.new_notes()) or notes)
        assert notes == [
            f"sampling continues, but cannot write {folder / 'monitor' / NAME}: no space left on the device"
        ]
        filler.unlink()
        count = num_samples(folder)
        wait_for(lambda: num_samples(folder) >= count + 2)
        sampler.stop()
        assert read_samples(folder / "monitor" / NAME).damaged == 0


def test_sampler_that_cannot_start_is_noted(tmp_path, start_sampler):
    (tmp_path / "monitor").write_text("a file")
    sampler = start_sampler(tmp_path, 0.1, 0, 1, 1)
    notes: list[str] = []
    wait_for(lambda: notes.extend(sampler.new_notes()) or notes)
    assert notes[0].startswith(
        "the sampler of this node ended, so that later samples are missing: cannot create"
    )
    sampler.stop()


def test_modules_in_the_working_directory_are_not_imported(tmp_path, monkeypatch, start_sampler):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "psutil.py").write_text("raise RuntimeError('imported')")
    sampler = start_sampler(tmp_path / "run", 0.1, 0, 1, 1)
    (tmp_path / "run").mkdir()
    wait_for(lambda: num_samples(tmp_path / "run") >= 1)
    assert sampler.new_notes() == []
    sampler.stop()


def test_imports_of_the_sampler():
    code = "import sys, paceline.monitor.sampler_main; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"torch", "numpy", "pydantic", "typer", "rich", "asyncio", "multiprocessing"}
    assert not slow & set(modules.stdout.split())


def test_energy_of_processors(tmp_path):
    """Two processors, of which a counter wraps."""
    for number, name in enumerate(["package-0", "package-1", "psys"]):
        zone = tmp_path / f"intel-rapl:{number}"
        zone.mkdir()
        (zone / "name").write_text(f"{name}\n")
        (zone / "energy_uj").write_text("900\n")
        (zone / "max_energy_range_uj").write_text("1000\n")
    sensor = CpuEnergySensor(tmp_path)
    (tmp_path / "intel-rapl:0/energy_uj").write_text("950\n")
    (tmp_path / "intel-rapl:1/energy_uj").write_text("100\n")
    (tmp_path / "intel-rapl:2/energy_uj").write_text("999\n")
    assert sensor.read(0.0) == [pytest.approx(250e-6)]
    (tmp_path / "intel-rapl:0/energy_uj").unlink()
    assert sensor.read(1.0) == [None]
    with pytest.raises(AbsentSensorError, match="has no counters of processors"):
        CpuEnergySensor(tmp_path / "nothing")


# In a training


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "fast", "0.01", "4000", ""])
def test_bad_intervals_are_refused(tmp_path, value):
    result = paceline("train", "digits", "--monitor", value, at=tmp_path)
    assert result.status == 2
    assert "monitor must be off, or seconds between samples from 0.1 to 3600" in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.processes
def test_training_is_sampled(tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.02)
    words = ("my.py:Regression", "--ranks", "2", "--steps", "40", "--batch", "10", "--monitor", "0.2")
    succeed("train", *words, "--run-dir", "r", at=tmp_path, SLOW=str(slow))
    samples = read_samples(tmp_path / "r/monitor" / NAME)
    assert len(samples) >= 3
    assert samples.numbers("rank") == [0, 1]
    assert samples.interval_s == pytest.approx(0.2, abs=0.1)
    assert all(value > 50 for rank in (0, 1) for value in samples.values(f"rank{rank} memory"))
    assert {"rank0", "rank1", "cpu"} <= samples.comments.keys()
    assert not events_of_kind(tmp_path / "r", Noted)


@pytest.mark.processes
def test_training_is_not_sampled_with_off(tmp_path):
    succeed("train", "digits", "--steps", "2", "--monitor", "off", "--run-dir", "r", at=tmp_path)
    assert not (tmp_path / "r/monitor").exists()
    assert 'monitor = "off"' in (tmp_path / "r/spec.toml").read_text()


@pytest.mark.processes
def test_killed_sampler_is_noted_and_the_training_continues(tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.02)
    run = tmp_path / "r"
    words = ("my.py:Regression", "--ranks", "2", "--steps", "400", "--batch", "10", "--monitor", "0.1")
    with start("train", *words, "--run-dir", "r", at=tmp_path, SLOW=str(slow)) as running:
        running.wait_until(lambda: num_samples(run) >= 2, "samples")
        [sampler] = find_samplers(running)
        sampler.kill()
        running.wait_until(lambda: events_of_kind(run, Noted), "a note")
        set_sample_delay(slow, 0.0)
        result = running.wait()
    assert result.status == 0, result.all
    assert [event.message for event in events_of_kind(run, Noted)] == [
        "the sampler of this node ended, so that later samples are missing: killed by SIGKILL (rank 0)"
    ]
    [ended] = events_of_kind(run, Ended)
    assert (ended.reason, ended.step) == ("done", 400)
    assert read_samples(run / "monitor" / NAME).damaged == 0


@pytest.mark.processes
def test_killed_rank_ends_the_sampler_and_a_restart_begins_another(tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.02)
    run = tmp_path / "r"
    words = ("my.py:Regression", "--ranks", "2", "--steps", "200", "--batch", "10", "--monitor", "0.1")
    with start("train", *words, "--restarts", "1", "--run-dir", "r", at=tmp_path, SLOW=str(slow)) as running:
        running.wait_until(lambda: num_samples(run) >= 2, "samples")
        [sampler] = find_samplers(running)
        running.ranks()[0].kill()
        running.wait_until(
            lambda: len(read_samples(run / "monitor" / NAME).sections) >= 2, "samples of the second start"
        )
        assert [process.pid for process in find_samplers(running)] != [sampler.pid]
        assert len(find_samplers(running)) == 1
        set_sample_delay(slow, 0.0)
        result = running.wait()
    assert result.status == 0, result.all
    running.wait_until_all_ended()
    samples = read_samples(run / "monitor" / NAME)
    assert (samples.damaged, samples.numbers("rank")) == (0, [0, 1])


@pytest.mark.processes
def test_killed_launcher_leaves_no_sampler(tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.02)
    run = tmp_path / "r"
    words = ("my.py:Regression", "--ranks", "2", "--steps", "400", "--batch", "10", "--monitor", "0.1")
    with start("train", *words, "--run-dir", "r", at=tmp_path, SLOW=str(slow)) as running:
        running.wait_until(lambda: num_samples(run) >= 2, "samples")
        running.process.send_signal(signal.SIGKILL)
        running.wait_until_all_ended()
    assert (run / "monitor" / NAME).read_bytes().endswith(b"\n")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [TORCHRUN, pytest.param(MPIRUN, marks=pytest.mark.mpi("mpirun"))], ids=["torchrun", "mpirun"]
)
def test_one_sampler_per_node_under_other_launchers(tmp_path, program):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.02)
    run = tmp_path / "r"
    words = ("train", "my.py:Regression", "--steps", "100", "--batch", "10", "--monitor-every", "0.1")
    with start(*words, "--run-dir", "r", at=tmp_path, program=program, SLOW=str(slow)) as running:
        running.wait_until(lambda: num_samples(run) >= 3, "samples")
        assert len(find_samplers(running)) == 1
        set_sample_delay(slow, 0.0)
        assert running.wait().status == 0
        running.wait_until_all_ended()
    assert read_samples(run / "monitor" / NAME).numbers("rank") == [0, 1]


def find_samplers(running) -> list[psutil.Process]:
    return [
        process
        for process in running.remaining_processes()
        if "paceline.monitor.sampler_main" in process.cmdline()
    ]
