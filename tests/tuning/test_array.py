"""paceline tune --array: the trials of a study as tasks of a Slurm job array."""

import re
import subprocess

import pytest

from command import PACELINE, clean_environment, paceline, succeed, write_task
from paceline.run import RunFolder
from paceline.tuning.journal import read_state
from slurm import start_cluster, wait_until

STUDY = ("tune", "my.py:Regression", "--grid", "seed=1..3", "--array", "--run-dir", "sweep")
LENGTH = ("--batch", "16", "--steps", "4", "--device", "cpu", "--set", "validation=20", "--set", "samples=40")


def test_script_is_that_of_a_training_with_a_run_folder_for_each_task(tmp_path):
    write_task(tmp_path)
    array = succeed(*STUDY, *LENGTH, "--time", "01:00:00", "--dry-run", at=tmp_path).out
    one = succeed(
        "submit", "my.py:Regression", "--run-dir", "r", "--time", "01:00:00", "--dry-run", at=tmp_path
    )
    assert not (tmp_path / "sweep").exists()
    assert subprocess.run(["bash", "-n"], input=array, text=True, capture_output=True).stderr == ""
    added = [line for line in array.splitlines() if line not in one.out.splitlines()]
    assert "#SBATCH --array=0-2" in added
    assert f'run={tmp_path}/sweep/trials/"$SLURM_ARRAY_TASK_ID"' in added
    assert f"#SBATCH --output={tmp_path}/sweep/trials/%a/slurm-%j.out" in added
    assert len(added) == 5, added
    assert "would all train in" not in array
    assert "would all train in" in one.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--array", "--scheduler", "asha"], "scheduler asha decides about each"),
        (["--array", "--where", "memory<1GiB"], "a prediction decides about each"),
        (["--time", "01:00:00"], "--time is for a Slurm job; add --launcher slurm, --nodes or --array"),
        (["--array", "--time", "soon"], "--time"),
    ],
    ids=["asha", "where", "no array", "time"],
)
def test_what_an_array_cannot_do_is_refused(words, sentence, tmp_path):
    write_task(tmp_path)
    result = paceline("tune", "my.py:Regression", "--grid", "seed=1,2", *words, at=tmp_path)
    assert result.status == 2
    assert sentence in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.slurm
@pytest.mark.slow
def test_tasks_train_their_trials(tmp_path):
    write_task(tmp_path)
    (tmp_path / "slurm").mkdir()
    with start_cluster(tmp_path / "slurm") as slurm:
        env = clean_environment(OMP_NUM_THREADS="1", **slurm.env)
        done = subprocess.run(
            [*PACELINE, *STUDY, *LENGTH], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        assert re.fullmatch(r"sweep: job array \d+, 3 tasks\n", done.stdout), done.stdout + done.stderr
        wait_until(
            lambda: not slurm.run("squeue", "-h"), "done with all tasks", tmp_path / "sweep/trials/0", 240
        )
    shown = succeed("show", "sweep", at=tmp_path).out
    assert "3 trials: 3 complete" in shown
    assert [trial.values for trial in read_state(tmp_path / "sweep/events.jsonl").trials.values()] == [
        {"seed": 1},
        {"seed": 2},
        {"seed": 3},
    ]
    for number in range(3):
        run = RunFolder(tmp_path / "sweep" / "trials" / str(number))
        assert run.request()[0].seed == number + 1
        assert run.checkpoints()[-1] == 4
