"""paceline submit: queue a training in Slurm."""

from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli.request_options import TrainingRequest, requesting

Time = Annotated[str | None, Option(help="Until the job must end: 02:00:00. Default: the partition's.")]
SiteFile = Annotated[
    Path | None, Option(help="What jobs must say at this centre. Default: site.toml here, if there is one.")
]


@requesting
def submit(
    request: TrainingRequest,
    time: Time = None,
    site: SiteFile = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the job script, and leave it at that.")] = False,
) -> None:
    """Queue a training in Slurm, and print the number of the job. It saves and queues itself again before its time is over."""
    from paceline import task
    from paceline.errors import Error
    from paceline.launch.slurm import client as slurm
    from paceline.launch.slurm.job_script import job_of, render
    from paceline.launch.slurm.site import read_site
    from paceline.plan.plan import AUTO, read_plan
    from paceline.run import choose_path, create

    spec, launch = request
    spec = spec.model_copy(update={"task": task.check_reference(spec.task)})
    path = choose_path(launch.run, spec.task)
    where = read_site(site)
    slurm.asked(time, where)
    job = job_of(launch, where, path, time)
    if launch.plan != AUTO:
        read_plan(launch.plan, job.ranks, spec.batch)
    script = render(job, where)
    if dry_run:
        print(script, end="")
        return
    slurm.check(job, where)
    run = create(path, spec, launch.model_copy(update={"ranks": job.ranks}))
    try:
        run.job_script.write_text(script, encoding="utf-8")
        number = slurm.submit(run.job_script)
        run.write_job(number)
    except (Error, OSError, KeyboardInterrupt):
        run.delete()  # nothing half submitted
        raise
    print(f"{path}: job {number}")
