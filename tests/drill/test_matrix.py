"""Drills under all plans: the file of results, the table, and continuing after a signal."""

import json
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from command import find_marked_processes, paceline, start, write_task
from paceline.drill.matrix import PLANS, DrillTrial, TrialFile, TrialResult, build_matrix, summarize
from paceline.errors import RunError
from paceline.plan.plan import parse
from pages import read_blocks

TRIAL = DrillTrial(task="t", batch=8, steps=12, seed=0, plan="ddp", ranks=2, fault="kill", moment=5)
RESULT = TrialResult(trial=TRIAL, verdict="holds", step=4, rank=1)


def result(fault: str, plan: str, moment: int, verdict: str, samples: bool = True) -> TrialResult:
    trial = replace(TRIAL, fault=fault, plan=plan, moment=moment)
    return TrialResult(trial=trial, verdict=verdict, step=4, rank=1, samples=samples)  # type: ignore[arg-type]


def test_plans_are_possible_on_their_ranks() -> None:
    assert len(PLANS) == 8
    for plan, ranks in PLANS:
        assert parse(plan).resolve(ranks).ranks_per_stage <= ranks <= 4


def test_results_are_kept_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "drills.jsonl"
    file = TrialFile(path)
    file.add(RESULT)
    file.close()
    with path.open("a") as end:
        end.write('{"trial": {"task": "t", "ba')  # a drill that was killed
    file = TrialFile(path)
    assert file.results == {TRIAL: RESULT}
    file.add(result("stop", "ddp", 6, "fails"))
    file.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["holds", "fails"]


def test_two_series_do_not_write_to_one_file(tmp_path: Path) -> None:
    first = TrialFile(tmp_path / "r.jsonl")
    with pytest.raises(RunError, match=r"another drill writes to .*r\.jsonl; wait for its end"):
        TrialFile(tmp_path / "r.jsonl")
    first.close()
    TrialFile(tmp_path / "r.jsonl").close()


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("important\n")
    with pytest.raises(RunError, match=r"notes\.txt has no results of drills; name another file"):
        TrialFile(path)
    assert path.read_text() == "important\n"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(RunError, match="cannot write"):
        TrialFile(tmp_path / "link")


def test_table_and_sum() -> None:
    results = [
        *(result("kill", "ddp", moment, "holds") for moment in range(3)),
        result("kill", "ddp", 3, "fails", samples=False),
        result("kill", "zero3", 0, "holds"),
        result("flip-gradient", "zero3", 0, "not found"),
        result("cut", "zero3", 0, "not tried"),
    ]
    assert build_matrix(results, ["kill", "stop", "cut", "flip-gradient"]) == [
        ["fault", "ddp (2)", "zero3 (2)"],
        ["kill", "1 FAIL, 3 hold", "1 hold"],
        ["cut", "", "1 not tried"],
        ["flip-gradient", "", "1 not found"],
    ]
    assert summarize(results) == (
        "4 of 6 drills left no trace, 1 failed, 1 flipped bits could not be found; "
        "samples were lost or repeated in 1"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--all",), "--all requires --record FILE, where its results are kept; write --all --record"),
        (("--record", "a.jsonl"), "--record a.jsonl keeps the results of --all; add --all, or leave it out"),
        (
            ("--all", "--record", "a.jsonl", "--plan", "ddp"),
            "--all drills under its own plans and keeps results in --record; leave --plan out",
        ),
        (("--all", "--record", "no/a.jsonl"), "cannot write no/a.jsonl: No such file or directory"),
    ],
    ids=["no record", "no all", "plan", "no folder"],
)
def test_bad_input_is_reported_in_one_sentence(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = paceline("drill", *words, at=tmp_path)
    assert (done.status, done.err.count("\n")) == (2, 1), done.all
    assert done.err.startswith(f"paceline: {message}")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_series_prints_its_table_and_continues(tmp_path: Path) -> None:
    """Two starts, each ended by SIGTERM after one more result: no drill is repeated."""
    page = shlex.split(read_blocks("docs/drill.md")["all"])
    assert page[:3] + page[3:5] == ["paceline", "drill", "digits", "--all", "--record"]
    words = ("drill", write_task(tmp_path), "--all", "--record", "r.jsonl", "--faults", "kill,flip-weight")
    record = tmp_path / "r.jsonl"

    def count() -> int:
        return len(record.read_text().splitlines()) if record.exists() else 0

    for expected in (1, 2):
        with start(*words, "--batch", "16", at=tmp_path) as running:
            running.wait_until(lambda wanted=expected: count() >= wanted, "a result")
            running.process.send_signal(signal.SIGTERM)
            done = running.wait()
            assert done.status == 143, done.all
            assert not find_marked_processes(running.mark)
        assert re.search(rf"{count()} of 16 drills are done; the same command continues", done.out), done.all
        assert re.search(r"kill +1 hold", done.out), done.all
    trials = [json.loads(line)["trial"] for line in record.read_text().splitlines()]
    assert len({json.dumps(trial) for trial in trials}) == len(trials) >= 2
    assert not list((tmp_path / "runs").iterdir()), "drills that hold are not kept"
