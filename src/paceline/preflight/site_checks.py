"""What a computing centre would say: the site file and what it names, Slurm's limits and variables."""

import os
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.distributed.world import read_world
from paceline.errors import LaunchError
from paceline.launch.slurm import client as slurm
from paceline.launch.slurm.job_script import Job, list_options, render
from paceline.launch.slurm.site import DEFAULT_FILE, Site, read_site
from paceline.launch.slurm.srun import count_allocated_nodes
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import Says, Verdict

ANSWER_S = 30.0
NO_MODULE = 97  # exit status
NO_COMMAND = 127
IMPORTS = "import importlib.util as u, sys; sys.exit(' and '.join(f'no {n}' for n in ('torch', 'paceline') if u.find_spec(n) is None) or 0)"
# Variables that win over what a job script asks for (sbatch(1), INPUT ENVIRONMENT VARIABLES).
WIN = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GRES": "gres",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_TIMELIMIT": "time",
}


def site(flight: PreflightContext) -> Says:
    """What can be known of it where no job runs."""
    found, file = read_site(flight.site_file), flight.site_file or DEFAULT_FILE
    said = ", ".join(name for name in Site.model_fields if name in found.model_fields_set)
    yield (
        "passes",
        f"{file}: {said or 'nothing is said'}"
        if file.exists()
        else f"there is no {file}: jobs ask for nothing special",
    )
    if found.modules:
        yield from _modules(found.modules)
    if found.conda is not None:
        yield from _conda(found.conda, found.modules)
    if found.venv is not None:
        yield from _python(Path(found.venv) / "bin/python", f"venv {found.venv}", found.modules)
    if found.container is not None:
        yield from _container(found.container)
    if found.stage_in is not None:
        yield from _stage_in(Path(found.stage_in))


def _modules(names: Sequence[str]) -> Says:
    load = shlex.join(("module", "load", *names))
    status, said = _tried(f"type module > /dev/null 2>&1 || exit {NO_MODULE}; {load}")
    if status == NO_MODULE:
        yield (
            "warns",
            f"there is no command module here, so whether there are {', '.join(names)} is not known",
        )
    elif status or "ERROR" in said:
        yield "fails", f"{load}: {_last(said)}; module avail lists what there is"
    else:
        yield "passes", f"modules {', '.join(names)} can be loaded"


def _conda(name: str, modules: Sequence[str]) -> Says:
    status, said = _tried_with(
        modules, "conda", "run", "-p" if "/" in name else "-n", name, "python", "-c", IMPORTS
    )
    if status == NO_COMMAND:
        where = "PATH, also with the modules" if modules else "PATH"
        yield "fails", f"conda={name!r}, and there is no conda on {where}; name the module that has it"
    else:
        yield _judged(f"conda environment {name}", status, said)


def _python(python: Path, what: str, modules: Sequence[str]) -> Says:
    if python.exists():
        yield _judged(what, *_tried_with(modules, str(python), "-c", IMPORTS))
    else:
        yield "fails", f"{what} has no {python}; make it there, or say another one in the site file"


def _judged(what: str, status: int, said: str) -> tuple[Verdict, str]:
    if status:
        return "fails", f"{what}: {_last(said)}; install it there, or say another one in the site file"
    return "passes", f"{what} has torch and paceline"


def _container(image: str) -> Says:
    if "://" not in image and not Path(image).exists():
        yield "fails", f"there is no container {image}; say its whole path in the site file"
    elif shutil.which("apptainer") is None:
        yield (
            "warns",
            f"there is no apptainer on PATH here, so container {image} was not tried; the nodes must have it",
        )
    else:
        yield "passes", f"container {image}, and apptainer to run it"


def _stage_in(tar: Path) -> Says:
    try:
        is_tar = tarfile.is_tarfile(tar)
    except OSError as error:
        yield "fails", f"stage_in={str(tar)!r} cannot be read: {error.strerror}"
        return
    yield (
        ("passes", f"stage_in {tar} is a tar")
        if is_tar
        else ("fails", f"stage_in={str(tar)!r} is no tar; make one with tar -cf")
    )


def _tried_with(modules: Sequence[str], *words: str) -> tuple[int, str]:
    """The same of a command with modules loaded, where there are such."""
    load = (
        f"type module > /dev/null 2>&1 && {shlex.join(('module', 'load', *modules))} > /dev/null 2>&1; "
        if modules
        else ""
    )
    return _tried(load + shlex.join(words))


def _tried(script: str) -> tuple[int, str]:
    """Exit status, and what was said on both outputs, of a shell as it is at a login."""
    try:
        done = subprocess.run(
            ("bash", "-lc", script),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=ANSWER_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no answer in {ANSWER_S:.0f} s"
    return done.returncode, done.stdout.strip()


def _last(said: str) -> str:
    return said.splitlines()[-1] if said else "it failed without a word"


def queue(flight: PreflightContext) -> Says:
    """What Slurm would do with the job, where there is a Slurm."""
    read_world()  # raises for variables that contradict each other
    job, where = flight.job, flight.site
    if job.nodes == 1 and (reason := _unreachable()) is not None:
        yield "passes", f"Slurm is not asked: {reason}; one node is here"
        return
    slurm.check(job, where)
    yield "passes", f"Slurm would take it: {slurm.dry_run_script(render(job, where))}"
    if "SLURM_JOB_ID" in os.environ:
        try:
            count_allocated_nodes(job.nodes, job.least_nodes)
        except LaunchError as error:
            yield "warns", f"in the job in which this runs it could not begin: {error}"
    for sentence in overridden(job, where, os.environ):
        yield "warns", sentence


def _unreachable() -> str | None:
    if shutil.which("sbatch") is None:
        return "there is no sbatch on PATH"
    try:
        slurm.list_partitions()
    except LaunchError as error:
        return str(error)
    return None


def overridden(job: Job, where: Site, environ: Mapping[str, str]) -> list[str]:
    """Variables that would make another job of it."""
    asked = list_options(job, where)
    return [
        f"{name}={environ[name]} wins over "
        + (
            f"{option}={asked[option]} of the job script"
            if option in asked
            else "a job script that says no " + option
        )
        + f"; unset {name}, or say it in the site file"
        for name, option in WIN.items()
        if name in environ and environ[name] != asked.get(option)
    ]


def limit_s(flight: PreflightContext) -> int | None:
    """Seconds that a job has; None where neither the request nor Slurm says."""
    if flight.time is not None:
        return slurm.parse_seconds(flight.time)
    try:
        known = {found.name: found.limit_s for found in slurm.list_partitions()}
    except LaunchError:
        return None
    return known.get(flight.site.partition or next(iter(known), ""))


def is_queued_again(site: Site, environ: Mapping[str, str]) -> bool:
    return "--no-requeue" not in site.sbatch and "SBATCH_NO_REQUEUE" not in environ
