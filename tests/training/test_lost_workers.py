"""Lost ranks of a parameter server.

The others continue if a worker is killed. All end if a server is killed or a worker raises an error.
"""

import signal
from pathlib import Path

import pytest

from command import (
    TASK,
    Running,
    checkpoint_weights,
    events_of_kind,
    last_step,
    paceline,
    set_sample_delay,
    start,
    succeed,
    unequal_tensors,
    write_task,
)
from paceline.events import Ended, Failed, Started, Step

pytestmark = pytest.mark.processes


def start_training(folder: Path, plan: str, *more: str, steps: int = 40, source: str = TASK) -> Running:
    """Start four ranks, whose steps take at least 0.04 s."""
    set_sample_delay(folder / "slow", 0.005)
    words = (
        "train",
        write_task(folder, source),
        "--batch",
        "24",
        "--steps",
        steps,
        "--set",
        "norm=false",
        "--run-dir",
        "run",
        "--ranks",
        "4",
    )
    return start(*map(str, words), "--plan", plan, *more, at=folder, SLOW=str(folder / "slow"))


@pytest.mark.parametrize(
    "plan",
    [
        "parameter-server,staleness=0",
        pytest.param("parameter-server,staleness=3,servers=2", marks=pytest.mark.slow),
    ],
)
def test_others_continue_without_a_killed_worker(plan: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(tmp_path, plan) as running:
        running.wait_for_step(run, 5)
        running.ranks()[3].send_signal(signal.SIGKILL)
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 0, result.all
    [lost] = events_of_kind(run, Failed)
    assert (lost.what, lost.rank) == ("worker", 3)
    assert "its part of each batch is left out from step" in lost.message
    assert lost.message in result.out
    [ended] = events_of_kind(run, Ended)
    assert (ended.step, ended.reason) == (40, "done")
    assert ended.lead is not None
    assert ended.lead <= (0 if "staleness=0" in plan else 3)
    assert [step.step for step in events_of_kind(run, Step)] == list(range(1, 41))
    assert checkpoint_weights(run, 40)


@pytest.mark.slow
def test_training_ends_without_workers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(tmp_path, "parameter-server", "--save-every", "4") as running:
        running.wait_until(lambda: (run / "ckpt" / "step_4").exists(), "saved")
        started = running.ranks()
        for rank in (1, 2, 3):
            started[rank].send_signal(signal.SIGKILL)
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 2, result.all
    assert "all 3 workers are gone" in result.err


@pytest.mark.slow
def test_killed_server_ends_all_and_restarts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(tmp_path, "parameter-server,servers=2", "--save-every", "4", steps=200) as running:
        running.wait_until(lambda: (run / "ckpt" / "step_4").exists(), "saved")
        running.ranks()[1].send_signal(signal.SIGKILL)
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 2, result.all
    assert "rank 1 was killed by SIGKILL" in result.err
    done = last_step(run)
    with start("resume", "run", "--restarts", "1", at=tmp_path, SLOW=str(tmp_path / "slow")) as running:
        running.wait_until(
            lambda: len(events_of_kind(run, Started)) == 2 and last_step(run) > done + 2, "resumed"
        )
        running.ranks()[0].send_signal(signal.SIGKILL)
        result = running.wait()
    assert result.status == 0, result.all
    assert len(events_of_kind(run, Started)) == 3
    assert events_of_kind(run, Ended)[-1].step == 200


@pytest.mark.slow
def test_failing_worker_ends_all(tmp_path: Path) -> None:
    """Its sample would fail on the others too."""
    source = TASK.replace(
        "        return self.x[index]",
        "        if index == 7: raise ValueError('a torn sample')\n        return self.x[index]",
    )
    with start_training(tmp_path, "parameter-server", source=source) as running:
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 2, result.all
    assert "a torn sample" in result.err
    assert "Traceback" not in result.err


@pytest.mark.slow
def test_signal_stops_and_resume_continues(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(tmp_path, "parameter-server,staleness=0") as running:
        running.wait_for_step(run, 3)
        running.process.send_signal(signal.SIGINT)
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 75, result.all
    assert "stopped; continue with: paceline resume run" in result.out
    succeed("resume", "run", at=tmp_path)
    through = tmp_path / "through"
    through.mkdir()
    with start_training(through, "parameter-server,staleness=0") as running:
        assert running.wait().status == 0
    assert not unequal_tensors(checkpoint_weights(run, 40), checkpoint_weights(through / "run", 40))


@pytest.mark.parametrize(
    ("plan", "batch", "message"),
    [
        (
            "parameter-server,servers=4",
            "24",
            "plan parameter-server,servers=4 has 4 servers and no worker on 4 ranks: use --ranks 5 or more",
        ),
        (
            "parameter-server,tp=2",
            "24",
            "parameter-server keeps the whole model on each rank; leave zero, tp, pp, cp and ep out",
        ),
        (
            "parameter-server",
            "2",
            "batch 2 is not divisible by workers × microbatches = 3 × 1 = 3: use --batch 3",
        ),
        (
            "parameter-server,microbatches=2",
            "25",
            "batch 25 is not divisible by microbatches=2: use --batch 26 or 24",
        ),
        ("parameter-server,servers=0", "24", "servers must be at least 1, got servers=0"),
        ("local-sgd,period=0", "24", "period must be at least 1, got period=0"),
        (
            "local-sgd,tp=2",
            "24",
            "local-sgd keeps the whole model on each rank; leave zero, tp, pp, cp and ep out",
        ),
        ("ddp,switch=3", "24", "switch=3 requires period, e.g. period=8,switch=3"),
        ("ddp,staleness=3", "24", "staleness=3 requires servers, e.g. servers=1,staleness=3"),
    ],
)
def test_bad_plans_are_refused_before_anything_starts(
    plan: str, batch: str, message: str, tmp_path: Path
) -> None:
    words = (
        "train",
        write_task(tmp_path),
        "--ranks",
        "4",
        "--batch",
        batch,
        "--plan",
        plan,
        "--run-dir",
        "run",
    )
    result = paceline(*words, at=tmp_path)
    assert (result.status, result.err) == (2, f"paceline: {message}\n")
    assert not (tmp_path / "run").exists()
