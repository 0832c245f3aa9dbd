"""paceline tune: studies with real trainings, from their files."""

import csv
import json
import os
import re
import shutil
import signal
import tomllib
from pathlib import Path

import psutil
import pytest

from command import TASK, events_of_kind, paceline, set_sample_delay, start, succeed, write_task
from mounts import mount_tmpfs
from paceline.doctor.rank_state import read_heartbeats
from paceline.events import Evaluated, Failed, Step
from paceline.run import RunFolder
from paceline.tuning.journal import Launched, Reached, Suggested, read_state

pytestmark = pytest.mark.processes

STUDY = ("tune", "my.py:Regression", "--space", "lr=log:1e-3:1e-1", "--space", "width=int:4:16:4")
LENGTH = ("--batch", "16", "--steps", "4", "--device", "cpu", "--set", "validation=20", "--set", "samples=40")
LENGTH += ("--set", "spec.threads=1")
BROKEN = TASK.replace(
    "    def model(self):",
    "    def model(self):\n        if self.width > 8: raise RuntimeError('too wide: ' * 2)",
)


def results(study: Path) -> list[tuple[dict, str, dict]]:
    """Return values, state and metrics of each trial, without what differs between two equal studies."""
    trials = read_state(study / "events.jsonl").trials
    assert list(trials) == list(range(len(trials)))
    return [
        (trial.values, trial.state, {name: trial.metrics.get(name) for name in ("loss", "parameters")})
        for trial in trials.values()
    ]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A study of four trials, two at a time."""
    folder = tmp_path_factory.mktemp("study")
    write_task(folder)
    succeed(*STUDY, *LENGTH, "--trials", "4", "--ranks", "2", "--run-dir", "s", at=folder)
    return folder / "s"


def test_each_trial_is_a_run_with_its_values(study):
    trials = read_state(study / "events.jsonl").trials
    assert len(trials) == 4
    assert len({trial.values["lr"] for trial in trials.values()}) == 4
    for number, trial in trials.items():
        run = RunFolder(study / "trials" / str(number))
        spec, _ = run.request()
        assert (spec.optimizer.lr, spec.set["width"]) == (trial.values["lr"], trial.values["width"])
        assert 1e-3 <= spec.optimizer.lr <= 1e-1
        assert spec.set["width"] in (4, 8, 12, 16)
        last = events_of_kind(run.path, Evaluated)[-1]
        assert trial.metrics["loss"] == last.metrics["loss"]
        assert run.checkpoints()[-1] == 4
        assert trial.metrics["time"] == trial.seconds > 0
        assert trial.not_predicted == ""
        assert trial.predicted["parameters"] == trial.metrics["parameters"]
        assert min(trial.predicted[name] for name in ("step_s", "memory", "time")) > 0
        assert json.loads(run.provenance.read_text())["command"][1] == "tune"


def test_next_trial_is_prepared_while_all_ranks_are_busy(study):
    ended = min(
        event.time for event in read_state(study / "events.jsonl").events if isinstance(event, Reached)
    )
    assert RunFolder(study / "trials" / "2").provenance.stat().st_mtime < ended


@pytest.mark.slow
def test_best_trial_is_shown_and_can_be_trained_again(study):
    trials = read_state(study / "events.jsonl").trials
    best = min(trials.values(), key=lambda trial: trial.metrics["loss"])
    request = tomllib.loads((study / "best.toml").read_text())
    assert (request["optimizer"]["lr"], request["set"]["width"]) == (best.values["lr"], best.values["width"])
    shown = succeed("show", study, at=study.parent).out
    rows = [line.split() for line in shown.splitlines() if re.match(r" *\d+\*? +[\d.]+ ", line)]
    order = sorted(trials.values(), key=lambda trial: trial.metrics["loss"])
    assert [row[0] for row in rows] == [f"{t.number}*" if t is best else str(t.number) for t in order]
    succeed("train", study / "best.toml", "--run-dir", "again", at=study.parent)
    again = events_of_kind(study.parent / "again", Evaluated)[-1]
    assert again.metrics["loss"] == pytest.approx(best.metrics["loss"], rel=1e-5)


def test_finished_study_does_nothing_when_resumed(study):
    before = (study / "events.jsonl").read_bytes()
    again = paceline(*STUDY, *LENGTH, "--run-dir", "s", at=study.parent)
    assert (again.status, again.err) == (
        2,
        "paceline: s already exists; choose another --run-dir (to continue it: paceline tune s --resume)\n",
    )
    succeed("tune", study, "--resume", at=study.parent)
    assert (study / "events.jsonl").read_bytes() == before
    for words, sentence in (
        ([], "is a study; continue it with"),
        (["--resume", "--lr", "1"], "as it was defined, got optimizer.lr"),
        (["--resume", "--sampler", "grid"], "as it was defined, got sampler"),
    ):
        result = paceline("tune", study, *words, at=study.parent)
        assert (result.status, sentence in result.err) == (2, True), result.all


@pytest.mark.slow
def test_more_trials_continue_the_same_sequence(study, tmp_path):
    write_task(tmp_path)
    succeed(*STUDY, *LENGTH, "--trials", "1", "--run-dir", "s", at=tmp_path)
    succeed("tune", "s", "--resume", "--trials", "2", at=tmp_path)
    assert results(tmp_path / "s") == results(study)[:2]


def test_killed_study_continues_with_the_same_trials(study, tmp_path):
    """Kill -9 of controller, launchers and ranks in the second trial: neither lost nor trained twice."""
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.0)
    command = (*STUDY, *LENGTH, "--trials", "3", "--run-dir", "s")
    journal = tmp_path / "s" / "events.jsonl"
    with start(*command, at=tmp_path, SLOW=str(slow)) as running:
        running.wait_until(lambda: 0 in read_state(journal).trials, "at trial 0")
        running.wait_until(lambda: read_state(journal).trials[0].state == "complete", "at the end of trial 0")
        set_sample_delay(slow, 0.2)
        running.wait_for_step(tmp_path / "s" / "trials" / "1", 1)
        second = paceline("tune", "s", "--resume", at=tmp_path)
        assert second.status == 2
        assert re.search(r"s is already being run by process \d+ on \S+; wait for it or end it$", second.err)
        for process in running.remaining_processes():
            process.send_signal(signal.SIGKILL)
    assert [trial.state for trial in read_state(journal).trials.values()] == ["complete", "running"]
    succeed("tune", "s", "--resume", at=tmp_path)
    assert results(tmp_path / "s") == results(study)[:3]
    events = read_state(journal).events
    assert [event.trial for event in events if isinstance(event, Suggested)] == [0, 1, 2]
    assert [event.trial for event in events if isinstance(event, Launched)] == [0, 1, 1, 2]


@pytest.mark.slow
def test_stopped_study_saves_and_continues(study, tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.05)
    with start(*STUDY, *LENGTH, "--trials", "1", "--run-dir", "s", at=tmp_path, SLOW=str(slow)) as running:
        run = tmp_path / "s" / "trials" / "0"
        running.wait_for_step(run, 1)
        running.process.send_signal(signal.SIGTERM)
        result = running.wait()
        assert not running.remaining_processes()
    assert result.status == 75, result.all
    assert "continue with: paceline tune s --resume" in result.err
    assert RunFolder(run).checkpoints()
    succeed("tune", "s", "--resume", at=tmp_path)
    assert results(tmp_path / "s") == results(study)[:1]


@pytest.mark.slow
def test_failed_trials_are_recorded_and_the_search_continues(tmp_path):
    write_task(tmp_path, BROKEN)
    study = ("tune", "my.py:Regression", "--grid", "width=4,16,8", "--run-dir", "s", *LENGTH)
    result = succeed(*study, at=tmp_path)
    states = [trial.state for trial in read_state(tmp_path / "s" / "events.jsonl").trials.values()]
    assert states == ["complete", "failed", "complete"]
    assert "trial 1: failed: " in result.out
    assert "too wide" in result.out


def test_trials_that_end_without_an_error_are_described(tmp_path):
    """One is killed, as by the system if memory is exhausted; one calls os._exit; one lacks the metric."""
    dying = """
        if self.width == 12: os.kill(os.getpid(), signal.SIGKILL)
        if self.width == 16: os._exit(0)"""
    loss = "    def loss(self, output, batch):"
    metrics = """
    def metrics(self, output, batch):
        return {} if self.width == 8 else {"error": (output - batch[1]).abs()}
"""
    write_task(tmp_path, "import os, signal\n" + TASK.replace(loss, loss + dying) + metrics)
    study = ("tune", "my.py:Regression", "--grid", "width=12,16,4,8", "--metric", "min error")
    succeed(*study, "--run-dir", "s", *LENGTH, at=tmp_path)
    killed, exited, complete, without = read_state(tmp_path / "s" / "events.jsonl").trials.values()
    assert [trial.state for trial in (killed, exited, complete, without)] == [
        *["failed"] * 2,
        "complete",
        "failed",
    ]
    assert without.message == "error is not among its metrics"
    assert killed.message == "the trial was killed by SIGKILL, after step 0; see s/logs/0.txt"
    assert exited.message.startswith(
        "the trial failed: ended with exit status 0 before the training was over"
    )
    assert [trial.not_predicted for trial in (killed, exited, complete)] == [
        "the prediction was killed by SIGKILL",
        "the prediction failed: ended with exit status 0 before it was over",
        "",
    ]
    for trial in (killed, exited):
        [failed] = events_of_kind(tmp_path / "s" / "trials" / str(trial.number), Failed)
        assert failed.message == trial.message


@pytest.mark.slow
def test_trial_that_hangs_is_ended(tmp_path):
    """The third step of the second trial is an endless loop of its task; the third trial is trained."""
    loss = "    def loss(self, output, batch):\n"
    endless = "        CALLS.append(1)\n        while self.width == 16 and len(CALLS) > 2: pass\n"
    write_task(tmp_path, "CALLS = []\n" + TASK.replace(loss, loss + endless))
    words = ("--grid", "width=12,16,4", "--set", "spec.timeout_s=4", "--run-dir", "s", *LENGTH)
    succeed("tune", "my.py:Regression", *words, at=tmp_path)
    trials = read_state(tmp_path / "s" / "events.jsonl").trials
    assert [trial.state for trial in trials.values()] == ["complete", "failed", "complete"]
    assert "is in Regression.loss" in trials[1].message
    assert "no rank has made progress for" in trials[1].message


@pytest.mark.slow
def test_study_that_would_fill_the_disk_is_refused(tmp_path):
    """A trial of width 16 has 3 checkpoints of AdamW: more than 12 bytes for each of 915 parameters."""
    write_task(tmp_path)
    (tmp_path / "small").mkdir()
    with mount_tmpfs(tmp_path / "small", "size=1m"):
        words = ("--space", "width=16,17", "--trials", "60", "--run-dir", "small/s", *LENGTH)
        result = paceline("tune", "my.py:Regression", *words, at=tmp_path)
        assert result.status == 2, result.all
        [line] = result.err.strip().splitlines()
        pattern = (
            r"60 trials with 3 checkpoints of [\d.]+ KiB each \(predicted\) need [\d.]+ MiB in \d,\d+ files"
        )
        assert re.search(pattern, line), line
        assert "free; use another --run-dir, fewer --trials or --set save.keep=1" in line
        assert not (tmp_path / "small" / "s").exists()


def test_study_whose_trials_all_fail_has_status_1(tmp_path):
    write_task(tmp_path, BROKEN)
    study = ("tune", "my.py:Regression", "--grid", "width=16,20", "--run-dir", "s", *LENGTH)
    result = paceline(*study, at=tmp_path)
    assert result.status == 1, result.all
    assert result.out.endswith("2 trials: 2 failed\n")


def test_identical_failures_stop_the_study(tmp_path):
    write_task(tmp_path, BROKEN)
    study = ("tune", "my.py:Regression", "--grid", "width=12,16,20,24", "--run-dir", "s", *LENGTH)
    result = paceline(*study, at=tmp_path)
    assert result.status == 2
    assert "3 trials in a row failed with the same error, so the study stops: " in result.err
    assert len(read_state(tmp_path / "s" / "events.jsonl").trials) == 3
    assert sorted(path.name for path in (tmp_path / "s" / "trials").iterdir()) == ["0", "1", "2"]


@pytest.mark.slow
def test_unknown_metric_ends_the_study_after_its_first_evaluation(tmp_path):
    write_task(tmp_path)
    result = paceline(*STUDY, *LENGTH, "--metric", "min los", "--trials", "3", "--run-dir", "s", at=tmp_path)
    assert result.status == 2
    assert result.err.strip().splitlines()[-1] == (
        "paceline: --metric 'min los': the evaluations have no los; did you mean loss?"
    )
    assert len(read_state(tmp_path / "s" / "events.jsonl").trials) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--space", "wdith=1,2"], "--space wdith: .* did you mean width?"),
        (["--space", "width=int:9:3"], "write 3:9"),
        (["--space", "width=8,16", "--set", "widt=3"], "^paceline: [^ ]*my.py:Regression has no field widt"),
        (["--space", "width=int:0:4"], "the value 0 is impossible"),
        (["--space", "optimizer.name=adamm,sgd"], "the value 'adamm' is impossible"),
        (["--space", "ranks=1,2"], "the study decides this key"),
        (["--space", "lr=1,2", "--space", "optimizer.lr=1,2"], "are the same key"),
        (
            ["--space", "width=8,16", "--metric", "loss"],
            "metrics must be 'min NAME' or 'max NAME', got 'loss'",
        ),
        (["--space", "width=8,16", "--ranks-per-trial", "2"], "use --ranks 2"),
        (["--space", "width=8,16", "--metric", "min price"], "cluster.json does not give it"),
        (
            ["--space", "width=8,16", "--metric", "min energy", "--ranks", "2"],
            "cannot be divided between trials that share it; use --ranks-per-trial 2",
        ),
        (["--space", "width"], "--space must be NAME=RANGE"),
        (["--space", "lr=1,2", "--lr", "3"], "lr is searched, and an option gives it the value 3"),
        (
            ["--space", "optimizer.momentum=0.5,0.9", "--space", "optimizer.name=adamw,sgd"],
            "or add a condition: 'optimizer.momentum=… if optimizer.name==sgd'",
        ),
        (["--space", "precision=fp32,fp99"], "got 'fp99'$"),
        (["--space", "width=8,16", "--ranks", "100000"], "--ranks must be at most"),
        (["--grid", "lr=log:1:2"], "has no step"),
        (["--grid", "width=8,16", "--trials", "3"], "the grid has 2 combinations"),
        ([], "tune requires a parameter to search"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(words, sentence, tmp_path):
    task = TASK.replace("width: int = 10", "width: int = 10\n    def __post_init__(self): assert self.width")
    write_task(tmp_path, task)
    result = paceline("tune", "my.py:Regression", *words, "--run-dir", "s", at=tmp_path)
    assert result.status == 2, result.all
    [line] = result.err.strip().splitlines()
    assert re.search(sentence, line)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_sweep_file_gives_the_same_study(study, tmp_path):
    write_task(tmp_path)
    (tmp_path / "sweep.toml").write_text(
        """
        task = "my.py:Regression"
        batch = 16
        steps = 4
        device = "cpu"
        threads = 1
        [set]
        validation = 20
        samples = 40
        [space]
        lr = "log:1e-3:1e-1"
        width = "int:4:16:4"
        [tune]
        trials = 1
        """
    )
    succeed("tune", "sweep.toml", "--run-dir", "s", at=tmp_path)
    assert results(tmp_path / "s") == results(study)[:1]
    assert json.loads((tmp_path / "s" / "events.jsonl").read_text().splitlines()[0])["event"] == "suggested"


def test_table_is_written_as_csv_and_for_optuna(study, tmp_path):
    optuna = pytest.importorskip("optuna")
    succeed("show", study, "--csv", tmp_path / "trials.csv", "--optuna", tmp_path / "optuna.log", at=tmp_path)
    trials = read_state(study / "events.jsonl").trials
    with open(tmp_path / "trials.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["trial"]), float(row["lr"]), float(row["metric.loss"])) for row in rows] == [
        (trial.number, trial.values["lr"], trial.metrics["loss"]) for trial in trials.values()
    ]
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "optuna.log"))
    storage = optuna.storages.JournalStorage(backend)
    loaded = optuna.load_study(study_name="s", storage=storage)
    assert loaded.best_trial.params == min(trials.values(), key=lambda trial: trial.metrics["loss"]).values
    again = paceline("show", study, "--optuna", tmp_path / "optuna.log", at=tmp_path)
    assert (again.status, "exists already" in again.err) == (2, True)
    wrong = paceline("show", study / "trials" / "0", "--csv", "t.csv", at=tmp_path)
    assert (wrong.status, "is not a study" in wrong.err) == (2, True)


@pytest.mark.slow
def test_trials_that_violate_a_bound_never_start(tmp_path):
    """The bound lies between the numbers of parameters that the models of widths 8 and 12 have."""
    write_task(tmp_path)
    counts = {
        width: 6 * width + width + 3 * (width * width + 2 * width) + 3 * width + 3 for width in (4, 8, 12)
    }
    bound = (counts[8] + counts[12]) // 2
    words = ("--grid", "width=4,8,12", "--where", f"parameters<{bound}", "--metric", "min predicted.memory")
    words += ("--metric", "min loss")
    printed = succeed("tune", "my.py:Regression", *words, *LENGTH, "--run-dir", "s", at=tmp_path).out
    assert "\nbest in predicted.memory: trial 0: " in printed
    assert printed.endswith("\nall trials of the Pareto front: paceline show s\n")
    trials = read_state(tmp_path / "s" / "events.jsonl").trials
    assert [trial.state for trial in trials.values()] == ["complete", "complete", "refused"]
    assert [trial.predicted.get("parameters") for trial in trials.values()] == [counts[4], counts[8], None]
    assert [trial.metrics.get("parameters") for trial in trials.values()] == [counts[4], counts[8], None]
    assert trials[0].predicted["memory"] < trials[1].predicted["memory"]
    assert trials[2].message == (
        f"the prediction is parameters={counts[12]}, but the study requires parameters<{bound}"
    )
    assert not (tmp_path / "s" / "trials" / "2").exists()


@pytest.mark.slow
def test_study_whose_trials_are_all_refused_says_what_would_fit(tmp_path):
    write_task(tmp_path)
    words = ("--grid", "width=12,8", "--where", "parameters<100", "--run-dir", "s", *LENGTH)
    result = paceline("tune", "my.py:Regression", *words, at=tmp_path)
    assert result.status == 2, result.all
    smallest = 6 * 8 + 8 + 3 * (8 * 8 + 2 * 8) + 3 * 8 + 3
    line = result.err.strip().splitlines()[-1]
    assert line.startswith("paceline: no trial can start: 2 trials refused in a row, the last because ")
    assert line.endswith(f"requires parameters<100; the smallest predicted parameters was {smallest}")


@pytest.mark.slow
def test_asha_continues_the_best_trials_exactly(tmp_path):
    """A promoted trial has the losses of a training that was never paused."""
    write_task(tmp_path)
    words = ("--grid", "lr=0.1,0.001,0.01", "--scheduler", "asha", "--rungs", "2")
    length = [word if word != "4" else "6" for word in LENGTH]
    succeed("tune", "my.py:Regression", *words, *length, "--run-dir", "s", at=tmp_path)
    trials = read_state(tmp_path / "s" / "events.jsonl").trials
    assert sorted(trial.state for trial in trials.values()) == ["complete", "pruned", "pruned"]
    [best] = [trial for trial in trials.values() if trial.state == "complete"]
    assert [stage.samples for stage in best.stages] == [32, 96]
    assert [len(trial.stages) for trial in trials.values()].count(1) == 2
    assert best.stages[0].metrics["loss"] == min(trial.stages[0].metrics["loss"] for trial in trials.values())
    lr = str(best.values["lr"])
    succeed("train", "my.py:Regression", *length, "--lr", lr, "--run-dir", "r", at=tmp_path)
    whole, paused = (
        {event.step: event.loss for event in events_of_kind(run, Step)}
        for run in (tmp_path / "r", tmp_path / "s" / "trials" / str(best.number))
    )
    assert paused == whole


@pytest.mark.slow
def test_too_few_trials_for_the_rungs_are_reported(tmp_path):
    write_task(tmp_path)
    words = ("--grid", "lr=0.1,0.001", "--scheduler", "asha", *LENGTH, "--run-dir", "s")
    printed = succeed("tune", "my.py:Regression", *words, at=tmp_path).out
    assert printed.endswith(
        "no trial trained to the end, so there is no best one; asha with 3 rungs wants 9 trials or more\n"
    )
    assert not (tmp_path / "s" / "best.toml").exists()


def test_page_shows_each_trial_and_loads_nothing(study, tmp_path):
    """A hostile name of a study appears as text only."""
    hostile = tmp_path / "<script>alert(1)<"
    shutil.copytree(study, hostile)
    succeed("report", hostile, "-o", tmp_path / "page.html", at=study.parent)
    page = (tmp_path / "page.html").read_text()
    assert "default-src 'none'; style-src 'sha256-" in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;" in page
    assert not re.findall(r"(?:src|href)=", page)
    trials = read_state(study / "events.jsonl").trials
    rows = re.findall(r'<th scope="row">(\d+)\*?</th>', page)
    assert sorted(map(int, rows)) == list(trials)
    assert len(re.findall(r"<title>trial \d+</title>", page)) == len(trials)
    both = paceline("report", study, study, at=study.parent)
    assert (both.status, "report one study" in both.err) == (2, True)


@pytest.mark.slow
def test_study_stops_at_its_time_limit_and_continues(study, tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.1)
    command = (*STUDY, *LENGTH, "--trials", "2", "--run-dir", "s", "--max-time", "3s")
    result = paceline(*command, at=tmp_path, SLOW=str(slow))
    assert result.status == 75, result.all
    assert "1 trial: 1 running" in result.out
    succeed("tune", "s", "--resume", "--max-time", "4h", at=tmp_path)
    assert results(tmp_path / "s") == results(study)[:2]
    wrong = paceline("tune", "s", "--resume", "--max-time", "soon", at=tmp_path)
    assert (wrong.status, "max_time must be a duration" in wrong.err) == (2, True)


def test_journal_of_another_user_cannot_control_the_terminal(study, tmp_path):
    hostile = tmp_path / "s"
    shutil.copytree(study, hostile)
    journal = hostile / "events.jsonl"
    event = {"time": 1.0, "trial": 4, "values": {"lr": "\x1b[2J[bold]x", "width": "[/red]"}}
    with open(journal, "a") as file:
        file.write(json.dumps({"event": "suggested", **event}) + "\n")
        file.write(json.dumps({"event": "suggested", "time": 1.0, "trial": 5, "values": {"lr": [1]}}) + "\n")
    shown = succeed("show", hostile, at=tmp_path).out
    assert "\x1b" not in shown
    assert "[bold]x" in shown
    assert "[/red]" in shown
    assert "skipped 1 unusable lines" in shown
    exported = paceline("show", hostile, "--optuna", tmp_path / "o.log", at=tmp_path)
    assert (exported.status, "outside of the space" in exported.err) == (2, True), exported.all


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_task_of_another_user_is_not_imported(study, tmp_path):
    theirs = tmp_path / "s"
    shutil.copytree(study, theirs)
    code = tmp_path / "theirs.py"
    code.write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()\n{TASK}")
    text = (theirs / "study.toml").read_text()
    (theirs / "study.toml").write_text(re.sub(r'task = ".*"', f'task = "{code}:Regression"', text))
    os.chown(theirs / "study.toml", 12345, -1)
    for words in (("show", theirs), ("report", theirs), ("tune", theirs, "--resume")):
        refused = paceline(*words, at=tmp_path)
        assert refused.status == 2
        assert "study.toml belongs to user 12345, whose task would run" in refused.err
        assert not (tmp_path / "imported").exists()
    os.chown(theirs / "study.toml", 0, -1)  # the negative control: a task that is imported leaves the file
    succeed("show", theirs, at=tmp_path)
    assert (tmp_path / "imported").exists()


@pytest.mark.slow
def test_trial_that_saves_and_stops_is_continued(study, tmp_path):
    """A signal lets the only rank of the trial save and stop, as at a max_time of its request."""
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.05)
    with start(*STUDY, *LENGTH, "--trials", "1", "--run-dir", "s", at=tmp_path, SLOW=str(slow)) as running:
        run = tmp_path / "s" / "trials" / "0"
        running.wait_for_step(run, 1)
        [heartbeat] = [beat for beat in read_heartbeats(RunFolder(run)) if beat is not None]
        psutil.Process(heartbeat.pid).send_signal(signal.SIGTERM)
        assert running.wait().status == 0
    assert results(tmp_path / "s") == results(study)[:1]
    events = read_state(tmp_path / "s" / "events.jsonl").events
    assert sum(isinstance(event, Launched) for event in events) == 2
