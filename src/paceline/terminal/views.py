"""The views of a run, each as lines of text for a screen of a given size."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from paceline.terminal.curves import MIN_HEIGHT, MIN_WIDTH, build_grid
from paceline.terminal.machines import build_figures, build_nodes, build_ranks
from paceline.terminal.reader import Snapshot
from paceline.terminal.sections import build_findings, build_log, build_parts, build_problems
from paceline.terminal.text import Lines, beside, plain, title, wrap

WIDE = 150  # columns from which sections stand beside each other


@dataclass(frozen=True)
class Look:
    """What the user chose. rank: whose line is emphasized. node: number of the node."""

    is_log: bool = False
    rank: int = 0
    node: int = 0


def build_overview(snapshot: Snapshot, look: Look, width: int, height: int) -> Lines:
    """Return the curves of loss and metrics, and the most important lines of the other views."""
    panels, tables = snapshot.panels, snapshot.tables
    names = panels.get("curves", {}).get("names", [])
    metrics = [name for name in names if name.startswith("metric:")]
    steps = [name for name in names if not name.startswith("metric:")]
    order = [*steps[:1], *metrics[:1], *steps[1:2], *metrics[1:], *steps[2:]]
    columns = max(1, (width + 2) // (MIN_WIDTH + 2))
    plot_rows = 1 if height < 34 else 2
    plot_height = max(MIN_HEIGHT + 2, height * (4 if plot_rows == 1 else 5) // 10)
    chosen = {**panels, "curves": {**panels["curves"], "names": order}} if "curves" in panels else panels
    lines = build_grid(chosen, tables, width, plot_height, look.is_log, columns * plot_rows)
    room = max(8, height - len(lines))
    if width >= WIDE:
        half = (width - 3) // 2
        left = _stack(_build_left(snapshot, look, half, room - 2), half)
        right = _stack([("Log", build_log(tables.get("log", {}), half, max(3, room - 1)))], half)
        return lines + beside([left, right], [half, half], 3)
    sections = _build_left(snapshot, look, width, room - 4)
    used = sum(len(section) + 1 for _, section in sections)
    left_over = max(2, room - used - 1)
    return lines + _stack([*sections, ("Log", build_log(tables.get("log", {}), width, left_over))], width)


def _build_left(snapshot: Snapshot, look: Look, width: int, room: int) -> list[tuple[str, Lines]]:
    """Return findings, ranks and nodes in at most about `room` lines."""
    each = max(1, (room - 3) // 3)
    problems = build_problems(snapshot.panels, width)[: max(1, each)]
    findings = build_findings(snapshot.panels, width, max(2, each)) + problems
    ranks = build_ranks(snapshot.ranks, width, None, max(3, each))
    nodes = build_nodes(snapshot.nodes, look.node, width, max(1, each - 1))
    return [("Findings", findings), ("Ranks", ranks), ("Machine", nodes)]


def _stack(sections: list[tuple[str, Lines]], width: int) -> Lines:
    return [line for name, section in sections for line in (title(name, width), *section)]


def build_curves(snapshot: Snapshot, look: Look, width: int, height: int) -> Lines:
    """Return all curves that the page would show too."""
    curves = snapshot.panels.get("curves", {})
    text = snapshot.request.selection.filter
    count, shown = curves.get("count", 0), len(curves.get("names", []))
    note = f"{shown} of {count} curves over {curves.get('axis', 'step')}"
    note += f', with "{text}" in their names' if text else ""
    note += "; press / to find others by name" if shown < count and not text else ""
    grid = build_grid(snapshot.panels, snapshot.tables, width, height - 1, look.is_log)
    return [title("Curves", width, note), *grid]


def build_rank_view(snapshot: Snapshot, look: Look, width: int, height: int) -> Lines:
    """Return a line for each rank, or the output of one rank."""
    if snapshot.request.rank is not None:
        output = snapshot.output.rstrip("\n").split("\n")
        lines = [piece for line in output for piece in wrap(line, width)]
        return [title(f"Output of rank {snapshot.request.rank}", width, "escape: all ranks"), *plain(lines)]
    note = "mean time of each phase of the recent steps"
    return [title("Ranks", width, note), *build_ranks(snapshot.ranks, width, look.rank)]


def build_machine_view(snapshot: Snapshot, look: Look, width: int, height: int) -> Lines:
    """Return the last values of all nodes, and the samples of one of them."""
    lines = [title("Nodes", width, "last sample"), *build_nodes(snapshot.nodes, look.node, width), Text()]
    return lines + build_figures(snapshot.panels, snapshot.tables, width)


def build_step_view(snapshot: Snapshot, look: Look, width: int, height: int) -> Lines:
    """Return the parts of a step and of memory."""
    return build_parts(snapshot.panels, width) if "parts" in snapshot.panels else []


def build_findings_view(snapshot: Snapshot, look: Look, width: int, height: int) -> Lines:
    findings = build_findings(snapshot.panels, width)
    return [title("Findings", width, "most costly first"), *findings, *build_problems(snapshot.panels, width)]


def build_log_view(snapshot: Snapshot, look: Look, width: int, height: int) -> Lines:
    return [title("Log", width), *build_log(snapshot.tables.get("log", {}), width)]


View = Callable[[Snapshot, Look, int, int], Lines]
# By key: name and contents.
VIEWS: dict[str, tuple[str, View]] = {
    "1": ("Overview", build_overview),
    "2": ("Curves", build_curves),
    "3": ("Ranks", build_rank_view),
    "4": ("Machine", build_machine_view),
    "5": ("Step", build_step_view),
    "6": ("Findings", build_findings_view),
    "7": ("Log", build_log_view),
}
