"""/metrics of `paceline watch`, read by the parser of prometheus-client."""

import contextlib
import json
import os
import re
import signal
import stat
import time
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_old

from command import paceline
from metric_runs import PARTS, make_lines, step, write_run
from paceline.monitor.last_sample import LastSample
from paceline.web.metrics.collector import MetricsCollector
from paceline.web.metrics.exposition import MetricFamily, render
from paceline.web.runs import RunList
from run_lines import folder, started
from watching import watch, why_not_built

built = pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))
EVIL = 'a"b\\c{}\n# EOF'


def read(text: str, parse=parse_open) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return the values by name and sorted labels."""
    values = {}
    for family in parse(text):
        for sample in family.samples:
            key = (sample.name.removeprefix("paceline_"), tuple(sorted(sample.labels.items())))
            assert key not in values
            values[key] = sample.value
    return values


def collect(path: Path, is_open: bool = True) -> str:
    return MetricsCollector(RunList(path)).collect(is_open)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "runs").mkdir()
    run = write_run(tmp_path / "runs/a")
    with contextlib.closing(run.lock()):
        yield run


def test_values_are_those_of_the_files(run):
    values = read(collect(run.path.parent))

    def value(name: str, **labels: str) -> float | None:
        return values.get((name, tuple(sorted({"run": "a", **labels}.items()))))

    assert value("run_info", task="my.py:T", plan="ddp", device="cpu", precision="fp32") == 1
    states = {
        dict(labels)["paceline_run_state"]: on for (name, labels), on in values.items() if name == "run_state"
    }
    assert {state for state, on in states.items() if on} == {"running"}
    assert len(states) == 7
    expected = {
        "step": 51, "target_step": 100, "ranks": 2, "samples": 8 * 51, "loss": 0.375, "gradient_norm": 2.0,
        "learning_rate": 0.01, "step_seconds": 0.125, "data_seconds": 0.0625, "samples_per_second": 64.0,
        "remaining_seconds": 49 * 0.125, "starts_total": 2, "saves_total": 2, "saved_bytes_total": 1500,
        "save_blocked_seconds_total": 0.75, "evaluations_total": 1, "evaluation_seconds_total": 1.5,
        "stalls_total": 1, "model_flops_utilization_ratio": 0.08,
    }  # fmt: skip
    assert {name: value(f"run_{name}") for name in expected} == expected
    assert value("run_metric", metric="accuracy") == 0.75
    assert value("run_named_loss", loss="policy") == 3.0
    assert value("run_failures_total", what="rank") == 1
    for part, seconds in PARTS.items():
        assert value("run_step_part_seconds", part=part) == seconds
        assert value("run_predicted_step_part_seconds", part=part) == seconds
    assert value("run_memory_part_bytes", part="weights") == 1000
    node = {"node": "node1"}
    assert value("node_cpu_ratio", **node) == 0.25
    assert value("node_memory_used_bytes", **node) == 3 * 2**20
    assert value("node_network_in_bytes_per_second", **node) == 5e6
    assert value("rank_cpu_ratio", **node, rank="0") == 1.5
    gpu = node | {"gpu": "0"}
    assert value("gpu_utilization_ratio", **gpu) == 0.75
    assert value("gpu_energy_joules_total", **gpu) == 1234.5
    assert value("gpu_clock_sm_hertz", **gpu) == 1.41e9
    assert value("gpu_temperature_celsius", **gpu) == 61
    assert value("gpu_ecc_corrected_errors_total", **gpu) == 2
    assert value("gpu_processes", **gpu) == 1
    assert value("gpu_throttled", **gpu, reason="power cap") == 1
    assert value("gpu_throttled", **gpu, reason="power brake") == 0
    assert not [name for name, _ in values if "cpu0" in name]
    assert abs(value("run_last_event_timestamp_seconds") - time.time()) < 3600


def test_both_formats_have_the_same_values(run):
    runs = RunList(run.path.parent)
    new, old = (MetricsCollector(runs).collect(is_open) for is_open in (True, False))
    assert read(new) == read(old, parse_old)
    assert new.endswith("# EOF\n")
    assert "# EOF" not in old
    assert "# UNIT" not in old


def test_names_follow_the_rules(run):
    """Units are base units and end the name; counters end in _total; each family has a help."""
    families = [*parse_open(collect(run.path.parent))]
    for family in families:
        assert family.documentation.endswith("."), family.name
        assert re.fullmatch(r"paceline_[a-z][a-z0-9_]*", family.name)
        if family.unit:
            assert family.name.endswith("_" + family.unit)
        names = {sample.name for sample in family.samples}
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        assert names == {family.name + ending}
    units = {family.unit for family in families}
    assert units == {
        "", "seconds", "bytes", "ratio", "watts", "joules", "hertz", "celsius", "errors", "bytes_per_second",
    }  # fmt: skip


def test_any_text_is_a_label(tmp_path):
    lines = make_lines()
    lines[0]["task"] = EVIL
    lines += [started(51, 1.7e9) | {"task": EVIL}, step(52, losses={EVIL: 1.0, "ü": 2.0})]
    write_run(tmp_path / EVIL.replace("/", "∕"), lines)
    values = read(collect(tmp_path))
    assert values[("run_named_loss", (("loss", EVIL), ("run", EVIL)))] == 1.0
    assert values[("run_named_loss", (("loss", "ü"), ("run", EVIL)))] == 2.0


def test_formats_escape_all_special_characters():
    family = MetricFamily("x", "gauge", "Back\\slash\nline.")
    family.add(1.0, (("label", EVIL),))
    for is_open, parse in ((True, parse_open), (False, parse_old)):
        [found] = parse(render([family], is_open))
        assert found.documentation == "Back\\slash\nline."
        assert found.samples[0].labels == {"label": EVIL}


def test_many_metrics_are_left_out_and_counted(tmp_path):
    """10,000 metrics and losses, 150 runs, 70 nodes and 2 runs of the same name in labels."""
    many = {f"m{number}": 0.5 for number in range(10_000)}
    lines = [*make_lines(), step(52, losses=many)]
    lines.insert(-1, {"time": time.time(), "event": "evaluated", "step": 51, "metrics": many, "seconds": 1.0})
    run = write_run(tmp_path / "first", lines)
    for number in range(70):
        (run.monitor / f"n{number}.csv").write_text(f"time [s],cpu [%]\n{time.time()},5\n")
    for number in range(150):
        folder(tmp_path / f"run{number}", [started(0, 1.7e9)])
    for name in ("bell\a", "bell\b"):
        folder(tmp_path / name, [started(0, 1.7e9)])
    with contextlib.closing(run.lock()):
        text = collect(tmp_path)
    assert len(text) < 200_000
    values = read(text)
    left_out = {
        dict(labels)["kind"]: value for (name, labels), value in values.items() if name == "omitted_values"
    }
    assert left_out["named losses"] == 10_000 - 32
    assert left_out["metrics"] == 10_000 - 64
    assert left_out["nodes"] == 71 - 64
    assert left_out["runs"] >= 153 - 100
    assert sum(name == "run_metric" for name, _ in values) == 64
    assert values[("runs", (("state", "interrupted"),))] == 152


def test_damaged_run_does_not_spoil_the_others(run, tmp_path):
    bad = folder(run.path.parent / "bad", [started(0, 1.7e9)])
    bad.events.unlink()
    os.mkfifo(bad.events)
    values = read(collect(run.path.parent))
    assert values[("unreadable_runs", ())] == 1
    assert values[("run_step", (("run", "a"),))] == 51


def test_counts_grow_with_the_files(run):
    collector = MetricsCollector(RunList(run.path.parent))
    key = ("run_saves_total", (("run", "a"),))
    assert read(collector.collect(True))[key] == 2
    saved = {
        "time": 1.8e9,
        "event": "saved",
        "step": 51,
        "path": "p",
        "bytes": 1,
        "seconds": 1.0,
        "blocked_s": 0.0,
    }
    with run.events.open("a") as file:
        file.write(json.dumps(saved) + "\n")
    assert read(collector.collect(True))[key] == 3
    run.events.write_text("".join(json.dumps(line) + "\n" for line in make_lines()[:2]))
    assert read(collector.collect(True))[key] == 0


def test_old_runs_and_old_samples_have_no_values(tmp_path):
    """A run of last week is counted only, and a node without samples for 5 minutes has no values."""
    old, live = write_run(tmp_path / "old"), write_run(tmp_path / "live")
    week_ago = time.time() - 7 * 86400
    for path in (old.events, old.spec, live.monitor / "node1.csv"):
        os.utime(path, (week_ago, week_ago))
    with contextlib.closing(live.lock()):
        values = read(collect(tmp_path))
    assert {dict(labels).get("run") for name, labels in values} == {"live", None}
    assert not [name for name, _ in values if name.startswith("node")]
    assert values[("runs", (("state", "interrupted"),))] == 1
    assert read(collect(old.path))[("run_step", (("run", "old"),))] == 51  # it was asked for


def test_last_sample_of_a_long_file(tmp_path):
    """It is found without reading all rows, also after a second start with other columns."""
    path = tmp_path / "n.csv"
    rows = "".join(f"{at},1,2\n" for at in range(100_000))
    first = "# paceline samples 1\n# node: one\ntime [s],cpu [%],load [processes]\n"
    path.write_text(first + rows)
    last = LastSample(path)
    last.refresh()
    assert (last.node, last.time, last.values) == ("one", 99_999, {"cpu": 1.0, "load": 2.0})
    with path.open("a") as file:
        file.write("# paceline samples 1\n# node: two\ntime [s],load [processes],cpu [%]\n100000,7,")
    last.refresh()
    assert last.values == {"cpu": 1.0, "load": 2.0}  # the line is not whole
    with path.open("a") as file:
        file.write("8\n")
    for sample in (last, LastSample(path)):
        sample.refresh()
        assert (sample.node, sample.time, sample.values) == ("two", 100_000, {"cpu": 8.0, "load": 7.0})
    with path.open("a") as file:
        file.write("".join(f"{at},1,\n" for at in range(100_001, 120_000)))
    sample = LastSample(path)
    sample.refresh()
    assert (sample.node, sample.time, sample.values) == ("two", 119_999, {"load": 1.0})
    path.write_text(first + "5,3,4\n")
    for _ in range(2):
        last.refresh()
    assert (last.node, last.time, last.values) == ("one", 5, {"cpu": 3.0, "load": 4.0})


@built
def test_metrics_need_the_token(run, tmp_path):
    token_file = tmp_path / "token"
    with watch("runs", "--metrics", "--token-file", token_file, at=tmp_path) as server:
        token = token_file.read_text().strip()
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert token != server.token
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        for given in (token, server.token):
            answer = server.ask("/metrics", cookie=None, Authorization=f"Bearer {given}", Accept=accept)
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
            assert read(answer.text)[("run_step", (("run", "a"),))] == 51
        answer = server.ask(f"/metrics?token={token}", cookie=None)
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "content-security-policy" in answer.headers
        for target, headers in (
            ("/metrics", {}),
            ("/metrics", {"Authorization": "Bearer wrong"}),
            ("/metrics", {"Authorization": f"Basic {token}"}),
            ("/metrics", {"Authorization": "Bearer "}),
            ("/metrics", {"Authorization": "Bearer \0"}),
            ("/metrics?token=", {}),
        ):
            answer = server.ask(target, cookie=server.cookie, **headers)
            assert answer.status in (400, 401)
            assert "my.py" not in answer.text
        bearer = {"Authorization": f"Bearer {token}"}
        assert server.ask("/metrics", Host="evil.example", **bearer).status == 403
        assert server.ask("/metrics", method="POST", **bearer).status == 405
        assert server.ask("/metrics", Sec_Fetch_Site="cross-site", **bearer).status == 403
        # The token of /metrics opens nothing else.
        assert server.ask(f"/?token={token}", cookie=None).status == 403
        assert server.ask("", cookie=None, **bearer).status == 403
    with watch("runs", at=tmp_path) as server:
        assert server.ask("/metrics", cookie=None, Authorization=f"Bearer {server.token}").status == 403


@built
def test_textfile_is_written_while_watching(run, tmp_path):
    path = tmp_path / "paceline.prom"
    with watch("runs", "--textfile", path, at=tmp_path) as server:
        server.output.wait_until(path.exists, "textfile")
        assert read(path.read_text(), parse_old)[("run_step", (("run", "a"),))] == 51
        assert [child.name for child in tmp_path.iterdir() if child.suffix == ".prom"] == ["paceline.prom"]
        server.output.process.send_signal(signal.SIGTERM)
        server.output.wait()
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--textfile", "out.txt"], "node_exporter only reads files that end in .prom, got out.txt"),
        (["--textfile", "no/out.prom"], "cannot write no/out.prom: no such folder: no"),
        (["--textfile", "link.prom"], "it is a link"),
        (["--token-file", "token"], "--token-file requires --metrics"),
        (["--metrics", "--token-file", "open"], "other users can read or write open: run chmod o=,g-w open"),
        (["--metrics", "--token-file", "short"], "short has no token of 16 to 200 letters"),
        (["--metrics", "--token-file", "no/token"], "cannot write no/token: no such folder: no"),
        (["--metrics", "--token-file", "link"], "cannot write link: it is a link"),
    ],
)
@built
def test_bad_options_are_one_sentence(tmp_path, words, message):
    (tmp_path / "runs").mkdir()
    (tmp_path / "link.prom").symlink_to("elsewhere.prom")
    (tmp_path / "link").symlink_to("nowhere/token")
    for name, mode, text in (("open", 0o644, "x" * 30), ("short", 0o600, "abc")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    result = paceline("watch", *words, at=tmp_path)
    assert result.status == 2
    assert message in " ".join(result.err.split())
    assert "Traceback" not in result.all
