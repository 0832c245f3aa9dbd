"""A study whose trials are the tasks of a Slurm job array, each with a run folder that exists before."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError, SpecError
from paceline.launch.slurm import client as slurm
from paceline.launch.slurm.job_script import Job, build_job, render
from paceline.launch.slurm.site import Site, read_site
from paceline.run import create
from paceline.tuning.definition import StudyDefinition
from paceline.tuning.folder import StudyFolder
from paceline.tuning.journal import JournalWriter, StudyState, Suggested
from paceline.tuning.samplers.table import SAMPLERS

INDEPENDENT = ("random", "quasi-random", "grid")  # samplers whose values do not depend on results


def plan_array(definition: StudyDefinition, time: str | None, site_file: Path | None) -> tuple[Job, Site]:
    """Return the job of an array whose run folders are in `trials`, and the site.

    Raises SpecError and LaunchError.
    """
    search = definition.search
    if search.sampler not in INDEPENDENT or search.scheduler != "none" or definition.needs_prediction:
        deciding = {
            f"sampler {search.sampler}": search.sampler not in INDEPENDENT,
            f"scheduler {search.scheduler}": search.scheduler != "none",
            "a prediction": definition.needs_prediction,
        }
        what = next(name for name, decides in deciding.items() if decides)
        raise SpecError(
            f"--array starts all trials at once, and {what} decides about each; use --grid, "
            "without --scheduler, --where and --ranks-per-trial auto"
        )
    site = read_site(site_file)
    slurm.check_time(time, site)
    _, launch = definition.build_request({}, {"ranks": search.ranks_per_trial, "launcher": "slurm"})
    job = build_job(launch, site, Path("trials"), time)
    return replace(job, array=f"0-{search.trials - 1}" if search.trials > 1 else "0"), site


def render_array(job: Job, site: Site, folder: StudyFolder) -> str:
    """Return the script of the array."""
    return render(replace(job, run=folder.trials.absolute()), site)


def submit_array(folder: StudyFolder, definition: StudyDefinition, job: Job, site: Site) -> str:
    """Create a run folder for each trial, submit the array and return its number. Raises LaunchError."""
    slurm.check(job, site)
    state, writer = StudyState(), JournalWriter(folder.journal)
    try:
        for number in range(definition.search.trials):
            values = SAMPLERS[definition.search.sampler](definition, state, number)
            _create_run(folder, definition, number, values, job.ranks)
            event = Suggested(trial=number, values=values)
            writer.write(event)
            state.apply(event)
    finally:
        writer.close()
    folder.job_script.write_text(render_array(job, site, folder), encoding="utf-8")
    return slurm.submit(folder.job_script)


def _create_run(
    folder: StudyFolder, definition: StudyDefinition, number: int, values: Mapping[str, Any], ranks: int
) -> None:
    try:
        spec, launch = definition.build_request(values, {"ranks": ranks})
    except SpecError as error:
        raise LaunchError(f"trial {number} is impossible: {error}") from error
    create(folder.run(number).path, spec, launch)
