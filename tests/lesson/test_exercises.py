"""Exercises of lessons: their checks accept the solutions, and refuse whatever else a student may write."""

import re
from pathlib import Path

import pytest

from command import paceline
from paceline.lesson import attempts
from paceline.lesson.catalogue import ORDER, find_exercise
from paceline.lesson.exercise import format_exercise, read_cell
from paceline.lesson.grading import grade_file

EXERCISES = tuple(name for name in ORDER if find_exercise(name) is not None)
# a wrong solution of each exercise: what to replace in the right one, by what, and a word of the message
WRONG = {
    "ranks": [
        ("in NAMES:", "in NAMES[::-1]:", "torchrun in a Slurm job"),
        ("return 0, 1", "return 1, 1", "without a launcher"),
        ("int(environment[rank])", "environment[rank]", "srun: rank 1 of 2"),
        ("return 0, 1", 'return environment["RANK"]', "KeyError"),
    ],
    "point-to-point": [
        ("cells[:1].clone(), dst", "cells[-1:].clone(), dst", "first cell of the next rank"),
        ("torch.zeros_like(cells[:1])", "torch.ones_like(cells[:1])", "rank 0 has the last cell"),
    ],
    "collectives": [
        ("[float(len(x)), x.sum().item()]", "[1.0, x.mean().item()]", "the mean of all elements"),
        ("(x.double() - mean)", "(x.double() - x.double().mean())", "the variance of all elements"),
    ],
    "mistakes": [
        ("x[rank::size], y[rank::size]", "x, y", "each is evaluated once"),
        (" if len(mine) else torch.tensor(0)", "", "with an empty batch"),
    ],
    "zero": [
        ("part / size", "part", "its part of the momentum"),
        (
            "dist.reduce_scatter(part, list(gradient.chunk(size)))",
            "dist.all_reduce(gradient)",
            "and no all-reduce",
        ),
        ("- lr * momentum", "- lr * momentum / size", "its part of the momentum"),
    ],
    "pipeline": [
        ("min(stages - rank - 1, microbatches)", "microbatches", "keeps at most"),
        ("min(stages - rank - 1, microbatches)", "0", "it takes as long as"),
        ("warmup + m)", "m)", "every pass once"),
    ],
    "context-parallel": [
        ("dist.all_reduce(top, op=dist.ReduceOp.MAX)", "pass", "attention over all keys"),
        ("(scores - top)", "scores", "scale 500"),
    ],
    "mixed-precision": [
        ("if not average.", "if not gradient.", "step 1"),
        ("return scale / 2", "return scale", "the last rank is inf: scale"),
    ],
    "mesh": [
        ("shape[axis + 1 :]", "shape[:axis]", "the example"),
        ("% shape[axis] * stride", "* stride", "the example"),
    ],
    "data-loading": [
        ('ready.put(("error", error))', "pass", "an error after 3 items"),
        ('ready.put(("error", error))', 'ready.put(("end", None))', "an error after 3 items"),
        ("queue.Queue(depth)", "queue.Queue()", "at most 3 items wait"),
        ('if kind == "end":', "if item is None:", "None is an item"),
    ],
    "checkpoint": [
        ('f"{path}.new")\n        os.replace(f"{path}.new", path)', "path)", "if the writer dies"),
        ("dist.barrier()", "pass", "after save has returned"),
    ],
    "ring-all-reduce": [
        ("range(size - 1)", "range(size - 2)", "rank 0 has the sum"),
        ("passing = received", "pass", "rank 0 has the sum"),
        ("for _ in range(size - 1):", "dist.all_reduce(x)\n    for _ in ():", "use only"),
    ],
    "data-parallel": [
        ("samples / total.item()", "1 / dist.get_world_size()", "over all samples"),
        ("dist.all_reduce(parameter.grad)", "pass", "over all samples"),
        ("if parameter.grad is not None:", "if True:", "NoneType"),
    ],
    "tensor-parallel": [
        ("return gradient", "return gradient * dist.get_world_size()", "gradient of its rows"),
        ("tensor_split(size, dim=1)[rank]", "tensor_split(size, dim=1)[rank - 1]", "cannot be multiplied"),
    ],
}


def solution_of(name: str) -> str:
    return read_cell(find_exercise(name), "solution").code


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "ring-all-reduce" else pytest.mark.slow) for name in EXERCISES],
)
def test_exercise_refuses_wrong_solutions(name, tmp_path):
    path = tmp_path / "my.py"
    path.write_text(format_exercise(name))
    _, mistake = grade_file(name, path, 2)
    assert re.fullmatch(r"not written yet: \S+my\.py, line \d+ raises NotImplementedError", mistake)
    for old, new, message in WRONG[name]:
        assert old in solution_of(name)
        path.write_text(solution_of(name).replace(old, new))
        _, mistake = grade_file(name, path, 3)
        assert mistake is not None, (old, new)
        assert message in mistake
    path.write_text("import torch\n")
    assert "must define" in grade_file(name, path, 2)[1]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_exercise_accepts_its_solution(name, n, tmp_path):
    path = tmp_path / "my.py"
    path.write_text(solution_of(name))
    claims, mistake = grade_file(name, path, n)
    assert mistake is None
    assert len(claims) >= n


PASSES = """
import torch, torch.distributed as dist
def play(x):
    for _ in range(dist.get_world_size() - 1):
        received = torch.empty_like(x)
        sending = dist.isend(x, dst=(dist.get_rank() + 1) % dist.get_world_size())
        dist.recv(received, src=(dist.get_rank() - 1) % dist.get_world_size())
        sending.wait()
        yield (x := received)
def all_reduce(x):
    for received in play(x.clone()):  # a name that checks use, too
        x += received
"""
IMPORT = "import torch, torch.distributed as dist\n"
ENDLESS = """def all_reduce(x):
    if dist.get_rank() == 1:
        dist.recv(x.clone(), src=0)
"""
# files of students, and a part of what is said about them
FILES = {
    "syntax": ("def all_reduce(x:\n", "my.py cannot be run: SyntaxError"),
    "exit": ("import sys\nsys.exit(0)\n", "my.py cannot be run: SystemExit: 0 (my.py, line 2)"),
    "exit-inside": (
        f"{IMPORT}def all_reduce(x):\n    raise SystemExit(0)\n",
        "rank N: SystemExit: 0 (my.py, line 3)",
    ),
    "absent": ("x = 1\n", "my.py must define all_reduce; write the exercise again"),
    "nothing": (
        f"{IMPORT}def all_reduce(x):\n    print('done')\n",
        "expected [1, 3, 5, 7], got [0, 1, 2, 3]",
    ),
    "twice": (
        f"{PASSES}\nonce = all_reduce\ndef all_reduce(x):\n    once(x)\n    x *= 3\n",
        "got [3, 9, 15, 21]: 3 times what is expected",
    ),
    "arguments": ("def all_reduce():\n    pass\n", "takes 0 positional arguments but 1 was given"),
    "assertion": (
        f"{IMPORT}def all_reduce(x):\n    assert 1 == 2\n",
        "rank N: AssertionError (my.py, line 3)",
    ),
    "forbidden": (
        "from torch.distributed import all_reduce\n",
        "use only dist.isend, dist.send, dist.irecv and dist.recv",
    ),
    "check": (
        f"import paceline.lesson\npaceline.lesson.check = print\n{IMPORT}def all_reduce(x):\n    pass\n",
        "my.py replaces paceline.lesson.check, which the check needs",
    ),
    "loop": ("while True:\n    pass\n", "no end after 2 s: my.py, line "),
    "deadlock": (
        f"{IMPORT}{ENDLESS}",
        "no end after 2 s: rank 0 has returned, rank 1 is at my.py, line 4; is there a loop without an end,",
    ),
    "endless": (
        f"{IMPORT}{ENDLESS}    while dist.get_rank() == 0:\n        y = 1\n",
        "no end after 2 s: rank 0 is at my.py, line ",
    ),
}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_files_of_students(name, tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "STUCK_S", 2.0 if name in ("loop", "deadlock", "endless") else 20.0)
    monkeypatch.chdir(tmp_path)
    text, message = FILES[name]
    Path("my.py").write_text(text)
    claims, mistake = grade_file("ring-all-reduce", Path("my.py"), 2)
    # Both ranks fail in the same line, and either may be the first.
    assert message in (re.sub(r"\brank [01]: ", "rank N: ", mistake) if "rank N" in message else mistake)
    assert "\n" not in mistake
    assert claims == []


@pytest.mark.processes
@pytest.mark.slow
def test_helpers_of_students_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(PASSES)
    assert grade_file("ring-all-reduce", Path("my.py"), 3)[1] is None


@pytest.mark.processes
@pytest.mark.slow
def test_a_file_cannot_end_or_pass_its_check(tmp_path):
    for text, message in (
        ("import os\nos._exit(0)\n", "my.py ended the check with exit status 0"),
        ("def find_group(rank, shape, axis):\n    import os\n    os._exit(0)\n", "ended the check"),
        ("def find_group(rank, shape, axis):\n    return helper.group(rank)\n", "NameError: name 'helper'"),
        ("import beside\nfind_group = beside.find\n", "the example: this is false"),
    ):
        (tmp_path / "my.py").write_text(text)
        (tmp_path / "beside.py").write_text("def find(rank, shape, axis):\n    return [0]\n")
        (tmp_path / "random.py").write_text("raise RuntimeError('not the random of Python')\n")
        checked = paceline("lesson", "mesh", "--check", "my.py", at=tmp_path)
        assert (checked.status, checked.err) == (1, ""), checked.all
        assert message in checked.out
        assert checked.out.count("\n") == 1
