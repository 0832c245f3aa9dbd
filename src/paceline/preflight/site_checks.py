"""Checks of the computing centre: the site file and the files that it names, Slurm's limits and variables."""

import os
import re
import shlex
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.cluster.modules import list_modules
from paceline.distributed.world import read_world
from paceline.errors import ClusterError, LaunchError
from paceline.launch.slurm import client as slurm
from paceline.launch.slurm.job_script import Job, list_options, render
from paceline.launch.slurm.site import DEFAULT_FILE, Site, read_site
from paceline.launch.slurm.srun import count_allocated_nodes
from paceline.preflight.context import PreflightContext
from paceline.preflight.finding import Results, Verdict
from paceline.spec import suggest
from paceline.units import several

ANSWER_S = 30.0
SOURCE = re.compile(r"\s*(?:source|\.)\s+([\w./~-]+)\s*(?:$|;|&&)")
NO_MODULE = 97  # exit status
NO_COMMAND = 127
IMPORTS = (
    "import importlib.util as u, sys; sys.exit("
    "' and '.join(f'no {n}' for n in ('torch', 'paceline') if u.find_spec(n) is None) or 0)"
)
# Variables that override options of a job script (sbatch(1), INPUT ENVIRONMENT VARIABLES).
OVERRIDES = {
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


def check_site(context: PreflightContext) -> Results:
    """Check everything in the site file that can be checked outside a job."""
    site, file = read_site(context.site_file), context.site_file or DEFAULT_FILE
    keys = ", ".join(name for name in Site.model_fields if name in site.model_fields_set)
    yield (
        "passes",
        f"{file}: {keys or 'no keys'}" if file.exists() else f"no {file}: jobs use Slurm's defaults",
    )
    if site.modules:
        yield from _check_modules(site.modules)
    if site.setup:
        yield from _check_setup(site.setup)
    if site.conda is not None:
        yield from _check_conda(site.conda, site.modules)
    if site.venv is not None:
        yield from _check_python(Path(site.venv) / "bin/python", f"venv {site.venv}", site.modules)
    if site.container is not None:
        yield from _check_container(site.container, site.runtime)
    if site.stage_in is not None:
        yield from _check_stage_in(Path(site.stage_in))


def _check_modules(names: Sequence[str]) -> Results:
    load = shlex.join(("module", "load", *names))
    status, output = _run_in_login_shell(f"type module > /dev/null 2>&1 || exit {NO_MODULE}; {load}")
    if status == NO_MODULE:
        yield (
            "warns",
            f"modules {', '.join(names)} were not checked: this machine has no command module",
        )
    elif status or "ERROR" in output:
        yield (
            "fails",
            f"{load}: {_last_line(output)}{_suggest_modules(names)}; module avail lists the modules",
        )
    else:
        yield "passes", f"modules {', '.join(names)} can be loaded"


def _check_setup(lines: Sequence[str]) -> Results:
    """Check the syntax of lines of bash, and the files that they source."""
    done = subprocess.run(["bash", "-n"], input="\n".join(lines), capture_output=True, text=True)
    if done.returncode:
        yield "fails", f"setup is not valid bash: {_last_line(done.stderr.strip())}; change the site file"
        return
    files = [match[1] for line in lines if (match := SOURCE.match(line)) is not None]
    missing = [file for file in files if not Path(file).expanduser().exists()]
    if missing:
        yield "warns", f"setup reads {', '.join(missing)}, which does not exist here; the nodes must have it"
    else:
        yield "passes", f"setup is valid bash, of {several(len(lines), 'line')}"


def _suggest_modules(names: Sequence[str]) -> str:
    """Return a question with the modules that are most similar to those that the machine lacks."""
    try:
        offered = [module.name for module in list_modules()]
    except ClusterError:  # the failure of the load was reported
        return ""
    return "".join(suggest(name, offered) for name in names if offered and name not in offered)


def _check_conda(name: str, modules: Sequence[str]) -> Results:
    status, output = _run_with_modules(
        modules, "conda", "run", "-p" if "/" in name else "-n", name, "python", "-c", IMPORTS
    )
    if status == NO_COMMAND:
        path = "PATH, even with the modules" if modules else "PATH"
        yield (
            "fails",
            f"conda={name!r} requires conda, which is not on {path}; add its module to the site file",
        )
    else:
        yield _judge_imports(f"conda environment {name}", status, output)


def _check_python(python: Path, what: str, modules: Sequence[str]) -> Results:
    if python.exists():
        yield _judge_imports(what, *_run_with_modules(modules, str(python), "-c", IMPORTS))
    else:
        yield "fails", f"{what} has no {python}; create it, or specify another venv in the site file"


def _judge_imports(what: str, status: int, output: str) -> tuple[Verdict, str]:
    if status:
        reason = _last_line(output)
        return "fails", f"{what}: {reason}; install it, or specify another environment in the site file"
    return "passes", f"{what} has torch and paceline"


def _check_container(image: str, runtime: str) -> Results:
    if runtime == "pyxis":
        yield from _check_pyxis(image)
        return
    is_remote = "://" in image or runtime == "podman"  # whose images have no prefix
    if not is_remote and not Path(image).exists():
        yield "fails", f"container {image} does not exist; specify its whole path in the site file"
    elif shutil.which(runtime) is None:
        yield (
            "warns",
            f"container {image} was not checked: this machine has no {runtime} on PATH; "
            "the nodes must have it",
        )
    else:
        yield "passes", f"container {image}, and {runtime} to run it"


def _check_pyxis(image: str) -> Results:
    """Check that srun knows the options of the plugin, which its help lists."""
    status, output = _run_in_login_shell("srun --help")
    if status:
        yield "warns", f"container {image} was not checked: this machine has no srun on PATH"
    elif "--container-image" not in output:
        yield (
            "fails",
            f"runtime='pyxis': srun has no option --container-image, which the plugin pyxis adds; use "
            f"runtime='apptainer' for {image}",
        )
    else:
        yield "passes", f"container {image}, and pyxis to run it"


def _check_stage_in(tar: Path) -> Results:
    try:
        is_tar = tarfile.is_tarfile(tar)
    except OSError as error:
        yield "fails", f"stage_in={str(tar)!r} cannot be read: {error.strerror}"
        return
    yield (
        ("passes", f"stage_in {tar} is a tar file")
        if is_tar
        else ("fails", f"stage_in={str(tar)!r} must be a tar file; create it with tar -cf")
    )


def _run_with_modules(modules: Sequence[str], *command: str) -> tuple[int, str]:
    """Run a command in a login shell with modules loaded, if there are any."""
    load = (
        f"type module > /dev/null 2>&1 && {shlex.join(('module', 'load', *modules))} > /dev/null 2>&1; "
        if modules
        else ""
    )
    return _run_in_login_shell(load + shlex.join(command))


def _run_in_login_shell(script: str) -> tuple[int, str]:
    """Return the exit status and the combined output of a script in a login shell."""
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


def _last_line(output: str) -> str:
    return output.splitlines()[-1] if output else "it failed without output"


def check_slurm(context: PreflightContext) -> Results:
    """Check whether Slurm accepts the job, if there is a Slurm."""
    read_world()  # raises for variables that contradict each other
    job, site = context.job, context.site
    if job.nodes == 1 and (reason := _find_no_slurm_reason()) is not None:
        yield "passes", f"one node does not require Slurm: {reason}"
        return
    slurm.check(job, site)
    yield "passes", f"Slurm accepts the job: {slurm.dry_run_script(render(job, site))}"
    if "SLURM_JOB_ID" in os.environ:
        try:
            count_allocated_nodes(job.nodes, job.least_nodes)
        except LaunchError as error:
            yield "warns", f"the training cannot start in the present job: {error}"
    for sentence in find_overrides(job, site, os.environ):
        yield "warns", sentence


def _find_no_slurm_reason() -> str | None:
    """Return why Slurm cannot be used; None if it can."""
    if shutil.which("sbatch") is None:
        return "no sbatch on PATH"
    try:
        slurm.list_partitions()
    except LaunchError as error:
        return str(error)
    return None


def find_overrides(job: Job, site: Site, environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each environment variable that overrides an option of the job script."""
    options = list_options(job, site)
    return [
        f"{name}={environ[name]} overrides "
        + (f"{option}={options[option]} of the job script" if option in options else f"the default {option}")
        + f"; unset {name}, or set {option} in the site file"
        for name, option in OVERRIDES.items()
        if name in environ and environ[name] != options.get(option)
    ]


def find_time_limit_s(context: PreflightContext) -> int | None:
    """Return the time limit of the job in seconds; None if neither the request nor Slurm specifies one."""
    if context.time is not None:
        return slurm.parse_seconds(context.time)
    try:
        limits = {partition.name: partition.limit_s for partition in slurm.list_partitions()}
    except LaunchError:
        return None
    return limits.get(context.site.partition or next(iter(limits), ""))


def can_requeue(site: Site, environ: Mapping[str, str]) -> bool:
    return "--no-requeue" not in site.sbatch and "SBATCH_NO_REQUEUE" not in environ
