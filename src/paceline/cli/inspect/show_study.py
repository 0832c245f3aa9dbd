"""paceline show and report of the folder of a study: its trials and the best of them."""

from pathlib import Path


def show_study(path: Path, csv: Path | None = None, optuna: Path | None = None) -> None:
    """Print the table of the best trials of a study. Write all trials as CSV or as a journal of Optuna."""
    from rich.console import Console

    from paceline.files import write_whole
    from paceline.tuning.definition import define_study, read_definition
    from paceline.tuning.folder import open_own_study
    from paceline.tuning.journal import read_state
    from paceline.tuning.outcome import collect_results
    from paceline.tuning.report.optuna_export import compute_importance, export_study
    from paceline.tuning.report.predictions import describe_predictions
    from paceline.tuning.report.results import SHOWN_TRIALS, build_table, count_states, format_csv

    folder = open_own_study(path)
    definition = define_study(*read_definition(folder.definition))
    state = read_state(folder.journal)
    collect_results(state, folder)
    console = Console(highlight=False, markup=False)
    search = definition.search
    goals = ", ".join(map(str, definition.objectives))
    console.print(f"study {path}: {goals}, sampler {search.sampler}, {count_states(state)}", markup=False)
    if state.skipped:
        console.print(f"skipped {state.skipped} unusable lines in events.jsonl", style="yellow")
    console.print(build_table(definition, state))
    if len(state.trials) > SHOWN_TRIALS:
        console.print(f"the best {SHOWN_TRIALS} of {len(state.trials)} trials")
    if importance := compute_importance(definition, state):
        shares = ", ".join(f"{name} {share:.0%}" for name, share in importance.items())
        console.print(f"share of the variance of {definition.objectives[0].name}: {shares}", markup=False)
    for line in describe_predictions(state):
        console.print(line, markup=False)
    if folder.best.exists():
        console.print(f"best configuration: {folder.best}", markup=False)
    if csv is not None:
        write_whole(csv, format_csv(definition, state))
    if optuna is not None:
        export_study(definition, state, optuna, path.resolve().name)


def write_study_page(path: Path, output: Path | None) -> str:
    """Write the page of a study, by default report.html in its folder, and return a line about it."""
    from paceline.errors import SpecError
    from paceline.files import check_target, write_whole
    from paceline.tuning.definition import define_study, read_definition
    from paceline.tuning.folder import open_own_study
    from paceline.tuning.journal import read_state
    from paceline.tuning.outcome import collect_results
    from paceline.tuning.report.page import build_study_page
    from paceline.units import format_bytes

    folder = open_own_study(path)
    target = output if output is not None else folder.path / "report.html"
    check_target(target, SpecError)
    definition = define_study(*read_definition(folder.definition))
    state = read_state(folder.journal)
    collect_results(state, folder)
    page = build_study_page(folder, definition, state)
    write_whole(target, page)
    return f"{target}: {format_bytes(len(page.encode()))}"
