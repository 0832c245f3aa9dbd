"""Outputs of tools that nobody prepared: facts are right or unknown, and no program harms the probe."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from command import paceline
from paceline.cluster import cpu, directories, environment, gpus, modules, network, run_tool, topology
from paceline.cluster.directories import parse_stripes
from paceline.cluster.local_cluster import build_cluster
from paceline.cluster.machine import Accelerator, Cpu, Machine, MemoryFacts, MigInstance
from paceline.cluster.quota import parse
from paceline.cluster.run_tool import run
from paceline.cluster.text import build_tables
from paceline.errors import ClusterError

HEAD = (
    "index, name, memory.total [MiB], driver_version, power.limit [W], pci.bus_id, uuid, compute_mode, "
    "mig.mode.current, clocks.max.sm [MHz], clocks.max.memory [MHz]\n"
)


def machine(**parts) -> Machine:
    plain = {
        "host": "node1",
        "system": "Linux",
        "cpu": Cpu(architecture="x86_64", usable_cores=4),
        "memory": MemoryFacts(total_bytes=2**36, available_bytes=2**35),
    }
    return Machine(**(plain | parts))


def text_of(found: Machine) -> str:
    from rich.console import Console

    console = Console(width=140, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for table in build_tables(found):
        console.print(table)
    console.file.close()
    return console.export_text()


def put_tool(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir(exist_ok=True)
    tool = folder / name
    tool.write_text(script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tool


# NVIDIA's GPUs


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (  # GB200: no limit is readable without rights
            "0, NVIDIA GB200, 189471 MiB, 580.82.07, [Insufficient Permissions], 00000008:01:00.0, GPU-1, "
            "Default, Disabled, 2062 MHz, 3996 MHz",
            ("NVIDIA GB200", 189471 * 2**20, None, None, 2062, "Default"),
        ),
        (  # GH200: not in the table of published devices
            "0, NVIDIA GH200 480GB, 97871 MiB, 550.90.07, 900.00 W, 00000009:01:00.0, GPU-1, Default, "
            "Disabled, 1980 MHz, 2619 MHz",
            ("NVIDIA GH200 480GB", 97871 * 2**20, 900.0, None, 1980, "Default"),
        ),
        (  # GB10: its memory is that of the processor
            "0, NVIDIA GB10, [N/A], 580.95.05, [N/A], 0000000F:01:00.0, GPU-1, Default, [N/A], 3003 MHz, "
            "[N/A]",
            ("NVIDIA GB10", None, None, None, 3003, "Default"),
        ),
        (
            "0, NVIDIA A100-SXM4-40GB, 40960 MiB, 550.90, ERR!, [Unknown Error], GPU-1, [Unknown Error], "
            "[Not Supported], [GPU requires reset], Unknown Error",
            ("NVIDIA A100-SXM4-40GB", 40960 * 2**20, None, None, None, None),
        ),
        (  # a unit that nvidia-smi does not use today
            "0, NVIDIA A100-SXM4-40GB, 40.0 GiB, 550.90, 400.00 W, b, GPU-1, Default, Enabled, 1.41 GHz, 1",
            ("NVIDIA A100-SXM4-40GB", None, 400.0, (), None, "Default"),
        ),
    ],
    ids=["GB200", "GH200", "GB10", "errors", "units"],
)
def test_values_that_nvidia_smi_does_not_know(row, expected):
    [found] = gpus.parse_nvidia(HEAD + row + "\n")
    assert (
        found.name,
        found.memory_bytes,
        found.power_W,
        found.mig,
        found.sm_MHz,
        found.compute_mode,
    ) == expected


def test_a_lost_gpu_does_not_hide_the_others():
    good = "1, NVIDIA H200, 143771 MiB, 570.1, 700.00 W, b, GPU-1, Default, Disabled, 1980 MHz, 3201 MHz\n"
    lost = "Unable to determine the device handle for GPU0000:C1:00.0: GPU is lost.  Reboot the system\n"
    broken = "[Unknown Error], [Unknown Error], [N/A], [N/A], [N/A], b, [N/A], [N/A], [N/A], [N/A], [N/A]\n"
    for text in (lost + HEAD + good, HEAD + lost + good, HEAD + broken + good + lost):
        assert [row.index for row in gpus.parse_nvidia(text)] == [1]
    with pytest.raises(ClusterError, match="nvidia-smi lists no GPU: Unable to determine"):
        gpus.parse_nvidia(HEAD + lost)


def test_a_driver_of_another_version_is_named(tmp_path, monkeypatch):
    message = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.129\n"
    put_tool(tmp_path, "nvidia-smi", f"#!/bin/sh\nprintf '%s' '{message}'\nexit 18\n", monkeypatch)
    with pytest.raises(ClusterError, match=r"version mismatch; NVML library version: 535\.129$"):
        gpus.list_nvidia()


def test_instances_of_old_and_new_drivers():
    found = gpus.parse_mig(
        "GPU 0: A100-SXM4-40GB (UUID: GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0)\n"
        "  MIG 3g.20gb Device 0: (UUID: MIG-GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0/1/0)\n"
        "  MIG 1c.4g.20gb Device 1: (UUID: MIG-GPU-e86cb44c-6756-fd30-cd4a-1e6da3caf9b0/2/0)\n"
        "GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n"
        "  MIG 1g.10gb+me.all Device  0: (UUID: MIG-2)\n"
        "Unable to retrieve device handle for MIG device\n"
    )
    assert [instance.profile for instance in found[0]] == ["3g.20gb", "1c.4g.20gb"]
    assert [instance.memory_bytes for instance in found[1]] == [10 * 10**9]


def test_planning_beside_divided_gpus():
    def gpu(index: int, mig: tuple[MigInstance, ...] | None) -> Accelerator:
        return Accelerator(
            index=index, name="NVIDIA H100 80GB HBM3", kind="cuda", memory_bytes=2**36, mig=mig
        )

    with pytest.raises(ClusterError, match="MIG is on, and NVIDIA H100 80GB HBM3 has no instance"):
        build_cluster(machine(accelerators=(gpu(0, ()), gpu(1, ()))))
    parts = (MigInstance(profile="1g.10gb", uuid="MIG-1"),)
    mixed = build_cluster(machine(accelerators=(gpu(0, parts), gpu(1, None), gpu(2, None))))
    assert mixed.devices_per_node == 2, "CUDA does not show divided GPUs beside whole ones"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("NoDevFiles", ()),
        ("-1", ()),
        ("0,-1,2", ("0",)),
        ("GPU-8932f937,1", ("GPU-8932f937", "1")),
        ("MIG-GPU-e86cb44c/1/0", ("MIG-GPU-e86cb44c/1/0",)),
        ("0,,1", ("0",)),
    ],
)
def test_visible_devices_end_as_in_cuda(value, expected):
    assert environment.visible_devices({"CUDA_VISIBLE_DEVICES": value}) == expected


# AMD's GPUs


def test_rocm_smi_with_text_around_and_a_second_die():
    tree = {
        "card0": {"Card Series": "AMD Instinct MI250X", "Max Graphics Package Power (W)": "560.0"},
        "card1": {"Card Series": "N/A", "Card Model": "0x7408", "Max Graphics Package Power (W)": "0.0"},
        "card2": "N/A",
        "cards": {},
        "system": "N/A",
    }
    text = f"WARNING: low-power state\n{json.dumps(tree)}\n==== End of ROCm SMI Log ====\n"
    found = gpus.parse_amd(text)
    assert [(row.index, row.name, row.power_W) for row in found] == [
        (0, "AMD Instinct MI250X", 560.0),
        (1, "0x7408", None),
    ]


def test_rocm_smi_that_is_cut_off_is_unknown(tmp_path, monkeypatch):
    put_tool(tmp_path, "rocm-smi", '#!/bin/sh\necho \'{"card0": {"Card series": \'\n', monkeypatch)
    with pytest.raises(ClusterError, match="the output of rocm-smi cannot be read"):
        gpus.list_amd()


def test_topologies_that_are_cut_off():
    table = "Link Type between two GPUs\n\n       GPU0         GPU1\nGPU0   0            XGMI\nGPU1   XGMI\n"
    assert topology.parse_amd(table).links == {"GPU0": {"GPU1": "XGMI"}}
    assert topology.parse_amd("Link Type between two GPUs\n\n") is None
    assert topology.parse_amd("Link Type between two GPUs\nERROR: no devices\n") is None
    wide = "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \tNV18\nGPU1"
    assert topology.count_gpu_links(topology.parse_nvidia(wide)) == {"NV18": 1}


# Processors


GRACE = """\
Architecture:             aarch64
CPU(s):                   72
On-line CPU(s) list:      0-63
Off-line CPU(s) list:     64-71
Model name:               Neoverse-V2
Core(s) per socket:       72
Socket(s):                1
CPU max MHz:              3447.0000
Flags:                    fp asimd sve sve2 bf16 i8mm
NUMA node(s):             9
NUMA node0 CPU(s):        0-71
NUMA node1 CPU(s):
NUMA node8 CPU(s):
"""
UNLIKE_CORES = """\
CPU(s):                   20
On-line CPU(s) list:      0-19
Vendor ID:                ARM
  Model name:             Cortex-X925
    Core(s) per socket:   10
    Socket(s):            1
    CPU max MHz:          4004.0000
  Model name:             Cortex-A725
    Core(s) per socket:   10
    Socket(s):            1
    CPU max MHz:          2860.0000
"""
POWER9 = """\
Architecture:        ppc64le
CPU(s):              160
On-line CPU(s) list: 0,8-166
Model name:          POWER9, altivec supported
Core(s) per socket:  20
Socket(s):           2
NUMA node(s):        6
NUMA node0 CPU(s):   0-79
NUMA node8 CPU(s):   80-159
NUMA node252 CPU(s):
"""
GUEST = "CPU(s): 4\nModel name: -\nSocket(s): -\nCore(s) per cluster: 4\nCluster(s): 1\nCPU max MHz: -\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GRACE, ("Neoverse-V2", 1, 72, 64, ("0-71",), 3447e6)),
        (UNLIKE_CORES, ("Cortex-X925", None, 20, 20, (), 4004e6)),
        (POWER9, ("POWER9, altivec supported", 2, 40, 160, ("0-79", "80-159"), None)),
        (GUEST, (None, None, None, 4, (), None)),
        ("CPU(s): ²\nCPU MHz: nan\nSocket(s): 99999999999999999999\n", (None, None, None, None, (), None)),
        ("\x00\xff\x1b[31m:::\n" * 1000, (None, None, None, None, (), None)),
    ],
    ids=["Grace", "unlike cores", "POWER9", "guest", "numbers", "binary"],
)
def test_processors(text, expected):
    found = cpu.parse(text, "?", 4)
    assert (
        found.name,
        found.sockets,
        found.cores,
        found.threads,
        found.numa,
        found.clock_Hz,
    ) == expected
    text_of(machine(cpu=found))


# Network, modules, file systems


@pytest.mark.parametrize(
    ("rate", "state", "layer", "expected"),
    [
        ("100 Gb/sec (2X HDR)", "4: ACTIVE", "InfiniBand", (True, 100_000, "2X HDR")),
        ("800 Gb/sec (4X XDR)", "4: ACTIVE", "InfiniBand", (True, 800_000, "4X XDR")),
        ("2.5 Gb/sec (1X SDR)", "1: DOWN", "InfiniBand", (False, None, None)),
        ("40 Gb/sec (4X QDR)", "1: DOWN", "Ethernet", (False, None, None)),
        ("200 Gb/sec (4X HDR)", "2: INIT", "InfiniBand", (False, None, None)),
        ("... Gb/sec", "4: ACTIVE", "", (True, None, None)),
        ("\x00", "4: ACTIVE", "InfiniBand", (True, None, None)),
    ],
)
def test_ports(rate, state, layer, expected, tmp_path):
    port = tmp_path / "infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("rate", rate), ("state", state), ("link_layer", layer)):
        (port / name).write_text(text)
    [found] = network.list_rdma(tmp_path)
    assert (found.up, found.Mbps, found.generation) == expected


def test_modules_with_colours_tags_and_messages():
    text = (
        "\x1b[1;94m/opt/modules\x1b[0m:\n\x1b[1mcuda/12.4\x1b[22m(\x1b[4mdefault\x1b[24m)\ncuda/12.8 <L>\n"
        "openmpi/5.0(default) <aL:H>\nopenmpi/4.1(L)\nLmod has detected the following error: x\n\x00\xff\n"
    )
    found = [(module.name, module.is_default) for module in modules.parse_modules(text)]
    assert found[:4] == [
        ("cuda/12.4", True),
        ("cuda/12.8", False),
        ("openmpi/5.0", True),
        ("openmpi/4.1", False),
    ]
    assert set(modules.choose_modules(modules.parse_modules(text))) == {"CUDA", "MPI"}


def test_quotas_that_are_exceeded_wrapped_or_cut_off():
    head = (
        "Disk quotas for usr me (uid 5):\n"
        "     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace\n"
    )
    row = "/lustre/a/very/long/name\n                100*      50      90  6d23h59m    9*   5   8  none\n"
    [(name, found)] = parse(head + row, "lfs quota")
    assert (name, found.used_bytes, found.limit_bytes) == ("/lustre/a/very/long/name", 102400, 92160)
    assert (found.used_files, found.soft_files, found.limit_files) == (9, 5, 8)
    for rest in ("/lustre 100* 50", "/lustre x 50 90 - 9 5 8 -", f"/l {'9' * 400} 0 0 - 0 0 0 -", "\x00\xff"):
        assert parse(head + rest, "lfs quota") == []
    assert parse("Disk quotas for", "quota") == parse("Disk quotas for \nFilesystem", "quota") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("stripe_count:  1 stripe_size:   1048576 pool:      \nlmm_fid: 7\n", (1, 2**20, None)),
        ("stripe_count:  0 stripe_size:   0 stripe_offset: -1\n", (None, None, None)),
        ("stripe_count:  4294967295 stripe_size:   -5\n", (None, None, None)),
    ],
)
def test_stripes_without_a_pool(text, expected):
    assert parse_stripes(text) == expected


def test_a_failing_lfs_keeps_the_free_space(tmp_path, monkeypatch):
    put_tool(tmp_path / "bin", "lfs", "#!/bin/sh\necho 'lfs: Permission denied' >&2\nexit 1\n", monkeypatch)
    mounts = [directories.Mount(str(tmp_path), "server:/lustre", "lustre")]
    found = directories.examine(tmp_path, (), [], mounts)
    assert found.free_bytes > 0
    assert found.note == "lfs failed with exit status 1: lfs: Permission denied"


# Programs that do harm


def test_a_hanging_tool_is_ended_with_its_children(tmp_path, monkeypatch):
    script = f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/pid\nwait\n"
    put_tool(tmp_path / "bin", "nvidia-smi", script, monkeypatch)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"nvidia-smi did not answer within 0\.5 s"):
        run("nvidia-smi", limit_s=0.5)
    assert time.monotonic() - began < 30
    pid = int((tmp_path / "pid").read_text())
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 30, "the child of the tool still runs"
        time.sleep(0.05)


def test_an_endless_output_is_cut_off(tmp_path, monkeypatch):
    put_tool(tmp_path, "nvidia-smi", "#!/bin/sh\nexec yes\n", monkeypatch)
    with pytest.raises(ClusterError, match=r"nvidia-smi printed more than 16\.0 MiB"):
        run("nvidia-smi")
    put_tool(tmp_path, "nvidia-smi", "#!/bin/sh\nhead -c 4000000 /dev/urandom\n", monkeypatch)
    assert gpus.parse_nvidia(run("nvidia-smi")) == ()
    assert gpus.parse_amd(run("nvidia-smi")) == ()
    assert topology.parse_nvidia(run("nvidia-smi")) is None
    put_tool(tmp_path, "nvidia-smi", "#!/bin/sh\nprintf 'a\\033[31m\\nb\\n' >&2; exit 3\n", monkeypatch)
    with pytest.raises(ClusterError, match=r"status 3: a\ufffd\[31m; b$"):
        run("nvidia-smi")


def test_programs_of_other_users_are_not_run(tmp_path, monkeypatch):
    tool = put_tool(tmp_path / "bin", "nvidia-smi", "#!/bin/sh\necho ran\n", monkeypatch)
    assert run("nvidia-smi") == "ran\n"
    tool.chmod(0o777)
    with pytest.raises(ClusterError, match=r"because every user can write it; remove .*bin from"):
        run("nvidia-smi")
    tool.chmod(0o755)
    tool.parent.chmod(0o1777)
    assert run("nvidia-smi") == "ran\n", "it belongs to this user"
    if os.geteuid() == 0:
        os.chown(tool, 12345, 12345)
        with pytest.raises(ClusterError, match=r"every user can write .*bin, and it belongs to another user"):
            run("nvidia-smi")
    monkeypatch.chdir(tool.parent)
    monkeypatch.setenv("PATH", f".::{os.defpath}")
    assert run_tool.find_program("nvidia-smi") is None, "the current folder may be of another user"


def test_names_that_look_like_commands_of_a_terminal(tmp_path):
    folder = tmp_path / "[bold] x [" / "nothing] \x1b[31m"
    folder.mkdir(parents=True)
    done = paceline("probe", folder, at=tmp_path, COLUMNS="200")
    assert done.status == 0, done.all
    assert "[bold] x [/nothing] \ufffd[31m" in done.out
    assert "\x1b" not in done.all


@pytest.mark.slow
def test_probe_beside_programs_that_hang(tmp_path):
    """Every tool sleeps; the probe still ends, and says which facts are unknown."""
    for name in ("nvidia-smi", "rocm-smi", "lscpu", "quota", "myquota", "mpirun"):
        (tmp_path / name).write_text("#!/bin/sh\nsleep 30077\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = paceline("probe", tmp_path, "--json", "m.json", at=tmp_path, PATH=path)
    assert done.status == 0, done.all
    assert "Traceback" not in done.all
    notes = {note.partition(":")[0]: note for note in json.loads((tmp_path / "m.json").read_text())["silent"]}
    slow = ("NVIDIA's GPUs", "NVIDIA's topology", "AMD's GPUs", "AMD's topology", "the CPU", "MPI", "quotas")
    assert all("did not answer within 10 s" in notes[name] for name in slow), notes
    left = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert ["sleep", "30077"] not in left


def test_ctrl_c_ends_the_tools(tmp_path):
    """A program that ends while a tool runs in a thread takes the tool with it."""
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nsleep 300\n")
    tool.chmod(0o755)
    program = (
        "import threading, time, pathlib\nfrom paceline.cluster.run_tool import run\n"
        f"threading.Thread(target=run, args=('{tool}',), daemon=True).start()\n"
        f"while not pathlib.Path('{tmp_path}/pid').exists(): time.sleep(0.01)\ntime.sleep(0.2)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid)
