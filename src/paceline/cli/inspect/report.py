"""paceline report: write one file about runs that opens in a browser without a network."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options.request_options import Json

if TYPE_CHECKING:
    from paceline.report.profile import PredictionReport
    from paceline.report.run_view import RunView

Option = typer.Option


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, a folder with runs, or a study of tune")
    ],
    output: Annotated[
        Path | None,
        Option("--output", "-o", metavar="FILE", help="HTML file to write [default: report.html of the run]"),
    ] = None,
    figures: Annotated[
        Path | None, Option(metavar="DIR", help="Write each figure into this folder, too, as SVG.")
    ] = None,
    predict: Annotated[
        bool,
        Option("--predict", help="Import the task and predict its time and memory, as profile does."),
    ] = False,
    cluster: Annotated[
        str | None, Option(help="Machine to predict for, with --predict [default: as for profile]")
    ] = None,
    json: Json = None,
) -> None:
    """Write a report of runs as one HTML file that opens without a network.

    Several runs are compared over steps, samples, time or energy. The folder of a study of tune gives a page
    about the study.
    """
    from paceline.errors import SpecError
    from paceline.files import check_target, write_whole
    from paceline.inspect.report.write import REPORT, Report, find_runs, write_figures
    from paceline.report.run_view import view
    from paceline.tuning.folder import is_study
    from paceline.units import format_bytes

    if cluster is not None and not predict:
        raise SpecError("--cluster is for a prediction; add --predict, or leave it out")
    if any(is_study(path) for path in runs):
        if len(runs) > 1 or figures is not None or predict or json is not None:
            raise SpecError(f"{runs[0]} is among the studies; report one study, with -o FILE only")
        from paceline.cli.inspect.show_study import write_study_page

        print(write_study_page(runs[0], output))
        return
    folders = find_runs(runs)
    if output is None and len(folders) > 1:
        raise SpecError(f"a report of {len(folders)} runs requires a file; add -o report.html")
    target = output if output is not None else folders[0].path / REPORT
    for path in filter(None, (target, json)):
        check_target(path, SpecError)
    views = [view(folder) for folder in folders]
    predictions = {run.run.path: made for run in views if (made := _predict(run, cluster))} if predict else {}
    found = Report(views, predictions)
    page = found.to_html()
    write_whole(target, page)
    if json is not None:
        write_whole(json, found.to_json())
    drawn = f", {len(write_figures(found, figures))} figures in {figures}" if figures is not None else ""
    print(f"{target}: {format_bytes(len(page.encode()))}{drawn}")


def _predict(view: "RunView", cluster: str | None) -> "PredictionReport | None":
    """Return the prediction for a run; None if no step was profiled."""
    from paceline.cli.inspect.profile import find_cluster_of_run, predict_run
    from paceline.errors import RunError

    try:
        measured = view.break_down()
    except RunError:
        return None
    return predict_run(view.run, measured, find_cluster_of_run(view.run, measured, cluster))
