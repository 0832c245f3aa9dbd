"""The journal of a study: what it keeps, and what damage to it costs."""

import json
import os

import pytest

from paceline.errors import RunError
from paceline.tuning.journal import (
    Finished,
    JournalWriter,
    Launched,
    Predicted,
    Reached,
    Suggested,
    read_state,
)
from paceline.tuning.report.predictions import describe_predictions

EVENTS = [
    Suggested(trial=0, values={"lr": 0.1, "name": "adamw", "wide": True}),
    Launched(trial=0, ranks=2),
    Reached(trial=0, samples=320, metrics={"accuracy": 0.5, "loss": None, "time": 2.0}, seconds=2.0),
    Finished(trial=0, state="complete"),
    Suggested(trial=1, values={"lr": 0.2}),
    Launched(trial=1, ranks=1),
    Predicted(trial=0, predicted={"time": 1.5}),
    Predicted(trial=1, problem="the model has no blocks"),
]


@pytest.fixture
def journal(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = JournalWriter(path)
    for event in EVENTS:
        writer.write(event)
    writer.close()
    return path


def test_state_follows_from_the_events(journal):
    state = read_state(journal)
    assert state.events == EVENTS
    assert state.skipped == 0
    first, second = state.trials.values()
    assert (first.state, first.rank_seconds, first.metrics["loss"]) == ("complete", 4.0, None)
    assert first.metrics["predicted.time"] == 1.5
    assert (second.state, second.metrics) == ("running", {})
    assert list(describe_predictions(state)) == [
        "predicted / measured, median and range: time 0.75 (0.75 to 0.75)",
        "1 trial without a prediction: the model has no blocks",
    ]


def test_lines_are_plain_json(journal):
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    names = [line["event"] for line in lines]
    assert names == [
        "suggested",
        "launched",
        "reached",
        "finished",
        "suggested",
        "launched",
        "predicted",
        "predicted",
    ]
    assert lines[0]["values"] == {"lr": 0.1, "name": "adamw", "wide": True}


def test_damaged_and_unknown_lines_are_counted(journal):
    lines = journal.read_bytes().splitlines(keepends=True)
    added = [b"\0\0\n", b'{"event":"moved","trial":0}\n', b'{"event":"launched","trial":"x"}\n', b"[]\n"]
    added += [b'{"event":"finished","trial":99,"state":"complete"}\n', lines[0]]
    journal.write_bytes(b"".join(lines[:1] + added + lines[1:]))
    state = read_state(journal)
    assert state.skipped == len(added)
    assert state.events == EVENTS


def test_lost_lines_leave_no_trial_without_a_result(journal):
    """Without its result, a trial is not complete. The number of a lost trial is that of the next new one."""
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:2] + lines[3:]))
    state = read_state(journal)
    assert (state.trials[0].state, state.skipped, state.next_number) == ("running", 1, 2)
    journal.write_bytes(b"".join(lines[1:]))
    state = read_state(journal)
    assert (list(state.trials), state.skipped, state.next_number) == ([1], 4, 0)
    journal.write_bytes(b"".join([*lines, lines[3]]))
    assert (read_state(journal).events, read_state(journal).skipped) == (EVENTS, 1)


def test_writer_removes_half_a_line_of_a_controller_that_died(journal):
    with open(journal, "ab") as file:
        file.write(b'{"event":"finished","tri')
    assert read_state(journal).events == EVENTS
    writer = JournalWriter(journal)
    writer.write(Finished(trial=1, state="failed", message="it broke"))
    writer.close()
    state = read_state(journal)
    assert state.skipped == 0
    assert state.trials[1].message == "it broke"


def test_journal_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="cannot write"):
        JournalWriter(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunError, match="not a regular file"):
        read_state(tmp_path / "pipe")
