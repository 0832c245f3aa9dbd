"""A case of benchmarks/findings.py: a training or a recording, and the rules that must find its fault."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TASK = f"{Path(__file__).parent / 'findings_tasks.py'}:Planted"
LIMIT_S = 240.0


@dataclass(frozen=True)
class Case:
    """A training or a recording.

    expected  the rules that must find something; empty: healthy
    also      rules that may find something besides, because the fault has this effect, too
    options   of paceline train, with the fields of the task as NAME=VALUE
    command   instead of paceline train: a function of the name of the run folder, or of the recording
    """

    name: str
    expected: tuple[str, ...] = ()
    options: Sequence[str] = ()
    also: tuple[str, ...] = ()
    task: str = TASK
    steps: int | None = 150
    batch: int | None = 32
    around: Callable[[Path], "contextlib.AbstractContextManager[Path]"] | None = None
    edit: Callable[[Path], None] | None = None
    before: Sequence["Case"] = ()
    command: Callable[[str], Sequence[str]] | None = None
    recording: Callable[[], str] | None = None
    fields: dict[str, object] = field(default_factory=dict)
