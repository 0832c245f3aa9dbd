"""The answer to /metrics: values of all recent runs for Prometheus, in bounded number."""

import threading
import time
from collections import Counter

from paceline.errors import Error
from paceline.version import __version__
from paceline.web.metrics.exposition import MetricFamily, render
from paceline.web.metrics.nodes import NodeFiles, add_nodes, describe_families
from paceline.web.metrics.runs import FAMILIES as RUN_FAMILIES
from paceline.web.metrics.runs import STATES, EventTotals, MetricSink, add_run, label
from paceline.web.runs import ListedRun, RunList

MAX_RUNS = 100  # with values of their own
MAX_VALUES = 50_000  # of all runs
RECENT_S = 86_400.0  # runs that do not train have values for this long after their last event
OMITTED = ("runs", "named losses", "metrics", "nodes", "samples")
FAMILIES = {
    "build": ("info", "", "The version of Paceline."),
    "runs": ("gauge", "", "Number of runs in the folder, by state."),
    "omitted_values": ("gauge", "", "What this answer leaves out, by kind."),
    "unreadable_runs": ("gauge", "", "Runs whose files cannot be read."),
    **RUN_FAMILIES,
    **describe_families(),
}


class MetricsCollector:
    """Collects the metrics of the runs in a folder. Methods may be called by several threads."""

    def __init__(self, runs: RunList):
        self._runs = runs
        self._totals: dict[str, EventTotals] = {}  # by identifier of the run
        self._nodes: dict[str, NodeFiles] = {}
        self._lock = threading.Lock()

    def collect(self, is_open: bool) -> str:
        """Return the metrics as text. is_open: in the format of OpenMetrics, else in that of Prometheus."""
        with self._lock:
            families = {
                name: MetricFamily(name, type_, text, unit) for name, (type_, unit, text) in FAMILIES.items()
            }
            families["build"].add(1, (("version", __version__),))
            listed = self._runs.listed()
            counts = Counter(run.row["state"] for run in listed)
            for state in STATES:
                families["runs"].add(counts[state], (("state", state),))
            omitted, unreadable = self._add_runs(families, listed)
            for kind in OMITTED:
                families["omitted_values"].add(omitted[kind], (("kind", kind),))
            families["unreadable_runs"].add(unreadable)
            return render(families.values(), is_open)

    def _add_runs(
        self, families: dict[str, MetricFamily], listed: list[ListedRun]
    ) -> tuple[Counter[str], int]:
        """Add the values of the recent runs. Return what was left out, and the number of unreadable runs."""
        recent = _choose(listed, time.time()) if not self._runs.is_single else listed
        sink, unreadable = MetricSink(families, MAX_VALUES), 0
        sink.omitted["runs"] = max(0, len(recent) - MAX_RUNS)
        shown = {run.id: run for run in recent[:MAX_RUNS]}
        self._totals = {
            run_id: self._totals.get(run_id) or EventTotals(run.folder) for run_id, run in shown.items()
        }
        self._nodes = {
            run_id: self._nodes.get(run_id) or NodeFiles(run.folder) for run_id, run in shown.items()
        }
        for run_id, run in shown.items():
            try:
                if run.summary is None:
                    raise Error(run.row["problem"])
                self._totals[run_id].refresh()
                add_run(sink, _name(run), run.row["state"], run.summary, self._totals[run_id])
            except Error:
                unreadable += 1
        for run_id, run in shown.items():
            if run.row["state"] == "running":
                add_nodes(sink, _name(run), self._nodes[run_id].refresh())
                sink.omitted["nodes"] += self._nodes[run_id].count_omitted()
        return sink.omitted, unreadable


def _choose(listed: list[ListedRun], now: float) -> list[ListedRun]:
    return [run for run in listed if run.row["state"] == "running" or now - run.modified < RECENT_S]


def _name(run: ListedRun) -> tuple[tuple[str, str]]:
    return (("run", label(run.row["name"])),)
