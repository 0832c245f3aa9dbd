"""The commands of docs/tune.md run as written, and its tables list what exists."""

import re
import shlex
from pathlib import Path

import pytest

from command import succeed
from paceline.tuning.samplers.table import SAMPLERS

PAGE = (Path(__file__).parents[2] / "docs" / "tune.md").read_text()


@pytest.mark.slow
@pytest.mark.processes
def test_commands_run_as_written(tmp_path):
    commands = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.S) for line in block.splitlines()]
    assert len(commands) >= 4
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "paceline"
        succeed(*words, at=tmp_path)
    [sweep] = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
    (tmp_path / "sweep.toml").write_text(sweep)
    succeed("tune", "sweep.toml", "--trials", "1", at=tmp_path)


def test_table_lists_the_samplers():
    table = PAGE.partition("## Samplers")[2].partition("##")[0]
    assert set(re.findall(r"^\| `([\w-]+)` \|", table, re.M)) == {"--sampler", *SAMPLERS}
