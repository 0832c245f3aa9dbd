"""Readers of run folders accept damaged files, use bounded memory, and read incrementally."""

import dataclasses
import json
import random
import statistics
import sys
import tracemalloc
from pathlib import Path

import pytest

from paceline import cli, events
from paceline import spec as specs
from paceline.doctor import heartbeat
from paceline.doctor.rank_state import find_damaged_heartbeats, read_heartbeats
from paceline.errors import RunError
from paceline.events import (
    Ended,
    Evaluated,
    Event,
    EventReader,
    Failed,
    Profiled,
    Saved,
    Skipped,
    Stalled,
    Started,
    Step,
    dumps,
    from_end,
)
from paceline.events import reader as events_reader
from paceline.launch.failure_cause import read_failures
from paceline.report import history as report_history
from paceline.report.run_view import EarlierEvents, RunView, glance, view
from paceline.report.summary import WARM_UP_STEPS, SummaryBuilder
from paceline.run import RunFolder
from paceline.spec import Launch, Spec

STARTED = Started(
    time=1.7e9, task="my.py:T", plan="ddp", ranks=2, batch=8, step=0, steps=40, samples=53, parameters=9,
    device="cpu", precision="fp32", threads=1,
)  # fmt: skip


def step(number: int, draw: random.Random | None = None) -> Step:
    step_s = draw.uniform(0.1, 0.3) if draw is not None else 0.1
    loss = draw.random() if draw is not None else 1 / number
    return Step(
        step=number,
        samples=8 * number,
        loss=loss,
        grad_norm=1.0,
        lr=0.1,
        step_s=step_s,
        data_s=step_s / 4,
        samples_per_s=8 / step_s,
    )


def evaluated(number: int) -> Evaluated:
    return Evaluated(step=number, metrics={"accuracy": number / 100}, seconds=0.5)


def saved(number: int) -> Saved:
    return Saved(step=number, path=f"ckpt/step_{number}", bytes=1024, seconds=1.0, blocked_s=0.25)


def profiled(number: int) -> Profiled:
    seconds = {
        "compute": 0.08,
        "communication": 0.01,
        "bubble": 0.0,
        "input": 0.01,
        "optimizer": 0.0,
        "other": 0.0,
    }
    facts = {
        "step": number,
        "num_steps": 2,
        "step_s": 0.1,
        "seconds": seconds,
        "input_s": 0.01,
        "costs_s": 0.1,
    }
    return Profiled(**facts, slowest=0, slowest_s=2.0, busy_s=1.0, fullest=0, memory={"weights": 8})


def folder(at: Path, *happened: Event) -> RunFolder:
    at.mkdir()
    specs.save(at / "spec.toml", Spec(task="my.py:T"), Launch(ranks=2, plan="ddp"))
    (at / "events.jsonl").write_text("".join(dumps(event) + "\n" for event in happened))
    return RunFolder(at)


SMALL = [
    STARTED,
    *map(step, range(1, 21)),
    profiled(10),
    evaluated(20),
    saved(20),
    *map(step, range(21, 31)),
    Ended(step=30, reason="stopped"),
]
MIDDLE = 15  # of its lines, a step


def command(monkeypatch, capsys, *words: object) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["paceline", *map(str, words)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        cli.main()
    shown = capsys.readouterr()
    return left.value.code or 0, shown.out + shown.err


def with_field(**fields: object) -> bytes:
    return json.dumps(json.loads(dumps(step(15))) | fields).encode()


DAMAGE = {
    "NUL bytes": b"\0" * 200,
    "a NUL in a step": dumps(step(15)).encode().replace(b'"step": 15', b'"step":\0 15'),
    "cut off": dumps(step(15)).encode()[:60],
    "two lines in one": dumps(step(15)).encode()[:60] + dumps(step(16)).encode(),
    "no UTF-8": dumps(step(15)).encode().replace(b"loss", b"lo\xff\xfes"),
    "UTF-16": dumps(step(15)).encode("utf-16"),
    "spaces": b"   ",
    "a list": b"[1, 2]",
    "a number": b"7",
    "null": b"null",
    "deep": b"[" * 100_000,
    "5,000 digits": with_field(step=1).replace(b'"step": 1,', b'"step": 1' + b"0" * 5000 + b","),
    "huge": b'{"time": 1, "event": "step", "x": "' + b"x" * (2**20 + 10) + b'"}',
    "no event": b'{"time": 1.0, "step": 3}',
    "event is a number": with_field(event=3),
    "event is a list": with_field(event=["step"]),
    "event is empty": with_field(event=""),
    "time is text": with_field(time="now"),
    "time is beyond dates": with_field(time=1e300),
    "no time": json.dumps(
        {key: value for key, value in json.loads(dumps(step(15))).items() if key != "time"}
    ).encode(),
    "a field is missing": json.dumps(
        {key: value for key, value in json.loads(dumps(step(15))).items() if key != "loss"}
    ).encode(),
    "step is text": with_field(step="15"),
    "step is true": with_field(step=True),
    "step is a fraction": with_field(step=15.5),
    "step is enormous": with_field(step=10**30),
    "loss is null": with_field(loss=None),
    "loss is text": with_field(loss="0.1"),
    "loss is a list": with_field(loss=[1.0]),
    "metrics are a list": json.dumps(json.loads(dumps(evaluated(20))) | {"metrics": [1]}).encode(),
    "metrics are text": json.dumps(
        json.loads(dumps(evaluated(20))) | {"metrics": {"accuracy": "high"}}
    ).encode(),
    "seconds are text": json.dumps(json.loads(dumps(profiled(10))) | {"seconds": {"compute": "?"}}).encode(),
    "ranks are text": json.dumps(json.loads(dumps(STARTED)) | {"ranks": "two"}).encode(),
    "notes are numbers": json.dumps(json.loads(dumps(STARTED)) | {"notes": [1, 2]}).encode(),
}


def put(run: RunFolder, at: int, line: bytes) -> None:
    lines = run.events.read_bytes().split(b"\n")
    lines.insert(at, line)
    run.events.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize("at", [0, MIDDLE, len(SMALL)], ids=["first", "middle", "last"])
@pytest.mark.parametrize("line", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_is_skipped_and_counted(line, at, tmp_path):
    run, whole = folder(tmp_path / "r", *SMALL), folder(tmp_path / "whole", *SMALL)
    put(run, at, line)
    found, expected = view(run), view(whole)
    assert found.skipped == Skipped(damaged=1)
    assert str(found.skipped) == "skipped 1 damaged line in events.jsonl"
    assert found.summary == expected.summary
    assert found.break_down() == expected.break_down()
    assert glance(run).skipped == Skipped(damaged=1)
    assert glance(run).summary == glance(whole).summary
    assert [*events.read(run.events)] == [*events.read(whole.events)] == SMALL
    for kind in (Started, Evaluated, Saved, Ended):
        assert events.last(run.events, kind) == events.last(whole.events, kind)


NEWER = {
    "kind": (
        b'{"time": 1.0, "event": "paused", "why": [1]}',
        Skipped(unknown={"paused": 1}),
        "1 event of an unknown kind (paused)",
    ),
    "field": (with_field(step=16, temperature=[1, {"a": None}]), Skipped(), ""),
}


@pytest.mark.parametrize(("line", "skipped", "words"), NEWER.values(), ids=NEWER)
def test_events_of_a_newer_version_are_skipped(line, skipped, words, tmp_path):
    run = folder(tmp_path / "r", STARTED, *map(step, range(1, 16)))
    put(run, 16, line)
    found = view(run)
    assert (found.skipped.damaged, dict(found.skipped.unknown)) == (0, dict(skipped.unknown))
    assert words in str(found.skipped)
    assert found.summary.steps == 15 + (not words), "an additional field must not skip a step"


@pytest.mark.parametrize("name", ["cut off", "NUL bytes", "huge", "metrics are text", "newer"])
def test_commands_report_skipped_lines(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    run = folder(tmp_path / "runs/a", *SMALL)
    folder(tmp_path / "runs/b", *SMALL)
    put(run, MIDDLE, DAMAGE.get(name, NEWER["kind"][0]))
    message = (
        "skipped 1 event of an unknown kind (paused)"
        if name == "newer"
        else "skipped 1 damaged line in events.jsonl"
    )
    for words in (("show", "runs/a"), ("profile", "runs/a", "--measured"), ("doctor", "runs/a")):
        status, text = command(monkeypatch, capsys, *words)
        assert status == 0, text
        assert message in text, words
    status, text = command(monkeypatch, capsys, "status")
    first, second = text.splitlines()
    assert first.startswith("runs/a: stopped at step 30")
    assert message in first
    assert second.startswith("runs/b: stopped at step 30")
    assert "skipped" not in second
    status, text = command(monkeypatch, capsys, "cancel", "runs/a")
    assert status == 2
    assert "runs/a is not running: stopped at step 30" in text
    assert message in text
    status, text = command(monkeypatch, capsys, "resume", "runs/a")
    assert (status, text.splitlines()[0]) == (
        2,
        f"runs/a: {message}" + (" in events.jsonl" if name == "newer" else ""),
    )


def test_status_shows_other_runs_besides_an_unreadable_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    bad = folder(tmp_path / "runs/a", *SMALL)
    bad.events.unlink()
    bad.events.mkdir()
    folder(tmp_path / "runs/b", *SMALL)
    status, text = command(monkeypatch, capsys, "status")
    assert status == 2
    assert "runs/b: stopped at step 30" in text
    assert "runs/a/events.jsonl must be a file" in text
    for words in (("show", "runs/a"), ("profile", "runs/a"), ("doctor", "runs/a"), ("cancel", "runs/a")):
        status, text = command(monkeypatch, capsys, *words)
        assert (status, text.count("\n")) == (2, 1), text
        assert "must be a file" in text


def test_random_bytes_are_skipped(tmp_path, monkeypatch, capsys):
    run = folder(tmp_path / "r")
    run.events.write_bytes(random.Random(1).randbytes(300_000))
    for name in ("show", "status", "doctor"):
        status, text = command(monkeypatch, capsys, name, run.path)
        assert status == 0, text
        assert "not started yet" in text
        assert "damaged lines" in text


def test_a_lost_start_does_not_hide_the_steps(tmp_path, monkeypatch, capsys):
    run = folder(tmp_path / "r", *map(step, range(1, 21)))
    status, text = command(monkeypatch, capsys, "status", run.path)
    assert (status, "after step 20; the event of its start is damaged" in text) == (0, True), text


# Compared with a simple reader that holds everything in memory


def summarize_simply(happened: list[Event]) -> tuple[object, ...]:
    """Return the figures of a summary, computed from all events."""
    steps: dict[int, Step] = {}
    others: list[Event] = []
    start = 0
    for event in happened:
        if isinstance(event, Started):
            start = event.step
            steps = {number: step for number, step in steps.items() if number <= start}
            others = [event for event in others if event.step <= start]
        elif isinstance(event, Step):
            steps[event.step] = event
        elif isinstance(event, (Evaluated, Saved)):
            others.append(event)
    warm = [step for number, step in steps.items() if number > start + WARM_UP_STEPS] or [*steps.values()]
    total_s = sum(step.step_s for step in steps.values()) + sum(
        getattr(event, "blocked_s", event.seconds) for event in others
    )
    return (
        max(steps),
        steps[min(steps)].loss,
        steps[max(steps)].loss,
        statistics.median(step.step_s for step in warm),
        total_s,
    )


def test_a_summary_that_continues_has_the_medians_of_all_steps():
    for seed in range(20):
        draw = random.Random(seed)
        happened, builder = history(draw, 60, 3), SummaryBuilder()
        for at, event in enumerate(happened):
            builder.add(event)
            if builder.history.points and draw.random() < 0.3:
                assert builder.build().step_s == pytest.approx(summarize_simply(happened[: at + 1])[3])


def test_medians_of_steps_that_represent_others(monkeypatch):
    monkeypatch.setattr(report_history, "MAX_POINTS", 16)
    draw, builder, expanded = random.Random(1), report_history.History(), []
    step = next(event for event in history(draw, 9, 1) if isinstance(event, Step))
    for number in range(1, 80):
        count = draw.randint(1, 3)
        seconds = draw.random()
        expanded += [seconds] * count
        builder.add(dataclasses.replace(step, step=len(expanded), step_s=seconds), count)
        if len(builder.points) < number:  # then neighbours are merged
            break
        assert builder.find_medians(-1)[0] == pytest.approx(statistics.median(expanded))
        assert builder.num_steps == len(expanded)
        assert builder.step_s == pytest.approx(sum(expanded))
    assert builder.num_steps == len(expanded), "after a merge, too"
    medians = builder.find_medians(-1)[0]
    assert medians == pytest.approx(
        statistics.median(value for point in builder.points for value in [point.step_s] * point.num_steps)
    )


def history(draw: random.Random, steps: int, starts: int) -> list[Event]:
    found: list[Event] = []
    at = 0
    for _ in range(starts):
        at = draw.randint(0, at)
        found.append(dataclasses.replace(STARTED, step=at, steps=steps))
        until = draw.randint(at + 1, steps)
        for number in range(at + 1, until + 1):
            found.append(step(number, draw))
            if not draw.randrange(7):
                found.append(draw.choice([evaluated, saved])(number))
        at = until
    return found


@pytest.mark.parametrize("seed", range(20))
def test_reading_at_once_and_incrementally_gives_the_same_result(seed, tmp_path):
    draw = random.Random(seed)
    happened = history(draw, draw.randint(5, 300), draw.randint(1, 5))
    run = folder(tmp_path / "r")
    content = "".join(dumps(event) + "\n" for event in happened).encode()
    growing, before = RunView(run), 0
    for cut in [*sorted(draw.randrange(len(content)) for _ in range(draw.randint(0, 20))), len(content)]:
        with open(run.events, "ab") as file:
            file.write(content[before:cut])
        before = cut
        growing.refresh()
    assert not growing.refresh(), "there is nothing new"
    found = growing.summary
    assert (found.steps, found.first_loss, found.last_loss, found.step_s, found.total_s) == pytest.approx(
        summarize_simply(happened)
    )
    assert found == view(run).summary
    assert found.starts == sum(isinstance(event, Started) for event in happened)
    now = glance(run).summary
    assert (now.started, now.steps, now.last_loss, now.metrics) == (
        found.started,
        found.steps,
        found.last_loss,
        found.metrics,
    )


def test_a_file_that_was_replaced_is_read_again(tmp_path):
    run = folder(tmp_path / "r", *SMALL)
    found = view(run)
    run.events.write_text("".join(dumps(event) + "\n" for event in SMALL[:5]))
    assert found.refresh()
    assert (found.summary.steps, found.summary.starts) == (4, 1)


@pytest.mark.parametrize("seed", range(10))
def test_reading_from_the_end_and_from_the_start_gives_the_same_result(seed, tmp_path, monkeypatch):
    """Blocks have a few bytes, so that lines cross the boundaries of blocks at any position."""
    draw = random.Random(seed)
    block_bytes = draw.choice([1, 7, 64, 300, 5000])
    for module in (events_reader, from_end):
        monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 800)
    happened = history(draw, 30, 3)
    lines = [dumps(event).encode() for event in happened]
    long = [
        b'{"time": 1, "event": "saved", "x": "' + b"x" * draw.choice([900, 3000]) + b'"}' for _ in range(3)
    ]
    for line in long:
        lines.insert(draw.randint(0, len(lines)), line)
    path = tmp_path / "e"
    path.write_bytes(b"\n".join(lines) + b"\n" + dumps(saved(99)).encode()[: draw.choice([0, 50])])
    reader = EventReader(path)
    assert [*reader.new()] == happened
    assert reader.skipped == Skipped(damaged=3)
    assert events.end(path) == sum(map(len, lines)) + len(lines)
    for kinds in ((Started,), (Step,), (Evaluated, Saved), (Started, Step, Saved), (Ended,)):
        expected = [
            next((event for event in reversed(happened) if type(event) is kind), None) for kind in kinds
        ]
        assert sorted(map(dumps, events.last(path, *kinds))) == sorted(
            dumps(event) for event in expected if event is not None
        )
    [newest] = events.last(path, Started, Step, until=(Started, Step))
    assert newest == next(event for event in reversed(happened) if isinstance(event, (Started, Step)))
    position, found = events.tail(path, Skipped(), 2000)
    assert [*events.read(path, position)] == found
    assert found == happened[len(happened) - len(found) :]


# Long runs


@pytest.fixture(scope="module")
def long_run(tmp_path_factory) -> tuple[RunFolder, list[Event]]:
    """Some 10 MB: 40,000 steps, resumed once from step 60,000 after 70,000."""
    draw, happened = random.Random(1), []
    for first, until in ((0, 28_000), (24_000, 36_000)):
        happened.append(dataclasses.replace(STARTED, step=first, steps=36_000, notes=("started",)))
        for number in range(first + 1, until + 1):
            happened.append(
                step(number, draw)
                if number > first + 3
                else dataclasses.replace(step(number, draw), step_s=1000.0)
            )
            if not number % 1000:
                happened += [evaluated(number), saved(number)]
            if not number % 5000:
                happened.append(profiled(number))
    happened.append(Failed(what="save", message="full", step=36_000))
    return folder(tmp_path_factory.mktemp("long") / "r", *happened), happened


@pytest.fixture
def small_limits(monkeypatch):
    """Limits for a run that is ten times as long."""
    monkeypatch.setattr(events_reader, "MAX_PARSED_BYTES", 2**20)
    monkeypatch.setattr(report_history, "MAX_POINTS", 2**11)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_long_run_is_read_once_and_in_bounded_memory(long_run, small_limits):
    run, happened = long_run
    size = run.events.stat().st_size
    before = bytes_read()
    found = view(run)
    assert bytes_read() - before < 1.05 * size
    tracemalloc.start()
    try:
        view(run)
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    summary = found.summary
    steps, first_loss, last_loss, step_s, total_s = summarize_simply(happened)
    assert (summary.steps, summary.first_loss, summary.last_loss, summary.starts) == (
        steps,
        first_loss,
        last_loss,
        2,
    )
    assert summary.sampled is not None
    assert 3_000 < summary.sampled < 6_000
    assert summary.step_s == pytest.approx(step_s, rel=0.02)
    assert summary.total_s == pytest.approx(total_s, rel=0.01), (
        "the slow first steps must not represent other steps"
    )
    assert sum(point.num_steps for point in found.steps) == 36_000
    assert [point.step for point in found.steps] == sorted({point.step for point in found.steps})
    assert summary.metrics == {"accuracy": 360.0}
    assert (len(summary.saved), summary.failures[-1].message) == (36, "full")
    breakdown = found.break_down()
    assert breakdown.steps == pytest.approx(36_000, rel=0.01)
    assert breakdown.sampled is not None
    assert breakdown.step_s == pytest.approx(0.2, rel=0.02)
    assert breakdown.profiles == 8


def test_a_glance_that_continues_sees_the_same(tmp_path):
    for seed in range(6):
        draw, run, earlier = random.Random(seed), RunFolder(tmp_path / str(seed)), EarlierEvents()
        run.path.mkdir()
        lines = [events.dumps(event) + "\n" for event in history(draw, 60, 3)]
        at = 0
        while at < len(lines):
            at += draw.randint(1, 12)
            run.events.write_text("".join(lines[:at]))
            assert glance(run, 500, earlier) == glance(run, 500)
        assert earlier.position > 0
        run.events.write_text("".join(lines[:3]))
        assert glance(run, 500, earlier) == glance(run, 500), "another file replaced it"


def test_a_glance_at_a_long_run_reads_its_end(long_run, tmp_path):
    run, _ = long_run
    copy = folder(tmp_path / "r")
    copy.events.write_bytes(
        run.events.read_bytes() + (dumps(dataclasses.replace(STARTED, step=36_000)) + "\n").encode()
    )
    with open(copy.events, "a") as file:
        file.writelines(dumps(step(number)) + "\n" for number in range(36_001, 37_001))
    before = bytes_read()
    tracemalloc.start()
    try:
        summary = glance(copy).summary
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()
    assert bytes_read() - before < 3e6
    assert (summary.started.step, summary.steps) == (36_000, 37_000)
    before = bytes_read()
    assert events.end(copy.events) == copy.events.stat().st_size
    assert bytes_read() - before < 1e6


@pytest.mark.parametrize(
    ("best", "metrics", "shown"),
    [
        ("min loss", {"loss": 0.25, "accuracy": 0.75}, ", validation loss 0.2500"),
        ("max accuracy", {"loss": 0.25, "accuracy": 0.75}, ", validation accuracy 0.7500"),
        (
            "max accuracy",
            {"perplexity": float("nan"), "f1": 0.5},
            ", validation perplexity nan",
        ),  # not measured: the first
        ("max accuracy", {}, ""),
        ("damaged", {"f1": 0.5, "accuracy": 0.75}, ", validation f1 0.5000"),
    ],
)
def test_status_shows_a_metric_and_the_speed(best, metrics, shown, tmp_path, monkeypatch, capsys):
    """The metric is of the last evaluation, 2,000 steps before the end: further back than a glance reads."""
    early = Evaluated(step=5, metrics={"loss": 9.0, "accuracy": 9.0}, seconds=0.1) if metrics else step(5)
    late = Evaluated(step=10, metrics=metrics, seconds=0.1) if metrics else step(10)
    run = folder(tmp_path / "r", STARTED, *map(step, range(1, 5)), early, late, *map(step, range(11, 2011)))
    if best == "damaged":
        run.spec.write_bytes(b"[save\n")
    else:
        specs.save(run.spec, Spec(task="my.py:T", save={"best": best}), Launch(ranks=2))
    status, text = command(monkeypatch, capsys, "status", run.path)
    assert (status, text.count("\n")) == (0, 1), text
    assert f", loss 0.0005{shown}, 80 samples/s\n" in text, "8 samples in 0.1 s"


def test_the_launcher_reads_a_long_run_in_bounded_memory(long_run, small_limits):
    run, happened = long_run
    tracemalloc.start()
    try:
        assert read_failures(run, 0) == ({}, 36_000)
        assert [*EventReader(run.events).new(Failed, Stalled)] == [happened[-1]]
        assert events.last(run.events, Started)[0].step == 24_000
        assert tracemalloc.get_traced_memory()[1] < 3e6
    finally:
        tracemalloc.stop()
    builder = SummaryBuilder()
    for event in events.follow(run.events, lambda: True):
        builder.add(event)
        assert len(builder.history.points) <= 2 * report_history.MAX_POINTS
    found = builder.build()
    steps, first_loss, last_loss, step_s, total_s = summarize_simply(happened)
    assert (found.steps, found.first_loss, found.last_loss) == (steps, first_loss, last_loss)
    assert found.total_s == pytest.approx(total_s), "sums are exact where each step passes by"
    assert found.step_s == pytest.approx(step_s, rel=0.02)


def test_damage_in_steps_that_are_not_parsed_is_counted(long_run, small_limits, tmp_path):
    run, _ = long_run
    copy = folder(tmp_path / "r")
    content = bytearray(run.events.read_bytes())
    draw = random.Random(2)
    lines = content.split(b"\n")
    chosen = sorted(draw.sample(range(1000, 25_000), 12))
    for at, how in zip(chosen, [b"\0", b"\xff", b"{"] * 4, strict=True):
        lines[at] = lines[at][:30] + (how + lines[at][31:] if how != b"{" else b"")
    copy.events.write_bytes(b"\n".join(lines))
    found = view(copy)
    assert found.skipped == Skipped(damaged=12)
    assert found.summary.steps == 36_000


def test_an_unreadable_run_raises_run_error(tmp_path):
    run = folder(tmp_path / "r", *SMALL)
    run.events.unlink()
    run.events.symlink_to(run.path)
    for look in (view, glance):
        with pytest.raises(RunError, match="it is not a regular file"):
            look(run)


# Other files of a run


BEAT = {
    "rank": 0,
    "ranks": 2,
    "host": "elsewhere",
    "pid": 7,
    "began": 1.7e9,
    "time": 1.7e9,
    "step": 3,
    "steps": None,
    "stepped": None,
}
BEAT |= {
    "longest_s": 0.1,
    "phase": "data",
    "since": 1.7e9,
    "patience_s": 60.0,
    "spent_s": {"data": 0.1},
    "birth": 7,
}
HEARTBEATS = {
    "empty": b"",
    "NUL bytes": b"\0" * 50,
    "cut off": json.dumps(BEAT).encode()[:70],
    "no UTF-8": b"\xff\xfe{",
    "a list": b"[]",
    "null": b"null",
    "deep": b"[" * 100_000,
    "a field is missing": json.dumps({key: value for key, value in BEAT.items() if key != "phase"}).encode(),
    "a billion ranks": json.dumps(BEAT | {"ranks": 10**9}).encode(),
    "rank beyond ranks": json.dumps(BEAT | {"rank": 2}).encode(),
    "negative process": json.dumps(BEAT | {"pid": -5}).encode(),
    "enormous process": json.dumps(BEAT | {"pid": 10**30}).encode(),
    "time is text": json.dumps(BEAT | {"time": "now"}).encode(),
    "time is infinite": json.dumps(BEAT | {"time": 1e999}).encode(),
    "time is no number": json.dumps(BEAT | {"since": float("nan")}).encode(),
    "spent is a list": json.dumps(BEAT | {"spent_s": [1]}).encode(),
}


@pytest.mark.parametrize("content", HEARTBEATS.values(), ids=HEARTBEATS)
def test_a_damaged_heartbeat_is_skipped_and_named(content, tmp_path):
    run = folder(tmp_path / "r", *SMALL)
    run.ranks.mkdir()
    run.alive(0).write_bytes(content)
    run.alive(1).write_text(json.dumps(BEAT | {"rank": 1, "newer": {"a": [1]}}))
    damaged, intact = read_heartbeats(run)
    assert damaged is None
    assert intact is not None
    assert (intact.rank, intact.step, intact.phase) == (1, 3, "data")
    assert find_damaged_heartbeats(run) == [run.alive(0)]
    run.said(1).write_bytes(content)
    assert heartbeat.read(run.said(1), heartbeat.StackAnswer) is None


def test_doctor_names_damaged_heartbeats(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = folder(Path("r"), *SMALL)
    run.ranks.mkdir()
    run.alive(0).write_bytes(b"\0")
    run.alive(1).mkdir()
    status, text = command(monkeypatch, capsys, "doctor", "r")
    assert status == 0
    notes = ["skipped damaged r/ranks/0.alive", "skipped damaged r/ranks/1.alive"]
    assert text.splitlines()[-2:] == notes, text


@pytest.mark.parametrize(
    "content", [b"", b"\xff\0", b"--help", b"12; touch x"], ids=["empty", "bytes", "option", "shell"]
)
def test_status_shows_a_run_with_a_damaged_job_and_later_runs(content, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    damaged = folder(tmp_path / "runs/a", *SMALL).path / "job"
    folder(tmp_path / "runs/b", *SMALL)
    damaged.write_bytes(content)
    status, text = command(monkeypatch, capsys, "status")
    first, second = text.splitlines()
    assert first.startswith("runs/a: stopped at step 30")
    assert str(damaged.relative_to(tmp_path)) in first
    assert second.startswith("runs/b: stopped at step 30")
    assert status == 0


@pytest.mark.parametrize("content", [b"", b"\0\xff", b"[1]", b"{", b"[" * 100_000])
def test_damaged_provenance_is_skipped(content, tmp_path):
    run = folder(tmp_path / "r", *SMALL)
    assert run.origin() == ({}, "")
    run.provenance.write_bytes(content)
    known, why = run.origin()
    assert known == {}
    assert why.startswith(f"skipped damaged {run.provenance}: ")


def test_status_names_an_invalid_lock_and_shows_other_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (folder(tmp_path / "runs/a", STARTED, step(1)).path / "lock").mkdir()
    folder(tmp_path / "runs/b", *SMALL)
    status, text = command(monkeypatch, capsys, "status")
    assert (status, "runs/b: stopped at step 30" in text, "runs/a/lock must be a file" in text) == (
        2,
        True,
        True,
    ), text
