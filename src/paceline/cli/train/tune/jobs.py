"""Queue a study in Slurm: as a job with its controller, or its trials as a job array."""

import shutil
from typing import TYPE_CHECKING

from paceline.cli.train.tune.options import TuningRequest
from paceline.cli.train.tune.study import define, open_definition, open_folder
from paceline.errors import Error, SpecError

if TYPE_CHECKING:
    from paceline.tuning.folder import StudyFolder


def submit_study(request: TuningRequest) -> None:
    """Queue a job that runs or continues a study, and print its number; or only print its script."""
    from paceline.launch.slurm.job_script import render
    from paceline.tuning.executors.slurm_job import plan_job, submit_job

    definition = open_definition(request)
    folder = _choose_folder(request, definition.request["task"])
    job, site = plan_job(definition, folder, request.time, request.site)
    if request.is_dry_run:
        print(render(job, site), end="")
        return
    open_folder(request, definition)
    try:
        number = submit_job(folder, job, site)
    except (Error, OSError, KeyboardInterrupt):
        if not request.is_resume:
            shutil.rmtree(folder.path)
        raise
    print(f"{folder.path}: job {number}")


def _choose_folder(request: TuningRequest, task: str) -> "StudyFolder":
    from pathlib import Path

    from paceline.tuning.folder import choose_study, open_study

    return open_study(Path(request.target)) if request.is_resume else choose_study(request.run_dir, task)


def submit_array(request: TuningRequest) -> None:
    """Queue the trials as a job array, and print its number; or only print its script."""
    from paceline.tuning.executors.array import plan_array, render_array, submit_array
    from paceline.tuning.folder import choose_study, create_study

    if request.is_resume:
        raise SpecError("--array starts a study, and --resume continues one; leave one out")
    definition = define(request)
    job, settings = plan_array(definition, request.time, request.site)
    task = definition.request["task"]
    if request.is_dry_run:
        print(render_array(job, settings, choose_study(request.run_dir, task)), end="")
        return
    folder = create_study(request.run_dir, task)
    try:
        definition.write(folder.definition)
        number = submit_array(folder, definition, job, settings)
    except (Error, OSError, KeyboardInterrupt):
        shutil.rmtree(folder.path)
        raise
    print(f"{folder.path}: job array {number}, {definition.search.trials} tasks")
