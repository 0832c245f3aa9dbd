"""`paceline.spawn`: a function on connected processes, defined where no other process can import it."""

import os
import signal
import textwrap
import threading

import pytest

from command import succeed
from paceline import DataError, LaunchError, RankError, SpecError, spawn
from pages import read_blocks

pytestmark = pytest.mark.processes

SCRIPT = """
import os, signal
import torch
import torch.distributed as dist
import paceline

FACTOR = 3


class Result:
    def __init__(self, value):
        self.value = value


def total(x):
    tensor = torch.tensor([x * FACTOR * (1 + dist.get_rank())])
    dist.all_reduce(tensor)
    print("from", dist.get_rank())
    return Result((dist.get_rank(), tensor))


def fail(how):
    if dist.get_rank() == 1:
        how()
    dist.barrier()


def raise_error():
    raise ValueError("no such number")


def refuse():
    raise paceline.DataError("no samples")
"""


@pytest.fixture
def script() -> dict:
    """Return the names of a script that other processes cannot import."""
    names: dict = {"__name__": "__main__"}
    exec(compile(SCRIPT, "script.py", "exec"), names)
    return names


def test_results_by_rank_and_output(script, capsys) -> None:
    results = spawn(script["total"], 3, 10.0)
    assert all(isinstance(result, script["Result"]) for result in results)
    assert [result.value[0] for result in results] == [0, 1, 2]
    assert [result.value[1].item() for result in results] == [180.0] * 3
    assert sorted(capsys.readouterr().out.split()) == ["0", "1", "2", *["from"] * 3]
    script["FACTOR"] = 1  # the ranks get the values of the moment
    assert spawn(script["total"], 1, 10.0)[0].value[1].item() == 10.0


def test_a_failing_rank_is_named(script) -> None:
    with pytest.raises(
        RankError, match=r"^rank 1: fail\(\) raised ValueError: no such number \(script\.py, line 29\)"
    ) as raised:
        spawn(script["fail"], 2, script["raise_error"])
    assert "\n" not in str(raised.value)
    with pytest.raises(RankError, match="rank 1 failed: it was killed by SIGKILL"):
        spawn(script["fail"], 2, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_errors_of_paceline_keep_their_class(script) -> None:
    with pytest.raises(DataError, match=r"^no samples$"):
        spawn(script["refuse"], 2)


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((print, 0), SpecError, "ranks must be an integer of at least 1, got 0"),
        ((print, True), SpecError, "got True"),
        ((print, 10**6), LaunchError, "at most"),
        ((3, 2), SpecError, "function must be callable, got int"),
        ((print, 2, threading.Lock()), SpecError, "cannot be sent to another process: TypeError"),
        ((threading.Lock, 1), RankError, r"rank 0: the result of \w+\(\) cannot be sent"),
    ],
)
def test_refused(arguments, kind, words) -> None:
    with pytest.raises(kind, match=words) as raised:
        spawn(*arguments)
    assert "\n" not in str(raised.value)


def test_refused_in_a_rank(monkeypatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="torchrun started this process as rank 1 of 2"):
        spawn(print, 2)
    with pytest.raises(SpecError, match="timeout_s must be above 0"):
        spawn(print, 2, timeout_s=0.0)


def test_the_program_of_the_page(tmp_path) -> None:
    (tmp_path / "script.py").write_text(read_blocks("docs/python.md")["spawn"])
    result = succeed("python", "script.py", at=tmp_path)
    *lines, means = result.out.splitlines()
    assert sorted(lines) == ["rank 0 has [1.0, 3.0]", "rank 1 has [2.0, 6.0]"]
    assert means == "[3.0, 3.0]"


def test_a_script_without_a_guard(tmp_path) -> None:
    body = """
    print([result.value[1].item() for result in paceline.spawn(total, 2, 1.0)])
    """
    (tmp_path / "script.py").write_text(SCRIPT + textwrap.dedent(body))
    result = succeed("python", "script.py", at=tmp_path)
    assert result.out.splitlines()[-1] == "[9.0, 9.0]"
    assert sorted(result.out.splitlines()[:-1]) == ["from 0", "from 1"]
    assert result.err == ""
