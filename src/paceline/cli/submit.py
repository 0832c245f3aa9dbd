"""paceline submit: queue a training in Slurm."""

from pathlib import Path
from typing import Annotated

from typer import Option

from paceline.cli.request import Request, requesting


@requesting
def submit(
    request: Request,
    time: Annotated[str | None, Option(help="Until the job must end: 02:00:00. Default: the partition's.")] = None,
    site: Annotated[Path | None, Option(help="What jobs must say at this centre. Default: site.toml here, if there is one.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the job script, and leave it at that.")] = False,
) -> None:
    """Queue a training in Slurm, and print the number of the job. It saves and queues itself again before its time is over."""
    import sys

    from paceline import task
    from paceline.cli.start import alike, lay_out
    from paceline.errors import Error
    from paceline.launch import slurm
    from paceline.launch.script import Job, render
    from paceline.launch.site import read_site
    from paceline.plan.plan import AUTO
    from paceline.run import create, default_path

    spec, launch = request
    where = read_site(site)
    ranks = launch.ranks or launch.nodes * (where.gpus_per_node or 1)
    per_node = alike(ranks, launch.nodes)
    if launch.plan != AUTO:
        lay_out(spec, launch, ranks)
    spec = spec.model_copy(update={"task": task.locate(spec.task)})
    path = default_path(launch.run, spec.task)
    job = Job(path.resolve(), Path.cwd(), launch.nodes, per_node, time, sys.executable, launch.least_nodes, launch.restarts)
    script = render(job, where)
    if dry_run:
        print(script, end="")
        return
    slurm.check(job, where)
    run = create(path, spec, launch.model_copy(update={"ranks": ranks}))
    try:
        run.job_script.write_text(script)
        number = slurm.submit(run.job_script)
        run.write_job(number)
    except (Error, OSError, KeyboardInterrupt):
        run.delete()  # nothing half submitted
        raise
    print(f"{path}: job {number}")
