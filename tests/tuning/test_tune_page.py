"""The commands of docs/tune.md run as written, and its tables list what exists."""

import json
import re
import shlex
import time
from pathlib import Path

import pytest

from browser import Browser, start_browser
from command import succeed
from paceline.tuning.folder import StudyFolder
from paceline.tuning.report.live import StudyWatch
from paceline.tuning.samplers.table import SAMPLERS
from watching import watch, why_not_built

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


STUDY_TOML = """
task = "nowhere.py:Task"
[space]
lr = "log:1e-3:1e-1"
[tune]
metrics = ["max accuracy"]
trials = 5
"""


def write_study(folder: Path) -> Path:
    """Write a study of four trials, whose task does not exist, and return its folder."""
    study = folder / "study"
    for number in range(2):
        run = study / "trials" / str(number)
        run.mkdir(parents=True)
        (run / "events.jsonl").touch()
        (run / "spec.toml").write_text('task = "digits"\n')
    (study / "study.toml").write_text(STUDY_TOML)
    events = []
    for number, accuracy in enumerate((0.5, 0.9, 0.7)):
        events.append({"event": "suggested", "trial": number, "values": {"lr": 0.01}})
        metrics = {"accuracy": accuracy}
        events.append({"event": "reached", "trial": number, "samples": 9, "metrics": metrics, "seconds": 2.0})
        events.append({"event": "finished", "trial": number, "state": "complete"})
    events.append({"event": "suggested", "trial": 3, "values": {"lr": 0.02}})
    events.append({"event": "finished", "trial": 3, "state": "failed", "message": "\x1b[2J<b>no"})
    with open(study / "events.jsonl", "w") as file:
        for event in events:
            file.write(json.dumps({**event, "time": 1.0}) + "\n")
    return study


def test_live_panel_follows_the_journal(tmp_path):
    """The task is not imported: the page may show a study of another user."""
    study = write_study(tmp_path)
    read = StudyWatch(StudyFolder(study))
    panel = read()
    assert panel["curve"] == {"trial": [0, 1, 2], "value": [0.5, 0.9, 0.7], "best": [0.5, 0.9, 0.9]}
    assert [row[:4] for row in panel["rows"]] == [
        [1, True, "complete", [0.9]],
        [2, False, "complete", [0.7]],
        [0, False, "complete", [0.5]],
        [3, False, "failed", [None]],
    ]
    assert "\x1b" not in panel["rows"][3][6]
    assert panel["counts"] == "4 trials: 3 complete, 1 failed"
    assert read() is panel
    with open(study / "events.jsonl", "a") as file:
        file.write('{"event":"suggested","time":1.0,"trial":4,"values":{"lr":0.03}}\n')
    assert len(read()["rows"]) == 5
    (study / "study.toml").write_text("[tune]\nmetrics = 3\n")
    assert "metrics" in read()["problem"]


SECTION = "document.querySelector('section[aria-label=Study]')"


def wait(browser: Browser, script: str) -> None:
    """Wait until an expression in the page is true."""
    deadline = time.monotonic() + 60
    while not browser.run(script):
        assert time.monotonic() < deadline, f"{script}: {browser.errors}"
        time.sleep(0.05)


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))
def test_page_of_watch_shows_the_study(tmp_path):
    study = write_study(tmp_path)
    with watch(study, at=tmp_path) as server, start_browser() as browser:
        browser.log_in(f"http://{server.host}{server.path}", server.cookie, server.path)
        browser.open(f"http://{server.host}{server.path}")
        wait(browser, f"{SECTION}?.querySelectorAll('tbody tr').length == 4")
        text = browser.run(f"{SECTION}.innerText")
        assert "4 trials: 3 complete, 1 failed, of 5 planned. Best: trial 1, accuracy 0.9." in text
        assert "<b>no" in text
        assert browser.run(f"{SECTION}.querySelectorAll('b').length") == 0
        wait(browser, f"{SECTION}.querySelectorAll('td a').length == 2")
        wait(browser, f"{SECTION}.querySelectorAll('canvas').length == 1")
        with open(study / "events.jsonl", "a") as file:
            for event in (
                {"event": "suggested", "trial": 4, "values": {"lr": 0.03}},
                {"event": "reached", "trial": 4, "samples": 9, "metrics": {"accuracy": 0.95}, "seconds": 1.0},
                {"event": "finished", "trial": 4, "state": "complete"},
            ):
                file.write(json.dumps({**event, "time": 2.0}) + "\n")
        wait(browser, f"{SECTION}.innerText.includes('Best: trial 4, accuracy 0.95.')")
        assert browser.errors == []
