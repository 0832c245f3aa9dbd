"""The terminal view in a real terminal, that of tmux, also with a training."""

import re
import shlex
import signal
import subprocess
import sys

import psutil
import pytest

from command import PACELINE, set_sample_delay, start, write_task
from run_lines import folder, started
from screens import TMUX, open_terminal

WATCH = shlex.join([*PACELINE, "watch"])

tmux = pytest.mark.skipif(TMUX is None, reason="tmux is not installed: apt-get install tmux")
textual = pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import textual"], capture_output=True).returncode != 0,
    reason='Textual is not installed: pip install "paceline[tui]"',
)
TRAIN = (
    "train",
    "my.py:Regression",
    "--ranks",
    "2",
    "--batch",
    "8",
    "--steps",
    "4000",
    "--run-dir",
    "runs/a",
)


def read_step(screen: str) -> int:
    match = re.search(r"step ([\d,]+) of 4,000", screen)
    return int(match[1].replace(",", "")) if match else 0


@tmux
@textual
@pytest.mark.processes
def test_live_run_that_is_killed_while_it_is_shown(tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.002)
    with start(*TRAIN, at=tmp_path, SLOW=str(slow)) as training, open_terminal(tmp_path) as terminal:
        training.wait_for_step(tmp_path / "runs/a", 3)
        terminal.type(f"{WATCH} runs/a --terminal; echo status $?", "Enter")
        first = read_step(
            terminal.wait_for(lambda screen: "▶ running" in screen and read_step(screen), "shown")
        )
        terminal.wait_for(lambda screen: read_step(screen) > first, "following")
        screen = terminal.screen("-e")
        codes = {
            code for match in re.findall(r"\x1b\[([\d;]*)m", screen) for code in match.split(";") if code
        }
        assert codes <= {
            "0",
            "1",
            "2",
            "7",
            "39",
            "49",
            *map(str, range(30, 38)),
            *map(str, range(90, 98)),
            *map(str, range(40, 48)),
            *map(str, range(100, 108)),
        }, codes
        for rank in training.ranks().values():
            rank.send_signal(signal.SIGKILL)
        terminal.wait_for(lambda screen: "✗ failed" in screen or "! interrupted" in screen, "judged")
        terminal.type("C-c")
        terminal.wait_for(lambda screen: "status 0" in screen, "ended")
        terminal.type("stty -a", "Enter")
        terminal.wait_for(lambda screen: re.search(r"(?<!-)icanon\b.*(?<!-)echo\b", screen, re.S), "echoing")


@tmux
@textual
@pytest.mark.parametrize(
    "size", [(80, 24), pytest.param((200, 50), marks=pytest.mark.slow)], ids=["80x24", "200x50"]
)
def test_terminal_is_restored_by_a_signal_and_by_q(tmp_path, size):
    folder(tmp_path / "a", [started(0, 1.7e9)])
    with open_terminal(tmp_path, *size) as terminal:
        terminal.type(f"{WATCH} a --terminal; echo status $?", "Enter")
        terminal.wait_for(lambda screen: "interrupted after step 0" in screen, "shown")
        terminal.type("?")
        terminal.wait_for(lambda screen: "this help" in screen, "helping")
        terminal.type("Escape")
        terminal.wait_for(lambda screen: "this help" not in screen and "1 Overview" in screen, "back")
        terminal.type("q")
        terminal.wait_for(lambda screen: "status 0" in screen, "ended")
        terminal.type(f"clear; {WATCH} a --terminal; echo ended by $?", "Enter")
        terminal.wait_for(lambda screen: "interrupted after step 0" in screen, "shown again")
        pane = psutil.Process(int(terminal.tmux("display-message", "-p", "#{pane_pid}")))
        [program] = pane.children()
        program.send_signal(signal.SIGTERM)
        terminal.wait_for(lambda screen: "ended by 143" in screen, "ended by the signal")
        terminal.type("echo still a terminal", "Enter")
        terminal.wait_for(lambda screen: screen.count("still a terminal") == 2, "echoing")


@tmux
def test_missing_extra_is_named(tmp_path):
    folder(tmp_path / "a", [started(0, 1.7e9)])
    code = "import sys; sys.modules['textual'] = None; from paceline.cli import main; main()"
    with open_terminal(tmp_path, 160) as terminal:
        terminal.type(
            f"{shlex.join([sys.executable, '-c', code])} watch a --terminal; echo status $?", "Enter"
        )
        screen = terminal.wait_for(lambda screen: "status 2" in screen, "refused")
        assert 'pip install "paceline[tui]"' in screen
        assert "Traceback" not in screen


@tmux
def test_simple_terminal_gets_lines(tmp_path):
    ended = {"time": 1.7e9 + 1, "event": "ended", "step": 5, "reason": "done"}
    folder(tmp_path / "a", [started(0, 1.7e9), ended])
    with open_terminal(tmp_path) as terminal:
        terminal.type(f"TERM=dumb {WATCH} a --terminal; echo status $?", "Enter")
        screen = terminal.wait_for(lambda screen: "status 0" in screen, "ended")
        assert "done at step 5" in screen
        assert "Overview" not in screen
