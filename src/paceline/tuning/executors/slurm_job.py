"""A Slurm job that runs the controller of a study. It saves before its time limit, and is queued again."""

from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.slurm import client as slurm
from paceline.launch.slurm.job_script import Job, build_job, render
from paceline.launch.slurm.site import Site, read_site
from paceline.tuning.definition import StudyDefinition
from paceline.tuning.folder import StudyFolder


def plan_job(
    definition: StudyDefinition, folder: StudyFolder, time: str | None, site_file: Path | None
) -> tuple[Job, Site]:
    """Return the job of a study and the site. Raises SpecError and LaunchError."""
    site = read_site(site_file)
    slurm.check_time(time, site)
    if site.container is not None:
        raise LaunchError(
            "a study in a job starts its trials with srun, which is not in the container of the site file; "
            "leave out container, or use --array"
        )
    search = definition.search
    overrides = {"ranks": search.ranks, "nodes": search.nodes, "launcher": "slurm"}
    _, launch = definition.build_request({}, overrides)
    return build_job(launch, site, folder.path, time, is_study=True), site


def submit_job(folder: StudyFolder, job: Job, site: Site) -> str:
    """Write the script of a study, submit it and return the number of the job. Raises LaunchError."""
    slurm.check(job, site)
    folder.job_script.write_text(render(job, site), encoding="utf-8")
    return slurm.submit(folder.job_script)
