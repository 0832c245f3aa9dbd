"""Ranks under Nsight Systems. A small program stands in for nsys: it records its arguments and signals."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from command import TORCHRUN, events_of_kind, paceline, set_sample_delay, start, succeed, write_task
from paceline.events import Ended, Step
from paceline.run import RunFolder
from paceline.spec import Launch
from pages import read_blocks

pytestmark = pytest.mark.processes

# Like nsys: it runs the command as its child, writes the report at its end, and returns its status.
NSYS = f"""#!{sys.executable}
import json, signal, subprocess, sys
seen = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: seen.append(number))
[output] = [word.partition("=")[2] for word in sys.argv if word.startswith("--output=")]
command = sys.argv[next(at for at in range(2, len(sys.argv)) if not sys.argv[at].startswith("-")):]
status = subprocess.run(command).returncode
with open(output + ".nsys-rep", "w") as file:
    json.dump({{"arguments": sys.argv[1:], "command": command, "signals": seen, "status": status}}, file)
sys.exit(status if status >= 0 else 128 - status)
"""
OPTIONS = ("my.py:Regression", "--batch", "8", "--seed", "3", "--monitor", "off", "--no-report")


@pytest.fixture
def path(tmp_path):
    """The search path with the program nsys."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/nsys"
    program.write_text(NSYS)
    program.chmod(0o755)
    write_task(tmp_path)
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


def read_reports(run: Path) -> dict[str, dict]:
    reports = (run / "nsys").glob("*/*.nsys-rep")
    return {f"{report.parent.name}/{report.name}": json.loads(report.read_text()) for report in reports}


@pytest.mark.slow
def test_each_rank_has_a_report_and_the_result_is_the_same(tmp_path, path):
    for name, words in (("plain", ()), ("profiled", ("--nsys",))):
        succeed(
            "train",
            *OPTIONS,
            "--ranks",
            "2",
            "--steps",
            "6",
            "--run-dir",
            name,
            *words,
            at=tmp_path,
            PATH=path,
        )
    plain, profiled = (
        [(step.loss, step.grad_norm) for step in events_of_kind(tmp_path / name, Step)]
        for name in ("plain", "profiled")
    )
    assert len(plain) == 6
    assert plain == profiled
    reports = read_reports(tmp_path / "profiled")
    assert {*reports} == {"start_0/rank_0.nsys-rep", "start_0/rank_1.nsys-rep"}
    for report in reports.values():
        assert report["arguments"][0] == "profile"
        assert "--trace=cuda,nvtx,osrt" in report["arguments"]
        assert report["command"][1:4] == ["-m", "paceline", "rank"]
        assert (report["status"], report["signals"]) == (0, [])
    spec, launch = RunFolder(tmp_path / "profiled").request()
    assert (spec.nvtx, launch.nsys) == (True, True)
    assert not (tmp_path / "plain/nsys").exists()


@pytest.mark.slow
def test_stopped_run_saves_and_continues_under_nsys(tmp_path, path):
    """The signal reaches the rank and not nsys, which writes its report after the rank has saved."""
    delay = set_sample_delay(tmp_path / "slow", 0.05)
    words = ("train", *OPTIONS, "--ranks", "1", "--steps", "20", "--nsys", "--run-dir", "run")
    with start(*words, at=tmp_path, PATH=path, SLOW=str(delay)) as running:
        running.wait_for_step(tmp_path / "run", 3)
        running.process.send_signal(signal.SIGTERM)
        assert running.wait().status == 75
    [report] = read_reports(tmp_path / "run").values()
    assert report["signals"] == []
    [ended] = events_of_kind(tmp_path / "run", Ended)
    assert (ended.reason, RunFolder(tmp_path / "run").checkpoints()) == ("stopped", [ended.step])
    succeed("resume", "run", at=tmp_path, PATH=path)
    assert {*read_reports(tmp_path / "run")} == {"start_0/rank_0.nsys-rep", "start_1/rank_0.nsys-rep"}
    succeed("resume", "run", "--steps", "22", "--no-nsys", at=tmp_path, PATH=path)
    assert len(read_reports(tmp_path / "run")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["launcher", "rank"])
def test_nothing_remains_when_a_process_is_killed(tmp_path, path, victim):
    delay = set_sample_delay(tmp_path / "slow", 0.05)
    words = ("train", *OPTIONS, "--ranks", "2", "--steps", "500", "--nsys", "--run-dir", "run")
    with start(*words, at=tmp_path, PATH=path, SLOW=str(delay)) as running:
        running.wait_for_step(tmp_path / "run", 3)
        nsys = running.ranks()[1]
        [rank] = nsys.children()
        assert isinstance(rank, psutil.Process)
        if victim == "rank":
            rank.kill()
            result = running.wait()
            assert result.status != 0
            assert "rank 1 failed" in result.err
        else:
            running.process.kill()
        running.wait_until_all_ended()


def test_it_is_refused_in_a_sentence(tmp_path, path):
    """Without nsys, and if another launcher starts the ranks."""
    without = ":".join(part for part in path.split(":") if not Path(part, "nsys").exists())
    words = ("train", *OPTIONS, "--nsys", "--steps", "2", "--run-dir", "run")
    result = paceline(*words, "--ranks", "2", at=tmp_path, PATH=without)
    assert result.status == 2
    assert "--nsys requires Nsight Systems, and there is no program nsys on the path" in result.err
    for other in ("slurm", "ray"):
        result = paceline(*words, "--ranks", "2", "--launcher", other, at=tmp_path, PATH=path)
        assert result.status == 2
        assert "--nsys requires that Paceline starts the ranks on this machine" in result.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_command_of_the_page(tmp_path, path):
    command = read_blocks("docs/traces.md")["nsys"].split()
    succeed(*command[1:], at=tmp_path, PATH=path)
    folder = next((tmp_path / "runs").iterdir())
    assert {*read_reports(folder)} == {"start_0/rank_0.nsys-rep", "start_0/rank_1.nsys-rep"}


@pytest.mark.slow
def test_foreign_launcher_is_refused(tmp_path, path):
    words = ("train", "my.py:Regression", "--nsys", "--steps", "2", "--run-dir", "run")
    result = paceline(*words, at=tmp_path, program=TORCHRUN, PATH=path)
    assert result.status != 0
    assert "--nsys requires that Paceline starts the ranks on this machine" in result.err


def test_it_is_off_by_default():
    assert not Launch().nsys
