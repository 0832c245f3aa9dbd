"""Probe: recorded output of tools is parsed, missing facts are absent, and this machine is described."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from command import paceline
from paceline.cluster import cpu, environment, gpus, limits, modules, mpi, network, topology
from paceline.cluster.backends import format_cusparselt, versions
from paceline.cluster.directories import Mount, examine, find_mount, list_usual, parse_stripes
from paceline.cluster.facts import Fact
from paceline.cluster.local_cluster import build_cluster
from paceline.cluster.machine import Cpu, Machine, MemoryFacts, Quota, Slurm, Torch
from paceline.cluster.probe import ParallelSources, probe
from paceline.cluster.published import sheets
from paceline.cluster.quota import find_quota, parse
from paceline.cluster.run_tool import run
from paceline.cluster.text import build_tables
from paceline.errors import ClusterError

RECORDED = Path(__file__).parent / "recorded"
GiB = 2**30


def recorded(name: str) -> str:
    return (RECORDED / name).read_text()


def machine(**parts) -> Machine:
    """Return a machine with a CPU, memory and these facts."""
    plain = {
        "host": "node1",
        "system": "Linux",
        "cpu": Cpu(architecture="x86_64", usable_cores=4),
        "memory": MemoryFacts(total_bytes=64 * GiB, available_bytes=60 * GiB),
    }
    return Machine(**(plain | parts))


def text_of(found: Machine, width: int = 120) -> str:
    from rich.console import Console

    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    for table in build_tables(found):
        console.print(table)
    console.file.close()
    return console.export_text()


# GPUs


def test_parse_nvidia_smi():
    found = gpus.parse_nvidia(recorded("nvidia-smi-query-8xH200.csv"))
    assert [row.index for row in found] == list(range(8))
    assert {(row.name, row.kind, row.memory_bytes, row.power_W, row.driver, row.sheet) for row in found} == {
        ("NVIDIA H200", "cuda", 143771 * 2**20, 700.0, "570.211.01", "h200")
    }
    v100 = gpus.parse_nvidia(recorded("nvidia-smi-query-2xV100.csv"))
    assert [(row.sheet, row.memory_bytes, row.power_W) for row in v100] == [
        ("v100-pcie-32g", 32 * GiB, None)
    ] * 2


MIG_QUERY = """\
index, name, memory.total [MiB], driver_version, power.limit [W], compute_mode, mig.mode.current, \
clocks.max.sm [MHz], clocks.max.memory [MHz]
0, NVIDIA A100-SXM4-40GB, 40960 MiB, 550.90, 400.00 W, Default, Enabled, 1410 MHz, 1215 MHz
1, NVIDIA A100-SXM4-40GB, 40960 MiB, 550.90, 400.00 W, Exclusive_Process, Disabled, 1410 MHz, 1215 MHz
"""


def write_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, refuses: str = "never") -> None:
    """Put a program on PATH that answers like nvidia-smi; one of an old driver refuses a field."""
    (folder / "query").write_text(MIG_QUERY)
    (folder / "list").write_text(recorded("nvidia-smi-list-mig.txt"))
    smi = folder / "nvidia-smi"
    smi.write_text(
        f'#!/bin/sh\ncase "$1" in\n*{refuses}*) echo "Field \\"{refuses}\\" is not a valid field to query."; '
        f"exit 2;;\n-L) exec cat {folder}/list;;\nesac\nexec cat {folder}/query\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_instances_clocks_and_modes_of_gpus(tmp_path, monkeypatch):
    write_smi(tmp_path, monkeypatch)
    first, second = gpus.list_nvidia()
    assert [instance.profile for instance in first.mig] == ["3g.20gb", "2g.10gb", "1g.5gb+me"]
    assert [instance.memory_bytes for instance in first.mig] == [20 * 10**9, 10 * 10**9, 5 * 10**9]
    assert (second.mig, second.compute_mode) == (None, "Exclusive_Process")
    assert (first.sm_MHz, first.memory_MHz, first.power_W) == (1410, 1215, 400)
    v100 = gpus.parse_nvidia(recorded("nvidia-smi-query-2xV100.csv"))
    assert [(row.mig, row.compute_mode) for row in v100] == [(None, "Default")] * 2


def test_an_old_driver_is_asked_for_less(tmp_path, monkeypatch):
    write_smi(tmp_path, monkeypatch, refuses="mig.mode.current")
    assert [row.index for row in gpus.list_nvidia()] == [0, 1]


def test_a_process_that_sees_an_instance_is_not_planned_with_a_whole_gpu(tmp_path, monkeypatch):
    write_smi(tmp_path, monkeypatch)
    rows = gpus.list_nvidia()
    uuid = rows[0].mig[1].uuid
    for visible in ((uuid,), (uuid[:12],), (uuid, rows[0].mig[0].uuid)):
        found = build_cluster(machine(accelerators=rows, visible=visible))
        assert (found.devices_per_node, found.device.name) == (1, "NVIDIA A100-SXM4-40GB, MIG 2g.10gb")
        assert found.device.memory_bytes.value == 10 * 10**9
        assert not found.device.peaks_flops
        assert found.links == ()
    whole = build_cluster(machine(accelerators=rows[1:], visible=("1",)))
    assert (whole.devices_per_node, whole.device.memory_bytes.value) == (1, 40960 * 2**20)
    with pytest.raises(ClusterError, match="MIG-other is a part of a GPU"):
        build_cluster(machine(accelerators=rows, visible=("MIG-other",)))


def test_a_gpu_with_a_similar_name_has_no_peaks_of_another():
    """An A800 has two thirds of the links of an A100."""
    text = recorded("nvidia-smi-query-8xA800.csv")
    assert {row.sheet for row in gpus.parse_nvidia(text)} == {"a800"}
    assert {row.sheet for row in gpus.parse_nvidia(text.replace("A800", "A900"))} == {None}
    assert {row.sheet for row in gpus.parse_amd(recorded("rocm-smi-2xMI250.json"))} == {None}


@pytest.mark.parametrize("text", ["", "No devices were found\n", "index, name\n", "garbage"])
def test_no_gpus(text):
    assert gpus.parse_nvidia(text) == ()
    assert gpus.parse_amd(text) == ()


def test_parse_rocm_smi():
    found = gpus.parse_amd(
        "WARNING: AMD GPU device(s) is/are in a low-power state\n" + recorded("rocm-smi-2xMI250.json")
    )
    assert [(row.index, row.name, row.power_W, row.driver, row.bus) for row in found] == [
        (k, "AMD INSTINCT MI250 (MCM) OAM AC MBA", 560.0, "6.2.4", "0000:2F:00.0") for k in range(2)
    ]
    assert {row.memory_bytes for row in found} == {None}, "the query had no memory"
    [gpu] = gpus.parse_amd(recorded("rocm-smi-memory-1xMI210.json"))
    assert (gpu.name, gpu.memory_bytes, gpu.driver) == ("Instinct MI210", 65520 * 2**20, None)


# Topology


def test_two_gpus_with_nvlink():
    found = topology.parse_nvidia(recorded("nvidia-smi-topo-2xA100.txt"))
    assert found.links == {"GPU0": {"GPU1": "NV12"}, "GPU1": {"GPU0": "NV12"}}
    assert found.cpus == {"GPU0": "0-95", "GPU1": "0-95"}
    assert found.numa == {"GPU0": "0", "GPU1": "0"}
    assert topology.find_nearest_nics(found) == {}
    assert topology.count_gpu_links(found) == {"NV12": 1}


def test_eight_gpus_with_network_cards():
    """Each GPU shares a switch with one card of a different number. NIC1, 2, 7 and 8 are for storage."""
    found = topology.parse_nvidia(recorded("nvidia-smi-topo-8xH100.txt"))
    assert topology.gpu_names(found) == tuple(f"GPU{k}" for k in range(8))
    assert topology.count_gpu_links(found) == {"NV18": 28}
    assert topology.find_nearest_nics(found) == {
        f"GPU{k}": ("PXB", (f"NIC{nic}",)) for k, nic in enumerate((0, 3, 4, 5, 6, 9, 10, 11))
    }
    assert found.numa["GPU3"] == "0"
    assert found.numa["GPU4"] == "1"


def test_network_cards_by_name():
    found = topology.parse_nvidia(recorded("nvidia-smi-topo-8xA100.txt"))
    best = topology.find_nearest_nics(found)
    assert best["GPU0"] == best["GPU1"] == ("PXB", ("mlx5_0", "mlx5_1"))
    assert best["GPU7"] == ("PXB", ("mlx5_6", "mlx5_7"))
    assert found.links["NIC8"]["NIC9"] == "PIX"
    assert found.numa["GPU6"] == "5"


def test_gpus_on_two_sockets():
    found = topology.parse_nvidia(recorded("nvidia-smi-topo-2-sockets.txt"))
    assert topology.count_gpu_links(found) == {"SYS": 1}
    assert topology.find_nearest_nics(found) == {
        "GPU0": ("PHB", ("NIC0", "NIC1")),
        "GPU1": ("PHB", ("NIC2", "NIC3")),
    }


def test_underlined_header_of_the_topology():
    plain = recorded("nvidia-smi-topo-8xA100.txt")
    first, rest = plain.split("\n", 1)
    assert topology.parse_nvidia(f"\t\x1b[4m{first.strip()}\x1b[0m\n{rest}") == topology.parse_nvidia(plain)


def test_topology_of_rocm_smi():
    found = topology.parse_amd(recorded("rocm-smi-showtopo-8xMI308X.txt"))
    assert topology.count_gpu_links(found) == {"XGMI": 28}
    assert found.numa == {f"GPU{k}": str(k // 4) for k in range(8)}


@pytest.mark.parametrize("text", ["", "Failed to initialize NVML", "NVIDIA-SMI has failed because …"])
def test_no_topology(text):
    assert topology.parse_nvidia(text) is None
    assert topology.parse_amd(text) is None


# CPU and what may be used of it


def test_two_sockets_with_numa_nodes():
    found = cpu.parse(recorded("lscpu-2xEPYC7742.txt"), "x86_64", 128)
    assert (found.name, found.sockets, found.cores, found.threads, found.usable_cores) == (
        "AMD EPYC 7742 64-Core Processor",
        2,
        128,
        256,
        128,
    )
    assert len(found.numa) == 8
    assert found.numa[3] == "48-63,176-191"
    assert found.vector == ("AVX2",), "flags go over several lines, and AVX2 stands for those before it"
    assert found.matrix == (), "its flag sme encrypts memory; that of an ARM multiplies matrices"
    assert found.virtual is None


def test_without_lscpu():
    flags = "fpu avx avx2 avx512f avx512_bf16 amx_bf16"
    info = (
        "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R)\n"
        f"flags\t\t: {flags}\n\nprocessor\t: 1\n"
    )
    found = cpu.parse(info, "x86_64", 2)
    assert (found.name, found.threads, found.sockets) == ("Intel(R) Xeon(R)", 2, None)
    assert (found.vector, found.matrix) == (("AVX-512", "AVX-512 BF16"), ("AMX BF16",))
    arm = cpu.parse("processor\t: 0\nFeatures\t: fp asimd sve sve2 bf16 sme\n", "aarch64", 1)
    assert (arm.vector, arm.matrix) == (("NEON", "SVE2", "BF16"), ("SME",))
    nothing = cpu.parse("", "arm64", 8)
    assert (nothing.name, nothing.sockets, nothing.usable_cores, nothing.vector) == (None, None, 8, ())


def test_limits_of_control_groups(tmp_path):
    """Version 2: the limits of the innermost group and its parents count."""
    inner = tmp_path / "system.slice/slurmstepd.scope/job_7"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (inner.parent / "cpu.max").write_text("350000 100000\n")
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text(f"{8 * GiB}\n")
    found = list(limits.list_control_groups("0::/system.slice/slurmstepd.scope/job_7\n", tmp_path))
    assert inner in found
    assert [limits.cpu_quota(group) for group in found if limits.cpu_quota(group)] == [3.5]
    assert [limits.group_memory_limit(group) for group in found if limits.group_memory_limit(group)] == [
        8 * GiB
    ]


def test_limits_of_control_groups_version_1(tmp_path):
    for controllers, files in (
        ("cpu,cpuacct", {"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}),
        ("memory", {"memory.limit_in_bytes": str(4 * GiB)}),
    ):
        folder = tmp_path / controllers / "docker/abc"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(text + "\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    found = list(
        limits.list_control_groups(
            "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n", tmp_path
        )
    )
    assert [limits.cpu_quota(group) for group in found if limits.cpu_quota(group)] == [2.0]
    assert [limits.group_memory_limit(group) for group in found if limits.group_memory_limit(group)] == [
        4 * GiB
    ], "nearly 2^63 is no limit"


def test_usable_cores_follow_the_affinity():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert limits.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


# Network


def test_rdma_devices(tmp_path):
    for name, rate, state, layer in (
        ("mlx5_10", "400 Gb/sec (4X NDR)", "4: ACTIVE", "InfiniBand"),
        ("mlx5_2", "100 Gb/sec (4X EDR)", "1: DOWN", "InfiniBand"),
        ("bnxt_re0", "25 Gb/sec (1X EDR)", "4: ACTIVE", "Ethernet"),
    ):
        port = tmp_path / "infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        for file, text in (("rate", rate), ("state", state), ("link_layer", layer)):
            (port / file).write_text(text + "\n")
    device = tmp_path / "infiniband/mlx5_10/device"
    (device / "net/ib0").mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    found = network.list_rdma(tmp_path)
    assert [(row.name, row.kind, row.up, row.Mbps) for row in found] == [
        ("bnxt_re0", "roce", True, 25_000),
        ("mlx5_2", "infiniband", False, None),  # without a link, the rate is not that of the port
        ("mlx5_10", "infiniband", True, 400_000),
    ]
    assert (found[2].numa, found[2].ports) == (1, "ib0")
    assert [row.generation for row in found] == [None, None, "4X NDR"]
    assert "infiniband 4X NDR" in text_of(machine(interfaces=found))
    assert network.list_rdma(tmp_path / "nowhere") == ()


# Slurm, containers, modules


def test_read_slurm_variables_of_a_job():
    env = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "a[1-2]",
        "SLURM_NTASKS": "8",
        "SLURM_GPUS_ON_NODE": "4",
    }
    assert environment.read_slurm(env) == Slurm(
        job="4711", nodes=2, node_list="a[1-2]", tasks=8, gpus_per_node="4"
    )
    array = environment.read_slurm(env | {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "3"})
    assert array.job == "4700_3"
    assert environment.read_slurm({"HOME": "/root"}) is None


@pytest.mark.parametrize(
    ("env", "marks", "cgroup", "found"),
    [
        ({}, set(), "0::/user.slice\n", None),
        ({}, {"/.dockerenv"}, "", "docker"),
        ({}, {"/run/.containerenv"}, "", "podman"),
        ({}, set(), "12:memory:/docker/0a1b2c\n", "docker"),
        ({"APPTAINER_CONTAINER": "/scratch/me/torch.sif"}, {"/.singularity.d"}, "", "apptainer, torch.sif"),
        ({"SINGULARITY_CONTAINER": "/x.sif"}, set(), "", "apptainer, x.sif"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, set(), "0::/\n", "kubernetes"),
        ({}, set(), "0::/kubepods/burstable/pod1\n", "kubernetes"),
    ],
)
def test_containers(env, marks, cgroup, found):
    assert environment.find_container(env, frozenset(marks), cgroup) == found


def test_modules_and_visible_devices():
    assert environment.loaded_modules({"LOADEDMODULES": "gcc/12.3:openmpi/4.1.6"}) == (
        "gcc/12.3",
        "openmpi/4.1.6",
    )
    assert environment.loaded_modules({}) == ()
    assert environment.visible_devices({"CUDA_VISIBLE_DEVICES": "0, 2"}) == ("0", "2")
    assert environment.visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert environment.visible_devices({}) is None


@pytest.mark.parametrize("system", ["environment-modules", "lmod"])
def test_offered_modules(system):
    found = modules.choose_modules(modules.parse_modules(recorded(f"module-avail-{system}.txt")))
    names = {what: [module.name for module in offered] for what, offered in found.items()}
    assert names == {
        "CUDA": ["cuda/11.8", "cuda/12.4", "cuda/12.8"],
        "ROCm": ["rocm/6.3.0"],
        "MPI": ["hpcx-mpi/2.20", "openmpi/4.1.6", "openmpi/5.0.3-GCC-13.3.0"],
        "Python": ["python3/3.11", "Python/3.12.3-GCCcore-13.3.0"],
        "PyTorch": ["PyTorch/2.6.0-foss-2024a-CUDA-12.6.0"],
        "NCCL": ["NCCL/2.22.3"],
    }
    defaults = [module.name for offered in found.values() for module in offered if module.is_default]
    assert defaults == (["cuda/12.4"] if system == "environment-modules" else [])
    text = " ".join(text_of(machine(offered_modules=found)).split())
    assert "offered CUDA: cuda/11.8, cuda/12.4" in text
    assert "gcc" not in text


def test_proposed_modules_fit_the_installed_torch():
    rows = modules.parse_modules(recorded("module-avail-environment-modules.txt"))
    offered = modules.choose_modules(rows)
    proposed = {
        versions: modules.propose_modules(offered, *versions)
        for versions in ((None, None), ("12.6", None), ("11.8", None), ("13.0", None), (None, "6.4"))
    }
    mpi = "openmpi/5.0.3-GCC-13.3.0"
    assert proposed == {
        (None, None): [mpi],
        ("12.6", None): ["cuda/12.4", mpi],  # the default, and not the newest
        ("11.8", None): ["cuda/11.8", mpi],
        ("13.0", None): [mpi],
        (None, "6.4"): ["rocm/6.3.0", mpi],
    }
    facts = {
        "offered_modules": offered,
        "torch": Torch(version="2.13", cuda="12.6", backends=(), communication=()),
    }
    assert 'in site.toml: modules = ["cuda/12.4", "openmpi/5.0.3-GCC-13.3.0"]' in " ".join(
        text_of(machine(**facts)).split()
    )
    assert modules.propose_modules({}, "12.6", None) == []


@pytest.mark.parametrize("text", ["", "garbage: (\n", "bash: module: command not found\n"])
def test_no_offered_modules(text):
    assert modules.choose_modules(modules.parse_modules(text)) == {}


def test_versions_of_modules_are_ordered_as_numbers():
    rows = modules.parse_modules("cuda/12.10\ncuda/12.8\ncompilers/gcc/openmpi/4.1\nmpi4py/3.1\n")
    found = modules.choose_modules(rows)
    assert [module.name for module in found["CUDA"]] == ["cuda/12.8", "cuda/12.10"]
    assert [module.name for module in found["MPI"]] == ["compilers/gcc/openmpi/4.1"]


def test_a_login_shell_lists_its_modules(tmp_path, monkeypatch):
    """Both module systems print the list to standard error."""
    text = tmp_path / "text"
    text.write_text(recorded("module-avail-lmod.txt"))
    (tmp_path / ".bash_profile").write_text(f'module() {{ [ "$*" = "-t avail" ] && cat {text} >&2; }}\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [module.name for module in modules.list_offered()["ROCm"]] == ["rocm/6.3.0"]
    (tmp_path / ".bash_profile").write_text("module() { echo broken >&2; return 3; }\n")
    with pytest.raises(ClusterError, match="bash failed with exit status 3: broken"):
        modules.list_offered()
    (tmp_path / ".bash_profile").write_text("unset -f module\n")
    assert modules.list_offered() == {}


# File systems and quotas


def test_quota_with_units_and_an_exceeded_limit():
    """The grace period is empty for a quota that is not exceeded."""
    (home, first), (data, second) = parse(recorded("quota-exceeded.txt"), "quota")
    assert (home, data) == ("/home/users", "/home/data")
    assert first == Quota(
        used_bytes=101 * GiB,
        soft_bytes=100 * GiB,
        limit_bytes=110 * GiB,
        used_files=382_000,
        soft_files=1_000_000,
        limit_files=1_100_000,
        source="quota",
    )
    assert (second.used_bytes, second.used_files, second.limit_files) == (22634 * 2**20, 33435, 10_000_000)


def test_quotas_of_several_file_systems():
    found = dict(parse(recorded("quota-nfs.txt"), "quota"))
    assert found["/home"].limit_files is None, "0 is no limit"
    assert found["/workspace"].limit_bytes == 500 * GiB
    assert found["/nfs_global"].limit_files == 10_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "stripe_count:  4 stripe_size:   1048576 pattern:       0 stripe_offset: -1 pool: flash\n",
            (4, 2**20, "flash"),
        ),
        ("/scratch\nstripe_count:   1 stripe_size:    4194304 stripe_offset:  -1\n", (1, 2**22, None)),
        (
            "  lcm_layout_gen:    0\n  lcm_entry_count:   2\n    lcme_id:             N/A\n"
            "      stripe_count:  1       stripe_size:   1048576       pattern:       raid0\n"
            "    lcme_id:             N/A\n      stripe_count:  -1       stripe_size:   4194304\n",
            (1, 2**20, None),
        ),
        ("stripe_count:  -1 stripe_size:   1048576 stripe_offset:  -1\n", (-1, 2**20, None)),
        ("", (None, None, None)),
        ("error: getstripe failed\n", (None, None, None)),
    ],
    ids=["pool", "path", "progressive", "all", "no lfs", "error"],
)
def test_stripes_of_lustre(text, expected):
    assert parse_stripes(text) == expected


def test_quotas_of_lustre():
    [(_, human)] = parse(recorded("lfs-quota-human.txt"), "lfs quota")
    assert (human.used_bytes, human.soft_bytes, human.limit_bytes) == (
        round(792.3 * 2**20),
        None,
        round(9.537 * 2**40),
    )
    assert (human.used_files, human.limit_files) == (9, 2_000_000)
    [(name, kbytes)] = parse(recorded("lfs-quota-kbytes.txt"), "lfs quota")
    assert (name, kbytes.used_bytes, kbytes.limit_bytes, kbytes.limit_files) == (
        "/fred",
        1041408 * 1024,
        6291456 * 1024,
        None,
    )


def test_a_site_counts_bytes_and_files():
    """A long name of a file system is on a separate line."""
    text = """
- HOME and Store filesystems:
Filesystem                 space   quota   limit   files   quota   limit
10.117.49.201:/Home_FT2    6034M      9G     10G   54721    100k    101k
10.117.49.101:/a/very/long/name/of/a/store
                           1024K    490G    500G       7    300k    301k
- Lustre:
     Filesystem    used   quota   limit   grace   files   quota   limit   grace
/mnt/lustre/scratch     2T*     2T      3T    6d1h   12345  200000  200000       -
"""
    found = dict(parse(text, "myquota"))
    home, store, lustre = (
        found["10.117.49.201:/Home_FT2"],
        found["10.117.49.101:/a/very/long/name/of/a/store"],
        found["/mnt/lustre/scratch"],
    )
    assert (home.limit_bytes, home.soft_files, home.used_files) == (10 * GiB, 100_000, 54721)
    assert (store.used_bytes, store.limit_bytes, store.soft_files) == (2**20, 500 * GiB, 300_000)
    assert (lustre.limit_bytes, lustre.limit_files) == (3 * 1024 * GiB, 200_000)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Disk quotas for user root (uid 0): none\n",
        "usage is fine\nFilesystem 3 4\n",
        "Filesystem blocks quota limit\n/home x y z\n",
    ],
)
def test_no_quota(text):
    assert parse(text, "quota") == []


def test_find_quota_of_a_directory():
    rows = [
        (name, Quota(used_bytes=k)) for k, name in enumerate(("server:/home", "/home/me", "/", "/scratch"))
    ]
    assert find_quota("/home/me/x", "/home", "server:/home", rows).used_bytes == 0
    assert find_quota("/home/me/x", "/home", "/dev/sda", rows).used_bytes == 1
    assert find_quota("/scratch/me", "/scratch", None, rows).used_bytes == 3
    assert find_quota("/scratchy", "/scratchy", None, rows[3:]) is None


def test_mount_of_a_directory():
    mounts = [Mount("/", "a", "ext4"), Mount("/home", "b", "nfs4"), Mount("/home", "c", "lustre")]
    assert find_mount("/home/me", mounts).filesystem == "lustre", "the last one hides the one below"
    assert find_mount("/homes", mounts).filesystem == "ext4"
    assert find_mount("/x", []) is None


def test_list_usual_directories(tmp_path):
    (tmp_path / "scratch").mkdir()
    env = {
        "HOME": str(tmp_path),
        "STORE": str(tmp_path),
        "SCRATCH": str(tmp_path / "scratch"),
        "WORK": str(tmp_path / "gone"),
        "DATA": "here",
    }
    found = list_usual(env, tmp_path)
    assert found[tmp_path] == ("HOME", "STORE")
    assert found[tmp_path / "scratch"] == ("SCRATCH",)
    assert Path("here") not in found


def test_usual_directories_that_do_not_exist_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for name, value in {"HOME": tmp_path, "WORK": tmp_path / "gone", "DATA": tmp_path / "file"}.items():
        monkeypatch.setenv(name, str(value))
    found = [row.path for row in probe().directories]
    assert str(tmp_path) in found
    assert not {str(tmp_path / "gone"), str(tmp_path / "file")} & {*found}


def test_examine_a_directory(tmp_path):
    own = [Mount(str(tmp_path), "disk", "made up")]
    quota = Quota(used_bytes=5)
    found = examine(tmp_path, ("SCRATCH",), [("disk", quota)], own)
    usage = psutil.disk_usage(str(tmp_path))
    assert (found.filesystem, found.mount, found.quota, found.size_bytes) == (
        "made up",
        str(tmp_path),
        quota,
        usage.total,
    )
    assert found.free_bytes == pytest.approx(usage.free, abs=GiB)


# Sources


def test_versions_in_the_build_configuration_of_torch():
    text = (
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for Intel(R) 64 "
        "architecture applications\n"
        "  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80afa71049cd69a3df32adcccb623b12cd7baa22)\n"
        "  - OpenMP 201511 (a.k.a. OpenMP 4.5)"
    )
    assert versions(text) == {"mkl": "2024.2", "mkldnn": "3.12.0", "openmp": "4.5"}
    assert [format_cusparselt(number) for number in (602, 701, 1000, None)] == [
        "0.6.2",
        "0.7.1",
        "1.0.0",
        None,
    ]
    assert versions("PyTorch built with:\n  - clang 14") == {}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/\n",
            "Open MPI 4.1.4",
        ),
        (
            "HYDRA build details:\n    Version:                                 4.0.2\n    Release Date: …",
            "MPICH 4.0.2",
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230306", "Intel MPI 2021.9"),
        ("", None),
    ],
)
def test_names_of_mpi(text, name):
    assert mpi.parse_mpi_name(text) == name


def test_missing_and_failing_tools():
    assert run("no-such-tool-here") == ""
    with pytest.raises(ClusterError, match="failed with exit status 3: no such device"):
        run(sys.executable, "-c", "import sys; print('no such device', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ClusterError, match=r"did not answer within 0.2 s"):
        run(sys.executable, "-c", "import time; time.sleep(60)", limit_s=0.2)


def test_a_hanging_source_does_not_block_others():
    def breaks():
        raise OSError(5, "Input/output error")

    began = time.monotonic()
    answers, reasons = ParallelSources(
        {"quick": lambda: 7, "slow": lambda: time.sleep(60), "broken": breaks}
    ).collect(0.3)
    assert time.monotonic() - began < 30
    assert answers == {"quick": 7}
    assert reasons == {"slow": "no answer within 0.3 s", "broken": "Input/output error"}


# The machine, and the cluster that it is


def h100s(**parts) -> Machine:
    query = "index, name, memory.total [MiB], driver_version, power.limit [W]\n"
    rows = "".join(f"{k}, NVIDIA H100 80GB HBM3, 81559 MiB, 550.90, 700.00 W\n" for k in range(8))
    return machine(
        accelerators=gpus.parse_nvidia(query + rows),
        topology=topology.parse_nvidia(recorded("nvidia-smi-topo-8xH100.txt")),
        **parts,
    )


def test_the_cluster_of_a_node_with_gpus():
    found = build_cluster(h100s(slurm=Slurm(job="1", nodes=4)))
    assert (found.nodes, found.devices_per_node, found.devices) == (4, 8, 32)
    assert found.device.memory_bytes == Fact(value=81559 * 2**20, source="measured", note="nvidia-smi")
    assert found.device.peaks_flops == sheets()["h100-sxm"].device().peaks_flops
    assert [(link.axis, link.beta_Bps.value, link.alpha_s) for link in found.links] == [("node", 450e9, None)]
    assert build_cluster(h100s(visible=("0", "3"))).devices_per_node == 2


def test_links_are_not_guessed():
    """Links are unknown without a topology, and if some pairs are connected by PCIe."""
    whole = h100s()
    assert build_cluster(whole.model_copy(update={"topology": None})).links == ()
    links = {name: dict(row) for name, row in whole.topology.links.items()}
    links["GPU0"]["GPU7"] = "SYS"
    assert (
        build_cluster(
            whole.model_copy(update={"topology": whole.topology.model_copy(update={"links": links})})
        ).links
        == ()
    )


def test_the_cluster_of_a_node_without_gpus():
    found = build_cluster(
        machine(memory=MemoryFacts(total_bytes=64 * GiB, available_bytes=GiB, limit_bytes=8 * GiB))
    )
    assert (found.device.kind, found.devices_per_node, found.cores_per_node) == ("cpu", 1, 4)
    assert found.device.memory_bytes.value == found.host_memory_bytes.value == 8 * GiB
    assert found.device.peaks_flops == {}
    assert build_cluster(h100s(visible=())).device.kind == "cpu", "no GPU is visible to this process"


@pytest.mark.parametrize("width", [80, 120])
def test_text_of_a_large_machine_fits_the_width(width):
    text = text_of(
        h100s(
            container="docker",
            modules=("cuda/12.8",),
            slurm=Slurm(job="4711", nodes=2, node_list="a[1-2]", partition="gpu"),
        ),
        width,
    )
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for part in (
        "8 × NVIDIA H100 80GB HBM3",
        "NV18 between 28 pairs of GPUs",
        "bf16 989.4 (1,978.9)",
        "Slurm job 4711 on gpu, 2 nodes (a[1-2])",
        "cuda/12.8",
        "132 streaming multiprocessors, 50 MiB of L2 cache, published",
    ):
        assert part in words
    assert re.search(r"^3 .*79\.6 GiB +700 W +0 .*NIC5 \(PXB\)", text, re.M)


def test_missing_facts_are_not_shown():
    text = text_of(machine())
    assert re.search(r"^GPUs +none", text, re.M)
    for word in ("peaks", "links", "modules", "within", "NUMA", "PyTorch"):
        assert word not in text


def test_a_failing_driver_is_not_reported_as_no_gpu(tmp_path, monkeypatch):
    """A fake nvidia-smi prints what the real tool prints without its driver."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA "
        "driver.'\nexit 9\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = probe([tmp_path])
    assert "NVIDIA's GPUs: nvidia-smi failed with exit status 9: NVIDIA-SMI has failed" in " ".join(
        found.silent
    )
    assert re.search(r"^GPUs +unknown", text_of(found), re.M)


def test_this_machine(tmp_path):
    found = probe([tmp_path])
    assert found.cpu.usable_cores == limits.usable_cores()
    assert found.memory.total_bytes == psutil.virtual_memory().total
    assert [row.path for row in found.directories] == [str(tmp_path)]
    assert found.directories[0].free_bytes > 0
    assert found.silent == ()
    assert Machine.model_validate_json(found.model_dump_json()) == found


def test_a_broken_torch_is_reported(tmp_path):
    broken = subprocess.Popen(
        [sys.executable, "-c", "import torch_of_another_name"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    found = probe([tmp_path], broken)
    assert found.torch is None
    assert found.silent == (
        "PyTorch: import torch failed: ModuleNotFoundError: No module named 'torch_of_another_name'",
    )


def test_probe_command_writes_its_json(tmp_path):
    result = paceline("probe", tmp_path, "--json", "found.json", at=tmp_path)
    assert result.status == 0, result.all
    tree = json.loads((tmp_path / "found.json").read_text())
    assert (tree["format"], tree["version"]) == ("paceline.probe", 1)
    found = Machine.model_validate_json((tmp_path / "found.json").read_text())
    assert found.torch is not None, found.silent
    assert [row.name for row in found.torch.backends] == [
        "cuda",
        "cudnn",
        "cusparselt",
        "mps",
        "mkl",
        "mkldnn",
        "openmp",
        "opt_einsum",
        "xeon",
    ]
    available = {row.name: row.available for row in found.torch.communication}
    assert available["gloo"]
    assert "xccl" in available
    assert all(row.available or row.note for row in (*found.torch.backends, *found.torch.communication)), (
        "each missing library must have a note on how to get it"
    )
    assert found.torch.version in result.out
    assert str(tmp_path) in result.out.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nowhere",), "there is no directory nowhere; name an existing one"),
        (
            ("--json", "nowhere/x.json"),
            "cannot write nowhere/x.json: no such folder: nowhere; create it first",
        ),
    ],
)
def test_bad_input(words, sentence, tmp_path):
    result = paceline("probe", *words, at=tmp_path)
    assert (result.status, result.out, result.err) == (2, "", f"paceline: {sentence}\n")
    assert not list(tmp_path.iterdir())
