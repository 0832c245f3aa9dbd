"""paceline show: show what happened in a run, from its files."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import SpecError


def show(
    run: Annotated[Path, typer.Argument(help="Folder of the run, or of a study of tune")],
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all trials of a study to this CSV file.")
    ] = None,
    optuna: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a study to this new journal file, for optuna-dashboard."),
    ] = None,
) -> None:
    """Show what happened in a run, or the results of a study."""
    from paceline.tuning.folder import is_study

    if is_study(run):
        from paceline.cli.inspect.show_study import show_study

        show_study(run, csv, optuna)
        return
    if csv is not None or optuna is not None:
        raise SpecError(
            f"{'--csv' if csv is not None else '--optuna'} writes the trials of a study, and {run} is not a "
            "study; leave it out"
        )
    _show_run(run)


def _show_run(run: Path) -> None:
    from rich.console import Console

    from paceline.report.run_state import describe_run
    from paceline.report.run_view import view
    from paceline.report.text import build_closing_table, format_event, format_headline
    from paceline.run import open_run
    from paceline.training.guard.suspects import describe_suspects

    folder = open_run(run)
    console = Console(highlight=False)
    run_view = view(folder)
    summary = run_view.summary
    if run_view.skipped:
        console.print(str(run_view.skipped), style="yellow", markup=False)
    if summary.started is None:
        console.print(f"{run}: {describe_run(folder, summary)}", markup=False)
        return
    console.print(format_headline(summary.started), markup=False)
    starts = f", started {summary.starts} times" if summary.starts > 1 else ""
    console.print(f"{describe_run(folder, summary)}{starts}", markup=False)
    console.print(build_closing_table(summary))
    for failure in summary.failures:
        if failure.what == "run" and not failure.lost_peer:
            console.print(format_event(failure), style="red", markup=False)
    for sentence in describe_suspects(folder):
        console.print(sentence, style="red", markup=False)
    steps = folder.checkpoints()
    console.print(
        f"checkpoints kept: {', '.join(f'step {step}' for step in steps)}" if steps else "no checkpoint"
    )
