"""A client of the commands of Slurm: queue a job, query its state, cancel it."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.slurm.job_script import Job
from paceline.launch.slurm.site import Site
from paceline.spec import suggest

ANSWER_S = 30.0  # for a command of Slurm
NODE_S = 5.0  # for a node to accept a connection
SLURMD_PORT = 6818  # default port of slurmd
# of squeue: job, array, task of the array, state, nodes, run time, time limit, start, reason
FIELDS = ("%A", "%F", "%K", "%T", "%N", "%M", "%l", "%S", "%r")
ACTIVE = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "SUSPENDED",
    "REQUEUED",
    "STOPPED",
    "STAGE_OUT",
    "SIGNALING",
    "RESIZING",
)
# Reasons of pending jobs that will never start. Slurm refuses such jobs only with EnforcePartLimits.
NEVER_STARTS = re.compile(
    "Partition(TimeLimit|NodeLimit|Config)|(Account|QOS)NotAllowed|Invalid(Account|QOS)|BadConstraints|use "
    "this partition"
)
# variables by which Slurm describes a job to its processes, except where its configuration is
OF_A_JOB = re.compile("SLURM_(?!CONF)|SLURMD_|SBATCH_|SRUN_|PMI_|PMIX_|OMPI_|MASTER_|RANK$|WORLD_SIZE$")


class SlurmUnavailable(LaunchError):
    """A command of Slurm cannot be started, or does not answer."""


@dataclass(frozen=True)
class Status:
    """The state of a job, in the words of Slurm."""

    id: str
    state: str  # RUNNING
    reason: str | None  # why it is pending, or ended
    nodes: str | None  # n[1-2]
    run_time: str  # 00:00:42, as days-hours:minutes:seconds
    time_limit: str
    start: str | None  # when it started, or is expected to start

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE


@dataclass(frozen=True)
class Partition:
    """A partition with its time limit and number of nodes."""

    name: str
    limit_s: int | None  # None: no limit
    nodes: int


def submit(script: Path) -> str:
    """Queue a job script and return the id of the job.

    Raises LaunchError if Slurm refuses it or would never start it.
    """
    job = _query("sbatch", "--parsable", str(script)).strip().partition(";")[0]
    state = status(job)
    if (
        state is not None
        and state.state == "PENDING"
        and state.reason is not None
        and NEVER_STARTS.search(state.reason)
    ):
        cancel(job)
        raise LaunchError(f"Slurm would never start the job: {state.reason}; it was cancelled")
    return job


def submit_joining(script: Path, note: str, occupied: Sequence[str]) -> str:
    """Queue a job script for one more node of a running training, and return the id of the job.

    note: the name of the file by which the node finds the training. occupied: nodes that work already.
    Raises LaunchError.
    """
    exclude = [f"--exclude={','.join(occupied)}"] if occupied else []
    # variables of this job would contradict those of the new job
    environ = {name: value for name, value in os.environ.items() if not OF_A_JOB.match(name)}
    command = ["sbatch", "--parsable", "--nodes=1", "--no-kill=off", *exclude, str(script), note]
    return _run(*command, environ=environ).stdout.strip().partition(";")[0]


def cancel_pending(job: str) -> None:
    """Cancel a job unless it runs. Raises LaunchError."""
    _query("scancel", "--state=PENDING", job)


def dry_run_script(script: str) -> str:
    """Return what Slurm would do with a job script, without queueing it: when it would start the job.

    Raises LaunchError if Slurm would refuse it.
    """
    lines = _run("sbatch", "--test-only", stdin=script).stderr.strip().splitlines()
    answer = next((line for line in lines if " to start at " in line), lines[-1] if lines else "nothing")
    return re.sub(r"^sbatch: ", "", answer)


def status(job: str) -> Status | None:
    """Return the state of a job, or None some minutes after its end, when Slurm has forgotten it."""
    try:
        found = [state for _, state in _list_jobs(f"--jobs={job}")]
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return replace(found[0], id=job) if found else None


def list_statuses(user: int) -> dict[str, Status]:
    """Return the states of a user's jobs by id, and by ARRAY_TASK for those of an array, with one query."""
    return {name: replace(state, id=name) for names, state in _list_jobs(f"--user={user}") for name in names}


def _list_jobs(*words: str) -> Iterator[tuple[tuple[str, ...], Status]]:
    """Yield names and state of jobs. Raises LaunchError.

    squeue prints only these fields: in those of scontrol, a comment or a folder may look like other fields.
    """
    command = ("squeue", "--array", "--noheader", "--states=all", f"--format={'|'.join(FIELDS)}", *words)
    for line in _query(*command).splitlines():
        cells = line.strip().split("|", len(FIELDS) - 1)
        if len(cells) != len(FIELDS):  # the name of a cluster
            continue
        job, array, task, state, nodes, run_time, time_limit, start, reason = cells
        names = (job, f"{array}_{task}") if task.isdecimal() else (job,)
        yield (
            names,
            Status(
                id=job,
                state=state,
                reason=_known(reason.replace("_", " ")),
                nodes=_known(nodes),
                run_time=_pad_clock(run_time),
                time_limit=_pad_clock(time_limit),
                start=_known(start),
            ),
        )


def _pad_clock(text: str) -> str:
    """Return a time with hours: squeue prints 10 minutes as 10:00."""
    if not re.fullmatch(r"(\d+:)?\d+:\d\d", text):  # 1-02:03:04, UNLIMITED
        return text
    return f"{text:0>8}" if text.count(":") == 2 else f"00:{text:0>5}"


def _known(text: str) -> str | None:
    return None if text in ("", "None", "(null)", "Unknown", "N/A") else text


def cancel(job: str) -> None:
    """Cancel a job. Raises LaunchError."""
    _query("scancel", job)


def requeue_without(job: str, node: str) -> bool:
    """Requeue a job if its first node is lost, and with it the job script.

    Return whether it is lost. Raises LaunchError.

    With --no-kill, Slurm 22.05 would keep the job running although nothing runs in it.
    """
    fields = dict(re.findall(r"(\w+)=(\S*)", _query("scontrol", "show", "node", "-o", node)))
    try:
        socket.create_connection(
            (fields["NodeAddr"], int(fields.get("Port", SLURMD_PORT))), timeout=NODE_S
        ).close()
    except OSError:
        _query("scontrol", "requeue", job)
        return True
    return False


def list_nodes() -> list[str]:
    """Return the names of all nodes. Raises LaunchError."""
    return sorted({*_query("sinfo", "--all", "--noheader", "--Node", "--format=%N").split()})


def list_partitions() -> list[Partition]:
    """Return all partitions, the default first. Raises LaunchError."""
    # --all: also partitions that this user does not see, but a job may name
    lines = [
        words
        for line in _query("sinfo", "--all", "--noheader", "-o", "%P|%l|%D").splitlines()
        if len(words := line.strip().split("|")) == 3  # a line of a cluster has its name alone
    ]
    nodes: dict[str, int] = {}
    limits: dict[str, int | None] = {}
    for name, limit, count in lines:
        try:
            nodes[name] = nodes.get(name, 0) + int(count)
            limits[name] = None if limit in ("infinite", "n/a") else parse_seconds(limit)
        except (ValueError, LaunchError):
            raise LaunchError(
                f"sinfo: partition {name} has the time limit {limit!r} and {count!r} nodes, which cannot be "
                "read; check the output of sinfo -o '%P|%l|%D'"
            ) from None
    default_first = sorted(nodes, key=lambda name: not name.endswith("*"))
    return [Partition(name.removesuffix("*"), limits[name], nodes[name]) for name in default_first]


def check(job: Job, site: Site) -> None:
    """Raise LaunchError for a job that Slurm would refuse or never start."""
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "there is no sbatch on PATH; submit from a machine with Slurm, or train here with paceline "
            "train (--dry-run shows the script)"
        )
    if tasks := os.environ.get("SBATCH_ARRAY_INX"):
        raise LaunchError(
            f"SBATCH_ARRAY_INX={tasks} makes a job array, whose tasks would all train in one run folder; "
            "unset it"
        )
    time_s = check_time(job.time, site)
    known = {partition.name: partition for partition in list_partitions()}
    name = site.partition or next(iter(known), None)
    if name is None or "," in name:
        return
    if name not in known:
        raise LaunchError(f"Slurm: Invalid partition name specified: {name}{suggest(name, known)}")
    limit_s, nodes = known[name].limit_s, known[name].nodes
    if time_s is not None and limit_s is not None and time_s > limit_s:
        raise LaunchError(
            f"Slurm: PartitionTimeLimit: --time {job.time} is over the limit of partition {name}, "
            f"{format_clock(limit_s)}"
        )
    if job.nodes > nodes:
        raise LaunchError(f"Slurm: PartitionNodeLimit: --nodes {job.nodes}, but partition {name} has {nodes}")


def check_time(time: str | None, site: Site) -> int | None:
    """Return the seconds of --time.

    Raises LaunchError for an invalid time, or one too short to save a checkpoint.
    """
    if time is None:
        return None
    time_s = parse_seconds(time)
    if time_s <= site.notice_s:
        raise LaunchError(
            f"--time must be above notice_s={site.notice_s}, the seconds for saving a checkpoint, got {time}"
        )
    return time_s


def parse_seconds(text: str) -> int:
    """Return the seconds of a time in the formats of Slurm. Raises LaunchError.

    They are minutes, minutes:seconds, h:m:s, days-hours, days-hours:minutes and days-hours:minutes:seconds.
    """
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text, re.ASCII)
    if match is None:
        raise LaunchError(
            f"--time {text!r} is not a time; write it as 02:00:00 (hours:minutes:seconds), 90 (minutes) or "
            "1-12 (days-hours)"
        )
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    hours, minutes, left = (
        [*numbers, 0, 0][:3] if days is not None or len(numbers) == 3 else [0, *numbers, 0][:3]
    )
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + left


def format_clock(duration_s: int) -> str:
    """Return seconds as hours:minutes:seconds."""
    hours, rest = divmod(duration_s, 3600)
    return f"{hours:02}:{rest // 60:02}:{rest % 60:02}"


def _query(*words: str) -> str:
    """Return the output of a command of Slurm. Raises LaunchError with its last line."""
    return _run(*words).stdout


def _run(
    *words: str, stdin: str = "", environ: Mapping[str, str] = os.environ
) -> "subprocess.CompletedProcess[str]":
    environ = {**environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_S,
            env=environ,
            input=stdin,
        )
    except (FileNotFoundError, NotADirectoryError):
        raise SlurmUnavailable(f"there is no {words[0]} on PATH; use a machine with Slurm") from None
    except OSError as error:
        raise SlurmUnavailable(f"{words[0]} cannot be started: {error.strerror}; check PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmUnavailable(
            f"Slurm did not answer {words[0]} within {ANSWER_S:.0f} s; try again later"
        ) from None
    if done.returncode:
        lines = [
            re.sub(rf"^({words[0]}|slurm_\w+)?:? ?(error: )?", "", line)
            for line in done.stderr.strip().splitlines()
        ]
        raise LaunchError(
            f"{words[0]}: {lines[-1] if lines else f'it failed with exit status {done.returncode}'}"
        )
    return done
