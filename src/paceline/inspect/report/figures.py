"""The figures of a report: which values of the records they show. SVG files and page share them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.inspect.report.run_record import Record

MAX_METRICS = 24  # drawn; the values of all metrics are in the summary
MAX_MACHINE_FIGURES = 24
USUALLY_ZERO = ("swap used", "disk read", "disk write", "network in", "network out")
TITLES = {
    "loss": ("Loss", ""),
    "grad_norm": ("Gradient norm", ""),
    "lr": ("Learning rate", ""),
    "samples_per_s": ("Throughput", "samples/s"),
    "step_s": ("Step time", "s"),
    "data_s": ("Waiting for data", "s"),
}
AXIS_TITLES = {
    "step": ("step", ""),
    "samples": ("samples", ""),
    "time": ("training time", "s"),
    "energy": ("energy", "J"),
}


@dataclass(frozen=True)
class Line:
    """A line of a figure, with the band between its extremes.

    colour: its number, which is the same for a run in all figures."""

    label: str
    colour: int
    x: Sequence[float]
    mean: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]


@dataclass(frozen=True)
class Figure:
    """A figure of lines over a common axis.

    name: for the name of its file. kind: "curves", "metrics" or "machine", the part of the record."""

    name: str
    kind: str
    title: str
    unit: str
    axis: str
    axis_unit: str
    lines: tuple[Line, ...]


def list_curve_figures(records: Sequence[Record], axis: str = "step") -> list[Figure]:
    """Return a figure for each quantity of the steps and each metric. A run without the axis has no line."""
    found = []
    for kind, axes_key in (("curves", "axes"), ("metrics", "evaluation_axes")):
        names = list(dict.fromkeys(name for record in records for name in record[kind]))
        for name in names if kind == "curves" else names[:MAX_METRICS]:
            lines = tuple(
                Line(record["label"], at, record[axes_key][axis], **record[kind][name])
                for at, record in enumerate(records)
                if name in record[kind] and axis in record[axes_key]
            )
            if any(value is not None for line in lines for value in line.mean):
                title, unit = TITLES.get(name, (name, "")) if kind == "curves" else (name, "")
                title = f"Evaluation: {title}" if kind == "metrics" else title
                found.append(Figure(f"{kind}-{name}", kind, title, unit, *AXIS_TITLES[axis], lines))
    return found


@dataclass(frozen=True)
class BarFigure:
    """Stacked bars: the parts of each row."""

    name: str
    title: str
    unit: str
    rows: Mapping[str, Mapping[str, float]]


def list_bar_figures(records: Sequence[Record]) -> list[BarFigure]:
    """Return the measured and predicted time of a step and peak memory, by part. Empty without a profile."""
    profiled = [record for record in records if record["breakdown"] is not None]
    figures = []
    for name, title, key, total, unit in (
        ("time", "Time of a step", "time_s", "step", "s"),
        ("memory", "Peak memory of a rank", "memory_bytes", "peak", "B"),
    ):
        rows: dict[str, dict[str, float]] = {}
        for record in profiled:
            parts = {part: values for part, values in record["breakdown"][key].items() if part != total}
            for kind in ("measured", "predicted"):
                label = kind if len(profiled) == 1 else f"{record['label']} {kind}"
                row = {part: values[kind] for part, values in parts.items() if values[kind]}
                rows |= {label: row} if row else {}
        if rows:
            figures.append(BarFigure(name, title, unit, rows))
    return figures


@dataclass(frozen=True)
class _SampledColumn:
    """A column of samples of a node: what its line is called, and its values."""

    label: str
    node: Record
    column: Record

    @property
    def is_zero(self) -> bool:
        return not any(self.column["low"]) and not any(self.column["high"])


def list_machine_figures(records: Sequence[Record]) -> list[Figure]:
    """Return a figure for each kind of samples, with a line for each node, rank or GPU."""
    figures = []
    zero = list_zero_samples(records)
    for kind, members in _group_samples(records).items():
        lines = tuple(
            Line(one.label, at, one.node["time_s"], *(one.column[key] for key in ("mean", "low", "high")))
            for at, one in enumerate(members)
        )
        if kind in zero or not any(value is not None for line in lines for value in line.mean):
            continue
        title = " ".join({"cpu": "CPU", "gpu": "GPU"}.get(word, word) for word in kind.split())
        title = title[:1].upper() + title[1:]
        unit = members[0].column["unit"]
        figures.append(Figure(f"machine-{kind}", "machine", title, unit, "time", "s", lines))
    return figures[:MAX_MACHINE_FIGURES]


def list_zero_samples(records: Sequence[Record]) -> list[str]:
    """Return the kinds of samples that have no figure, because they are usually 0 and are 0 everywhere."""
    groups = _group_samples(records)
    return [kind for kind in USUALLY_ZERO if kind in groups and all(one.is_zero for one in groups[kind])]


def _group_samples(records: Sequence[Record]) -> dict[str, list[_SampledColumn]]:
    groups: dict[str, list[_SampledColumn]] = {}
    for record in records:
        for node in record["machine"]:
            for name, column in node["columns"].items():
                what, number, rest = _split(name)
                run = record["label"] if len(records) > 1 else ""
                host = node["node"] if len(record["machine"]) > 1 else ""
                label = " ".join(filter(None, (run, host, f"{what}{number}" if number else "")))
                kind = f"{what} {rest}".strip() if number else name
                groups.setdefault(kind, []).append(_SampledColumn(label or node["node"], node, column))
    return groups


def _split(name: str) -> tuple[str, str, str]:
    """Return the parts of a name: "gpu0 power" -> ("gpu", "0", "power"); "cpu" -> ("cpu", "", "")."""
    first, _, rest = name.partition(" ")
    what = first.rstrip("0123456789")
    return (what, first[len(what) :], rest) if what in ("rank", "gpu") else (name, "", "")
