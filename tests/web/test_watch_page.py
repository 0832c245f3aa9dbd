"""The page of `paceline watch` in a headless Chromium that reaches nothing but this machine."""

import gzip
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from browser import start_browser
from paceline import spec as specs
from paceline.plotting.png import encode_png
from paceline.run import RunFolder
from paceline.spec import Launch, Optimizer, Spec
from run_lines import folder, started, step
from watching import watch, why_not_built

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built())),
]
EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


# The mean of red + green + blue over the left side of a figure, where the numbers of its axis are.
BRIGHTNESS = """(() => {
    const canvas = PANEL.querySelector('canvas');
    const data = canvas.getContext('2d').getImageData(0, 0, 50, canvas.height).data;
    let sum = 0, count = 0;
    for (let at = 0; at < data.length; at += 4)
        if (data[at + 3] > 200) { sum += data[at] + data[at + 1] + data[at + 2]; count += 1; }
    return sum / count;
})()"""


def build_lines(steps: int) -> list[dict]:
    draw = random.Random(1)
    lines = [started(0, 1.7e9) | {"task": EVIL}]
    for number in range(1, steps + 1):
        lines.append(step(number, 1.7e9 + number / 10, draw) | {"loss": 1.0, "losses": {EVIL: 1.0}})
    at = 1.7e9 + steps / 10
    lines.append({"time": at, "event": "evaluated", "step": steps, "metrics": {EVIL: 0.5}, "seconds": 0.1})
    lines.append({"time": at, "event": "noted", "step": steps, "message": EVIL})
    seconds = {"compute": 0.006, "communication": 0.003, "input": 0.001}
    lines.append(
        {
            "time": at,
            "event": "profiled",
            "step": steps,
            "num_steps": 1,
            "step_s": 0.01,
            "seconds": seconds | {EVIL: 0.0},
            "input_s": 0.001,
            "slowest": 1,
            "slowest_s": 0.01,
            "busy_s": 0.01,
            "fullest": 1,
            "memory": {"weights": 1000, "activations": 500, EVIL: 7},
            "costs_s": 0.0,
        }
    )
    return lines


def write_rank_files(run: RunFolder) -> None:
    """Write samples of two ranks, and for each a heartbeat and output."""
    run.monitor.mkdir()
    run.ranks.mkdir()
    names = "time [s],cpu [%],rank0 cpu [%],rank1 cpu [%],gpu0 power [W]"
    rows = [f"{1.7e9 + at},{at},10,{20 + at},300" for at in range(40)]
    (run.monitor / "node1.csv").write_text(
        "\n".join(["# paceline samples 1", "# node: <b>node1", names, *rows, ""])
    )
    beat = {
        "ranks": 2, "host": "<b>node1", "pid": 7, "began": 1.7e9, "time": 1.7e9, "step": 50, "steps": 60,
        "stepped": 1.7e9, "longest_s": 1.0, "phase": "backward", "since": 1.7e9, "patience_s": None,
        "spent_s": {"forward": 0.25, EVIL: 0.5},
    }  # fmt: skip
    for rank in range(2):
        run.alive(rank).write_text(json.dumps(beat | {"rank": rank}))
        run.rank_log(rank).write_text(f"output of rank {rank}\n{EVIL}\n")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    at = tmp_path_factory.mktemp("watched")
    lines = build_lines(50)
    first = folder(at / "first", lines)
    write_rank_files(first)
    folder(at / EVIL.replace("/", "∕"), lines)
    return at


@pytest.fixture(scope="module")
def server(runs, tmp_path_factory):
    with watch(runs, at=tmp_path_factory.mktemp("home")) as watching:
        yield watching


@pytest.fixture(scope="module")
def browser():
    with start_browser() as opened:
        yield opened


def wait(browser, script: str, holds: Callable[[object], bool] = bool) -> object:
    """Return the value of an expression when it holds."""
    deadline = time.monotonic() + 60
    while not holds(value := browser.run(script)):
        assert time.monotonic() < deadline, (
            f"{script} is {value!r}; {browser.errors}; {browser.run('document.body.innerText')}"
        )
        time.sleep(0.05)
    return value


def open_page(browser, server, **options) -> None:
    address = f"http://{server.host}{server.path}"
    browser.log_in(address, server.cookie, server.path)
    browser.open(address, **options)
    wait(browser, "document.body?.dataset.ready")


def open_run(browser, server, name: str = "first", **options) -> None:
    open_page(browser, server, **options)
    link = f"[...document.querySelectorAll('td a')].find(link => link.textContent == {json.dumps(name)})"
    wait(browser, f"!!{link}")
    browser.run(f"{link}.click()")
    wait(browser, "document.querySelectorAll('section canvas').length > 5")


def panel(title: str) -> str:
    return f"document.querySelector('section[aria-label={json.dumps(title)}]')"


def read_table(browser, title: str) -> list[list[str]]:
    """Return the figure of a panel as the table that the page offers."""
    browser.run(f"{panel(title)}.querySelector('button').click()")
    rows = (
        "[...document.querySelectorAll('dialog tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    found = browser.run(rows)
    browser.run("document.querySelector('dialog').close()")
    wait(browser, "!document.querySelector('dialog')")
    return found


def test_printed_address_opens_the_page(server, browser):
    browser.page.context.clear_cookies()
    browser.page.goto(server.url)
    browser.page.wait_for_url(f"http://{server.host}{server.path}")
    browser.page.wait_for_selector("body[data-ready]")
    assert browser.run("location.pathname") == server.path
    assert server.token not in browser.run("location.href + document.cookie + document.referrer")
    browser.page.context.clear_cookies()
    browser.open(f"http://{server.host}{server.path}")
    assert browser.run("document.body.innerText") == "open the address that paceline watch printed"


def test_page_shows_the_events(server, browser):
    open_run(browser, server)
    text = browser.run("document.querySelector('header').innerText")
    assert "first · interrupted" in text
    assert "50 / 1,000,000" in text
    assert "ddp · 2 ranks" in text
    rows = read_table(browser, "Loss")
    assert rows[0] == ["step", "low", "high", "mean", "last"]
    assert rows[1:] == [[str(number), "1", "1", "1", "1"] for number in range(1, 51)]
    parts = {row[0]: row[1] for row in read_table(browser, "A step")[1:]}
    assert {*parts} == {"compute", "communication", "input"}
    assert "not predicted yet" in browser.run(f"{panel('A step')}.innerText")
    assert [row[:2] for row in read_table(browser, "Memory of a rank")[1:]] == [
        ["weights", "1,000 B"],
        ["activations", "500 B"],
    ]
    assert browser.errors == []


def test_page_loads_only_from_its_server(server, browser):
    open_run(browser, server)
    assert len(browser.requests) > 4
    assert {address.split("/")[2] for address in browser.requests} == {server.host}


def test_markup_in_names_and_messages_is_text(server, browser):
    for name in ("first", EVIL.replace("/", "∕")):
        open_run(browser, server, name)
        wait(browser, f"{panel('Log')}.innerText.includes('<img src=x onerror')")
        assert browser.run("document.querySelectorAll('img, main script').length") == 0
        assert "taken" not in browser.run("document.title.replace(/<.*>/, '')")
        titles = browser.run("[...document.querySelectorAll('section h2 .name')].map(e => e.textContent)")
        assert {f"losses/{EVIL}", EVIL} <= {*titles}
    assert browser.errors == []


def test_policy_stops_a_script_that_is_inserted(server, browser):
    """Negative control of the previous test: markup as HTML would show, but not run."""
    open_run(browser, server)
    browser.run(f"document.body.insertAdjacentHTML('beforeend', {json.dumps(EVIL)})")
    assert browser.run("document.querySelectorAll('img').length") == 1
    wait(browser, "1", lambda _: any("Content Security Policy" in error for error in browser.errors))
    assert browser.run("document.title") != "taken"


def test_new_events_appear(runs, server, browser):
    """Steps, the loss in the heading and the log grow while the page is open."""
    open_run(browser, server)
    draw = random.Random(2)
    with (runs / "first/events.jsonl").open("a") as file:
        for number in range(51, 61):
            line = step(number, 1.7e9 + number / 10, draw) | {"loss": 0.25}
            file.write(json.dumps(line) + "\n")
            file.flush()
        file.write(json.dumps({"time": 1.8e9, "event": "noted", "step": 60, "message": "new note"}) + "\n")
    wait(browser, f"{panel('Loss')}.innerText.includes('now 0.25')")
    wait(browser, f"{panel('Log')}.innerText.includes('new note')")
    assert "60 / 1,000,000" in browser.run("document.querySelector('header').innerText")
    assert read_table(browser, "Loss")[-1] == ["60", "0.25", "0.25", "0.25", "0.25"]
    assert sum("stream" in address for address in browser.requests) == 2  # the list and the run


def test_brush_zooms_all_curves_and_escape_shows_all(server, browser):
    open_run(browser, server)
    box = browser.run(
        f"(() => {{ const box = {panel('Loss')}.querySelector('.u-over').getBoundingClientRect();"
        "return [box.left, box.top, box.width, box.height]; })()"
    )
    y = box[1] + box[3] / 2
    browser.drag([(box[0] + share * box[2], y) for share in (0.25, 0.3, 0.5)])
    wait(browser, "document.body.innerText.includes('show all')")
    for title in ("Loss", "Throughput"):
        rows = read_table(browser, title)[1:]
        deadline = time.monotonic() + 30
        while len(rows) > 30 and time.monotonic() < deadline:
            rows = read_table(browser, title)[1:]
        assert 10 < len(rows) < 20  # a quarter
        assert int(rows[0][0]) > 10
    browser.page.keyboard.press("Escape")
    wait(browser, "!document.body.innerText.includes('show all')")
    assert len(read_table(browser, "Loss")) > 50


def test_keyboard_changes_axis_run_and_list(server, browser):
    open_run(browser, server)
    browser.page.keyboard.press("a")
    wait(browser, "location.hash.includes('axis=samples')")
    wait(browser, "1", lambda _: read_table(browser, "Loss")[0][0] == "samples")
    assert read_table(browser, "Loss")[1][0] == "8"
    before = browser.run("location.hash")
    browser.page.keyboard.press("k")
    browser.page.keyboard.press("j")
    wait(browser, f"location.hash != {json.dumps(before)}")
    browser.page.keyboard.press("r")
    wait(browser, "document.querySelector('header').innerText.includes('2 runs')")
    assert browser.run("document.querySelectorAll('section canvas').length") == 0


def test_machine_has_a_figure_for_each_kind_of_samples(server, browser):
    open_run(browser, server)
    wait(browser, f"!!{panel('GPU power')}?.querySelector('canvas')")
    assert read_table(browser, "Processors")[-1] == ["39", "39"]
    assert "<b>node1" in browser.run("document.getElementById('node').innerText")
    rows = read_table(browser, "Ranks over time")
    assert rows[1][0] == "GPU 0 · <b>node1"


def test_click_on_a_row_opens_the_rank(server, browser):
    open_run(browser, server)
    choose = f"{panel('Ranks over time')}.querySelector('select')"
    wait(browser, f"!!{choose}")
    browser.run(f"{choose}.value = 'Processor time'; {choose}.dispatchEvent(new Event('change'))")
    wait(browser, "location.hash.includes('Processor')")
    wait(browser, f"{panel('Ranks over time')}.innerText.includes('a row is a rank')")
    canvas = f"{panel('Ranks over time')}.querySelector('canvas')"
    browser.run(f"{canvas}.scrollIntoView({{block: 'center'}})")
    browser.draw()
    box = browser.run(f"(box => [box.left, box.top, box.width])({canvas}.getBoundingClientRect())")
    browser.page.mouse.click(box[0] + 0.6 * box[2], box[1] + 27)  # the second row
    text = wait(browser, "document.querySelector('dialog')?.innerText")
    assert "backward after step 50" in text
    assert "output of rank 1" in text
    assert EVIL in text
    assert ["forward", "250 ms"] in browser.run(
        "[...document.querySelectorAll('dialog tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    browser.page.keyboard.press("Escape")
    wait(browser, "!document.querySelector('dialog')")
    assert browser.errors == []


def test_rank_without_heartbeat_and_output_opens(runs, server, browser):
    run = folder(runs / "silent", build_lines(5))
    write_rank_files(run)
    shutil.rmtree(run.ranks)
    open_run(browser, server, "silent")
    for label, value in (("What the map shows", "Processor time"), ("Open a rank", "1")):
        choose = f"{panel('Ranks over time')}.querySelector('select[aria-label={json.dumps(label)}]')"
        wait(browser, f"!!{choose}")
        browser.run(f"{choose}.value = '{value}'; {choose}.dispatchEvent(new Event('change'))")
    text = wait(browser, "document.querySelector('dialog')?.innerText")
    assert "rank 1 has no heartbeat in " in text
    assert "rank 1 has no output in " in text
    assert browser.errors == []
    shutil.rmtree(run.path)


def test_comparison_shows_only_what_differs(runs, server, browser):
    """The other run has another learning rate and another loss, and the curves of both are drawn."""
    other = folder(
        runs / "second", [line | ({"loss": 3.0} if "loss" in line else {}) for line in build_lines(20)]
    )
    specs.save(other.spec, Spec(task="my.py:T", optimizer=Optimizer(lr=0.5)), Launch(ranks=2, plan="ddp"))
    open_run(browser, server)
    box = "document.querySelector('input[aria-label=\"Compare with second\"]')"
    wait(browser, f"!!{box}")
    browser.run(f"{box}.click()")
    wait(browser, f"!!{panel('Comparison')}?.querySelector('table')")
    wait(browser, f"{panel('Comparison')}.innerText.includes('optimizer.lr')")
    rows = read_table(browser, "Comparison")
    assert rows[0] == ["what differs", "first (baseline)", "second"]
    assert [row for row in rows if row[0].startswith("optimizer")] == [["optimizer.lr", "0.001", "0.5"]]
    assert "plan" not in [row[0] for row in rows]
    messages = server.messages(run=find_id(server, "first"), **{"with": find_id(server, "second")})
    table = next(messages)["tables"]["other:0:step:loss"]["columns"]
    assert table["x"] == [*range(1, 21)]
    assert {*table["mean"]} == {3.0}
    browser.run(f"{box}.click()")
    wait(browser, f"!{panel('Comparison')}")
    assert browser.errors == []
    shutil.rmtree(other.path)


def find_id(server, name: str) -> str:
    return next(row["id"] for row in next(server.messages())["lists"]["runs"]["rows"] if row["name"] == name)


def test_provenance_is_shown_as_text(runs, server, browser):
    (runs / "first/provenance.json").write_text(json.dumps({"command": ["paceline", EVIL], "host": "h1"}))
    open_run(browser, server)
    wait(browser, f"!!{panel('Provenance')}?.querySelector('table')")
    rows = {row[0]: row[1] for row in read_table(browser, "Provenance")}
    assert rows["command"] == f"paceline {EVIL}"
    assert (rows["host"], rows["task"], rows["ranks"]) == ("h1", "my.py:T", "2")


def test_traced_pipeline_is_shown_over_its_ideal_schedule(runs, server, browser):
    lines = build_lines(5)
    lines[0] |= {"plan": "pp=2,microbatches=2", "ranks": 2}
    run = folder(runs / "piped", lines)
    (run.traces / "steps_5-5").mkdir(parents=True)
    kinds = ("forward", "backward")
    for rank, begins in ((0, (0, 1, 4, 6)), (1, (1, 3, 2, 4))):
        events = [{"name": "step 5", "cat": "step", "ts": 0, "dur": 10}]
        for at, begin in enumerate(begins):
            args = {"stage": rank, "micro_batch": at % 2}
            name = f"{kinds[at // 2]} {at % 2}"
            events.append({"name": name, "cat": "schedule", "ts": begin, "dur": 1, "args": args})
        text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        (run.traces / f"steps_5-5/{rank}.json.gz").write_bytes(gzip.compress(text.encode()))
    open_run(browser, server, "piped")
    wait(browser, f"!!{panel('Pipeline')}?.querySelector('svg rect')")
    text = browser.run(f"{panel('Pipeline')}.innerText")
    assert "step 5" in text
    assert "ideal 33 %" in text  # (p - 1)/(m + p - 1)
    assert browser.run(f"{panel('Pipeline')}.querySelectorAll('svg text').length") >= 2
    rows = read_table(browser, "Pipeline")
    assert ["1", "backward", "1", "4", "5"] in rows
    assert len(rows) == 1 + 8
    shutil.rmtree(run.path)


def test_figures_of_the_task_are_shown_by_step(runs, server, browser):
    run = folder(runs / "drawn", build_lines(5))

    def draw(name: str, step: int, width: int) -> None:
        (run.figures / name).mkdir(parents=True, exist_ok=True)
        pixels = np.full((20, width, 3), 200, np.uint8)
        (run.figures / name / f"step_{step:09}.png").write_bytes(encode_png(pixels))

    draw("errors", 5, 30)
    draw("errors", 10, 40)
    draw("first filters", 5, 300)
    (run.figures / "empty").mkdir()
    (run.figures / "errors/notes.txt").write_text("no image")
    open_run(browser, server, "drawn")
    images = f"[...({panel('Figures')}?.querySelectorAll('figure') ?? [])]"
    drawn = f"{images}.map(e => [e.innerText.trim(), e.firstChild.naturalWidth])"
    wait(browser, drawn, [["errors, step 10", 40], ["first filters, step 5", 300]].__eq__)
    assert "step 10, the last; 2 steps" in browser.run(f"{panel('Figures')}.innerText")
    assert browser.run(f"{images}.map(e => e.firstChild.width)") == [160, 300], "a small one is enlarged"
    slider = f"{panel('Figures')}.querySelector('input')"
    browser.run(f"{slider}.value = '0'; {slider}.dispatchEvent(new Event('input'))")
    wait(browser, drawn, [["errors, step 5", 30], ["first filters, step 5", 300]].__eq__)
    assert browser.run(f"{slider}.getAttribute('aria-valuetext')") == "step 5"
    draw("errors", 15, 50)
    wait(browser, f"{panel('Figures')}.innerText", lambda text: "step 5; 3 steps" in str(text))
    browser.run(f"{slider}.value = '2'; {slider}.dispatchEvent(new Event('input'))")
    draw("errors", 20, 60)
    wait(browser, drawn, [["errors, step 20", 60], ["first filters, step 5", 300]].__eq__)
    assert {address.split("/")[2] for address in browser.requests} == {server.host}
    assert browser.errors == []
    (run.figures / "errors/step_000000025.png").write_text("<svg onload=alert(1)>")
    wait(browser, f"{panel('Figures')}.innerText", lambda text: "is not a PNG image" in str(text))
    assert browser.errors == []
    open_run(browser, server, "first")
    assert not browser.run(f"!!{panel('Figures')}")
    shutil.rmtree(run.path)


def test_header_shows_mfu_and_cost_if_they_are_known(runs, server, browser):
    run = folder(runs / "priced", build_lines(5))
    times = {"step": {"predicted": 0.01}, "compute": {"predicted": 0.01}}
    profile = {"plan": "ddp", "ranks": 2, "batch": 8, "time_s": times, "flops": 1e9, "peak_flops": 1e12}
    run.profile.write_text(json.dumps(profile | {"price_per_device_hour": 36e6}))
    open_run(browser, server, "priced")
    text = browser.run("document.querySelector('header').innerText")
    assert re.search(r"\d %\s+MFU", text)
    assert "10.0 k\ncost" in text or "10 k\ncost" in text  # 0.5 s on 2 ranks
    open_run(browser, server, "first")
    assert "MFU" not in browser.run("document.querySelector('header').innerText")
    shutil.rmtree(run.path)


def test_filter_limits_the_curves(server, browser):
    open_run(browser, server)
    browser.run("document.getElementById('filter').value = 'grad'")
    browser.run("document.getElementById('filter').dispatchEvent(new Event('change'))")
    wait(browser, f"!{panel('Loss')} && !!{panel('Gradient norm')}")


@pytest.mark.parametrize("is_dark", [False, True])
def test_colours_follow_the_system(server, browser, is_dark):
    open_run(browser, server, is_dark=is_dark)
    numbers = "getComputedStyle(document.body)['{}'].match(/\\d+/g).slice(0, 3).map(Number)"
    background, text = (sum(browser.run(numbers.format(name))) for name in ("backgroundColor", "color"))
    assert (background < 100 and text > 600) if is_dark else (background > 700 and text < 150)
    labels = browser.run(BRIGHTNESS.replace("PANEL", panel("Loss")))
    assert labels > 300 if is_dark else labels < 480


@pytest.mark.parametrize("width", [390, 820])
def test_narrow_screen_has_no_horizontal_scroll(server, browser, width):
    open_run(browser, server, width=width)
    choose = f"{panel('Ranks over time')}.querySelector('select')"
    wait(browser, f"!!{choose}")
    browser.run(f"{choose}.value = 'Processor time'; {choose}.dispatchEvent(new Event('change'))")
    opener = "select[aria-label='Open a rank']"  # which makes the widest heading
    wait(browser, f'!!{panel("Ranks over time")}.querySelector("{opener}")')
    browser.draw()
    assert browser.run("document.documentElement.scrollWidth") <= width
    right = "Math.max(...[...document.querySelectorAll('section')].map(e => e.getBoundingClientRect().right))"
    assert browser.run(right) <= width
    assert browser.run(f"{panel('Loss')}.querySelector('canvas').clientWidth") > 200


def test_every_control_has_a_name(server, browser):
    """Negative control: a control without a name is found."""
    nameless = (
        "[...document.querySelectorAll('button, a, select, input, [role=img], section')].filter(e =>"
        " !(e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent.trim())).length"
    )
    open_run(browser, server)
    assert browser.run(nameless) == 0
    browser.run("document.body.append(document.createElement('button'))")
    assert browser.run(nameless) == 1


def test_deleted_run_is_reported(runs, server, browser):
    run = folder(runs / "short-lived", build_lines(5))
    open_run(browser, server, "short-lived")
    run.events.unlink()
    run.spec.unlink()
    run.path.rmdir()
    wait(browser, "document.querySelector('[role=status]').innerText.includes('folder was deleted')")


@pytest.mark.parametrize("is_single", [False, True], ids=["folder", "run"])
def test_folder_that_disappears_is_reported(browser, tmp_path, is_single):
    """The page names the reason, and shows the run again when the folder is back."""
    (tmp_path / "runs").mkdir()
    run = folder(tmp_path / "runs/a", build_lines(5))
    with watch(run.path if is_single else "runs", at=tmp_path) as watching:
        open_page(browser, watching)  # which shows the only run
        has_run = "document.querySelector('header').innerText.includes('a · interrupted')"
        wait(browser, has_run)
        (tmp_path / "runs").rename(tmp_path / "moved")
        status = "document.querySelector('[role=status]').innerText"
        wait(browser, f"{status}.includes('folder was deleted')")
        # The page shows an only run again until the server has looked at the folder.
        problem = f"{status}.includes('cannot read') && {status}.includes('No such file')"
        wait(browser, f"(location.hash = '#', {problem})")
        (tmp_path / "moved").rename(tmp_path / "runs")
        wait(browser, has_run)
    assert browser.errors == []


def test_page_with_10000_metrics_stays_usable(runs, server, browser):
    """24 curves are drawn, the page says how many there are, and the filter finds another."""
    lines = build_lines(5)
    metrics = {f"metric {number}": number / 100 for number in range(10_000)}
    line = {"time": 1.7e9 + 9, "event": "evaluated", "step": 5, "metrics": metrics, "seconds": 0.1}
    run = folder(runs / "many", [*lines, line])
    open_run(browser, server, "many")
    wait(browser, "document.querySelector('[role=status]').innerText.includes('of 10,001 metrics are kept')")
    assert browser.run("document.querySelectorAll('.uplot').length") < 40
    browser.run("document.getElementById('filter').value = 'metric 62'")
    browser.run("document.getElementById('filter').dispatchEvent(new Event('change'))")
    wait(browser, "[...document.querySelectorAll('h2 .name')].some(e => e.textContent.endsWith('metric 62'))")
    assert browser.errors == []
    shutil.rmtree(run.path)


def test_page_survives_the_end_of_the_server(runs, browser, tmp_path):
    with watch(runs, at=tmp_path) as watching:
        open_run(browser, watching)
    wait(browser, "document.querySelector('[role=status]').innerText.includes('No connection')")
    assert browser.run("document.querySelectorAll('section canvas').length") > 5
