"""What stands against a training is found before it is queued, and what does not is not made up. (With a real Slurm: test_slurm.py.)"""

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

from clusters import cluster
from command import paceline, succeed, write_task
from mounts import mounted
from paceline import train
from paceline.cluster import directories, file
from paceline.cluster.facts import Cluster, Device, Disk, Fact
from paceline.cluster.machine import Quota
from paceline.distributed.world import World
from paceline.launch.slurm.job_script import Job
from paceline.launch.slurm.site import Site
from paceline.preflight.checks import CHECKS
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import findings
from paceline.preflight.resource_checks import needed, slurm_bytes
from paceline.preflight.site_checks import is_queued_again, overridden
from paceline.run import create
from paceline.spec import Launch, Save, Spec

pytestmark = pytest.mark.processes

Found = dict[str, list[str]]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_CONF", raising=False)
    write_task(tmp_path)
    return tmp_path


def asked(
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


def looked(**words: Any) -> Found:
    """By check what was said, each begun by its verdict."""
    found: Found = {}
    for one in findings(asked(**words), CHECKS):
        found.setdefault(one.check, []).append(f"{one.verdict}: {one.message}")
    return found


def only(check: str, **words: Any) -> list[str]:
    return [f"{verdict}: {message}" for verdict, message in CHECKS[check].run(asked(**words))]


def failing(found: Found) -> list[str]:
    return [line for lines in found.values() for line in lines if line.startswith("fails: ")]


def machine(folder: Path, memory_bytes: float, flops: float = 1e11, **more: Any) -> Path:
    """A cluster.json of processors of which all is known."""
    device = Device(
        name="cpu",
        kind="cpu",
        memory_bytes=Fact(value=memory_bytes),
        memory_Bps=Fact(value=20e9),
        peaks_flops={"fp32": Fact(value=flops)},
    )
    path = folder / "there.json"
    file.write(path, Cluster(name="there", nodes=2, device=device, cores_per_node=8, **more))
    return path


@pytest.mark.parametrize(
    ("plan", "ranks", "played"),
    [
        ("single", 1, "rank 0"),
        ("ddp", 4, "ranks 0, 3"),
        ("zero3", 4, "ranks 0, 3"),
        ("pp=2", 4, "ranks 0, 2, 3"),
        ("tp=2", 2, "ranks 0, 1"),
    ],
)
def test_nothing_speaks_against_it(plan, ranks, played):
    found = looked(plan=plan, ranks=ranks, task="text" if plan == "tp=2" else "models:Text", batch=16)
    assert failing(found) == []
    assert found["build"][0].startswith(f"passes: a step of {played} was built and played: it sends ")
    assert list(found) == list(CHECKS)


def test_all_is_looked_at_even_when_much_fails():
    Path("site.toml").write_text('partiton = "gpu"\n')
    found = looked(batch=13, run=".")
    assert found["site"] == ["fails: site.toml: unknown key partiton; did you mean partition?"]
    assert found["slurm"] == ["skipped: needs what site would tell"]
    assert found["plan"] == [
        "fails: batch 13 is not divisible by ranks × microbatches = 2 × 1 = 2: use --batch 14 or 12"
    ]
    assert found["build"] == found["memory"] == found["time"] == ["skipped: needs what plan would tell"]
    assert found["room"] == ["fails: . already exists; choose another --run-dir (it is not a run)"]
    assert len(failing(found)) == 3
    assert found["task"][0].startswith("passes: Points makes a model of 78 parameters")


def test_ranks_that_cannot_be():
    found = looked(ranks=3, nodes=2)
    assert found["ranks"] == ["fails: 3 ranks cannot be spread evenly over 2 nodes; use --ranks 4"]
    assert found["task"][0].startswith("passes")


def test_two_nodes_need_a_slurm(monkeypatch):
    monkeypatch.setenv("PATH", os.devnull)
    assert looked(nodes=2)["slurm"][0].startswith("fails: there is no sbatch on PATH")
    assert looked(nodes=1)["slurm"] == [
        "passes: Slurm is not asked: there is no sbatch on PATH; one node is here"
    ]


# The site file


def on_site(text: str) -> list[str]:
    Path("site.toml").write_text(text)
    return looked(task="nowhere")["site"][1:]


def test_modules_are_loaded_as_at_a_login(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert on_site('modules = ["cuda/12"]')[0].startswith("warns: there is no command module here")
    (here / ".bash_profile").write_text(
        'module() { [ "$2" = cuda/12 ] || { echo "no module $2" >&2; return 1; }; }\n'
    )
    assert on_site('modules = ["cuda/12"]') == ["passes: modules cuda/12 can be loaded"]
    assert on_site('modules = ["cuda/99"]') == [
        "fails: module load cuda/99: no module cuda/99; module avail lists what there is"
    ]


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_python_without_torch(here):
    assert on_site('venv = "env"')[0].startswith("fails: venv env has no env/bin/python; make it there")
    program(here / "env/bin/python", "echo no torch >&2; exit 1")
    assert on_site('venv = "env"') == [
        "fails: venv env: no torch; install it there, or say another one in the site file"
    ]
    program(here / "env/bin/python", f'exec {sys.executable} -S "$@"')  # without what is installed
    assert on_site('venv = "env"')[0].startswith("fails: venv env: no torch")
    program(here / "env/bin/python", f'exec {sys.executable} "$@"')
    assert on_site('venv = "env"') == ["passes: venv env has torch and paceline"]


def test_conda_may_come_with_a_module(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    assert (
        on_site('conda = "train"')[0]
        == "fails: conda='train', and there is no conda on PATH; name the module that has it"
    )
    program(here / "bin/conda", '[ "$3" = train ] || { echo "EnvironmentLocationNotFound: $3"; exit 1; }')
    (here / ".bash_profile").write_text(f'module() {{ PATH="{here}/bin:$PATH"; }}\n')
    found = on_site('modules = ["conda"]\nconda = "train"')
    assert found == [
        "passes: modules conda can be loaded",
        "passes: conda environment train has torch and paceline",
    ]
    assert on_site('modules = ["conda"]\nconda = "trian"')[1].startswith(
        "fails: conda environment trian: EnvironmentLocationNotFound: trian; "
    )


def test_what_the_site_file_names_is_there(here):
    Path("no.tar").write_text("no tar")
    assert on_site('container = "no.sif"') == [
        "fails: there is no container no.sif; say its whole path in the site file"
    ]
    assert on_site('scratch = "/x"\nstage_in = "none.tar"')[0].startswith(
        "fails: stage_in='none.tar' cannot be read: No such file"
    )
    assert on_site('scratch = "/x"\nstage_in = "no.tar"')[0].startswith("fails: stage_in='no.tar' is no tar")


def test_variables_that_win_over_the_script():
    job = Job(Path("/r"), Path("/"), 2, 4, "02:00:00", "python")
    environ = {"SBATCH_PARTITION": "gpu", "SBATCH_TIMELIMIT": "02:00:00", "HOME": "/"}
    (said,) = overridden(job, Site(partition="cpu"), environ)
    assert said.startswith(
        "SBATCH_PARTITION=gpu wins over partition=cpu of the job script; unset SBATCH_PARTITION"
    )
    assert overridden(job, Site(partition="gpu"), environ) == []


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


def test_the_last_sample_is_missing(here):
    write_task(here, BROKEN, "broken.py")
    found = looked(task="broken.py:Broken")
    assert found["data"] == [
        "fails: sample 52 of 'train' raised FileNotFoundError: img_52.png (broken.py, line 9)"
    ]
    assert found["build"] == ["skipped: needs what data would tell"]


def test_a_mistake_in_the_task_is_a_finding_like_others(here):
    """And those that would meet it again are spared."""
    write_task(here, BROKEN, "broken.py")
    found = looked(task="broken.py:Careless")
    assert re.match(
        r"fails: loss\(\) raised RuntimeError: .*must have same.* \(broken\.py, line \d+\)",
        found["build"][0],
        re.S,
    ), found["build"]
    assert found["memory"] == found["time"] == ["skipped: needs what build would tell"]
    assert found["room"][0].startswith("passes: ")


def test_a_plan_that_the_model_does_not_allow():
    found = looked(plan="pp=8", ranks=8, batch=96)
    assert found["plan"][0].startswith("passes")
    [failed] = [said for said in found["build"] if said.startswith("fails: ")]
    assert failed.count("; ") + failed.count(": ") >= 2  # with a way out
    assert (
        "warns: batch 96 is more than the 29 training samples: each step has samples several times"
        in found["build"]
    )
    assert looked(plan="ddp", ranks=30, batch=30)["build"] == [
        "fails: 30 ranks for 29 training samples; use at most --ranks 29"
    ]


def test_what_cannot_be_built_without_values_is_not_held_against_it(here):
    write_task(here, BROKEN, "broken.py")
    found = looked(task="broken.py:Peeking")
    assert found["build"][0].startswith("warns: not built: Peeking uses values that depend on its weights")
    assert failing(found) == []
    found = looked(plan="local-sgd")
    assert found["build"][0].startswith("warns: plan local-sgd cannot be built without its ranks")
    assert found["memory"][0].startswith("warns: not predicted: ")
    assert failing(found) == []


# Memory, room, time


def test_memory_that_does_not_suffice(here):
    words = {"task": "text", "plan": "ddp", "ranks": 4, "batch": 16}
    (enough,) = only("memory", target=machine(here, 2**30), **words)
    assert enough.startswith("passes: ")
    assert enough.endswith("512.0 MiB is what a rank has on there")
    (little,) = only("memory", target=machine(here, 50 * 2**20), **words)
    assert little.startswith("fails: ")
    assert "25.0 MiB is what a rank has on there: plan " in little
    (none,) = only("memory", target=machine(here, 2**20), **words)
    assert none.endswith("no plan needs so little on as many ranks; use more of them, or a smaller --batch")
    Path("site.toml").write_text('memory = "50M"\n')
    (asked_for,) = only("memory", target=machine(here, 2**30), **words)
    assert "12.5 MiB is what memory='50M' leaves a rank" in asked_for
    assert asked_for.startswith("fails: ")


def test_more_ranks_than_devices(here):
    file.write(here / "gpus.json", cluster(8, of_a_node=4))
    flight = PreflightContext(
        Spec(task="models:Points", batch=16), Launch(nodes=2, ranks=16), None, None, "gpus.json"
    )
    (said,) = (one for one in findings(flight, CHECKS) if one.check == "memory")
    assert (said.verdict, said.message.partition(";")[0]) == (
        "fails",
        "nodes × ranks are 2 × 8, nodes × devices of a100 2 × 4",
    )


def test_gpus_that_are_not_here():
    Path("site.toml").write_text('gres = "gpu:a100:4"\n')
    flight = PreflightContext(Spec(task="models:Points", batch=12), Launch(ranks=2), None, None, None)
    said = {one.check: (one.verdict, one.message) for one in findings(flight, CHECKS)}
    assert said["memory"] == said["time"]
    assert said["memory"][0] == "warns"
    assert said["memory"][1].startswith(
        "not predicted: jobs get GPUs (gpu:a100:4 a node), and there are none here: say what they are"
    )


@pytest.mark.parametrize(
    ("text", "size"), [("64G", 2**36), ("500", 500 * 2**20), ("1T", 2**40), ("0", math.inf), ("?", math.inf)]
)
def test_memory_as_slurm_writes_it(text, size):
    assert slurm_bytes(text) == size


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_room_is_that_of_real_checkpoints(ranks, here):
    if ranks == 1:
        list(train(Spec(task="digits", steps=2), world=World(), run=create(here / "r", Spec(), Launch())))
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
        succeed("train", "digits", *words, at=here)
    real = [path.stat().st_size for path in (here / "r/ckpt/step_2").iterdir()]
    flight = asked(task="digits", batch=64, ranks=ranks)
    (size, files), (_, others) = needed(flight, 1), needed(flight, 0)
    assert size == pytest.approx(sum(real), rel=0.02)
    assert files - others == len(real) == ranks + 2
    assert sum(path.is_file() for path in (here / "r").rglob("*")) <= files


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=3m", "has 3.0 MiB free; say another --run-dir"),
        ("size=64m,nr_inodes=20", "has room for 19 files; say another --run-dir"),
        ("size=64m", None),
    ],
)
def test_too_little_room(options, said, here):
    (here / "small").mkdir()
    with mounted(here / "small", options):
        (found,) = only("room", task="digits", batch=64, run="small/a")
    assert found.startswith(
        ("fails" if said else "passes")
        + ": 4 checkpoints of 1.8 MiB (--keep 2, the best and the next) in 42 files"
    )
    assert said is None or said in found


def test_quotas(monkeypatch, here):
    def of(**more: int) -> str:
        monkeypatch.setattr(directories, "read_quotas", lambda: [(str(here), Quota(used_bytes=0, **more))])
        return " | ".join(only("room", task="digits", batch=64))

    assert of(limit_bytes=2**30, soft_bytes=2**30).startswith("passes: ")
    assert "has 1.0 MiB left of a quota of 1.0 MiB; say another" in of(limit_bytes=2**20)
    assert "has 5 files left of a quota of 10; say another" in of(used_files=5, limit_files=10)
    assert "warns: with them a quota of 1.0 MiB is exceeded, which is allowed for a while only" in of(
        soft_bytes=2**20
    )


@pytest.mark.parametrize(
    ("steps", "time", "site", "verdict", "said"),
    [
        (100, "02:00:00", "", "passes", "02:00:00 asked"),
        (10**7, "02:00:00", "", "warns", "02:00:00 asked: it will be queued again "),
        (
            10**7,
            "02:00:00",
            'sbatch = ["--no-requeue"]',
            "fails",
            "and --no-requeue, so that it would not be done",
        ),
        (
            10**7,
            "2",
            "notice_s = 90",
            "fails",
            "and 90 s before no step would be done and saved: ask for more time",
        ),
        (10**7, "two hours", "", "fails", "--time 'two hours' is not a time"),
    ],
)
def test_time(steps, time, site, verdict, said, here):
    Path("site.toml").write_text(site)
    (found,) = looked(task="digits", batch=64, steps=steps, time=time, target=machine(here, 2**30))["time"]
    assert found.startswith(f"{verdict}: ")
    assert said in found


def test_how_often_it_is_queued_again_and_how_long_it_saves(here):
    """From the figures of the sentence itself."""
    disk = Disk(path=str(here), checkpoint_Bps=Fact(value=1e5))
    target = machine(here, 2**30, flops=1e9, disks=(disk,))
    flight = asked(
        task="digits",
        batch=64,
        steps=10**5,
        time="01:00:00",
        target=target,
        save=Save(every=10**4, minutes=math.inf),
    )
    (said,) = CHECKS["time"].run(flight)
    save_s = flight.checkpoint_bytes / 1e5
    work_s = 10**5 * flight.cost.step_s + 10 * save_s
    assert "10 saves of 18." in said[1]
    again = -(-work_s // (3600 - 120 - 30)) - 1
    assert said[0] == "warns"
    assert said[1].endswith(f"it will be queued again {again:.0f} time{'s' * (again > 1)}")


def test_auto_is_not_chosen_for_another_kind_of_device():
    Path("site.toml").write_text("gpus_per_node = 2\n")
    flight = PreflightContext(Spec(task="models:Points", batch=12), Launch(plan="auto"), None, None, None)
    (said,) = (one for one in findings(flight, CHECKS) if one.check == "plan")
    assert said.verdict == "fails"
    assert said.message.endswith("say what they are, as in --cluster a100-80g:4x1")


def test_no_requeue():
    assert is_queued_again(Site(), {})
    assert not is_queued_again(Site(sbatch=("--no-requeue",)), {})
    assert not is_queued_again(Site(), {"SBATCH_NO_REQUEUE": "1"})


# The command


def test_the_command(here):
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
    good = succeed(*words, "--json", "found.json", at=here, COLUMNS="160")
    assert good.out.splitlines()[-1].startswith("nothing speaks against it")
    assert {one["check"] for one in json.loads((here / "found.json").read_text())} == {*CHECKS}
    bad = paceline(*words[:2], "--batch", "25", *words[4:], at=here, COLUMNS="160")
    assert bad.status == 2
    assert "batch 25 is not divisible by ranks × microbatches = 2 × 1 = 2: use --batch 26 or 24" in bad.out
    assert bad.out.splitlines()[-1] == "it would fail: 1 of 11 findings say why, and 3 could not be looked at"
    assert not (here / "runs").exists()
    assert platform.node() in good.out
