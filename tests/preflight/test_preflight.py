"""Preflight finds the problems of a training before it is queued, and no others.

Tests with a real Slurm are in test_slurm.py.
"""

import json
import math
import os
import platform
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from clusters import make_cluster
from command import paceline, succeed, write_task
from mounts import mount_tmpfs
from paceline import train
from paceline.cluster import directories, file
from paceline.cluster.facts import Cluster, Device, Disk, Fact
from paceline.cluster.machine import Quota
from paceline.distributed.world import World
from paceline.launch.slurm.job_script import Job
from paceline.launch.slurm.site import Site
from paceline.preflight.checks import CHECKS
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import run_checks
from paceline.preflight.resource_checks import parse_slurm_bytes
from paceline.preflight.room_check import estimate_log_bytes, estimate_usage
from paceline.preflight.site_checks import can_requeue, find_overrides
from paceline.run import create
from paceline.spec import Launch, Save, Spec

pytestmark = pytest.mark.processes

Findings = dict[str, list[str]]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    write_task(tmp_path)
    return tmp_path


def build_context(
    plan: str | None = None, ranks: int = 2, time: str | None = None, target: Path | None = None, **more: Any
) -> PreflightContext:
    launch = Launch(
        plan=plan,
        ranks=ranks,
        device="cpu",
        **{key: more.pop(key) for key in ("nodes", "run") if key in more},
    )
    spec = Spec(**{"task": "models:Points", "batch": 12, "steps": 10} | more)
    return PreflightContext(spec, launch, time, None, str(target) if target is not None else None)


def run_all(**words: Any) -> Findings:
    """Return "VERDICT: message" of each finding by check."""
    results: Findings = {}
    for finding in run_checks(build_context(**words), CHECKS):
        results.setdefault(finding.check, []).append(f"{finding.verdict}: {finding.message}")
    return results


def run_one(check: str, **words: Any) -> list[str]:
    return [f"{verdict}: {message}" for verdict, message in CHECKS[check].run(build_context(**words))]


def find_failures(results: Findings) -> list[str]:
    return [line for lines in results.values() for line in lines if line.startswith("fails: ")]


def write_cluster(folder: Path, memory_bytes: float, flops: float = 1e11, **more: Any) -> Path:
    """Write a cluster.json of CPUs with all facts known."""
    device = Device(
        name="cpu",
        kind="cpu",
        memory_bytes=Fact(value=memory_bytes),
        memory_Bps=Fact(value=20e9),
        peaks_flops={"fp32": Fact(value=flops)},
    )
    path = folder / "cluster.json"
    file.write(path, Cluster(name="other", nodes=2, device=device, cores_per_node=8, **more))
    return path


@pytest.mark.parametrize(
    ("plan", "ranks", "played"),
    [
        ("single", 1, "rank 0"),
        pytest.param("ddp", 4, "ranks 0, 3", marks=pytest.mark.slow),
        ("zero3", 4, "ranks 0, 3"),
        ("pp=2", 4, "ranks 0, 2, 3"),
        pytest.param("tp=2", 2, "ranks 0, 1", marks=pytest.mark.slow),
    ],
)
def test_a_valid_training_has_no_failure(plan, ranks, played):
    results = run_all(plan=plan, ranks=ranks, task="text" if plan == "tp=2" else "models:Text", batch=16)
    assert find_failures(results) == []
    assert results["build"][0].startswith(f"passes: built and simulated a step of {played}: it sends ")
    assert list(results) == list(CHECKS)


def test_checks_continue_after_failures():
    Path("site.toml").write_text('partiton = "gpu"\n')
    results = run_all(batch=13, run=".")
    assert results["site"] == ["fails: site.toml: unknown key partiton; did you mean partition?"]
    assert results["slurm"] == ["skipped: requires the result of site"]
    assert results["plan"] == [
        "fails: batch 13 is not divisible by ranks × microbatches = 2 × 1 = 2: use --batch 14 or 12"
    ]
    assert (
        results["build"] == results["memory"] == results["time"] == ["skipped: requires the result of plan"]
    )
    assert results["room"] == ["fails: . already exists; choose another --run-dir (it is not a run)"]
    assert len(find_failures(results)) == 3
    assert results["task"][0].startswith("passes: Points builds a model of 78 parameters")


def test_ranks_that_do_not_fit_the_nodes():
    results = run_all(ranks=3, nodes=2)
    assert results["ranks"] == ["fails: 3 ranks cannot be spread evenly over 2 nodes; use --ranks 4"]
    assert results["task"][0].startswith("passes")


def test_two_nodes_require_slurm(monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    assert run_all(nodes=2)["slurm"][0].startswith("fails: there is no sbatch on PATH")
    assert run_all(nodes=1)["slurm"] == ["passes: one node does not require Slurm: no sbatch on PATH"]


# The site file


def check_site_file(text: str) -> list[str]:
    Path("site.toml").write_text(text)
    return run_all(task="nowhere")["site"][1:]


def test_modules_are_loaded_in_a_login_shell(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert check_site_file('modules = ["cuda/12"]')[0].startswith(
        "warns: modules cuda/12 were not checked: this machine has no command module"
    )
    (folder / ".bash_profile").write_text(
        'module() { [ "$2" = cuda/12 ] || { echo "no module $2" >&2; return 1; }; }\n'
    )
    assert check_site_file('modules = ["cuda/12"]') == ["passes: modules cuda/12 can be loaded"]
    assert check_site_file('modules = ["cuda/99"]') == [
        "fails: module load cuda/99: no module cuda/99; module avail lists the modules"
    ]
    (folder / ".bash_profile").write_text(
        'module() { [ "$*" != "-t avail" ] && { echo "no module $2"; return 1; }; '
        "printf 'openmpi/4.1\\ncuda/12.4(default)\\n' >&2; }\n"
    )
    assert check_site_file('modules = ["cuda/12.3"]') == [
        "fails: module load cuda/12.3: no module cuda/12.3; did you mean cuda/12.4?; module avail lists the "
        "modules"
    ]


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_venv_without_torch_fails(folder):
    assert check_site_file('venv = "env"')[0].startswith("fails: venv env has no env/bin/python; create it")
    write_program(folder / "env/bin/python", "echo no torch >&2; exit 1")
    assert check_site_file('venv = "env"') == [
        "fails: venv env: no torch; install it, or specify another environment in the site file"
    ]
    write_program(folder / "env/bin/python", f'exec {sys.executable} -S "$@"')  # without installed packages
    assert check_site_file('venv = "env"')[0].startswith("fails: venv env: no torch")
    write_program(folder / "env/bin/python", f'exec {sys.executable} "$@"')
    assert check_site_file('venv = "env"') == ["passes: venv env has torch and paceline"]


def test_conda_may_come_with_a_module(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    assert (
        check_site_file('conda = "train"')[0]
        == "fails: conda='train' requires conda, which is not on PATH; add its module to the site file"
    )
    write_program(
        folder / "bin/conda", '[ "$3" = train ] || { echo "EnvironmentLocationNotFound: $3"; exit 1; }'
    )
    (folder / ".bash_profile").write_text(f'module() {{ PATH="{folder}/bin:$PATH"; }}\n')
    results = check_site_file('modules = ["conda"]\nconda = "train"')
    assert results == [
        "passes: modules conda can be loaded",
        "passes: conda environment train has torch and paceline",
    ]
    assert check_site_file('modules = ["conda"]\nconda = "trian"')[1].startswith(
        "fails: conda environment trian: EnvironmentLocationNotFound: trian; "
    )


def test_lines_of_setup_are_checked(folder):
    Path("set_vars.sh").write_text("export A=1\n")
    assert "passes: setup is valid bash, of 2 lines" in check_site_file(
        'setup = ["source set_vars.sh", "A=1; export A"]'
    )
    assert check_site_file('setup = ["if true"]')[0].startswith("fails: setup is not valid bash: bash: line")
    assert check_site_file('setup = [". ./none.sh"]')[0].startswith("warns: setup reads ./none.sh, which")


def test_files_that_the_site_file_names_must_exist(folder):
    Path("no.tar").write_text("no tar")
    assert check_site_file('container = "no.sif"') == [
        "fails: container no.sif does not exist; specify its whole path in the site file"
    ]
    assert check_site_file('scratch = "/x"\nstage_in = "none.tar"')[0].startswith(
        "fails: stage_in='none.tar' cannot be read: No such file"
    )
    assert check_site_file('scratch = "/x"\nstage_in = "no.tar"')[0].startswith(
        "fails: stage_in='no.tar' must be a tar file"
    )


def test_variables_that_override_the_script_are_named():
    job = Job(Path("/r"), Path("/"), 2, 4, "02:00:00", "python")
    environ = {"SBATCH_PARTITION": "gpu", "SBATCH_TIMELIMIT": "02:00:00", "HOME": "/"}
    (sentence,) = find_overrides(job, Site(partition="cpu"), environ)
    assert sentence.startswith(
        "SBATCH_PARTITION=gpu overrides partition=cpu of the job script; unset SBATCH_PARTITION"
    )
    assert find_overrides(job, Site(partition="gpu"), environ) == []


# The training

BROKEN = """
from paceline import Task
from my import Points, Regression


class Missing(Points):
    def __getitem__(self, index):
        if index == len(self) - 1:
            raise FileNotFoundError("img_52.png")
        return super().__getitem__(index)


class Broken(Regression):
    def dataset(self, split):
        return Missing(53) if split == "train" else None


class Careless(Regression):
    def loss(self, output, batch):
        return output @ batch[1]


class Peeking(Regression):
    def loss(self, output, batch):
        return super().loss(output, batch) * (2.0 if output.mean().item() > 0 else 1.0)
"""


def test_a_missing_last_sample_is_found(folder):
    write_task(folder, BROKEN, "broken.py")
    results = run_all(task="broken.py:Broken")
    assert results["data"] == [
        "fails: sample 52 of 'train' raised FileNotFoundError: img_52.png (broken.py, line 9)"
    ]
    assert results["build"] == ["skipped: requires the result of data"]


def test_bytes_of_the_data(folder):
    """The digits have 1,437 training samples of 8 × 8 float32, and an int64 each."""
    training, validation = run_one("data", task="digits", batch=64)
    assert training.endswith("; as tensors, all have about 370.5 KiB")
    assert validation.endswith("; as tensors, all have about 92.8 KiB")


def test_an_error_in_the_task_is_a_finding(folder):
    """Checks that would repeat the error are skipped."""
    write_task(folder, BROKEN, "broken.py")
    results = run_all(task="broken.py:Careless")
    assert re.match(
        r"fails: loss\(\) raised RuntimeError: .*must have same.* \(broken\.py, line \d+\)",
        results["build"][0],
        re.S,
    ), results["build"]
    assert results["memory"] == results["time"] == ["skipped: requires the result of build"]
    assert results["room"][0].startswith("passes: ")


def test_a_plan_that_the_model_does_not_support():
    results = run_all(plan="pp=8", ranks=8, batch=96)
    assert results["plan"][0].startswith("passes")
    [failed] = [line for line in results["build"] if line.startswith("fails: ")]
    assert failed.count("; ") + failed.count(": ") >= 2  # with a fix
    assert (
        "warns: batch 96 is more than the 29 training samples: each step has samples several times"
        in results["build"]
    )
    assert run_all(plan="ddp", ranks=30, batch=30)["build"] == [
        "fails: 30 ranks for 29 training samples; use at most --ranks 29"
    ]


def test_a_model_that_cannot_be_built_without_values_is_a_warning(folder):
    write_task(folder, BROKEN, "broken.py")
    results = run_all(task="broken.py:Peeking")
    assert results["build"][0].startswith("warns: not built: Peeking uses values that depend on its weights")
    assert find_failures(results) == []
    results = run_all(plan="local-sgd")
    assert results["build"][0].startswith("warns: plan local-sgd cannot be built without its ranks")
    assert results["memory"][0].startswith("warns: not predicted: ")
    assert find_failures(results) == []


# Memory, room, time


def test_too_little_memory(folder):
    words = {"task": "text", "plan": "ddp", "ranks": 4, "batch": 16}
    (enough,) = run_one("memory", target=write_cluster(folder, 2**30), **words)
    assert enough.startswith("passes: ")
    assert enough.endswith("the limit of other per rank is 512.0 MiB")
    (little,) = run_one("memory", target=write_cluster(folder, 50 * 2**20), **words)
    assert little.startswith("fails: ")
    assert "the limit of other per rank is 25.0 MiB; use plan " in little
    (none,) = run_one("memory", target=write_cluster(folder, 2**20), **words)
    assert none.endswith("no plan fits on this number of ranks; use more ranks or a smaller --batch")
    Path("site.toml").write_text('memory = "50M"\n')
    (requested,) = run_one("memory", target=write_cluster(folder, 2**30), **words)
    assert "the limit of memory='50M' per rank is 12.5 MiB" in requested
    assert requested.startswith("fails: ")


def test_more_ranks_than_devices(folder):
    file.write(folder / "gpus.json", make_cluster(8, of_a_node=4))
    context = PreflightContext(
        Spec(task="models:Points", batch=16), Launch(nodes=2, ranks=16), None, None, "gpus.json"
    )
    [finding] = [finding for finding in run_checks(context, CHECKS) if finding.check == "memory"]
    assert (finding.verdict, finding.message.partition(";")[0]) == (
        "fails",
        "nodes × ranks must be at most 2 × 4, the nodes × devices of a100, got 2 × 8",
    )


def test_gpus_of_an_unknown_kind_need_a_cluster():
    Path("site.toml").write_text('gres = "gpu:a100:4"\n')
    context = PreflightContext(Spec(task="models:Points", batch=12), Launch(ranks=2), None, None, None)
    results = {finding.check: (finding.verdict, finding.message) for finding in run_checks(context, CHECKS)}
    assert results["memory"] == results["time"]
    assert results["memory"][0] == "warns"
    assert results["memory"][1].startswith(
        "not predicted: jobs get GPUs (gpu:a100:4 per node), but this machine has none; specify the cluster"
    )


@pytest.mark.parametrize(
    ("text", "size"), [("64G", 2**36), ("500", 500 * 2**20), ("1T", 2**40), ("0", math.inf), ("?", math.inf)]
)
def test_memory_in_slurm_notation(text, size):
    assert parse_slurm_bytes(text) == size


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_estimated_usage_equals_real_checkpoints(ranks, folder):
    if ranks == 1:
        list(train(Spec(task="digits", steps=2), world=World(), run=create(folder / "r", Spec(), Launch())))
    else:
        words = (
            "--steps",
            "2",
            "--ranks",
            str(ranks),
            "--device",
            "cpu",
            "--run-dir",
            "r",
            "--plan",
            "zero1",
        )
        succeed("train", "digits", *words, at=folder)
    real = [path.stat().st_size for path in (folder / "r/ckpt/step_2").iterdir()]
    files_of_run = [path for path in (folder / "r").rglob("*") if path.is_file()]
    logs = sum(path.stat().st_size for path in files_of_run if "ckpt" not in path.parts)
    context = build_context(task="digits", batch=64, ranks=ranks)
    (size, files), (_, others) = estimate_usage(context, 1), estimate_usage(context, 0)
    assert size == pytest.approx(sum(real), rel=0.02)
    assert files - others == len(real) == ranks + 2
    assert len(files_of_run) <= files
    assert logs <= estimate_log_bytes(context) <= 2**18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("size=3m", "has 3.0 MiB free; use another --run-dir"),
        ("size=7400k", "has 7.2 MiB free; use another --run-dir"),  # too little with logs
        ("size=64m,nr_inodes=20", "has space for 19 files; use another --run-dir"),
        ("size=64m", None),
    ],
)
def test_too_little_disk_space(options, message, folder):
    (folder / "small").mkdir()
    with mount_tmpfs(folder / "small", options):
        (line,) = run_one("room", task="digits", batch=64, run="small/a")
    assert line.startswith(
        ("fails" if message else "passes")
        + ": 4 checkpoints of 1.8 MiB (--keep 2, the best and the next) and logs of up to "
    )
    assert " KiB, 7.3 MiB in 43 files" in line
    assert message is None or message in line


def test_a_folder_without_backups(monkeypatch, folder):
    monkeypatch.setenv("STORE", str(folder))
    said = {}
    for place in ("[]", '["/elsewhere"]', '["$STORE"]', '["/elsewhere", "$STORE"]', '["$UNSET"]'):
        Path("site.toml").write_text(f"backups = {place}\n")
        said[place] = " | ".join(run_one("room", task="digits", batch=64)).partition(" is not backed up")[2]
    assert said == {
        "[]": ": copy what you keep to another site",
        '["/elsewhere"]': ": copy what you keep to /elsewhere",
        '["$STORE"]': "",
        '["/elsewhere", "$STORE"]': "",
        '["$UNSET"]': ": copy what you keep to $UNSET",
    }


def test_quotas(monkeypatch, folder):
    def check_quota(**more: int) -> str:
        monkeypatch.setattr(directories, "read_quotas", lambda: [(str(folder), Quota(used_bytes=0, **more))])
        return " | ".join(run_one("room", task="digits", batch=64))

    assert check_quota(limit_bytes=2**30, soft_bytes=2**30).startswith("passes: ")
    assert "has 1.0 MiB left of a quota of 1.0 MiB; use another" in check_quota(limit_bytes=2**20)
    assert "has 5 files left of a quota of 10; use another" in check_quota(used_files=5, limit_files=10)
    assert "warns: they exceed a quota of 1.0 MiB, which is permitted only for a while" in check_quota(
        soft_bytes=2**20
    )


@pytest.mark.parametrize(
    ("steps", "time", "site", "verdict", "message"),
    [
        (100, "02:00:00", "", "passes", "the limit of the job is 02:00:00"),
        (10**7, "02:00:00", "", "warns", "the limit of the job is 02:00:00: the job will be requeued "),
        (
            10**7,
            "02:00:00",
            'sbatch = ["--no-requeue"]',
            "fails",
            "and --no-requeue ends the training there; request more time",
        ),
        (
            10**7,
            "2",
            "notice_s = 90",
            "fails",
            "and no step can be done and saved 90 s before it; request more time",
        ),
        (10**7, "two hours", "", "fails", "--time 'two hours' is not a time"),
    ],
)
def test_time_limits(steps, time, site, verdict, message, folder):
    Path("site.toml").write_text(site)
    target = write_cluster(folder, 2**30)
    (line,) = run_all(task="digits", batch=64, steps=steps, time=time, target=target)["time"]
    assert line.startswith(f"{verdict}: ")
    assert message in line


def test_the_number_of_requeues_and_saves_follows_from_the_predicted_times(folder):
    disk = Disk(path=str(folder), checkpoint_Bps=Fact(value=1e5))
    target = write_cluster(folder, 2**30, flops=1e9, disks=(disk,))
    context = build_context(
        task="digits",
        batch=64,
        steps=10**5,
        time="01:00:00",
        target=target,
        save=Save(every=10**4, minutes=math.inf),
    )
    ((verdict, message),) = CHECKS["time"].run(context)
    save_s = context.checkpoint_bytes / 1e5
    work_s = 10**5 * context.cost.step_s + 10 * save_s
    assert "10 saves of 18." in message
    requeues = -(-work_s // (3600 - 120 - 30)) - 1
    assert verdict == "warns"
    assert message.endswith(f"the job will be requeued {requeues:.0f} time{'s' * (requeues > 1)}")


def test_auto_requires_a_known_device():
    Path("site.toml").write_text("gpus_per_node = 2\n")
    context = PreflightContext(Spec(task="models:Points", batch=12), Launch(plan="auto"), None, None, None)
    [finding] = [finding for finding in run_checks(context, CHECKS) if finding.check == "plan"]
    assert finding.verdict == "fails"
    assert finding.message.endswith("specify the cluster, e.g. --cluster a100-80g:4x1")


def test_no_requeue():
    assert can_requeue(Site(), {})
    assert not can_requeue(Site(sbatch=("--no-requeue",)), {})
    assert not can_requeue(Site(), {"SBATCH_NO_REQUEUE": "1"})


# The command


def test_the_preflight_command(folder):
    words = (
        "preflight",
        "my.py:Regression",
        "--batch",
        "24",
        "--ranks",
        "2",
        "--steps",
        "10",
        "--device",
        "cpu",
    )
    good = succeed(*words, "--json", "found.json", at=folder, COLUMNS="160")
    assert good.out.splitlines()[-1].startswith("no failure found")
    assert {finding["check"] for finding in json.loads((folder / "found.json").read_text())} == {*CHECKS}
    bad = paceline(*words[:2], "--batch", "25", *words[4:], at=folder, COLUMNS="160")
    assert bad.status == 2
    assert "batch 25 is not divisible by ranks × microbatches = 2 × 1 = 2: use --batch 26 or 24" in bad.out
    assert (
        bad.out.splitlines()[-1] == "the training would fail: 1 of 13 findings are failures, 3 were skipped"
    )
    assert not (folder / "runs").exists()
    assert platform.node() in good.out
