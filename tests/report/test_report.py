"""Summaries of events, and their text."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from paceline import events
from paceline.events import Ended, Evaluated, Event, Failed, Saved, Started, Step
from paceline.report.progress import watch
from paceline.report.summary import summarize
from paceline.report.text import build_closing_table, format_event, format_headline
from paceline.run import RunFolder


def started(step: int = 0, **more) -> Started:
    fields = {
        "task": "/home/me/my.py:Points",
        "plan": "zero3",
        "ranks": 2,
        "batch": 10,
        "steps": 20,
        "samples": 1437,
        "parameters": 151_000,
    }
    return Started(**fields | {"device": "cpu", "precision": "fp32", "threads": 1} | more, step=step)


def step(number: int, step_s: float = 0.1, data_s: float = 0.02, loss: float | None = None) -> Step:
    return Step(
        step=number,
        samples=10 * number,
        loss=loss if loss is not None else 1 / number,
        grad_norm=1.0,
        lr=0.1,
        step_s=step_s,
        data_s=data_s,
        samples_per_s=10 / step_s,
    )


def saved(number: int, blocked_s: float = 0.05) -> Saved:
    return Saved(step=number, path=f"ckpt/step_{number}", bytes=1024, seconds=1.0, blocked_s=blocked_s)


def steps(first: int, last: int) -> list[Step]:
    return [step(number) for number in range(first, last + 1)]


def render(renderable) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()


def test_summary_of_a_run_without_events():
    found = summarize([])
    assert found.started is None
    assert found.ended is None
    assert (found.starts, found.steps, found.first_loss, found.last_loss, found.total_s, found.shares) == (
        0,
        0,
        None,
        None,
        0,
        {},
    )
    assert render(build_closing_table(found)).strip() == ""


def test_summary_of_a_completed_run():
    found = summarize(
        [
            started(),
            *steps(1, 20),
            Evaluated(step=10, metrics={"loss": 0.5}, seconds=0.2),
            Evaluated(step=20, metrics={"loss": 0.4, "accuracy": 0.9}, seconds=0.3),
            saved(20),
            Ended(step=20, reason="done", communication=0.25),
        ]
    )
    assert (found.starts, found.steps, found.first_loss, found.last_loss) == (1, 20, 1.0, 1 / 20)
    assert found.metrics == {"loss": 0.4, "accuracy": 0.9}
    assert found.samples_per_s == pytest.approx(100)
    assert found.step_s == pytest.approx(0.1)
    assert found.total_s == pytest.approx(20 * 0.1 + 0.5 + 0.05)
    assert sum(found.shares.values()) == pytest.approx(1)
    seconds = {name: share * found.total_s for name, share in found.shares.items()}
    expected = {
        "data": 20 * 0.02,
        "communication": 0.25 * 20 * 0.08,
        "compute": 0.75 * 20 * 0.08,
        "evaluation": 0.5,
        "save": 0.05,
    }
    assert seconds == pytest.approx(expected)


def test_communication_is_not_separated_if_unknown():
    found = summarize([started(), *steps(1, 5), Ended(step=5, reason="done", communication=None)])
    assert {*found.shares} == {"data", "compute and communication", "evaluation", "save"}


def test_the_first_steps_are_left_out_of_rates():
    slow = [step(number, step_s=9.0) for number in (1, 2, 3)]
    assert summarize([started(), *slow, step(4), step(5)]).step_s == pytest.approx(0.1)
    assert summarize([started(), *slow]).step_s == 9.0, "without other steps they count"


def test_an_interrupted_run():
    found = summarize([started(), *steps(1, 12), saved(10)])
    assert found.ended is None
    assert found.steps == 12


def test_repeated_steps_count_once_and_the_later_line_counts():
    repeated = [step(number, loss=100.0 + number) for number in range(11, 21)]
    found = summarize(
        [started(), *steps(1, 14), saved(10), started(10), *repeated, Ended(step=20, reason="done")]
    )
    assert (found.starts, found.steps) == (2, 20)
    assert found.last_loss == 120.0
    assert found.total_s == pytest.approx(20 * 0.1 + 0.05)
    assert found.ended is not None


def test_a_resumed_run_has_the_steps_of_its_checkpoint():
    found = summarize([started(), *steps(1, 14), started(10)])
    assert found.steps == 10
    assert found.last_loss == 1 / 10
    assert summarize([started(10)]).steps == 10, "also if earlier steps were not recorded"


def test_a_run_that_continues_after_its_end_has_not_ended():
    events = [started(), *steps(1, 20), Ended(step=20, reason="done"), started(20), *steps(21, 22)]
    assert summarize(events).ended is None
    assert summarize(events).steps == 22


def test_the_warm_up_of_each_start_is_left_out_of_rates():
    slow = [step(number, step_s=9.0) for number in (11, 12, 13)]
    found = summarize([started(), *steps(1, 10), started(10), *slow, *steps(14, 20)])
    assert found.step_s == pytest.approx(0.1)


def test_a_repeated_evaluation_does_not_count():
    """Events after the resumed checkpoint do not count."""
    old = Evaluated(step=14, metrics={"loss": 9.0}, seconds=1.0)
    found = summarize([started(), *steps(1, 14), saved(12), old, started(10), *steps(11, 12)])
    assert (found.metrics, found.saved) == ({}, ())
    assert found.total_s == pytest.approx(12 * 0.1)
    assert summarize([started(), *steps(1, 14), old, started(14)]).metrics == {"loss": 9.0}


def test_failures_are_shown():
    full = Failed(
        what="save",
        message="checkpoint of step 5 was not written: No space left on device; there is none yet",
        step=5,
    )
    found = summarize([started(), *steps(1, 5), full, *steps(6, 20), Ended(step=20, reason="done")])
    assert found.failures == (full,)
    assert "No space left on device" in render(build_closing_table(found))


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (step(3), "step 3  loss 0.3333  grad norm 1  lr 0.1  100 samples/s"),
        (
            Evaluated(step=3, metrics={"loss": 0.25, "accuracy": 0.5}, seconds=1.0),
            "step 3  evaluated: loss 0.2500  accuracy 0.5000",
        ),
        (saved(3), "step 3  saved ckpt/step_3, 1.0 KiB in 1.0 s"),
        (Failed(what="run", message="ValueError: no", step=3, rank=1), "step 3  rank 1: ValueError: no"),
        (
            Failed(what="run", message="rank 1 was killed by SIGKILL", step=3, rank=1),
            "step 3  rank 1 was killed by SIGKILL",
        ),
        (Ended(step=3, reason="stopped"), "step 3  stopped"),
        (
            Ended(step=3, reason="stopped", why="max_time=2h is over"),
            "step 3  stopped: max_time=2h is over",
        ),
        (
            started(5),
            "my.py:Points with 151 k parameters: from step 5 to step 20, "
            "batch 10 of 1,437 samples; plan zero3 on 2 ranks, cpu, fp32, 1 thread each",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Event) else "",
)
def test_an_event_is_one_line(event, text):
    assert format_event(event) == text


def test_a_step_without_update_reports_overflow():
    overflowed = Step(
        step=1, samples=1, loss=1.0, grad_norm=None, lr=0.1, step_s=1.0, data_s=0.0, samples_per_s=1.0
    )
    assert "overflow" in format_event(overflowed)


def test_named_losses_are_reported():
    named = replace(step(3), losses={"inside": 0.25, "distance": 1.0})
    assert "loss 0.3333 (inside 0.2500  distance 1.0000)  grad norm" in format_event(named)
    table = render(build_closing_table(summarize([started(), step(1), step(2), named])))
    assert "1.0000 → 0.3333 (inside 0.2500  distance 1.0000)" in table


def test_the_headline_of_one_rank():
    assert "on 1 rank, cpu, fp32, 2 threads each" in format_headline(started(ranks=1, threads=2))


def test_closing_table_of_a_run():
    found = summarize(
        [
            started(),
            *steps(1, 20),
            Evaluated(step=20, metrics={"accuracy": 0.9}, seconds=0.3),
            saved(20),
            Ended(step=20, reason="done"),
        ]
    )
    text = render(build_closing_table(found))
    for expected in (
        "loss",
        "1.0000 → 0.0500",
        "validation accuracy",
        "0.9000",
        "100 samples/s",
        "100.0 ms a step",
        "data",
        "save",
        "1.0 KiB",
    ):
        assert expected in text, text


def test_lines_and_a_log_without_a_terminal(tmp_path):
    run, console = RunFolder(tmp_path), Console(file=io.StringIO(), width=200)
    notes = started(notes=("something [bold]to know[/]",))
    watch(iter([notes, *steps(1, 20), saved(20), Ended(step=20, reason="done")]), run, console)
    out, log = console.file.getvalue(), run.log.read_text()
    for text in (out, log):
        assert "note: something [bold]to know[/]" in text
        assert "step 20  saved ckpt/step_20" in text
        assert "\x1b" not in text
    assert len([line for line in log.splitlines() if "loss" in line]) == 1, "at most one line a second"
    assert f"run  {tmp_path}" in out


def test_a_stopped_run_shows_how_to_continue(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    watch(
        iter([started(), *steps(1, 5), saved(5), Ended(step=5, reason="stopped")]),
        RunFolder(tmp_path),
        console,
    )
    assert f"continue with: paceline resume {tmp_path}" in console.file.getvalue()


def test_events_are_read_while_they_are_written(tmp_path):
    path = tmp_path / "events.jsonl"
    writer = events.EventWriter(path)
    for event in (started(), *steps(1, 3)):
        writer.write(event)
        summarize(events.read(path))
    writer.close()
    assert summarize(events.read(path)).steps == 3
