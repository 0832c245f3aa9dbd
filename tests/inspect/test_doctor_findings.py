"""`paceline doctor` on runs that have ended, on recordings, and on damaged folders."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import TASK, paceline, set_sample_delay, succeed, write_task
from paceline.cli.inspect.doctor import _add_free_space
from paceline.cluster.directories import list_mounts
from paceline.inspect import find
from paceline.inspect.conclude import conclude
from paceline.inspect.facts import RunFacts
from paceline.inspect.finding import Outcome, Rule
from paceline.inspect.read_facts import read_facts
from paceline.inspect.rules import RULES
from paceline.run import RunFolder

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes


def read_found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "found.json").read_text())


def doctor(folder: Path, name: str = "runs/a") -> tuple[str, dict[str, Any]]:
    result = paceline("doctor", name, "--json", "found.json", at=folder)
    assert (result.status, result.err) == (0, ""), result.all
    assert "Traceback" not in result.all
    return result.out, read_found(folder)


def train(folder: Path, *options: str, task: str = TASK, **environment: str) -> Path:
    """Train into runs/a, and return this folder."""
    words = ("train", write_task(folder, task), "--batch", "16", "--run-dir", "runs/a", *options)
    succeed(*words, at=folder, **environment)
    return folder / "runs/a"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("healthy"), "--steps", "80")


def find_rules(found: dict[str, Any]) -> set[str]:
    return {finding["rule"] for finding in found["findings"]}


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """The recording is what nvidia-smi writes, with units and spaces."""
    page = (ROOT / "docs/findings.md").read_text()
    blocks = re.findall(
        r"<!-- run as tests/inspect/test_doctor_findings.py: commands -->\n+```sh\n(.*?)```", page, re.S
    )
    set_sample_delay(tmp_path / "slow", 0.002)
    train(tmp_path, "--steps", "80", SLOW=str(tmp_path / "slow"))
    lines = ["timestamp, index, utilization.gpu [%], memory.used [MiB], memory.total [MiB]"]
    for second in range(120):
        for gpu, used in ((0, 94), (1, 0)):
            time = f"2026/01/05 10:{second // 60:02}:{second % 60:02}.000"
            lines.append(f"{time}, {gpu}, {used} %, {2758 + 60000 * (gpu == 0)} MiB, 81559 MiB")
    (tmp_path / "gpu.csv").write_text("\n".join(lines) + "\n")
    outputs = [
        paceline(*line.split()[1:], at=tmp_path) for block in blocks for line in block.strip().splitlines()
    ]
    assert len(outputs) == 3
    assert all(output.status == 0 for output in outputs)
    assert "- the training waits for its input for " in outputs[0].out
    assert "    fix: paceline train runs/a/spec.toml --workers " in outputs[0].out
    assert find_rules(read_found(tmp_path)) == {"slow-input"}
    assert "waiting for input" not in outputs[2].out
    assert "growing memory of ranks" in outputs[2].out
    assert outputs[2].out.startswith(
        "gpu.csv: 1 finding\n- GPU 1 was idle (0 %) for the whole 2:00 (costs 50% of the time"
    )


def test_the_page_lists_every_rule() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (.*)", (ROOT / "docs/findings.md").read_text(), re.M)
    assert [name for name, _ in rows] == [rule.name for rule in RULES]
    for (name, text), rule in zip(rows, RULES, strict=True):
        assert ("(*simulated*)" in text) == rule.is_simulated, name


def test_the_end_of_a_training_shows_the_findings(tmp_path: Path) -> None:
    for options, where in (([], "alone"), (["--ranks", "2"], "two")):
        words = (write_task(tmp_path), "--batch", "16", "--steps", "4", "--run-dir", where, *options)
        result = succeed("train", *words, "--tf32", at=tmp_path)
        assert "finding: --tf32 has no effect: it applies to CUDA devices" in result.out
        assert f"how to change it: paceline doctor {where}\n" in result.out
        assert "finding" not in succeed("train", *words[:6], f"{where}-ok", *options, at=tmp_path).out


def test_a_prediction_is_compared_on_request(tmp_path: Path) -> None:
    words = ("digits", "--steps", "40", "--profile", "--monitor", "off", "--run-dir", "runs/a")
    succeed("train", *words, at=tmp_path)
    _, found = doctor(tmp_path)
    assert "paceline doctor RUN --predict" in found["not_checked"]["computing compared with the device"]
    result = paceline("doctor", "runs/a", "--predict", "--json", "found.json", at=tmp_path)
    assert result.status == 0, result.all
    # On a busy machine, the rule reports that ranks waited for a core.
    reason = read_found(tmp_path)["not_checked"].get(
        "computing compared with the device", "waited for a core"
    )
    assert "waited for a core" in reason, reason


def test_the_quota_limits_the_space_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool named quota answers as that of a file system does: 90 of 100 blocks of 1 KiB are used."""
    device = next(mount.device for mount in list_mounts() if mount.point == "/")
    (tmp_path / "quota").write_text(
        "#!/bin/sh\necho 'Disk quotas for user me (uid 1000):'\n"
        "echo '     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace'\n"
        f"echo '{device} 90 100 100 3 0 0'\n"
    )
    (tmp_path / "quota").chmod(0o755)
    facts = RunFacts(path=tmp_path, disk_free_bytes=10**12)
    before = _add_free_space(facts).disk_free_bytes
    assert before is not None
    assert before > 10 * 2**10
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    on_root = replace(facts, path=Path("/"))
    assert _add_free_space(on_root).disk_free_bytes == 10 * 2**10
    (tmp_path / "quota").write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    assert _add_free_space(on_root).notes[0].startswith("the quota was not checked: quota")


def test_a_prediction_needs_a_profile(run: Path) -> None:
    result = paceline("doctor", "runs/a", "--predict", "--json", "found.json", at=run.parents[1])
    assert result.status == 0, result.all
    reason = read_found(run.parents[1])["not_checked"]["computing compared with the device"]
    assert reason.startswith("it needs a profile (--profile): "), reason


def test_an_error_in_a_rule_does_not_end_a_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(facts: RunFacts) -> Outcome:
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(find, "RULES", (Rule("bad", "something", check),))
    assert conclude(RunFolder(run)) == ["no findings: ZeroDivisionError: a mistake"]


def test_a_healthy_run_has_no_findings(run: Path) -> None:
    out, found = doctor(run.parents[1])
    assert out.startswith("runs/a is not running: it was done at step 80\nnothing found\nchecked: "), out
    assert found["findings"] == []
    assert {"threads and cores", "options without effect"} <= {*found["checked"]}
    assert found["verdict"] is None


def test_facts_of_a_run_come_from_its_files(run: Path) -> None:
    """Compare with the lines of the file, read by the standard library."""
    facts = read_facts(RunFolder(run))
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [point.loss for point in facts.steps] == [line["loss"] for line in steps]
    assert [point.since_start for point in facts.steps] == list(range(1, 81))
    assert len(facts.evaluated) == sum(line["event"] == "evaluated" for line in lines)
    assert facts.facts["local_ranks"] == 1
    [beat] = facts.beats
    assert beat is not None
    assert beat.total_steps == 75
    assert beat.core_wait_s is None or beat.core_wait_s >= 0
    # The steps after the first five, by the clock of the loop, contain these phases.
    phases_s = sum(beat.total_s[phase] for phase in ("data", "forward", "backward", "update"))
    assert 0 < phases_s <= sum(line["step_s"] for line in steps[5:]) * 1.01


def copy_run(run: Path, folder: Path) -> Path:
    """Copy a run to runs/a of another folder."""
    shutil.copytree(run, folder / "runs/a")
    return folder / "runs/a"


def test_damaged_runs_have_notes_and_no_traceback(run: Path, tmp_path: Path) -> None:
    copy = copy_run(run, tmp_path)
    with open(copy / "events.jsonl", "a") as file:
        file.write('{"time": 1, "event": "paused"}\nnonsense\n{"time": 2, "event": "step", "st')
    (copy / "ranks/0.alive").write_text('{"rank": 0,')
    (copy / "monitor").mkdir(exist_ok=True)
    (copy / "monitor/broken.csv").write_text("a,b\n1,2\n")
    (copy / "monitor/empty.csv").write_text("")
    out, found = doctor(tmp_path)
    assert "skipped 1 damaged line and 1 event of an unknown kind (paused) in events.jsonl" in out
    assert any("0.alive" in note for note in found["notes"])
    assert any(note.startswith("the last line of events.jsonl is incomplete") for note in found["notes"])
    assert any("broken.csv has no known column" in note for note in found["notes"])
    assert found["findings"] == []


def test_neighbours_that_are_no_runs_are_skipped(run: Path, tmp_path: Path) -> None:
    copy_run(run, tmp_path)
    for name in ("pipe", "empty", "text"):
        (tmp_path / "runs" / name).mkdir()
    os.mkfifo(tmp_path / "runs/pipe/spec.toml")
    (tmp_path / "runs/empty/spec.toml").touch()
    (tmp_path / "runs/text/spec.toml").write_text("not TOML")
    _, found = doctor(tmp_path)
    assert found["findings"] == []


def test_a_request_of_a_newer_version_is_noted(run: Path, tmp_path: Path) -> None:
    copy = copy_run(run, tmp_path)
    text = (copy / "spec.toml").read_text()
    (copy / "spec.toml").write_text("quantum = true\n" + text)
    out, found = doctor(tmp_path)
    assert "rules about the request were not checked: " in out
    assert found["not_checked"]["options without effect"] == "the request of the run cannot be read"


def test_a_run_of_an_older_version_is_checked_as_far_as_its_files_allow(run: Path, tmp_path: Path) -> None:
    copy = copy_run(run, tmp_path)
    events = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    events[0].pop("facts")
    (copy / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    beat = json.loads((copy / "ranks/0.alive").read_text())
    del beat["total_s"], beat["total_steps"]
    (copy / "ranks/0.alive").write_text(json.dumps(beat))
    _, found = doctor(tmp_path)
    assert found["findings"] == []
    assert "by a version that did not record the machine" in found["not_checked"]["threads and cores"]
    assert "options without effect" in found["checked"]


@pytest.mark.parametrize("lines", [[], ["started"]])
def test_a_run_without_steps(run: Path, tmp_path: Path, lines: list[str]) -> None:
    copy = copy_run(run, tmp_path)
    kept = [
        line
        for line in (copy / "events.jsonl").read_text().splitlines()
        if json.loads(line)["event"] in lines
    ]
    (copy / "events.jsonl").write_text("".join(f"{line}\n" for line in kept))
    _, found = doctor(tmp_path)
    assert found["findings"] == []
    assert "waiting for input" in found["not_checked"]


def test_nan_and_many_metrics(run: Path, tmp_path: Path) -> None:
    copy = copy_run(run, tmp_path)
    metrics = {f"metric {k}": None if k % 2 else 1e308 for k in range(10_000)}
    with open(copy / "events.jsonl", "a") as file:
        for step in range(81, 90):
            event = {"time": 2e9, "event": "evaluated", "step": step, "seconds": 1e-9}
            file.write(json.dumps({**event, "metrics": {"loss": None, **metrics}}) + "\n")
    _, found = doctor(tmp_path)
    assert found["findings"] == []


@pytest.mark.parametrize(("shift_s", "when"), [(86_400, "after the last"), (-86_400, "before the first")])
def test_clocks_of_nodes_that_differ_are_noted(run: Path, tmp_path: Path, shift_s: int, when: str) -> None:
    copy = copy_run(run, tmp_path)
    at = json.loads((copy / "events.jsonl").read_text().splitlines()[-1])["time"]
    lines = ["# paceline samples 1", "# node: node7", "time [s],cpu [%]"]
    (copy / "monitor").mkdir(exist_ok=True)
    for name, shift in (("near", 0), ("far", shift_s)):
        rows = [f"{at + shift - k:.3f},50" for k in range(20, 0, -1)]
        (copy / f"monitor/{name}.csv").write_text("\n".join([*lines, *rows]) + "\n")
    _, found = doctor(tmp_path)
    [note] = [note for note in found["notes"] if "node7" in note]
    assert f" {when} step by the clock of rank 0, and are left out" in note


def test_numbers_that_are_not_finite_are_damaged_lines(run: Path, tmp_path: Path) -> None:
    """Nothing writes them; a copy that went wrong, or another program, may."""
    copy = copy_run(run, tmp_path)
    lines = [json.loads(line) for line in (copy / "events.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    steps[9]["lr"], steps[19]["step_s"], steps[29]["data_s"] = math.nan, math.inf, -math.inf
    text = "\n".join(map(json.dumps, lines)) + "\n"
    (copy / "events.jsonl").write_text(text.replace("-Infinity", "-1e999"))
    out, found = doctor(tmp_path)
    assert "skipped 3 damaged lines in events.jsonl" in out
    assert found["findings"] == []
    for words in (("show", "runs/a"), ("status", "runs/a"), ("report", "runs/a", "-o", "r.html")):
        result = paceline(*words, at=tmp_path)
        assert (result.status, result.err) == (0, ""), result.all
    assert "skipped 3 damaged lines" in (tmp_path / "r.html").read_text()


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "folder").mkdir()
    for name, words in (
        ("other.csv", "has no known column"),
        ("folder", "is not a run folder"),
        ("missing.csv", "no such run"),
    ):
        result = paceline("doctor", name, at=tmp_path)
        assert result.status == 2
        assert re.fullmatch(r"paceline: [^\n]*\n", result.err), result.err
        assert words in result.err
    result = paceline("doctor", "empty.csv", at=tmp_path)
    assert (result.status, result.err) == (0, "")
    assert "nothing found" in result.out
    assert "not checked: " in result.out
