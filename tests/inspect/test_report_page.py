"""Reports in a browser without a network: what they draw, and that names cannot become markup or code."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Browser, start_browser
from paceline import cli
from paceline.inspect.report import page, sections, svg
from paceline.inspect.report.write import Report
from paceline.plotting.png import encode_png
from paceline.report.run_view import view
from paceline.run import RunFolder
from pages import read_blocks
from run_lines import folder, make_history, started, step

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    with start_browser() as found:
        yield found


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_page(path: Path, *runs: RunFolder) -> Path:
    path.write_text(Report([view(run) for run in runs]).to_html())
    return path


def make_samples(run: RunFolder) -> None:
    run.monitor.mkdir()
    rows = [f"{1.7e9 + k},{k % 100},{k % 7},{100 + k},{k % 5}" for k in range(900)]
    head = "time [s],cpu [%],rank0 cpu [%],gpu0 power [W],gpu1 utilization [%]"
    lines = ["# paceline samples 1", "# node: node17", "# cpu: 2 of 2 cores: 0-1", head, *rows]
    (run.monitor / "node17.csv").write_text("\n".join(lines) + "\n")


SET = """(() => {{
    const control = document.getElementById("{id}");
    control.{property} = {value};
    control.dispatchEvent(new Event("input"));
}})()"""


def set_control(browser: Browser, id: str, value: Any) -> None:
    name = "checked" if isinstance(value, bool) else "value"
    browser.run(SET.format(id=id, property=name, value=json.dumps(value)))
    browser.draw()


def read_drawn_lines(browser: Browser, title: str) -> list[list[tuple[float, float]]]:
    """Return the points of each line of a figure, in the units of its labels."""
    drawn = browser.run(
        f"""(() => {{
        const figure = [...document.querySelectorAll("figure")].find((figure) =>
            figure.querySelector("figcaption").textContent.trim().startsWith({json.dumps(title)}));
        const read = (element, name) => element.getAttribute(name);
        const texts = [...figure.querySelectorAll("svg.live text")].map((text) =>
            [read(text, "text-anchor"), +read(text, "x"), +read(text, "y"), text.textContent]);
        const lines = figure.querySelectorAll("path.line:not(.raw)");
        return {{texts, paths: [...lines].map((path) => read(path, "d"))}};
    }})()"""
    )
    number = re.compile(r"-?[\d.]+(e-?\d+)?( [kMG])?")
    x = [
        (at, text) for anchor, at, _, text in drawn["texts"] if anchor == "middle" and number.fullmatch(text)
    ]
    y = [(at - 4, text) for anchor, _, at, text in drawn["texts"] if anchor == "end"]
    (x0, x1), (y0, y1) = read_scale(x), read_scale(y)
    lines = []
    for path in drawn["paths"]:
        points = [tuple(map(float, point.split())) for point in re.findall(r"[ML]([-\d.]+ [-\d.]+)", path)]
        lines.append([(x0 + x1 * across, y0 + y1 * down) for across, down in points])
    return lines


def read_scale(labels: list[tuple[float, str]]) -> tuple[float, float]:
    sizes = {"k": 1e3, "M": 1e6, "G": 1e9}
    values = [(at, float(text.split()[0]) * sizes.get(text.split()[-1], 1.0)) for at, text in sorted(labels)]
    (begin, first), (end, last) = values[0], values[-1]
    unit = (last - first) / (end - begin)
    return first - begin * unit, unit


def test_the_page_draws_the_events_over_each_axis(browser, tmp_path):
    runs = []
    for name, batch in (("a", 8), ("b", 16)):
        draw = random.Random(batch)
        lines = [started(0, 1.7e9)]
        for n in range(1, 201):
            lines.append(step(n, 1.7e9 + 4 * n, draw) | {"loss": draw.uniform(1, 9), "samples": batch * n})
        runs.append(folder(tmp_path / name, lines))
        make_samples(runs[-1])
    browser.open(write_page(tmp_path / "r.html", *runs))
    assert browser.errors == []
    assert browser.requests == [(tmp_path / "r.html").as_uri()]
    events = [[json.loads(line) for line in run.events.read_text().splitlines()][1:] for run in runs]
    sizes = {"step": 200, "samples": 3200, "time": 800, "energy": 4e5}
    for axis in ("step", "samples"):
        set_control(browser, "axis", axis)
        drawn = read_drawn_lines(browser, "Loss")
        assert len(drawn) == 2
        for line, steps in zip(drawn, events, strict=True):
            assert len(line) == 200
            for (x, y), event in zip(line, steps, strict=True):
                assert x == pytest.approx(event[axis], abs=sizes[axis] / 300)
                assert y == pytest.approx(event["loss"], abs=0.05)
    assert drawn[0][50][1] != pytest.approx(events[0][51]["loss"], abs=0.05), "the comparison can fail"
    for axis in ("time", "energy"):  # their labels have units
        set_control(browser, "axis", axis)
        assert browser.errors == []
        shapes = browser.run(
            "[...document.querySelectorAll('path.line')].map((path) => path.getAttribute('d'))"
        )
        assert all("NaN" not in shape and shape.count("L") > 5 for shape in shapes)


def test_controls_change_the_curves(browser, tmp_path):
    run = folder(tmp_path / "r", make_history(random.Random(1), 400, 2))
    make_samples(run)
    browser.open(write_page(tmp_path / "r.html", run))
    whole = browser.run(PATHS)
    set_control(browser, "smooth", 90)
    assert browser.run("document.querySelectorAll('path.raw').length") > 5
    set_control(browser, "smooth", 0)
    assert browser.run(PATHS) == whole
    for control in ("log-y", "log-x"):
        set_control(browser, control, True)
        changed = browser.run(PATHS)
        assert changed != whole
        assert "NaN" not in json.dumps(changed)
        set_control(browser, control, False)
    browser.run("document.querySelector('svg.live').scrollIntoView()")
    box = browser.run("(() => {const box = document.querySelector('svg.live').getBoundingClientRect();"
                      "return [box.x, box.y, box.width, box.height]})()")  # fmt: skip
    browser.drag([(box[0] + share * box[2], box[1] + 0.5 * box[3]) for share in (0.4, 0.5, 0.6)])
    browser.draw()
    assert browser.run("document.querySelector('.tip').textContent").startswith("step ")
    assert browser.run(PATHS) != whole, "it is zoomed"
    assert not browser.run("document.getElementById('reset').disabled")
    browser.run("document.getElementById('reset').click()")
    browser.draw()
    assert browser.run(PATHS) == whole
    assert browser.errors == []


PATHS = "[...document.querySelectorAll('path.line')].map((path) => path.getAttribute('d'))"


def test_images_are_shown_despite_the_policy(browser, tmp_path):
    run = folder(tmp_path / "a", make_history(random.Random(1), 5, 1))
    (run.figures / "errors").mkdir(parents=True)
    pixels = np.full((6, 4, 3), 200, np.uint8)
    (run.figures / "errors/step_000000005.png").write_bytes(encode_png(pixels))
    browser.open(write_page(tmp_path / "r.html", run))
    sizes = "[...document.querySelectorAll('img')].map((image) => [image.naturalWidth, image.naturalHeight])"
    assert browser.run(sizes) == [[4, 6]]
    assert browser.run("document.querySelector('figure.image').innerText") == "errors, step 5"


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_page_fits_its_window(width, is_dark, browser, tmp_path):
    run = folder(tmp_path / ("r" * 100), make_history(random.Random(1), 50, 2))
    make_samples(run)
    browser.open(write_page(tmp_path / "r.html", run, run), width, is_dark)
    assert browser.run(TOO_WIDE) == []
    figures = browser.run("[...document.querySelectorAll('figure')].map((figure) => figure.clientWidth)")
    assert len(figures) > 8
    assert min(figures) > 300
    colours = browser.run("['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])")
    luminance = [sum(map(int, re.findall(r"\d+", colour))) / 765 for colour in colours]
    assert (luminance[0] > 0.8, luminance[1] < 0.2) == (is_dark, is_dark)


TOO_WIDE = """[...document.querySelectorAll("body *")].filter((element) =>
    !element.parentElement.closest(".scroll, pre") &&
    element.getBoundingClientRect().right > document.documentElement.clientWidth + 1
).map((element) => element.outerHTML.slice(0, 200))"""
MARKUP = (
    "</script><script>window.broken = 1</script>",
    '"><img src=x onerror="window.broken = 1">',
    "<svg onload='window.broken = 1'>",
    "' onmouseover='window.broken = 1' x='",
    "</style><style>*{display:none}</style>",
    "<!--<script>",
    "</title></textarea></pre><iframe src=https://example.com></iframe>",
    "javascript:window.broken=1",
    "]]>&lt;b&gt;\u2028\ud800",
)


def make_hostile_run(at: Path) -> RunFolder:
    """Return a run in which each name and text that its files may have is markup."""
    everything = " ".join(MARKUP)
    draw = random.Random(1)
    begin = started(0, 1.7e9) | dict.fromkeys(("task", "plan", "device", "precision", "lr_group"), everything)
    begin |= {"notes": list(MARKUP), "start_s": {everything: 1.0}}
    losses = {"losses": dict.fromkeys(MARKUP, 1.0)}
    lines = [begin, *(step(n, 1.7e9 + n, draw) | losses | {"loss": 1.0} for n in range(1, 9))]
    metrics = dict.fromkeys(MARKUP, 0.5)
    profile = {"step_s": 0.1, "seconds": dict.fromkeys(MARKUP, 0.01), "input_s": 0.0, "slowest": 0}
    profile |= {"slowest_s": 0.1, "busy_s": 0.1, "fullest": 0, "memory": dict.fromkeys(MARKUP, 9)}
    lines += [
        {"time": 1.7e9, "event": "evaluated", "step": 8, "metrics": metrics, "seconds": 0.1},
        {"time": 1.7e9, "event": "profiled", "step": 8, "num_steps": 2, "costs_s": 0.1} | profile,
        {"time": 1.7e9, "event": "noted", "step": 8, "message": everything},
        {"time": 1.7e9, "event": "failed", "what": "save", "message": everything, "step": 8},
        {"time": 1.7e9, "event": "saved", "path": everything, "bytes": 1, "seconds": 1.0, "blocked_s": 1.0}
        | {"step": 8},
        {"time": 1.7e9, "event": "ended", "step": 8, "reason": everything, "why": everything},
    ]
    run = folder(at / 'r"><img src=x onerror=window.broken=1><script>window.broken=1<', lines)
    with open(run.events, "a") as file:
        file.write(json.dumps({"time": 1.0, "event": "img"}) + "\n")
    run.provenance.write_text(json.dumps({everything: everything, "packages": {"paceline": MARKUP[1]}}))
    run.spec.write_text(f"# {everything}\n".encode("utf-8", "replace").decode() + run.spec.read_text())
    run.monitor.mkdir()
    text = everything.encode("utf-8", "replace").decode()
    names = [f"gpu0 {MARKUP[1]} [{MARKUP[2]}]", f"cpu [{text}]"]
    head = ["# paceline samples 1", f"# node: {text}", f"# {text}: {text}", f"# absent: {text}: {text}"]
    head.append(",".join(["time [s]", *names]))
    rows = [f"{1.7e9 + k:.0f},5,6" for k in range(9)]
    (run.monitor / "n.csv").write_text("\n".join([*head, *rows]) + "\n")
    return run


def test_names_cannot_become_markup_or_code(browser, tmp_path):
    run = make_hostile_run(tmp_path)
    path = tmp_path / "r.html"
    path.write_text(Report([view(run), view(folder(tmp_path / "s", []))]).to_html())
    browser.open(path, 1200)
    assert browser.run("window.broken === undefined")
    assert browser.errors == [], "not even an attempt that the policy refused"
    assert browser.requests == [path.as_uri()]
    assert browser.run("document.documentElement.dataset.ready") == "yes"
    assert browser.run("document.querySelectorAll('script, style, img, iframe').length") == 3
    text = browser.run("document.body.innerText")
    assert all(markup in text for markup in MARKUP[:4])


def test_files_with_hostile_names_are_written_inside_the_folder(tmp_path, browser):
    report = Report([view(make_hostile_run(tmp_path))])
    drawn = report.draw_figures()
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+\.svg", name) and not name.startswith(".") for name in drawn)
    for name, text in drawn.items():
        (tmp_path / name).write_text(text)
        browser.open(tmp_path / name) if name == next(iter(drawn)) else None
    assert browser.errors == []


@pytest.mark.parametrize("has_policy", [True, False])
def test_missing_escapes_are_found(has_policy, browser, tmp_path, monkeypatch):
    """Negative control: without escapes, names become code, which the policy then refuses."""
    for module in (page, sections, svg):
        monkeypatch.setattr(module, "escape", lambda text, quote=True: text)
    html = Report([view(make_hostile_run(tmp_path))]).to_html()
    if not has_policy:
        html = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", html)
    path = tmp_path / "r.html"
    path.write_bytes(html.encode("utf-8", "replace"))
    browser.open(path)
    assert browser.run("window.broken === 1") is not has_policy
    assert len(browser.requests) > 1 or browser.errors


def test_unescaped_data_is_found(browser, tmp_path, monkeypatch):
    """Negative control: a name that ends the element of the data."""
    monkeypatch.setattr(page, "_embed", json.dumps)
    path = tmp_path / "r.html"
    path.write_text(Report([view(make_hostile_run(tmp_path))]).to_html())
    browser.open(path)
    assert browser.errors, "the policy refuses the script"


def test_commands_of_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    for name in "ab":
        folder(Path("runs") / name, make_history(random.Random(1), 30, 1))
    commands = read_blocks("docs/report.md")["commands"].splitlines()
    assert len(commands) > 3
    for command in commands:
        words = command.partition("#")[0].split()
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code in (0, None), capsys.readouterr()
    assert {path.name for path in Path().iterdir()} >= {"report.html", "figures", "a.json"}
    assert Path("runs/a/report.html").is_file()
