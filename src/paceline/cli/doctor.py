"""paceline doctor: does a run go on, and if not, which rank keeps it, where, and since when."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.run import RunFolder

if TYPE_CHECKING:
    from paceline.report.summary import Summary


def doctor(
    run: Annotated[
        Path | None, typer.Argument(help="The run's folder [default: the latest in runs/].")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all that was found there, too.")
    ] = None,
) -> None:
    """Say why a run does not go on. Exits with 1 where it is stuck. Ask from any machine that sees its folder."""
    from paceline.cli.plan_options import check_outputs, show
    from paceline.doctor.examine import examine
    from paceline.doctor.rank_state import find_damaged_heartbeats
    from paceline.doctor.text import format_details, format_sentence
    from paceline.run import find_latest, open_run

    run = run if run is not None else find_latest()
    folder = open_run(run)
    check_outputs(json, None)
    found = examine(folder)
    damaged = [f"skipped damaged {path}" for path in find_damaged_heartbeats(folder)]
    if json is not None:
        _write(json, found)
    if found is None:
        show(f"{run} is not running: {_last_words(folder)}", *damaged)
        return
    show(f"{run}: {format_sentence(found)}", *format_details(found), *damaged)
    if found.verdict == "stuck":
        raise typer.Exit(1)


def _last_words(folder: RunFolder) -> str:
    from paceline.report.run_view import view

    found = view(folder)
    skipped = f"; {found.skipped}" if found.skipped else ""
    return f"{_end_of(found.summary, folder)}{skipped}"


def _end_of(summary: "Summary", folder: RunFolder) -> str:
    if summary.started is None:
        from paceline.cli.run_state import of_run

        return "it has not started yet" if folder.is_locked() else of_run(folder, summary)
    if summary.ended is not None:
        return f"it was {summary.ended.reason} at step {summary.ended.step}"
    own = [failure for failure in summary.failures if failure.what == "run" and not failure.lost_peer]
    why = f" ({own[-1].message})" if own else ""
    return f"it was interrupted after step {summary.steps} of {summary.started.steps}{why}; go on with: paceline resume {folder.path}"


def _write(path: Path, found: Any) -> None:
    import json
    from dataclasses import asdict

    from paceline.files import write_whole

    write_whole(path, json.dumps(asdict(found) if found is not None else None, indent=1) + "\n")
