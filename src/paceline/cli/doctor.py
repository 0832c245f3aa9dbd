"""paceline doctor: find out whether a run is stalled, which rank it waits for, where, and since when."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.run import RunFolder

if TYPE_CHECKING:
    from paceline.report.summary import Summary


def doctor(
    run: Annotated[
        Path | None, typer.Argument(help="Folder of the run [default: the latest in runs/]")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the diagnosis to this JSON file.")
    ] = None,
) -> None:
    """Find out whether a run is stalled, and which rank it waits for.

    Works on any machine that can read the run folder.

    Exit status: 0 not stalled, 1 stalled, 2 bad input.
    """
    from paceline.cli.plan_options import check_outputs, print_parts
    from paceline.doctor.examine import examine
    from paceline.doctor.rank_state import find_damaged_heartbeats
    from paceline.doctor.text import format_details, format_sentence
    from paceline.run import find_latest, open_run

    run = run if run is not None else find_latest()
    folder = open_run(run, needs_request=False)
    check_outputs(json, None)
    diagnosis = examine(folder)
    damaged = [f"skipped damaged {path}" for path in find_damaged_heartbeats(folder)]
    if json is not None:
        _write(json, diagnosis)
    if diagnosis is None:
        print_parts(f"{run} is not running: {_describe_last_state(folder)}", *damaged)
        return
    print_parts(f"{run}: {format_sentence(diagnosis)}", *format_details(diagnosis), *damaged)
    if diagnosis.verdict == "stuck":
        raise typer.Exit(1)


def _describe_last_state(folder: RunFolder) -> str:
    """Return how the run ended, and how many damaged lines were skipped."""
    from paceline.report.run_view import view

    run = view(folder)
    skipped = f"; {run.skipped}" if run.skipped else ""
    return f"{_describe_end(run.summary, folder)}{skipped}"


def _describe_end(summary: "Summary", folder: RunFolder) -> str:
    if not folder.spec.exists():
        return "its ranks have ended"
    if summary.started is None:
        from paceline.cli.run_state import describe_run

        return "it has not started yet" if folder.is_locked() else describe_run(folder, summary)
    if summary.ended is not None:
        return f"it was {summary.ended.describe()}"
    causes = [failure for failure in summary.failures if failure.what == "run" and not failure.lost_peer]
    cause = f" ({causes[-1].message})" if causes else ""
    progress = f"step {summary.steps} of {summary.started.steps}"
    return f"it was interrupted after {progress}{cause}; continue with: paceline resume {folder.path}"


def _write(path: Path, diagnosis: Any) -> None:
    import json
    from dataclasses import asdict

    from paceline.files import write_whole

    write_whole(path, json.dumps(asdict(diagnosis) if diagnosis is not None else None, indent=1) + "\n")
