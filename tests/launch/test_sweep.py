"""Sweeps as job arrays: their values, their script, and real arrays in Slurm."""

import shlex
import subprocess
from pathlib import Path

import pytest

from command import clean_environment, paceline, write_task
from paceline.errors import SpecError
from paceline.events import Ended, Started, read
from paceline.launch.slurm.job_script import Job
from paceline.launch.slurm.site import Site
from paceline.launch.slurm.sweep import ArraySweep, build_requests, parse_sweep, render_sweep
from paceline.run import RunFolder
from paceline.spec import Launch, Spec
from pages import read_blocks
from slurm import start_cluster


def test_values_of_a_sweep() -> None:
    assert parse_sweep(["seed=1..3"]) == ArraySweep({"seed": (1, 2, 3)})
    assert parse_sweep(["optimizer.lr=0.1,1e-3%2", "width=4,8"]) == ArraySweep(
        {"optimizer.lr": (0.1, 1e-3), "set.width": (4, 8)}, limit=2
    )
    assert parse_sweep(["set.seed=1,2", "spec.batch=8,16"]).values.keys() == {"set.seed", "batch"}
    assert parse_sweep(["seed=1,2", "batch=8,16"]).combinations() == [
        {"seed": 1, "batch": 8},
        {"seed": 1, "batch": 16},
        {"seed": 2, "batch": 8},
        {"seed": 2, "batch": 16},
    ]


def test_each_training_has_its_request_and_name() -> None:
    sweep = parse_sweep(["seed=1..2", "optimizer.lr=0.1", "set.text=a b/c"])
    requests = build_requests(sweep, Spec(set={"width": 4}, batch=8), Launch(ranks=2))
    assert [name for name, _ in requests] == ["seed=1,lr=0.1,text=a_b_c", "seed=2,lr=0.1,text=a_b_c"]
    for seed, (_, spec) in enumerate(requests, 1):
        assert (spec.seed, spec.optimizer.lr, spec.batch) == (seed, 0.1, 8)
        assert spec.set == {"width": 4, "text": "a b/c"}


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("seed", "--array must be NAME=VALUES, got 'seed'"),
        ("=1", "--array must be NAME=VALUES, got '=1'"),
        ("seed=8..1", "--array seed=8..1: the range must have 1 to 1,000 numbers"),
        ("seed=1..5000", "--array seed=1..5000: the range must have 1 to 1,000 numbers"),
        ("seed=1,,2", "--array seed=1,,2: a value is empty"),
        ("seed=1,1", "--array seed=1,1: a value comes twice; leave it out"),
        ("ranks=1,2", "--array cannot change ranks, which the job has; submit each value separately"),
    ],
)
def test_bad_values_are_refused(item: str, message: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_sweep([item])
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_too_many_or_wrong_trainings_are_refused() -> None:
    with pytest.raises(SpecError, match="--array has 10,000 trainings; use at most 1,000"):
        parse_sweep(["seed=1..100", "batch=1..100"])
    with pytest.raises(SpecError, match=r"--array has spec\.seed twice"):
        parse_sweep(["seed=1,2", "spec.seed=3,4"])
    with pytest.raises(SpecError, match="batch must be greater than or equal to 1, got 0"):
        build_requests(parse_sweep(["batch=0,1"]), Spec(), Launch())


def test_the_script_of_an_array_starts_one_run_per_task(tmp_path: Path) -> None:
    """With a stand-in for each job script that prints its run and whether it sees the array."""
    folder = tmp_path / "my sweep"
    jobs = [
        Job(folder / f"seed={seed}", tmp_path, nodes=1, ranks_per_node=2, time="1:00", python="python")
        for seed in (1, 2)
    ]
    for job in jobs:
        job.run.mkdir(parents=True)
        (job.run / "job.sh").write_text('echo "$0 [$SLURM_ARRAY_TASK_ID]"\n')
    script = render_sweep(jobs, folder, Site(partition="gpu", sbatch=("--exclusive",)), limit=1)
    head = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --array=0-1%1" in head
    assert {"#SBATCH --partition=gpu", "#SBATCH --exclusive", "#SBATCH --time=1:00"} <= {*head}
    for task, job in enumerate(jobs):
        env = clean_environment(SLURM_ARRAY_TASK_ID=str(task), SLURM_JOB_ID="7")
        subprocess.run(["bash", "-c", script], env=env, check=True)
        assert (job.run / "slurm-7.out").read_text() == f"{job.run}/job.sh []\n"
    done = subprocess.run(["bash", "-c", script], env=clean_environment(), capture_output=True, text=True)
    assert done.returncode
    assert "submit this script with sbatch" in done.stderr


def test_dry_run_writes_no_files(tmp_path: Path) -> None:
    words = ("digits", "--array", "seed=1..8%2", "--dry-run", "--run-dir", "s", "--device", "cpu")
    done = paceline("submit", *words, at=tmp_path)
    assert done.status == 0, done.all
    assert "#SBATCH --array=0-7%2\n" in done.out
    assert done.out.count("/s/seed=") == 8
    assert not list(tmp_path.iterdir())


def test_the_command_of_the_page(tmp_path: Path) -> None:
    words = shlex.split(read_blocks("docs/slurm.md")["array"])
    done = paceline(*words[1:], "--dry-run", "--device", "cpu", at=tmp_path)
    assert done.out.count("runs/seeds/seed=") == 8, done.all


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with start_cluster(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.mark.slurm
@pytest.mark.slow
def test_an_array_trains_each_value_in_its_own_folder(slurm, tmp_path: Path) -> None:
    write_task(tmp_path)
    words = ("my.py:Regression", "--steps", "6", "--batch", "16", "--device", "cpu", "--no-report")
    result = paceline(
        "submit", *words, "--array", "seed=3..5", "--run-dir", "sweep", at=tmp_path, **slurm.env
    )
    assert result.status == 0, result.all
    lines = result.out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"sweep/seed={seed}" for seed in (3, 4, 5)]
    for line in lines:
        slurm.wait_for_state(line.split()[-1], "COMPLETED", "FAILED", timeout_s=120)
    for seed in (3, 4, 5):
        run = RunFolder(tmp_path / f"sweep/seed={seed}")
        assert run.request()[0].seed == seed
        events = list(read(run.events))
        assert isinstance(events[-1], Ended), next(run.path.glob("slurm-*.out")).read_text()
        assert sum(isinstance(event, Started) for event in events) == 1
    status = paceline("status", "sweep/seed=4", at=tmp_path, **slurm.env)
    assert "done" in status.out, status.all
