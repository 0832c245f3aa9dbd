"""The page of optimizers lists every option, and its commands run."""

import re
import shlex
from pathlib import Path

import pytest

from command import succeed
from paceline.optimizer_options import OPTIMIZERS
from paceline.spec import SCHEDULE_OWNERS, Optimizer, Schedule
from paceline.training.optimization.schedule import SHAPES

PAGE = (Path(__file__).parent.parent.parent / "docs" / "optimizers.md").read_text()
COMMANDS = re.findall(r"^paceline (.+)$", PAGE, re.M)


def rows(title: str) -> dict[str, str]:
    """Return the rows of the first table after a title, by each name in their first column."""
    section = PAGE.partition(title)[2]
    table = re.search(r"(?:^\|.*\n)+", section, re.M)
    assert table is not None
    lines = [line.strip("|").split("|") for line in table[0].splitlines()[2:]]
    return {name: "|".join(cells[1:]) for cells in lines for name in re.findall(r"`([\w-]+)`", cells[0])}


def test_the_table_has_every_optimizer_and_option() -> None:
    found = rows("# Optimizers")
    assert found.keys() == OPTIMIZERS.keys()
    for name, options in OPTIMIZERS.items():
        assert all(f"`{option}" in found[name] for option in options), name


def test_the_table_has_every_schedule_and_option() -> None:
    found = rows("## Schedules")
    assert found.keys() == {*SHAPES, "one-cycle", "task"}
    assert all(f"`{option}" in found[name] for option, name in SCHEDULE_OWNERS.items())


def test_every_key_is_on_the_page() -> None:
    keys = {
        f"optimizer.{key}" for key in Optimizer.model_fields if key not in set().union(*OPTIMIZERS.values())
    }
    keys |= {f"schedule.{key}" for key in Schedule.model_fields if key not in SCHEDULE_OWNERS}
    keys -= {"optimizer.name", "optimizer.lr", "schedule.name", "schedule.floor", "schedule.factor"}
    keys -= {"optimizer.clip", "schedule.every", "optimizer.swa_every"}
    assert [key for key in sorted(keys) if key not in PAGE] == []


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_page(command: str, tmp_path: Path) -> None:
    words = [word for word in shlex.split(command) if word not in ("--epochs", "5")]
    length = ("--epochs", "6") if "warmup" in command else ("--steps", "2")
    succeed(*words, *length, "--no-report", at=tmp_path)
