"""paceline doctor: whether a run is stalled, which rank it waits for, and findings about its speed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.run import RunFolder

if TYPE_CHECKING:
    from paceline.doctor.diagnose import Diagnosis
    from paceline.inspect.facts import RunFacts
    from paceline.inspect.finding import Findings
    from paceline.report.summary import Summary


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of a run, or a recording of paceline monitor or nvidia-smi (CSV) "
            "[default: the latest run in runs/]"
        ),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write diagnosis and findings to this JSON file.")
    ] = None,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict", help="Import the task and compare its computing with a prediction, as profile does."
        ),
    ] = False,
) -> None:
    """Find out whether a run is stalled, which rank it waits for, and what makes it slow.

    Works on any machine that can read the run folder, also after the end of the run.

    Exit status: 0 not stalled, 1 stalled, 2 bad input.
    """
    from paceline.cli.options.plan_options import check_outputs, print_parts
    from paceline.doctor.examine import examine
    from paceline.doctor.text import format_details, format_sentence
    from paceline.errors import SpecError
    from paceline.inspect.find import find
    from paceline.inspect.read_facts import read_facts, read_recorded_facts
    from paceline.inspect.text import format_findings
    from paceline.run import find_latest, open_run
    from paceline.training.guard.suspects import describe_suspects

    run = run if run is not None else find_latest()
    if run.is_file():
        if predict:
            raise SpecError(f"--predict requires a run, and {run} is a recording; leave it out")
        check_outputs(json, None)
        found = find(read_recorded_facts(run))
        if json is not None:
            _write(json, None, found)
        print_parts(f"{run}: {_count(found)}", *format_findings(found))
        return
    folder = open_run(run, needs_request=False)
    check_outputs(json, None)
    diagnosis = examine(folder)
    facts = read_facts(folder)
    if facts.is_running:
        facts = _add_free_space(facts)
    found = find(_add_prediction(folder, facts) if predict else facts)
    if json is not None:
        _write(json, diagnosis, found)
    # The loop of a user records only the state of its ranks, and samples.
    findings = format_findings(found) if folder.spec.exists() or facts.windows else []
    findings = [*describe_suspects(folder), *findings]
    if diagnosis is None:
        first = f"{run} is not running: {_describe_last_state(folder)}"
        print_parts(first, *(line for line in findings if line not in first))
        return
    print_parts(f"{run}: {format_sentence(diagnosis)}", *format_details(diagnosis), *findings)
    if diagnosis.verdict == "stuck":
        raise typer.Exit(1)


def _add_free_space(facts: "RunFacts") -> "RunFacts":
    """Return the facts with the space that file system and quota leave to a run."""
    from dataclasses import replace

    from paceline.bench.storage.suite import read_free_space
    from paceline.errors import ClusterError

    try:
        return replace(facts, disk_free_bytes=read_free_space(facts.path)["free_bytes"])
    except (ClusterError, OSError) as error:
        return replace(facts, notes=(*facts.notes, f"the quota was not checked: {error}"))


def _add_prediction(folder: RunFolder, facts: "RunFacts") -> "RunFacts":
    """Return the facts with a prediction for this machine, or with the reason why there is none."""
    from dataclasses import replace

    from paceline.cli.inspect.profile import find_cluster_of_run, predict_run
    from paceline.errors import RunError
    from paceline.report.run_view import view

    try:
        measured = view(folder).break_down()
    except RunError as error:
        return replace(facts, why_not_predicted=f"it needs a profile (--profile): {error}")
    cluster = find_cluster_of_run(folder, measured, None)
    return replace(facts, prediction=predict_run(folder, measured, cluster, others=True))


def _count(found: "Findings") -> str:
    from paceline.units import several

    return several(len(found.findings), "finding")


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
        from paceline.report.run_state import describe_run

        return "it has not started yet" if folder.is_locked() else describe_run(folder, summary)
    if summary.ended is not None:
        return f"it was {summary.ended.describe()}"
    causes = [failure for failure in summary.failures if failure.what == "run" and not failure.lost_peer]
    cause = f" ({causes[-1].message})" if causes else ""
    progress = f"step {summary.steps} of {summary.started.steps}"
    return f"it was interrupted after {progress}{cause}; continue with: paceline resume {folder.path}"


def _write(path: Path, diagnosis: "Diagnosis | None", found: "Findings") -> None:
    import json
    from dataclasses import asdict, fields

    from paceline.doctor.diagnose import Diagnosis
    from paceline.files import write_whole
    from paceline.inspect.text import to_json

    state = (
        asdict(diagnosis)
        if diagnosis is not None
        else dict.fromkeys(field.name for field in fields(Diagnosis))
    )
    write_whole(path, json.dumps({**state, **to_json(found)}, indent=1) + "\n")
