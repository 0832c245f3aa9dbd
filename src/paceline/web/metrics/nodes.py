"""Metrics of the machines of runs: the last sample of each node."""

import contextlib
import time
from collections.abc import Iterable

from paceline.errors import RunError
from paceline.monitor.columns import COLUMNS, THROTTLE_REASONS, kind_of, number_of, throttle_reasons
from paceline.monitor.last_sample import LastSample
from paceline.report.machine_samples import MAX_NODES
from paceline.run import RunFolder
from paceline.web.metrics.exposition import Labels
from paceline.web.metrics.runs import MetricSink, label

MAX_AGE_S = 300.0  # of a sample; then it says nothing about the present
# By unit of a column: the unit of the metric, and the factor. OpenMetrics wants base units.
UNITS = {
    "": ("", 1.0),
    "%": ("ratio", 0.01),
    "MiB": ("bytes", 2.0**20),
    "MB/s": ("bytes_per_second", 1e6),
    "MHz": ("hertz", 1e6),
    "W": ("watts", 1.0),
    "J": ("joules", 1.0),
    "C": ("celsius", 1.0),
    "processes": ("", 1.0),
    "errors": ("errors", 1.0),
}
COUNTERS = ("J", "errors")
# Cores are too many for labels; the others belong to commands of `paceline monitor`.
LEFT_OUT = ("time", "cpuN", "step", "step time", "gpuN throttle")
THROTTLED = "gpu_throttled"
OWNERS = ("rank", "gpu")  # what a column may belong to, besides its node


def name_metric(kind: str) -> str:
    """Return the name of the metric of a kind of column: "gpuN memory used" -> "gpu_memory_used_bytes"."""
    owner, _, rest = kind.partition("N ")
    words = f"{owner} {rest}" if rest else f"node {kind}"
    return "_".join(filter(None, [*words.split(), UNITS[COLUMNS[kind].unit][0]]))


def describe_families() -> dict[str, tuple[str, str, str]]:
    """Return the type, unit and help of each metric of a node by its name."""
    families = {}
    for kind, column in COLUMNS.items():
        if kind not in LEFT_OUT:
            unit, factor = UNITS[column.unit]
            text = (
                column.meaning.replace("100 is one core", "1 is one core") if factor != 1 else column.meaning
            )
            type_ = "counter" if column.unit in COUNTERS else "gauge"
            families[name_metric(kind)] = (type_, unit, f"{text[0].upper()}{text[1:]}.")
    return families | {THROTTLED: ("gauge", "", "Whether the clock is lowered for this reason.")}


class NodeFiles:
    """The last sample of each node of a run."""

    def __init__(self, run: RunFolder):
        self.run = run
        self._samples: dict[str, LastSample] = {}  # by file name

    def refresh(self) -> list[LastSample]:
        """Return the samples of the first MAX_NODES nodes that are recent, and read what was appended."""
        recent, now = [], time.time()
        for path in sorted(self.run.monitor.glob("*.csv"))[:MAX_NODES]:
            sample = self._samples.setdefault(path.name, LastSample(path))
            with contextlib.suppress(OSError, RunError):  # the page and `paceline show` name the reason
                if now - path.stat().st_mtime < MAX_AGE_S:
                    sample.refresh()
                    if sample.values:
                        recent.append(sample)
        return recent

    def count_omitted(self) -> int:
        return max(0, len([*self.run.monitor.glob("*.csv")]) - MAX_NODES)


def add_nodes(sink: MetricSink, run: Labels, samples: Iterable[LastSample]) -> None:
    """Add the values of the nodes of a run, each with the labels run and node, and rank or gpu."""
    for sample in samples:
        node = (*run, ("node", label(sample.node)))
        for column, value in sample.values.items():
            kind = kind_of(column)
            numbers = ((owner, number_of(column, owner)) for owner in OWNERS)
            labels = (*node, *((owner, str(number)) for owner, number in numbers if number is not None))
            if kind == "gpuN throttle":
                active = throttle_reasons(value)
                for reason in THROTTLE_REASONS:
                    if reason != "idle":
                        sink.add(THROTTLED, float(reason in active), (*labels, ("reason", reason)), "samples")
            elif kind in COLUMNS and kind not in LEFT_OUT:
                factor = UNITS[COLUMNS[kind].unit][1]
                sink.add(name_metric(kind), value * factor, labels, "samples")
