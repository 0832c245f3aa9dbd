"""A real Prometheus scrapes `paceline watch`, and answers the queries of the Grafana dashboard."""

import contextlib
import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from command import paceline
from metric_runs import SAMPLES, step, write_run
from paceline.web.metrics.collector import MetricsCollector
from paceline.web.runs import RunList
from pages import read_blocks
from watching import watch, why_not_built

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built())),
]


def ask(address: str, path: str, **query: str) -> dict:
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)["data"]


@contextlib.contextmanager
def run_prometheus(at: Path, scrape_configs: str) -> Iterator[str]:
    """Yield the address of a Prometheus with this configuration."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (at / "prometheus.yml").write_text("global: {scrape_interval: 250ms}\n" + scrape_configs)
    options = {
        "config.file": at / "prometheus.yml",
        "storage.tsdb.path": at / "data",
        "web.listen-address": address,
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (
        (at / "prometheus.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError):
                    ask(address, "targets")
                    break
                assert process.poll() is None, (at / "prometheus.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield address
        finally:
            process.terminate()


def wait_for(address: str, query: str, count: int = 1) -> list[dict]:
    """Return the answer to a query when it has that many values."""
    deadline = time.monotonic() + 60
    while len(found := ask(address, "query", query=query)["result"]) < count:
        assert time.monotonic() < deadline, (query, ask(address, "targets"))
        time.sleep(0.2)
    return found


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory):
    at = tmp_path_factory.mktemp("prometheus")
    (at / "runs").mkdir()
    run = write_run(at / "runs/a")
    blocks = read_blocks("docs/watch.md")
    command = blocks["metrics"].replace("--port 9477 ", "").split()[2:]  # a free port
    with contextlib.closing(run.lock()), watch(*command, at=at) as server:
        token = at / "metrics-token"
        good = blocks["prometheus.yml"].replace("127.0.0.1:9477", server.host).replace("15s", "250ms")
        good = good.replace("job_name: paceline", "job_name: good").replace(
            "/home/me/metrics-token", str(token)
        )
        job = "  - job_name: {}\n    static_configs: [{{targets: ['" + server.host + "']}}]\n"
        jobs = job.format("old") + f"    bearer_token_file: {token}\n"
        jobs += job.format("bad") + "    authorization: {credentials: wrong}\n"
        with run_prometheus(at, good + jobs) as address:
            wait_for(address, 'count_over_time(up{job="good"}[1h]) > 1')
            with run.events.open("a") as file:
                file.write(json.dumps(step(60, loss=0.125)) + "\n")
            wait_for(address, 'paceline_run_step{job="good"} == 60')
            yield address


def test_scrape_with_the_token_succeeds(prometheus):
    """Negative control: without it, the target is down and has no values."""
    up = {row["metric"]["job"]: row["value"][1] for row in wait_for(prometheus, "up", 3)}
    assert up == {"good": "1", "old": "1", "bad": "0"}
    errors = {
        target["labels"]["job"]: target["lastError"] for target in ask(prometheus, "targets")["activeTargets"]
    }
    assert errors["good"] == errors["old"] == ""
    assert "401" in errors["bad"]
    assert ask(prometheus, "query", query='paceline_run_step{job="bad"}')["result"] == []
    assert len(wait_for(prometheus, "paceline_run_step == 60", 2)) == 2


def test_prometheus_knows_types_units_and_help(prometheus):
    known = ask(prometheus, "metadata")
    for name, type_, unit in (
        ("paceline_run_state", "stateset", ""),
        ("paceline_run", "info", ""),
        ("paceline_run_saved_bytes", "counter", "bytes"),
        ("paceline_gpu_power_watts", "gauge", "watts"),
    ):
        assert {(row["type"], row["unit"]) for row in known[name]} == {(type_, unit)}
        assert all(row["help"] for row in known[name])


def test_each_query_of_the_dashboard_has_data(prometheus, tmp_path):
    dashboard = json.loads(paceline("watch", "--grafana", at=tmp_path).out)
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [row["expr"].removesuffix(" > 0") for row in dashboard["annotations"]["list"]]
    assert len(queries) > 40
    empty = []
    for query in queries:
        for name, value in (("$run", "a"), ("$node", "node1"), ("$__rate_interval", "1m")):
            query = query.replace(name, value)
        assert "$" not in query
        if not ask(prometheus, "query", query=query)["result"]:
            empty.append(query)
    assert empty == []
    assert ask(prometheus, "query", query="paceline_run_no_such_metric")["result"] == []  # negative control


def test_variables_of_the_dashboard_have_values(prometheus, tmp_path):
    dashboard = json.loads(paceline("watch", "--grafana", at=tmp_path).out)
    source, *variables = dashboard["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    for variable, expected in zip(variables, ("a", "node1"), strict=True):
        series, name = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
        rows = ask(prometheus, "query", query=series.replace("$run", "a"))["result"]
        assert {row["metric"][name] for row in rows} == {expected}


def test_commands_of_the_page(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "textfiles").mkdir()
    blocks = read_blocks("docs/watch.md")
    with watch(*blocks["textfile"].split()[2:], at=tmp_path) as server:
        path = tmp_path / "textfiles/paceline.prom"
        server.output.wait_until(path.exists, "textfile")
        assert check(path.read_text()) == (0, "")
    words, _, file = blocks["grafana"].partition(" > ")
    assert file == "paceline-dashboard.json\n"
    assert json.loads(paceline(*words.split()[1:], at=tmp_path).out)["title"] == "Paceline"


def test_dashboard_is_consistent(tmp_path):
    dashboard = json.loads(paceline("watch", "--grafana", at=tmp_path).out)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own


def test_promtool_finds_no_fault(tmp_path):
    run = write_run(tmp_path / "runs")
    with contextlib.closing(run.lock()):
        text = MetricsCollector(RunList(tmp_path / "runs")).collect(False)
    assert text.count("gpu") > len([name for name in SAMPLES if name.startswith("gpu")])
    assert check(text) == (0, "")
    assert check(text + "# TYPE bad_ms counter\nbad_ms 1\n") != (0, "")  # negative control


def check(text: str) -> tuple[int, str]:
    result = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr
