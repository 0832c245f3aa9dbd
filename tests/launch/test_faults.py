"""Faults during a training are reported once and soon, and no process remains."""

from pathlib import Path

import pytest

from command import TASK, TORCHRUN, Running, events_of_kind, set_sample_delay, start, write_task
from paceline.events import Failed, Started

pytestmark = pytest.mark.processes

# If the file ROOM exists, rank 1 limits its memory and allocates more.
GREEDY = TASK.replace(
    "        return (output - batch[1]).square()",
    """        if os.environ.get("RANK") == "1" and os.path.exists(os.environ.get("ROOM", "")):
            import resource
            resource.setrlimit(resource.RLIMIT_AS, (2**32, 2**32))
            torch.zeros(2**34)
        return (output - batch[1]).square()""",
)
# A dataset that the user has divided already, with the rank from the environment.
OWN_PART = TASK.replace("count = self.samples if", "count = self.samples - int(os.environ.get('RANK', 0)) if")
LAUNCHERS = [None, pytest.param(TORCHRUN, marks=pytest.mark.slow)]


def start_training(folder: Path, source: str, *more: str, program: tuple[str, ...] | None = None) -> Running:
    set_sample_delay(folder / "slow", 0.01)
    words = (
        "train",
        write_task(folder, source),
        "--ranks",
        "2",
        "--batch",
        "16",
        "--steps",
        "1000",
        "--run-dir",
        "run",
        *more,
    )
    return start(
        *words,
        at=folder,
        program=program,
        SLOW=str(folder / "slow"),
        ROOM=str(folder / "room"),
        OMP_NUM_THREADS="1",
    )


@pytest.mark.parametrize("program", LAUNCHERS)
def test_out_of_memory_on_one_rank_ends_all(program: tuple[str, ...] | None, tmp_path: Path) -> None:
    """The default timeout of a minute does not pass."""
    run = tmp_path / "run"
    with start_training(tmp_path, GREEDY, program=program) as running:
        running.wait_for_step(run, 3)
        (tmp_path / "room").touch()
        result = running.wait(30)
        running.wait_until_all_ended()
    assert result.status != 0
    [failure] = [event for event in events_of_kind(run, Failed) if not event.lost_peer]
    assert failure.rank == 1
    assert "can't allocate memory" in failure.message
    if program is None:
        assert result.status == 2, result.all
        assert result.err.startswith("paceline: rank 1: loss() raised RuntimeError: "), result.all
        assert result.err.count("paceline: ") == 1


@pytest.mark.parametrize("program", LAUNCHERS)
def test_datasets_of_unequal_length_are_refused_before_the_first_step(
    program: tuple[str, ...] | None, tmp_path: Path
) -> None:
    with start_training(tmp_path, OWN_PART, program=program) as running:
        result = running.wait(60)
        running.wait_until_all_ended()
    sentence = (
        "dataset('train') has 53 samples on rank 0 and 52 on rank 1; every rank must see the whole dataset, "
        "Paceline splits it\n"
    )
    assert result.status != 0
    assert result.all.count(sentence) == 1, result.all
    assert not events_of_kind(tmp_path / "run", Started)
