"""The request of a run as hyper-parameters, for tables that compare runs."""

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.errors import RunError, SpecError
from paceline.files import reason
from paceline.run import RunFolder

Value = bool | int | float | str
# Keys that describe no training: places, and what Paceline writes itself.
LEFT_OUT = frozenset({"run", "chosen", "asked", "asked_ranks"})


def read_hyperparameters(run: RunFolder) -> dict[str, Value]:
    """Return the keys of the request that have values, such as `optimizer.lr`; empty if it is damaged."""
    try:
        spec, launch = run.request()
    except (RunError, SpecError):
        return {}
    tree = launch.model_dump(exclude_none=True) | spec.model_dump(exclude_none=True)
    return {name: value for name, value in _flatten(tree) if name not in LEFT_OUT}


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, (bool, int, float, str)):
            yield f"{prefix}{key}", value
        else:
            yield f"{prefix}{key}", str(value)


def format_request(run: RunFolder) -> str:
    """Return the request of a run as Markdown, or why it cannot be read."""
    try:
        text = run.spec.read_text("utf-8", errors="replace")
    except OSError as error:
        return f"{run.spec}: {reason(error)}"
    return "\n".join(f"    {line}" for line in text.splitlines())
