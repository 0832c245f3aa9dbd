"""Under a foreign launcher the same command becomes a rank: one run folder, one output, the same training."""

import os
from pathlib import Path

import pytest

from command import MPIRUN, PACELINE, TORCHRUN, Result, events_of_kind, paceline, read_events, write_task
from paceline.events import Ended, Started, Step

pytestmark = pytest.mark.processes

WORDS = ("--steps", "12", "--batch", "24", "--set", "dropout=0.0", "--device", "cpu")
MPICH = ("mpiexec.hydra", "-np", "2", *PACELINE)
# test_readme.py trains under torchrun, too.
LAUNCHERS = [
    pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow),
    pytest.param(MPIRUN, id="mpirun", marks=pytest.mark.mpi("mpirun")),
    pytest.param(MPICH, id="mpich", marks=[pytest.mark.mpi("mpiexec.hydra"), pytest.mark.slow]),
]
FAILING = [
    pytest.param(TORCHRUN, id="torchrun"),
    pytest.param(MPIRUN, id="mpirun", marks=[pytest.mark.mpi("mpirun"), pytest.mark.slow]),
    pytest.param(MPICH, id="mpich", marks=[pytest.mark.mpi("mpiexec.hydra"), pytest.mark.slow]),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("single")
    write_task(folder)
    assert paceline("train", "my.py:Regression", *WORDS, "--run-dir", "run", at=folder).status == 0
    return [step.loss for step in events_of_kind(folder / "run", Step)]


def become(program: tuple[str, ...], folder: Path, *words: str) -> Result:
    write_task(folder)
    return paceline("train", *words, at=folder, program=program, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("program", LAUNCHERS)
@pytest.mark.parametrize("plan", ["ddp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_two_ranks_share_one_run(
    program: tuple[str, ...], plan: str, tmp_path: Path, reference: list[float]
) -> None:
    result = become(program, tmp_path, "my.py:Regression", *WORDS, "--plan", plan)
    assert result.status == 0, result.all
    (run,) = (tmp_path / "runs").glob("*/")  # no file of the rendezvous remains
    (started,) = events_of_kind(run, Started)
    assert (started.ranks, started.plan) == (2, plan)
    assert [step.loss for step in events_of_kind(run, Step)] == pytest.approx(reference, rel=1e-5)
    assert isinstance(read_events(run)[-1], Ended)
    assert result.all.count("463 parameters") == 1, result.all
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]
    assert (run / "report.html").exists()


@pytest.mark.parametrize("program", FAILING)
def test_an_error_before_the_start_is_printed_once(program: tuple[str, ...], tmp_path: Path) -> None:
    result = become(program, tmp_path, "my.py:Regression", "--batch", "25", "--ranks", "2")
    assert result.status != 0
    assert "batch 25 is not divisible by ranks × microbatches = 2 × 1 = 2: use --batch 26 or 24" in result.all
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("program", FAILING)
@pytest.mark.slow
def test_an_error_of_all_ranks_is_printed_once(program: tuple[str, ...], tmp_path: Path) -> None:
    result = become(program, tmp_path, "my.py:Regression", *WORDS, "--set", "schedule.warmup=100000")
    assert result.status != 0
    assert result.all.count("paceline: schedule.warmup=100000 samples is longer") == 1, result.all


@pytest.mark.slow
def test_ranks_other_than_those_started_are_refused(tmp_path: Path) -> None:
    result = become(TORCHRUN, tmp_path, "my.py:Regression", "--ranks", "4")
    assert "--ranks 4, but torchrun started 2" in result.all


@pytest.mark.slow
def test_resume_under_torchrun(tmp_path: Path, reference: list[float]) -> None:
    write_task(tmp_path)
    words = [word if word != "12" else "7" for word in WORDS]
    assert paceline("train", "my.py:Regression", *words, "--run-dir", "run", at=tmp_path).status == 0
    resumed = paceline("resume", "run", "--steps", "12", at=tmp_path, program=TORCHRUN, OMP_NUM_THREADS="1")
    assert resumed.status == 0, resumed.all
    assert [step.loss for step in events_of_kind(tmp_path / "run", Step)] == pytest.approx(
        reference, rel=1e-5
    )
    assert os.path.exists(tmp_path / "run/ckpt/step_12")
