"""Where a run comes from, and in which settings runs differ."""

from collections.abc import Sequence
from typing import Any

from paceline.inspect.report.run_record import find_differences, flatten_tables, read_request
from paceline.web.runs import WatchedRun, sign

MAX_ROWS = 300

Rows = list[list[Any]]


def build_origin(run: WatchedRun) -> dict[str, Any]:
    """Return origin and request of a run as rows of name and value. They are read if their files changed."""
    signature = sign(run.folder.spec, run.folder.provenance)
    return run.keep("origin", signature, lambda: _read_origin(run))


def _read_origin(run: WatchedRun) -> dict[str, Any]:
    origin, problem = run.folder.origin()
    request, why = read_request(run.view)
    return {
        "origin": _to_rows(flatten_tables(origin)),
        "request": _to_rows(request),
        "problem": "; ".join(filter(None, (problem, why))),
    }


def build_differences(runs: Sequence[WatchedRun]) -> Rows:
    """Return the settings that differ, each with its value in every run; None where it is not set."""
    requests = [{"request": dict(build_origin(run)["request"])} for run in runs]
    return [[name, *values] for name, values in find_differences(requests).items()][:MAX_ROWS]


def _to_rows(tree: dict[str, Any]) -> Rows:
    return [[name, value] for name, value in tree.items()][:MAX_ROWS]
