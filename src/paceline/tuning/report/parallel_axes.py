"""Parallel coordinates: an axis for each parameter and objective, a line for each complete trial."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from paceline.tuning.definition import StudyDefinition
from paceline.tuning.journal import StudyState, Trial
from paceline.tuning.parameter import Parameter
from paceline.tuning.report.results import find_front, format_value, read_result

WIDTH, HEIGHT, TOP, BOTTOM, SIDE = 760, 260, 28, 18, 60


def draw_parallel_axes(definition: StudyDefinition, state: StudyState) -> str:
    """Return the complete trials as an SVG element; those of the Pareto front are emphasized."""
    objectives = definition.objectives
    trials = [trial for trial in state.trials.values() if read_result(objectives, trial) is not None]
    if not trials:
        return ""
    names = [parameter.name for parameter in definition.space.parameters]
    titles = [*names, *(goal.name for goal in objectives)]
    columns = [_place_parameter(parameter, trials) for parameter in definition.space.parameters]
    columns += [_place_numbers([trial.metrics[goal.name] for trial in trials]) for goal in objectives]
    ends = [(parameter.extremes()[0], parameter.extremes()[-1]) for parameter in definition.space.parameters]
    for goal in objectives:
        values = [value for trial in trials if (value := trial.metrics[goal.name]) is not None]
        ends.append((min(values), max(values)))
    front = {trial.number for trial in find_front(objectives, state)}
    parts = [
        f'<svg class="figure" viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" role="img" '
        'aria-label="parallel coordinates of the trials">'
    ]
    at = [SIDE + (WIDTH - 2 * SIDE) * index / max(1, len(titles) - 1) for index in range(len(titles))]
    for index in sorted(range(len(trials)), key=lambda index: trials[index].number in front):
        points = [
            f"{x:.1f},{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share:.1f}"
            for x, column in zip(at, columns, strict=True)
            if (share := column[index]) is not None
        ]
        emphasis = "line s1" if trials[index].number in front else "line raw s0"
        label = escape(f"trial {trials[index].number}")
        parts.append(
            f'<polyline class="{emphasis}" points="{" ".join(points)}"><title>{label}</title></polyline>'
        )
    for x, title, (low, high) in zip(at, titles, ends, strict=True):
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        for y, text in ((11, title), (TOP - 4, format_value(high)), (HEIGHT - 4, format_value(low))):
            short = text if len(text) <= 16 else text[:15] + "…"
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{y}" text-anchor="middle">{escape(short)}</text>'
            )
    parts.append("</svg>")
    return "\n".join(parts)


def _place_parameter(parameter: Parameter, trials: Sequence[Trial]) -> list[float | None]:
    """Return the position of each trial on the axis of a parameter, from 0 to 1."""
    return [
        _share_of(parameter, trial.values[parameter.name]) if parameter.name in trial.values else None
        for trial in trials
    ]


def _share_of(parameter: Parameter, value: Any) -> float | None:
    if not parameter.contains(value):
        return None
    if parameter.kind == "choice":
        return parameter.choices.index(value) / max(1, len(parameter.choices) - 1)
    low, high, here = parameter.low, parameter.high, float(value)
    if parameter.is_log:
        low, high, here = math.log(low), math.log(high), math.log(here)
    return (here - low) / (high - low) if high > low else 0.5


def _place_numbers(values: Sequence[float | None]) -> list[float | None]:
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    return [
        None if value is None else (value - low) / (high - low) if high > low else 0.5 for value in values
    ]
