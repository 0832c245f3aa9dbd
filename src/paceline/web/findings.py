"""The findings of a run as a panel."""

from typing import Any

from paceline.inspect.find import find
from paceline.inspect.read_facts import read_facts
from paceline.inspect.text import to_json
from paceline.run import RunFolder
from paceline.units import without_controls

EVERY_S = 10.0  # between two computations, which read all files of the run


def compute_findings(run: RunFolder) -> dict[str, Any]:
    """Return what the rules find. Raises Error or OSError for unreadable files."""
    tree: dict[str, Any] = _clean(to_json(find(read_facts(run))))
    return tree


def _clean(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {_clean(key): _clean(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_clean(value) for value in tree]
    if isinstance(tree, float):
        return float(f"{tree:.4g}")
    return without_controls(tree) if isinstance(tree, str) else tree
