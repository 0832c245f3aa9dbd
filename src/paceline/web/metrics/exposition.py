"""Metrics as text: the format of OpenMetrics 1.0, and that of Prometheus for older readers.

https://github.com/prometheus/OpenMetrics/blob/main/specification/OpenMetrics.md
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "paceline_"

Labels = tuple[tuple[str, str], ...]


@dataclass
class MetricFamily:
    """Values of one kind, by labels.

    name: without the suffix of the type, ending with its unit. type: gauge, counter, info or stateset."""

    name: str
    type: str
    help: str
    unit: str = ""
    values: dict[Labels, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert not self.unit or self.name.endswith(f"_{self.unit}"), self.name
        assert '"' not in self.help, self.name

    def add(self, value: float | None, labels: Labels = ()) -> bool:
        """Add a value, unless it is unknown. Return False if these labels already have a value."""
        is_counter = self.type == "counter"
        if value is None or (is_counter and not 0 <= value < math.inf):
            return True
        if labels in self.values:
            return False
        self.values[labels] = value
        return True


def render(families: Iterable[MetricFamily], is_open: bool) -> str:
    """Return families as text. Those without values are left out. is_open: in the format of OpenMetrics."""
    lines = [line for family in families if family.values for line in _render_family(family, is_open)]
    return "\n".join([*lines, *(["# EOF"] if is_open else []), ""])


def _render_family(family: MetricFamily, is_open: bool) -> Iterator[str]:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    name = PREFIX + family.name
    # The older format names the samples, and knows fewer types.
    type_ = family.type if is_open or family.type == "counter" else "gauge"
    title = name if is_open else name + suffix
    yield f"# TYPE {title} {type_}"
    if family.unit and is_open:
        yield f"# UNIT {title} {family.unit}"
    yield f"# HELP {title} {_escape(family.help)}"  # without quotes, which only one format escapes
    for labels, value in family.values.items():
        pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels)
        yield f"{name}{suffix}{{{pairs}}} {_format(value)}" if pairs else f"{name}{suffix} {_format(value)}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _format(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
