"""events.jsonl: written events can be read, even if the writer was killed."""

import dataclasses
import json
import math
import os
import threading
import time

import pytest

from paceline import events
from paceline.events import (
    KINDS,
    Ended,
    Evaluated,
    Event,
    EventReader,
    EventWriter,
    Failed,
    Noted,
    Saved,
    Stalled,
    Started,
    Step,
    dumps,
    follow,
    loads,
    read,
)

STARTED = Started(
    task="digits",
    plan="zero3",
    ranks=2,
    batch=64,
    step=0,
    steps=10,
    samples=1437,
    parameters=99,
    device="cpu",
    precision="fp32",
    threads=1,
)
ALL: list[Event] = [
    dataclasses.replace(STARTED, notes=("one", "zwei → drei")),
    Step(
        step=1, samples=64, loss=1 / 3, grad_norm=None, lr=1e-300, step_s=0.1, data_s=0.0, samples_per_s=640.0
    ),
    Evaluated(step=1, metrics={"loss": 0.1 + 0.2, "accuracy": 1.0}, seconds=0.5),
    Noted(step=1, message="buffer mean has different values"),
    Saved(step=1, path="ckpt/step_1", bytes=2**40, seconds=1.0, blocked_s=0.1),
    Failed(what="run", message='a\nb\t"c"', step=1, rank=3, lost_peer=True, meant=True),
    Stalled(step=1, ranks=(1, 3), message="rank 1 is stopped; rank 3 too"),
    Ended(step=1, reason="done", why="validation loss 0.1 reached stop.target=0.2", communication=0.25),
    dataclasses.replace(
        Step(step=2, samples=2, loss=1, grad_norm=1, lr=1, step_s=1, data_s=0, samples_per_s=1),
        losses={"kl": 1 / 3, "inside": -0.1},
    ),
]


def step(number: int) -> Step:
    return Step(
        step=number,
        samples=number,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        step_s=1.0,
        data_s=0.0,
        samples_per_s=1.0,
    )


def write(path, *written: Event) -> None:
    writer = EventWriter(path)
    for event in written:
        writer.write(event)
    writer.close()
    assert writer.lost == 0


@pytest.mark.parametrize("event", ALL, ids=lambda event: type(event).__name__)
def test_event_round_trip_in_one_line(event):
    line = dumps(event)
    assert "\n" not in line
    assert json.loads(dumps(loads(line))) == json.loads(line)
    assert type(loads(line)) is type(event)
    absent = {"losses"} if isinstance(event, Step) and not event.losses else set()
    assert {*json.loads(line)} == {"event", *vars(event)} - absent


def test_kinds_and_fields_are_stable():
    kinds = "started step noted profiled noisemeasured evaluated saved failed stalled ended"
    assert [*KINDS] == kinds.split()
    written = json.loads(dumps(ALL[1]))
    assert {*written} == {
        "time",
        "event",
        "step",
        "samples",
        "loss",
        "grad_norm",
        "lr",
        "step_s",
        "data_s",
        "samples_per_s",
    }
    assert {"time", "event", "step", "metrics"} <= {*json.loads(dumps(ALL[2]))}


def test_floats_round_trip_exactly():
    found = loads(dumps(dataclasses.replace(step(1), loss=math.pi * 1e-7, grad_norm=0.1 + 0.2)))
    assert isinstance(found, Step)
    assert (found.loss, found.grad_norm) == (math.pi * 1e-7, 0.1 + 0.2)


def test_non_finite_numbers_are_valid_json():
    """Other programs read the file, too: jq, a browser, a database."""
    line = dumps(Evaluated(step=1, metrics={"loss": math.nan, "perplexity": math.inf}, seconds=0.1))
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    found = loads(line)
    assert isinstance(found, Evaluated)
    assert {*found.metrics} == {"loss", "perplexity"}


def test_file_round_trip(tmp_path):
    write(tmp_path / "e", *ALL)
    assert [type(event) for event in read(tmp_path / "e")] == [type(event) for event in ALL]
    write(tmp_path / "e", step(2))  # appended
    assert [type(event) for event in read(tmp_path / "e")] == [*(type(event) for event in ALL), Step]


def test_readers_skip_a_torn_last_line_and_writers_end_it(tmp_path):
    path = tmp_path / "e"
    write(path, step(1), step(2))
    whole = path.read_bytes()
    torn = whole + dumps(step(3)).encode()[:20]
    path.write_bytes(torn)
    assert [event.step for event in read(path)] == [1, 2]
    assert events.end(path) == len(whole)
    assert path.read_bytes() == torn, "a reader must not touch it"
    write(path, step(4), step(5))
    assert [event.step for event in read(path)] == [1, 2, 4, 5]
    assert path.read_bytes().startswith(torn + b"\n{"), "a writer must not remove what others wrote"
    reader = EventReader(path)
    assert len([*reader.new()]) == 4
    assert reader.skipped.damaged == 1


def test_a_file_with_only_a_torn_line(tmp_path):
    path = tmp_path / "e"
    path.write_bytes(b'{"time": 1, "eve')
    write(path)
    assert path.read_bytes() == b'{"time": 1, "eve'
    write(path, step(1))
    assert [event.step for event in read(path)] == [1]


def test_an_empty_line_is_not_damaged(tmp_path):
    """A writer leaves one if it sees a part of the line of another writer, which is not torn."""
    path = tmp_path / "e"
    path.write_text(f"{dumps(step(1))}\n\n{dumps(step(2))}\n")
    reader = EventReader(path)
    assert [event.step for event in reader.new()] == [1, 2]
    assert not reader.skipped


def test_processes_that_append_at_a_time_lose_no_event(tmp_path):
    """Ranks that fail together each append their error; the cause must not be removed."""
    path, count = tmp_path / "e", 1000
    children = []
    for first in (0, count):
        child = os.fork()
        if not child:
            for number in range(first, first + count):
                events.append(path, step(number))
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    reader = EventReader(path)
    assert sorted(event.step for event in reader.new()) == [*range(2 * count)]
    assert not reader.skipped


def test_a_reader_can_continue_at_a_position(tmp_path):
    path = tmp_path / "e"
    assert events.end(path) == 0
    write(path, step(1))
    position = events.end(path)
    write(path, step(2))
    assert [event.step for event in read(path, position)] == [2]


def test_follow_waits_for_events_and_ends_when_done(tmp_path):
    path = tmp_path / "e"
    write(path, step(1))  # from before: left out
    over, seen = threading.Event(), []
    following = follow(path, over.is_set, events.end(path), poll_s=0.01)
    thread = threading.Thread(target=lambda: seen.extend(following))
    thread.start()
    try:
        write(path, step(2))
        with open(path, "a") as file:  # a line in two halves
            line = dumps(step(3)) + "\n"
            file.write(line[:10])
            file.flush()
            while not seen:
                time.sleep(0.01)
            file.write(line[10:])
    finally:
        over.set()
        thread.join()
    assert [event.step for event in seen] == [2, 3], "also what was written right before the end"


def test_follow_waits_for_a_missing_file(tmp_path):
    path = tmp_path / "e"
    over, seen = threading.Event(), []
    thread = threading.Thread(target=lambda: seen.extend(follow(path, over.is_set, poll_s=0.01)))
    thread.start()
    write(path, step(1))
    over.set()
    thread.join()
    assert [event.step for event in seen] == [1]


def test_a_full_disk_loses_only_events():
    writer = EventWriter("/dev/full")
    writer.write(step(1))
    writer.write(step(2))
    writer.close()
    assert writer.lost == 2
