"""paceline submit: queue a training in Slurm."""

from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli.request_options import TrainingRequest, with_request_options

Time = Annotated[
    str | None, Option(help="Time limit of the job, such as 02:00:00 [default: that of the partition]")
]
SiteFile = Annotated[
    Path | None,
    Option(
        help="Site file with the settings of this computing centre [default: site.toml here, if it exists]"
    ),
]


@with_request_options
def submit(
    request: TrainingRequest,
    time: Time = None,
    site: SiteFile = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the job script without submitting it.")] = False,
) -> None:
    """Queue a training in Slurm, and print the number of the job.

    Before its time limit the job saves and requeues itself.
    """
    from paceline import task
    from paceline.errors import Error, SpecError
    from paceline.launch.slurm import client as slurm
    from paceline.launch.slurm.job_script import build_job, render
    from paceline.launch.slurm.site import read_site
    from paceline.plan.plan import AUTO, read_plan
    from paceline.report.mlflow_process import check_mlflow
    from paceline.run import choose_path, create

    spec, launch = request
    if spec.precision == "auto":
        raise SpecError(
            "--precision auto chooses for this machine, and the job runs on others; "
            "specify bf16, fp16 or fp32"
        )
    check_mlflow(launch.mlflow)
    spec = spec.model_copy(update={"task": task.check_reference(spec.task)})
    path = choose_path(launch.run, spec.task)
    settings = read_site(site)
    slurm.check_time(time, settings)
    job = build_job(launch, settings, path, time)
    if launch.plan != AUTO:
        read_plan(launch.plan, job.ranks, spec.batch)
    script = render(job, settings)
    if dry_run:
        print(script, end="")
        return
    slurm.check(job, settings)
    run = create(path, spec, launch.model_copy(update={"ranks": job.ranks}))
    try:
        run.job_script.write_text(script, encoding="utf-8")
        number = slurm.submit(run.job_script)
        run.write_job(number)
    except (Error, OSError, KeyboardInterrupt):
        run.delete()
        raise
    print(f"{path}: job {number}")
