"""The job script of a run, a pure function of the job and the site."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.slurm.site import Site
from paceline.spec import Launch

# Paceline distributes the cores of a node. A rank that ends must not end the others, which save a checkpoint.
SRUN = ("srun", "--kill-on-bad-exit=0", "--wait=60", "--cpu-bind=none")
ELASTIC = ("--no-kill",)  # an agent on each node restarts its ranks when another node is lost


@dataclass(frozen=True)
class Job:
    """What a job script needs to know about a training."""

    run: Path  # absolute path of the run folder
    folder: Path  # current folder of the command; relative paths of the request start there
    nodes: int
    ranks_per_node: int
    time: str | None  # in the format of Slurm; None: the default of the partition
    python: str  # interpreter, unless the site has an environment
    least_nodes: int | None = None  # on which to continue when nodes are lost; None: all nodes
    restarts: int = 0  # maximum number of restarts of all ranks; 0: no agent would restart them
    array: str | None = None  # tasks of a job array, such as 0-9; `run` contains a run folder for each
    is_study: bool = False  # `run` is a study, whose controller starts an agent on each node

    def __post_init__(self) -> None:
        for text in map(str, (self.run, self.folder, self.time, self.python)):
            if not text.isprintable():
                raise LaunchError(
                    f"a name in a job script must be a single line of printable text, got {text!r}"
                )
        if "\\" in str(self.run):  # Slurm replaces no %j in a name of a file with a backslash
            raise LaunchError(
                f"the folder of a run in Slurm must have no backslash, got {str(self.run)!r}; choose another "
                "--run-dir"
            )

    def cpus_per_task(self, site: Site) -> int | None:
        """Return the cores of a task: a rank, or the agent that starts all ranks of a node."""
        return self.ranks_per_node * (site.cpus_per_rank or 1) if self.has_agents else site.cpus_per_rank

    @property
    def has_agents(self) -> bool:
        """Whether the task of a node is an agent that starts all its ranks."""
        return self.is_study or bool(self.restarts)

    @property
    def can_grow(self) -> bool:
        """Whether the script may start again for one node that joins the training."""
        has_range = self.least_nodes is not None and self.least_nodes < self.nodes
        return has_range and self.restarts > 0 and self.array is None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def build_job(launch: Launch, site: Site, run: Path, time: str | None, is_study: bool = False) -> Job:
    """Return the job that trains in the folder `run`, by default with one rank per GPU of the site.

    Raises LaunchError.
    """
    ranks = launch.ranks or launch.nodes * (site.gpus_per_node or 1)
    per_node = check_even_split(ranks, launch.nodes)
    if launch.launcher not in (None, "slurm"):
        raise LaunchError(
            f"--launcher {launch.launcher} is not possible in a job, where srun starts the ranks; leave "
            "--launcher out"
        )
    return Job(
        run.resolve(),
        Path.cwd(),
        launch.nodes,
        per_node,
        time,
        sys.executable,
        launch.least_nodes,
        launch.restarts,
        is_study=is_study,
    )


def check_even_split(ranks: int, nodes: int) -> int:
    """Return the ranks per node. Raises LaunchError if they cannot be spread evenly."""
    if ranks % nodes:
        raise LaunchError(
            f"{ranks} ranks cannot be spread evenly over {nodes} nodes; use --ranks "
            f"{ranks + nodes - ranks % nodes}"
        )
    return ranks // nodes


def render(job: Job, site: Site) -> str:
    """Return the job script."""
    parts = [_head(job, site), _set_up(job, site), _stage_in(site), _train(job, site)]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def list_options(job: Job, site: Site) -> dict[str, str]:
    """Return the options of sbatch by name, without the further options of the site."""
    options = {
        "job-name": job.run.name if job.array is None else job.run.parent.name,
        "array": job.array,
        "nodes": job.nodes if job.least_nodes in (None, job.nodes) else f"{job.least_nodes}-{job.nodes}",
        # with this option and 2-4 nodes, Slurm would take only 2
        "ntasks-per-node": job.ranks_per_node if not job.has_agents else None,
        "cpus-per-task": job.cpus_per_task(site),
        "time": job.time,
        "partition": site.partition,
        "account": site.account,
        "qos": site.qos,
        "constraint": site.constraint,
        "reservation": site.reservation,
        "gres": site.gres,
        "gpus-per-node": site.gpus_per_node,
        "mem": site.memory,
        "output": f"{_literal(job.run)}/{'' if job.array is None else '%a/'}{site.log}",
        "open-mode": "append",
        "signal": f"B:USR1@{site.notice_s}",
    }
    return {name: str(value) for name, value in options.items() if value is not None}


def describe_head(job: Job, site: Site) -> list[str]:
    """Return the lines of a job script with the options of sbatch."""
    options = [f"--{name}={_quoted(value)}" for name, value in list_options(job, site).items()]
    return [
        f"#SBATCH {option}"
        for option in (*options, "--requeue", *(ELASTIC if job.has_agents else ()), *site.sbatch)
    ]


def _head(job: Job, site: Site) -> str:
    lines = describe_head(job, site)
    script = (job.run if job.array is None else job.run.parent) / "job.sh"
    comment = (
        f"# Trains, or continues from the last checkpoint. To start it again: sbatch {quote_word(script)}"
    )
    return "\n".join(["#!/bin/bash", *lines, comment])


def _set_up(job: Job, site: Site) -> str:
    lines = [
        f"run={quote_word(job.run)}"
        if job.array is None
        else f'run={quote_word(job.run)}/"$SLURM_ARRAY_TASK_ID"',
        _NO_ARRAY if job.array is None else None,
        f"cd {quote_word(job.folder)} || exit",
        _JOIN if job.can_grow else 'echo "$SLURM_JOB_ID" > "$run/job"',
        *_environment(job, site),
    ]
    return "\n".join(line for line in lines if line is not None)


def render_environment(job: Job, site: Site) -> str:
    """Return the lines that load the modules and the environment of a job, in its folder."""
    lines = [f"run={quote_word(job.run)}", f"cd {quote_word(job.folder)} || exit", *_environment(job, site)]
    return "\n".join(line for line in lines if line is not None)


def _environment(job: Job, site: Site) -> list[str | None]:
    return [
        f"module load {shlex.join(site.modules)}" if site.modules else None,
        *site.setup,
        f'eval "$(conda shell.bash hook)"\nconda activate {quote_word(site.conda)}'
        if site.conda is not None
        else None,
        f"source {quote_word(site.venv)}/bin/activate" if site.venv is not None else None,
        *(f"export {name}={quote_word(value)}" for name, value in sorted(_variables(site).items())),
        # since Slurm 22.05, srun no longer inherits --cpus-per-task
        f"export SRUN_CPUS_PER_TASK={cpus}" if (cpus := job.cpus_per_task(site)) is not None else None,
    ]


def _stage_in(site: Site) -> str:
    if site.stage_in is None or site.scratch is None:
        return ""
    return f"""
# Unpack once on each node, even if several jobs start at the same time; unpack again if the tar is newer.
stage_in() {{
    scratch={_expanded(site.scratch)} tar={quote_word(site.stage_in)}
    mkdir -p "$scratch" && exec 9> "$scratch/.${{tar##*/}}.lock" && flock 9 || return
    [ "$scratch/.${{tar##*/}}.done" -nt "$tar" ] && return
    tar -xf "$tar" -C "$scratch" && touch "$scratch/.${{tar##*/}}.done"
}}
export -f stage_in
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \\
    bash -c stage_in || exit"""


def _train(job: Job, site: Site) -> str:
    begin = _BEGIN.replace(_CHECKPOINTS, _PROGRESS) if job.is_study else _BEGIN
    end = _END.replace(_CHECKPOINTS, _PROGRESS) if job.is_study else _END
    python = job.python if site.conda is None and site.venv is None and site.container is None else "python"
    rank = f'{quote_word(python)} -m paceline {"agent" if job.restarts else "rank"} "$run"'
    if job.can_grow:
        rank += " $join"
    srun = " ".join(
        [*SRUN, *ELASTIC, '--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'] if job.restarts else SRUN
    )
    if job.is_study:
        return f'{begin}\n{quote_word(python)} -m paceline tune "$run" --resume &\n{end}'
    container = _container(job, site)
    if container:
        rank = f"bash -c 'in_container {rank}'"
    elif site.container is not None:
        srun = f"{srun} {_pyxis_options(job, site)}"
    return "\n\n".join(part for part in (container, f"{begin}\n{srun} {rank} &\n{end}") if part)


VARIABLE = re.compile(r"(\$[A-Za-z_]\w*|\$\{[A-Za-z_]\w*(?::-[\w./-]*)?\})", re.ASCII)
SEPARATORS = {":", ","}  # in the options of containers for folders
# the GPUs that Slurm gives a job, by vendor
DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def _list_mounts(job: Job, site: Site) -> list[str]:
    """Return words of the shell with the folders that a container sees. Raises LaunchError."""
    outside = [] if job.run.is_relative_to(job.folder) else [job.run.parent]
    for path in (job.folder, *outside):
        if set(str(path)) & SEPARATORS:
            raise LaunchError(
                f"a folder that a container sees must have no colon and no comma, got {str(path)!r}; use "
                "another folder"
            )
    scratch = [_expanded(site.scratch)] if site.scratch is not None else []
    return [*map(quote_word, (job.folder, *outside)), *scratch]


def _pyxis_options(job: Job, site: Site) -> str:
    """Return the options with which NVIDIA's plugin for srun starts ranks in a container."""
    mounts = ",".join(f"{mount}:{mount}" for mount in _list_mounts(job, site))
    return (
        f"--container-image={quote_word(site.container)} --container-mounts={mounts} "
        f"--container-workdir={quote_word(job.folder)}"
    )


def _podman(job: Job, site: Site) -> str:
    names = ["${!SLURM_*}", *DEVICES, "run", *sorted(_variables(site))]
    volumes = " ".join(f"-v {mount}:{mount}" for mount in _list_mounts(job, site))
    return f"""
# The container gets the variables that identify a rank, the network of the node and its GPUs.
in_container() {{
    options=()
    for name in {" ".join(names)}; do
        [ -z "${{!name+set}}" ] || options+=(-e "$name")
    done
    [ -e /dev/kfd ] && options+=(--device /dev/kfd --device /dev/dri)
    [ -e /dev/nvidiactl ] && options+=(--device nvidia.com/gpu=all)
    exec podman run --rm --network host --ipc host --userns keep-id --pids-limit -1 {volumes} \\
        -w {quote_word(job.folder)} "${{options[@]}}" {quote_word(site.container)} "$@"
}}
export -f in_container
export run""".strip("\n")


def _container(job: Job, site: Site) -> str:
    if site.container is None or site.runtime == "pyxis":
        return ""
    if site.runtime == "podman":
        return _podman(job, site)
    binds = [f"--bind {mount}" for mount in _list_mounts(job, site)]
    names = ["${!SLURM_*}", *DEVICES, *sorted(_variables(site))]
    return f"""
# The container starts with an empty environment, so pass on the variables that identify a rank.
in_container() {{
    for name in {" ".join(names)}; do
        [ -z "${{!name+set}}" ] || export "APPTAINERENV_$name=${{!name}}"
    done
    [ -e /dev/kfd ] && [ ! -e /dev/nvidiactl ] && gpu=--rocm || gpu=--nv
    exec apptainer exec -e "$gpu" {" ".join(binds)} {quote_word(site.container)} "$@"
}}
export -f in_container
export run""".strip("\n")


def _variables(site: Site) -> dict[str, str]:
    interface = {
        name: site.interface
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        if site.interface is not None
    }
    return {**site.environment, **interface}


_NO_ARRAY = """
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    echo "paceline: tasks of a job array would all train in $run; submit each training separately" >&2
    exit 2
fi""".strip("\n")

_JOIN = """
# Paceline passes a word to the script for a node that joins the training of another job.
join=${1:+--join=$1}
export join
[ -n "$join" ] || echo "$SLURM_JOB_ID" > "$run/job\"""".strip("\n")

# What is different once a training has saved.
_CHECKPOINTS = 'ls "$run/ckpt"'
_PROGRESS = 'ls -d "$run"/trials/*/ckpt/*'  # of a study

_BEGIN = """
# USR1 comes before the time limit: all ranks save and end, and the job is requeued.
# scancel signals the ranks itself.
near_end= ranks=
trap 'near_end=1; kill -USR1 $ranks' USR1
trap : TERM
before=$(ls "$run/ckpt" 2> /dev/null)""".strip("\n")

_END = """
ranks=$!
while wait "$ranks"; status=$?; kill -0 "$ranks" 2> /dev/null; do :; done
if [ -n "$near_end" ] && [ "$status" != 0 ]; then
    if [ "$before" != "$(ls "$run/ckpt" 2> /dev/null)" ]; then
        echo "paceline: the time limit is reached; job $SLURM_JOB_ID is queued again"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "paceline: not requeued: no new checkpoint since the last start; increase --time" >&2
    fi
fi
exit "$status\"""".strip("\n")


def quote_word(text: object) -> str:
    """Return a word of the shell in which nothing is expanded."""
    return shlex.quote(str(text))


def _expanded(text: str) -> str:
    """Return a word of the shell in which variables are expanded, and nothing else, such as $(…)."""
    parts = VARIABLE.split(text)  # every second part is a variable
    parts[::2] = [re.sub(r'([\\"`$])', r"\\\1", part) for part in parts[::2]]
    return '"' + "".join(parts) + '"'


def _quoted(text: str) -> str:
    """Return a value as sbatch reads it in a #SBATCH line."""
    if not set(text) & set(" \t'\"#\\"):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _literal(path: Path) -> str:
    """Return a path in which Slurm replaces nothing, as it does with %j."""
    return str(path).replace("%", "%%")
