"""The terminal view in Textual's test driver, of run folders that are written here by json alone."""

import asyncio
import json
import random
import shutil
import time

import pytest

pytest.importorskip("textual")

from paceline.terminal.app import TerminalView
from paceline.web.runs import RunList
from run_lines import folder, started, step
from screens import read_screen

BEGIN = 1.7e9


def build_lines(steps: int, **fields) -> list[dict]:
    draw = random.Random(3)
    lines = [started(0, BEGIN) | {"steps": 200} | fields]
    lines += [
        step(at, BEGIN + at, draw) | {"loss": 8.0 / at, "step_s": 0.01, "samples_per_s": 800.0}
        for at in range(1, steps + 1)
    ]
    evaluated = {"time": BEGIN + steps, "event": "evaluated", "step": steps, "seconds": 0.1}
    return [*lines, evaluated | {"metrics": {"loss": 0.25, "accuracy": 0.75}}]


def write_beat(run, rank: int, data_s: float, host: str = "elsewhere", ranks: int = 2) -> None:
    run.ranks.mkdir(exist_ok=True)
    now = time.time()
    beat = {
        "rank": rank, "ranks": ranks, "host": host, "pid": 7, "began": now - 60, "time": now, "step": 40,
        "steps": 200, "stepped": now, "longest_s": 0.1, "phase": "backward", "since": now, "patience_s": None,
        "spent_s": {"data": data_s, "forward": 0.004, "backward": 0.02, "update": 0.001, "report": 0.001},
    }  # fmt: skip
    run.alive(rank).write_text(json.dumps(beat))


@pytest.fixture
def run(tmp_path):
    made = folder(tmp_path / "a", build_lines(40))
    write_beat(made, 0, 0.001)
    write_beat(made, 1, 0.001)
    made.monitor.mkdir()
    lines = ["# paceline samples 1", "# node: node1", "time [s],cpu [%],memory used [MiB],memory total [MiB]"]
    lines += [f"{BEGIN + at},{at},1024,4096" for at in range(1, 38)]
    (made.monitor / "node1.csv").write_text("\n".join([*lines, ""]))
    return made


def drive(path, scenario, size=(80, 24), price=None) -> None:
    """Run a scenario, a coroutine function of the app and its pilot."""

    async def run_scenario() -> None:
        app = TerminalView(RunList(path, price))
        async with app.run_test(size=size) as pilot:
            await scenario(app, pilot)

    asyncio.run(run_scenario())


async def wait_for(app, pilot, *texts: str, timeout_s: float = 20.0) -> str:
    deadline = time.monotonic() + timeout_s
    while not all(text in read_screen(app) for text in texts):
        assert time.monotonic() < deadline, f"{texts} not in\n{read_screen(app)}"
        await pilot.pause(0.05)
    return read_screen(app)


@pytest.mark.parametrize("size", [(80, 24), (200, 50), (40, 10)], ids=["80x24", "200x50", "40x10"])
def test_every_view_fits_the_screen(run, size):
    async def scenario(app, pilot):
        await wait_for(app, pilot, "interrupted", "loss 0.2")
        for key in "1234567r":
            await pilot.press(key)
            await pilot.pause(0.1)
            screen = read_screen(app)
            assert len(screen.split("\n")) == size[1]
            assert all(len(line) <= size[0] for line in screen.split("\n"))

    drive(run.path, scenario, size)


def test_overview_has_the_values_of_the_files(run):
    async def scenario(app, pilot):
        screen = await wait_for(
            app, pilot, "step 40 of 200", "node1", "0 elsewhere", "interrupted after step 40"
        )
        assert "my.py:T".rpartition("/")[2] in screen
        assert "ddp on 2 ranks" in screen
        assert "800 samples/s" in screen
        assert "loss 0.2 " in screen  # 8 / 40
        assert "validation loss 0.25" in screen
        assert "37 %" in screen  # of the processors, in the last sample
        assert "1.0 GiB of 4.0 GiB" in screen
        assert "cost " in screen
        assert any("\u2801" <= char <= "\u28ff" for char in screen)

    drive(run.path, scenario, price=3600.0)


def test_straggler_is_marked_without_colours(run):
    async def scenario(app, pilot):
        await wait_for(app, pilot, "step 40 of 200")
        await pilot.press("3")
        screen = await wait_for(app, pilot, "1 elsewhere", "20.0 ms")
        assert "ms▲" not in screen
        write_beat(run, 1, 0.030)
        screen = await wait_for(app, pilot, "30.0 ms▲")
        line = next(line for line in screen.split("\n") if "▲" in line)
        assert line.startswith("1 elsewhere")
        assert line.rstrip().rpartition(" ")[2].startswith("d")  # its bar begins with reading data

    drive(run.path, scenario, (120, 24))


def test_new_events_appear(run):
    async def scenario(app, pilot):
        await wait_for(app, pilot, "step 40 of 200")
        with run.events.open("a") as file:
            draw = random.Random(1)
            file.write(json.dumps(step(41, BEGIN + 41, draw) | {"loss": 0.125}) + "\n")
            failed = {
                "time": BEGIN + 42,
                "event": "failed",
                "what": "run",
                "message": "out of memory",
                "step": 41,
            }
            file.write(json.dumps(failed) + "\n")
        screen = await wait_for(app, pilot, "step 41 of 200", "loss 0.125", "failed after step 41")
        assert "out of memory" in screen

    drive(run.path, scenario)


def test_keys_choose_axis_scale_and_curves(run):
    async def scenario(app, pilot):
        await wait_for(app, pilot, "step 40 of 200")
        await pilot.press("2")
        await wait_for(app, pilot, "8 of 8 curves over step")
        await pilot.press("a")
        await wait_for(app, pilot, "over samples", "samples 320")
        assert " log" not in read_screen(app).split("\n")[5]
        await pilot.press("l")
        await wait_for(app, pilot, "loss 0.2 log")
        await pilot.press("slash", *"accu")
        await wait_for(app, pilot, '1 of 8 curves over samples, with "accu" in their names', "accuracy 0.75")
        assert "grad_norm" not in read_screen(app)
        await pilot.press("enter", "3")  # a key of a view again, not a part of the filter
        await wait_for(app, pilot, "Ranks  mean time")
        await pilot.press("2", "escape")
        await wait_for(app, pilot, "8 of 8 curves")

    drive(run.path, scenario)


def test_list_of_runs_and_output_of_a_rank(run, tmp_path):
    folder(tmp_path / "b", build_lines(7))
    run.rank_log(1).write_text("from rank one \x1b[31m\n")

    async def scenario(app, pilot):
        screen = await wait_for(app, pilot, "  run", "40/200", "7/200")
        names = [line.split()[0].strip("▸") or line.split()[1] for line in screen.split("\n")[5:7]]
        assert sorted(names) == ["a", "b"]
        assert screen.split("\n")[5].startswith("▸")
        await pilot.press("down")
        assert read_screen(app).split("\n")[6].startswith("▸")
        await pilot.press(*(["up"] if names[0] == "a" else []), "enter")
        await wait_for(app, pilot, "a  ", "step 40 of 200")
        await pilot.press("3")
        await wait_for(app, pilot, "1 elsewhere")
        await pilot.press("down", "enter")
        await wait_for(app, pilot, "Output of rank 1", "from rank one �[31m")
        await pilot.press("escape")
        await wait_for(app, pilot, "Ranks  mean time")
        await pilot.press("j")
        await wait_for(app, pilot, "step 7 of 200")

    drive(tmp_path, scenario)


def test_folder_that_disappears_is_reported(run):
    async def scenario(app, pilot):
        await wait_for(app, pilot, "step 40 of 200")
        shutil.rmtree(run.path)
        await wait_for(app, pilot, "the folder of this run is gone")
        await pilot.press("r")
        await wait_for(app, pilot, "cannot read")

    drive(run.path, scenario)


def test_ten_thousand_metrics_are_bounded(run):
    metrics = {f"metric {number}": 0.5 for number in range(10_000)}
    line = {"time": BEGIN + 50, "event": "evaluated", "step": 40, "metrics": metrics, "seconds": 0.1}
    with run.events.open("a") as file:
        file.write(json.dumps(line) + "\n")

    async def scenario(app, pilot):
        await wait_for(app, pilot, "only the first 64 of 10,002 metrics are kept")
        await pilot.press("2")
        await wait_for(app, pilot, "24 of 70 curves", "press / to find others by name")
        await pilot.press("slash", *"metric 59")
        await wait_for(app, pilot, "1 of 70 curves", "validation metric 59 0.5")

    drive(run.path, scenario, (120, 30))


@pytest.mark.slow
def test_nothing_is_drawn_while_nothing_changes(run, monkeypatch):
    """Only lines that changed are drawn again; of a run that has ended, at most the age of its data."""
    from paceline.terminal.widgets import TextLines

    drawn: list[tuple[str, int]] = []
    render = TextLines.render_line
    monkeypatch.setattr(
        TextLines, "render_line", lambda self, y: (drawn.append((self.id, y)), render(self, y))[1]
    )

    async def scenario(app, pilot):
        await wait_for(app, pilot, "step 40 of 200", "node1")
        await pilot.press("4")
        await wait_for(app, pilot, "Samples of node1", "Processors")
        await pilot.pause(1.5)  # the findings are computed in a thread
        drawn.clear()
        await pilot.pause(3.0)
        assert {name for name, _ in drawn} <= {"head"}
        assert len(drawn) <= 4, drawn
        await pilot.press("7")
        await wait_for(app, pilot, "Log ")
        assert {name for name, _ in drawn} >= {"body"}

    drive(run.path, scenario)


def test_help_lists_every_key(run):
    async def scenario(app, pilot):
        await wait_for(app, pilot, "step 40 of 200")
        await pilot.press("question_mark")
        screen = await wait_for(app, pilot, "this help", "Findings")
        assert "quit; training is not affected" in screen
        await pilot.press("escape")
        await wait_for(app, pilot, "step 40 of 200")

    drive(run.path, scenario)


def test_an_unexpected_error_of_the_reader_ends_the_view(run, monkeypatch):
    from paceline.terminal import reader

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(reader, "build", fail)

    async def scenario(app, pilot):
        deadline = time.monotonic() + 60
        while app.error is None:
            assert time.monotonic() < deadline
            await pilot.pause(0.05)
        assert str(app.error) == "a defect"
        assert app.return_code == 1

    drive(run.path, scenario)
