"""Ranks that are forked from the fork server equal spawned ranks, also when the fork server dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from command import PACELINE, TASK, Running, events_of_kind, paceline, set_sample_delay, start, write_task
from hf_folders import write_folder, write_text
from paceline.events import Ended, Failed, Started
from paceline.launch import fork_server
from paceline.launch.fork_server import is_safe
from paceline.run import RunFolder

pytestmark = pytest.mark.processes

WORDS = (
    "train",
    "my.py:Regression",
    "--batch",
    "24",
    "--device",
    "cpu",
    "--ranks",
    "2",
    "--set",
    "spec.threads=1",
)

# The properties of its process that a rank sees when it builds the model
LOOKS = """
import json, resource, signal, stat, sys, threading


def surroundings():
    def kind(descriptor):
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISSOCK(mode):
            return "socket"
        return "pipe" if stat.S_ISFIFO(mode) else os.readlink(f"/proc/self/fd/{descriptor}")

    files = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            files.append((descriptor if descriptor < 3 else "more", kind(descriptor)))
    umask = os.umask(0)
    os.umask(umask)
    items = Path("/proc/self/environ").read_text().split("\\0")
    shown = dict(item.split("=", 1) for item in items if "=" in item)
    return {
        "environment": dict(os.environ),
        "shown": {name: value for name, value in shown.items() if name != "PACELINE_ROOM"},
        "words": Path("/proc/self/cmdline").read_text().split("\\0")[:5],
        "argv": sys.argv[:3],
        "path": sys.path,
        "main": sys.modules["__main__"].__spec__.name,
        "folder": os.getcwd(),
        # a thread opens the .stacks files
        "files": sorted((file for file in files if not file[1].endswith(".stacks")), key=str),
        "signals": {number: str(signal.getsignal(number)).partition(" at ")[0] for number in range(1, 32)},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "umask": umask,
        "limits": [resource.getrlimit(limit) for limit in range(16)],
        "cores": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "session": os.getsid(0) == os.getpgrp() == os.getpid(),
        "of the launcher": os.getppid() == int(sys.argv[3]),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "torch": [torch.get_num_threads(), torch.initial_seed(), torch.get_rng_state().sum().item()],
    }
"""
LOOKING = LOOKS + TASK.replace(
    "    def model(self):\n",
    """    def model(self):
        seen = Path(f"{os.environ['SEEN']}-{os.environ['RANK']}.json")
        if not seen.exists():
            seen.write_text(json.dumps(surroundings()))
""",
)
# A launcher that spawns its ranks on request, as on a machine with a GPU
LAUNCHER = """
import os, signal, sys
from paceline.launch import fork_server
if os.environ["SEEN"] == "spawned":
    fork_server.ACCELERATORS = ("/dev/null",)
os.umask(0o027)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from paceline.cli import main
main()
"""


def seen(how: str, at: Path) -> list[dict[str, Any]]:
    result = paceline(
        *WORDS, "--steps", "1", "--run-dir", "r", at=at, program=(sys.executable, "-c", LAUNCHER), SEEN=how
    )
    assert result.status == 0, result.all
    assert (at / "r/ranks/fork_server.txt").exists() == (how == "forked")
    (at / "r").rename(at / how)
    return [json.loads((at / f"{how}-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_a_forked_rank_equals_a_spawned_rank(tmp_path: Path) -> None:
    assert LOOKING.count("surroundings()") == 2
    write_task(tmp_path, LOOKING)
    for forked, spawned in zip(seen("forked", tmp_path), seen("spawned", tmp_path), strict=True):
        for properties in (forked, spawned):
            for name in ("environment", "shown"):
                for different in (
                    "MASTER_PORT",
                    "SEEN",
                    "PACELINE_TESTS",
                    "TORCHINDUCTOR_CACHE_DIR",
                ):  # torch._dynamo sets the last
                    properties[name].pop(different, None)
        assert {
            name: (value, spawned[name]) for name, value in forked.items() if value != spawned[name]
        } == {}
        assert forked["of the launcher"]
        assert forked["umask"] == 0o027
        assert forked["signals"]["1"] == str(signal.SIG_IGN)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["forked", "spawned"])
def test_the_library_of_a_model_is_imported_once(how: str, tmp_path: Path) -> None:
    """Python lists what each process imports in its log: also a module that the model's module imports."""
    pytest.importorskip("transformers")
    folder, text = write_folder(tmp_path / "llama"), write_text(tmp_path / "text.txt")
    words = ("train", f"hf:{folder}", "--set", f"data={text}", "--set", "length=8", "--batch", "4")
    options = ("--steps", "1", "--ranks", "2", "--device", "cpu", "--run-dir", "r")
    environ = {"SEEN": how, "PYTHONPROFILEIMPORTTIME": "1"}
    result = paceline(*words, *options, at=tmp_path, program=(sys.executable, "-c", LAUNCHER), **environ)
    assert result.status == 0, result.all
    logs = {path.name: path.read_text() for path in (tmp_path / "r/ranks").iterdir() if path.is_file()}
    importing = {name for name, log in logs.items() if "transformers.modeling_layers\n" in log}
    ranks = {RunFolder(tmp_path / "r").rank_log(rank).name for rank in range(2)}
    assert ranks < logs.keys()
    assert importing == ({"fork_server.txt"} if how == "forked" else ranks)


def test_what_is_imported_before_forks_starts_no_threads(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = write_folder(tmp_path / "llama")
    code = f"""
import os, sys
from paceline.hf.task import import_model_library
import_model_library({str(folder)!r})
assert "transformers.models.llama.modeling_llama" in sys.modules
print(len(os.listdir("/proc/self/task")))
"""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize("words", [("--run-dir", "r"), ()])
def test_a_refused_request_leaves_no_fork_server(words: tuple[str, ...], tmp_path: Path) -> None:
    """The fork server starts before the request is checked."""
    write_task(tmp_path)
    with start(*WORDS, "--plan", "dp=3", *words, at=tmp_path) as running:
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 2, result.all
    assert "dp=3" in result.all
    assert {path.name for path in tmp_path.iterdir()} <= {"my.py", "__pycache__"}


def test_ranks_are_spawned_if_forks_are_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    one_thread = {"OMP_NUM_THREADS": "1"}
    assert is_safe(one_thread)
    assert not is_safe({"OMP_NUM_THREADS": "2"})
    assert not is_safe({})
    assert not is_safe(one_thread, num_threads=2)
    monkeypatch.setattr(fork_server, "ACCELERATORS", ("/dev/null",))
    assert not is_safe(one_thread)


def server_of(running: Running) -> psutil.Process | None:
    children = psutil.Process(running.process.pid).children()
    return next(
        (child for child in children if "rank" in child.cmdline() and "RANK" not in child.environ()), None
    )


@pytest.mark.slow
def test_ranks_continue_when_the_fork_server_is_killed(tmp_path: Path) -> None:
    """Restarted ranks are then spawned."""
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.01)
    words = (*WORDS, "--steps", "20", "--set", "save.every=1", "--restarts", "1", "--run-dir", "r")
    with start(*words, at=tmp_path, program=PACELINE, SLOW=str(slow)) as running:
        running.wait_for_step(tmp_path / "r", 2)
        server, ranks = server_of(running), running.ranks()
        assert server is not None
        server.kill()
        assert [rank.is_running() for rank in ranks.values()] == [True, True]
        running.wait_for_step(tmp_path / "r", 5)
        ranks[1].kill()
        set_sample_delay(slow, 0.0)
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 0, result.all
    [failed] = [failed for failed in events_of_kind(tmp_path / "r", Failed) if failed.what == "rank"]
    assert failed.message.startswith("rank 1 was killed by SIGKILL, after step ")
    assert len(events_of_kind(tmp_path / "r", Started)) == 2
    assert events_of_kind(tmp_path / "r", Ended)[-1].step == 20


@pytest.mark.slow
def test_a_fork_server_that_is_killed_during_its_imports(tmp_path: Path) -> None:
    write_task(tmp_path)
    with start(*WORDS, "--steps", "2", "--run-dir", "r", at=tmp_path, program=PACELINE) as running:
        running.wait_until(lambda: server_of(running) is not None, "with a fork server")
        server = server_of(running)
        assert server is not None
        server.kill()
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 0, result.all


@pytest.mark.slow
def test_restarted_ranks_are_forked_again(tmp_path: Path) -> None:
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.01)
    with start(
        *WORDS,
        "--steps",
        "20",
        "--restarts",
        "1",
        "--run-dir",
        "r",
        at=tmp_path,
        program=PACELINE,
        SLOW=str(slow),
    ) as running:
        running.wait_for_step(tmp_path / "r", 2)
        server, before = server_of(running), running.ranks()
        before[0].kill()
        running.wait_until(lambda: len(events_of_kind(tmp_path / "r", Started)) == 2, "started again")
        after = running.ranks()
        assert server is not None
        assert server.is_running()
        assert all(after[rank].pid != before[rank].pid for rank in (0, 1))
        assert after[0].cmdline() == server.cmdline()  # the command of a spawned rank has one word less
        set_sample_delay(slow, 0.0)
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 0, result.all


def test_a_forked_process_without_go_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the fork server died before its answer, and another process became this rank."""
    from paceline.launch.spawn import build_rank_environments

    run = RunFolder(tmp_path)
    run.ranks.mkdir()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = []
    with fork_server.fork_server(run, 2) as server:
        assert server is not None
        while not server.has_answered(1.0):
            pass
        monkeypatch.setattr(fork_server, "_is_child", lambda pid: found.append(psutil.Process(pid)))
        [environ, _] = build_rank_environments(["localhost"] * 2, "127.0.0.1", 1, "job", 0)
        with open(run.rank_log(0), "wb") as log:
            assert server.fork(environ, log) is None
        [process] = found
        assert process.wait(60) is not None
        assert process.pid != server.pid
    deadline = time.monotonic() + 60
    while psutil.pid_exists(server.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(server.pid)
