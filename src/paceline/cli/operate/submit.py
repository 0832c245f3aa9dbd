"""paceline submit: queue a training in Slurm."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from paceline.cli.options.request_options import TrainingRequest, with_request_options

if TYPE_CHECKING:
    from paceline.launch.slurm.job_script import Job
    from paceline.launch.slurm.site import Site
    from paceline.launch.slurm.sweep import ArraySweep

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
    array: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=VALUES",
            help="Train once for each value, as a job array: seed=1..8, optimizer.lr=0.1,0.01, or "
            "seed=1..8%2 for two at a time. Repeat it for all combinations.",
        ),
    ] = None,
    kubernetes: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Print a manifest for Kubernetes with the settings of this file, and queue nothing: "
            "paceline submit … --kubernetes kubernetes.toml | kubectl apply -f -",
        ),
    ] = None,
    jupyter: Annotated[
        bool,
        Option(
            "--jupyter",
            help="Start JupyterLab on a node instead of a training, and print the command of the tunnel.",
        ),
    ] = False,
    build_image: Annotated[
        str | None,
        Option(
            metavar="DEVICE",
            help="Write the definition file of an Apptainer image for cuda, rocm or cpu, with the packages "
            "of this environment; build the container of the site file, or paceline.sif; queue nothing.",
        ),
    ] = None,
    image_base: Annotated[
        str | None,
        Option(
            metavar="IMAGE",
            help="Image to build on, an address or a .sif file [default: Python's image, or that of ROCm]",
        ),
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print the job script or the definition file, and do nothing else.")
    ] = False,
) -> None:
    """Queue a training in Slurm, and print the number of the job.

    Before its time limit the job saves and requeues itself.
    """
    from paceline import task
    from paceline.errors import Error, LaunchError, SpecError
    from paceline.launch.slurm import client as slurm
    from paceline.launch.slurm.job_script import build_job, render
    from paceline.launch.slurm.site import read_site
    from paceline.launch.slurm.sweep import parse_sweep
    from paceline.plan.plan import AUTO, read_plan
    from paceline.report.mlflow_process import check_mlflow
    from paceline.run import choose_path, create

    spec, launch = request
    if build_image is not None:
        others = bool(array or kubernetes or jupyter or time)
        _build_image(request, build_image, image_base, site, dry_run, others)
        return
    if image_base is not None:
        raise LaunchError("--image-base requires --build-image; specify the device, or leave it out")
    if jupyter:
        _submit_jupyter(request, time, site, dry_run, bool(array or kubernetes))
        return
    if spec.precision == "auto":
        raise SpecError(
            "--precision auto chooses for this machine, and the job runs on others; "
            "specify bf16, fp16 or fp32"
        )
    check_mlflow(launch.mlflow)
    spec = spec.model_copy(update={"task": task.check_reference(spec.task)})
    path = choose_path(launch.run, spec.task)
    if kubernetes is not None:
        _print_manifest(TrainingRequest(spec, launch), path.name, kubernetes, bool(array or time or site))
        return
    settings = read_site(site)
    slurm.check_time(time, settings)
    job = build_job(launch, settings, path, time)
    if launch.plan != AUTO:
        read_plan(launch.plan, job.ranks, spec.batch)
    if array:
        _submit_sweep(parse_sweep(array), TrainingRequest(spec, launch), job, settings, dry_run)
        return
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


def _build_image(
    request: TrainingRequest,
    device: str,
    base: str | None,
    site: Path | None,
    dry_run: bool,
    has_others: bool,
) -> None:
    """Write the definition file of an image, and build the image if Apptainer is installed.

    Raises an Error.
    """
    import shlex

    from paceline.errors import LaunchError, SpecError
    from paceline.launch.environment import image as images
    from paceline.launch.environment.installed import list_installed, read_requirements
    from paceline.launch.slurm.site import read_site
    from paceline.spec import Launch, Spec, suggest

    spec, launch = request
    if has_others or spec != Spec() or launch != Launch():
        raise LaunchError(
            "--build-image builds an image for all trainings of this folder; besides it, only --image-base, "
            "--site and --dry-run are possible"
        )
    kind = next((name for name in images.DEVICES if name == device), None)
    if kind is None:
        names = ", ".join(images.DEVICES)
        raise SpecError(f"--build-image must be {names}, got {device!r}{suggest(device, images.DEVICES)}")
    container = read_site(site).container
    image = Path(container if container is not None else "paceline.sif")
    if not dry_run:
        images.check_image_name(image)
    installed = list_installed()
    contents = images.describe_image(kind, read_requirements(), installed, base)
    if dry_run:
        print(images.render_definition(contents, image.with_suffix(".files").name), end="")
        return
    definition = images.write_image_files(image, contents, installed)
    print(f"{definition}: wrote the definition file", flush=True)
    images.build(image, definition)
    if container is None:
        print(f"to use it, write into site.toml: container = {shlex.quote(str(image.absolute()))}")


def _submit_jupyter(
    request: TrainingRequest, time: str | None, site: Path | None, dry_run: bool, has_others: bool
) -> None:
    """Start JupyterLab in a job, wait for it, and print how to connect. Raises an Error."""
    import shutil

    from paceline.errors import Error, LaunchError
    from paceline.launch.slurm import client as slurm
    from paceline.launch.slurm import jupyter
    from paceline.launch.slurm.job_script import build_job
    from paceline.launch.slurm.site import read_site
    from paceline.run import choose_path
    from paceline.spec import Launch, Spec

    spec, launch = request
    if has_others or spec != Spec() or launch.model_copy(update={"run": None}) != Launch():
        raise LaunchError(
            "--jupyter starts JupyterLab and no training; besides it, only --time, --site, --run-dir and "
            "--dry-run are possible"
        )
    settings = read_site(site)
    slurm.check_time(time, settings)
    folder = choose_path(launch.run, "jupyter").absolute()
    job = build_job(launch.model_copy(update={"ranks": 1}), settings, folder, time)
    script = jupyter.render_jupyter(job, settings)
    if dry_run:
        print(script, end="")
        return
    slurm.check(job, settings)
    try:
        number = slurm.submit(jupyter.prepare_folder(folder, script))
    except (Error, OSError, KeyboardInterrupt):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"{folder}: job {number}; to end it: scancel {number}", flush=True)
    try:
        tunnel = jupyter.wait_for_tunnel(folder, number)
    except KeyboardInterrupt:
        print(f"the job continues; the command of the tunnel will be in {folder / jupyter.TUNNEL}")
        raise
    print(f"on your computer:  {tunnel}")
    print(f"in your browser:   http://localhost:{jupyter.PORT}/lab")
    print(f"token:             cat {folder / jupyter.TOKEN}")


def _print_manifest(request: TrainingRequest, name: str, file: Path, has_slurm_options: bool) -> None:
    """Print the manifest of a training. Raises an Error."""
    from paceline.errors import LaunchError
    from paceline.launch.kubernetes.cluster import read_kubernetes
    from paceline.launch.kubernetes.manifest import PodTraining, render_manifest
    from paceline.launch.slurm.job_script import check_even_split
    from paceline.plan.plan import AUTO, read_plan

    if has_slurm_options:
        raise LaunchError(
            "--kubernetes prints a manifest, and --array, --time and --site are options of Slurm; leave them "
            "out"
        )
    spec, launch = request
    cluster = read_kubernetes(file)
    ranks = launch.ranks or launch.nodes * (cluster.gpus_per_node or 1)
    per_node = check_even_split(ranks, launch.nodes)
    if launch.plan != AUTO:
        read_plan(launch.plan, ranks, spec.batch)
    print(render_manifest(PodTraining(name, spec, launch, launch.nodes, per_node), cluster), end="")


def _submit_sweep(
    sweep: "ArraySweep", request: TrainingRequest, job: "Job", settings: "Site", dry_run: bool
) -> None:
    """Queue an array of jobs, each with a run folder in the folder of `job`. Raises an Error."""
    import shutil

    from paceline.errors import Error, RunError
    from paceline.launch.slurm import client as slurm
    from paceline.launch.slurm.job_script import render
    from paceline.launch.slurm.sweep import build_requests, render_sweep
    from paceline.plan.plan import AUTO, read_plan
    from paceline.run import create, create_folder
    from paceline.user_code import relative_path

    spec, launch = request
    requests = build_requests(sweep, spec, launch)
    jobs = [replace(job, run=job.run / name) for name, _ in requests]
    if len({one.run for one in jobs}) < len(jobs):
        raise RunError("two trainings of --array would have the same folder; use values that differ more")
    if launch.plan != AUTO:
        for _, each in requests:
            read_plan(launch.plan, job.ranks, each.batch)
    script = render_sweep(jobs, job.run, settings, sweep.limit)
    if dry_run:
        print(script, end="")
        return
    slurm.check(job, settings)
    create_folder(job.run)  # alone: what another command puts there is not deleted below
    try:
        runs = []
        for one, (_, each) in zip(jobs, requests, strict=True):
            run = create(one.run, each, launch.model_copy(update={"ranks": job.ranks}))
            run.job_script.write_text(render(one, settings), encoding="utf-8")
            runs.append(run)
        (job.run / "array.sh").write_text(script, encoding="utf-8")
        number = slurm.submit(job.run / "array.sh")
        for at, run in enumerate(runs):
            run.write_job(f"{number}_{at}")
    except (Error, OSError, KeyboardInterrupt):
        shutil.rmtree(job.run, ignore_errors=True)
        raise
    for at, run in enumerate(runs):
        print(f"{relative_path(str(run.path))}: job {number}_{at}")
