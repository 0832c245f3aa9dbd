"""The page of a study: one HTML file that needs no network, with the figures of `paceline report` for runs.

All texts are escaped.
"""

import time
from collections.abc import Sequence
from html import escape

from paceline.inspect.report.figures import BarFigure, Figure, Line
from paceline.inspect.report.html_head import build_head, read_asset
from paceline.inspect.report.sections import build_table
from paceline.inspect.report.svg import draw_bars, draw_lines
from paceline.tuning.definition import StudyDefinition
from paceline.tuning.folder import StudyFolder
from paceline.tuning.journal import StudyState, Trial
from paceline.tuning.report.optuna_export import compute_importance
from paceline.tuning.report.parallel_axes import draw_parallel_axes
from paceline.tuning.report.predictions import describe_predictions
from paceline.tuning.report.results import count_states, find_front, format_value, order_trials
from paceline.tuning.schedulers.median_rule import EvaluationCurve
from paceline.version import __version__

MAX_CURVES = 64  # of the best trials
MAX_ROWS = 200


def build_study_page(folder: StudyFolder, definition: StudyDefinition, state: StudyState) -> str:
    """Return the HTML of a study: learning curves, parallel coordinates, Pareto front, importance, table."""
    goals = definition.objectives
    ordered = order_trials(goals, state)
    front = ""
    if len(goals) > 1:
        front = f"<p>{escape(goals[1].name)} over {escape(goals[0].name)}</p>\n"
        front += draw_lines(_build_front(definition, state))
    curves = f"<p>{escape(goals[0].name)} over samples</p>\n"
    curves += draw_lines(_build_curves(folder, definition, ordered[:MAX_CURVES]))
    sections = {
        "Learning curves": curves,
        "Parameters and results": draw_parallel_axes(definition, state),
        "Pareto front": front,
        "Importance": _draw_importance(definition, state),
        "Predictions": "\n".join(f"<p>{escape(line)}</p>" for line in describe_predictions(state)),
        "Trials": _build_trials(definition, state, ordered[:MAX_ROWS]),
    }
    body = "\n".join(
        f"<section><h2>{name}</h2>\n{content}</section>" for name, content in sections.items() if content
    )
    title = f"study {folder.path.resolve().name}"
    search = definition.search
    about = f"{', '.join(map(str, goals))}; sampler {search.sampler}, scheduler {search.scheduler}"
    written = time.strftime("written %Y-%m-%d %H:%M:%S UTC by Paceline ", time.gmtime()) + __version__
    head = build_head(f"{title} – Paceline", read_asset("report.css"))
    return f"""{head}
<body>
<header>
<h1>{escape(title)}: {escape(count_states(state))}</h1>
<p>{escape(about)}</p>
<p class="dim">{escape(written)}</p>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _build_curves(folder: StudyFolder, definition: StudyDefinition, trials: Sequence[Trial]) -> Figure:
    """Return the first objective over samples, a line for each trial."""
    goal = definition.objectives[0]
    lines = []
    for trial in trials:
        curve = EvaluationCurve(folder.run(trial.number), goal)
        curve.update()
        values = [goal.as_loss(loss) for _, loss in curve.points]
        samples = [float(at) for at, _ in curve.points]
        lines.append(Line(f"trial {trial.number}", trial.number, samples, values, values, values))
    return Figure("curves", "metrics", goal.name, "", "samples", "", tuple(lines))


def _build_front(definition: StudyDefinition, state: StudyState) -> Figure:
    """Return the first two objectives of all trials: a point each, and a line through the front."""
    first, second = definition.objectives[:2]

    def line(label: str, colour: int, trials: Sequence[Trial]) -> Line:
        pairs = [(trial.metrics[first.name], trial.metrics[second.name]) for trial in trials]
        x = [float(pair[0]) for pair in pairs if pair[0] is not None]
        y = [pair[1] for pair in pairs]
        return Line(label, colour, x, y, y, y)

    complete = [trial for trial in state.trials.values() if trial.state == "complete"]
    points = [line(f"trial {trial.number}", 0, [trial]) for trial in complete]
    front = sorted(
        find_front(definition.objectives, state), key=lambda trial: trial.metrics[first.name] or 0.0
    )
    return Figure(
        "front", "metrics", second.name, "", first.name, "", (*points, line("Pareto front", 1, front))
    )


def _draw_importance(definition: StudyDefinition, state: StudyState) -> str:
    shares = compute_importance(definition, state)
    if not shares:
        return ""
    name = definition.objectives[0].name
    return (
        f"<p>Share of the variance of {escape(name)} that each parameter explains (fANOVA).</p>\n"
        + draw_bars(BarFigure("importance", f"importance for {name}", "", {"share": shares}))
    )


def _build_trials(definition: StudyDefinition, state: StudyState, trials: Sequence[Trial]) -> str:
    names = [parameter.name for parameter in definition.space.parameters]
    front = {trial.number for trial in find_front(definition.objectives, state)}
    head = ["trial", *(goal.name for goal in definition.objectives), *names, "seconds", "ranks", "state"]
    rows = [
        [
            f"{trial.number}{'*' if trial.number in front else ''}",
            *(trial.metrics.get(goal.name) for goal in definition.objectives),
            *(format_value(trial.values.get(name)) for name in names),
            round(trial.seconds, 1),
            trial.ranks,
            f"{trial.state}: {trial.message.splitlines()[0]}" if trial.message else trial.state,
        ]
        for trial in trials
    ]
    return build_table(head, rows)
