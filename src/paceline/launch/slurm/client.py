"""What is asked of Slurm: queue a job, say how it is, cancel it; and what its answers mean."""

import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import LaunchError
from paceline.launch.slurm.job_script import Job
from paceline.launch.slurm.site import Site
from paceline.spec import nearest

ANSWER_S = 30.0
NODE_S = 5.0  # for a node to answer
SLURMD = 6818  # its port, if not said
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
# Why a job waits that will never begin, unless Slurm is told to refuse such jobs (EnforcePartLimits).
IN_VAIN = re.compile(
    "Partition(TimeLimit|NodeLimit|Config)|(Account|QOS)NotAllowed|Invalid(Account|QOS)|BadConstraints|use this partition"
)


@dataclass(frozen=True)
class Status:
    """Of a job, in Slurm's words."""

    id: str
    state: str  # RUNNING
    reason: str | None  # why it waits, or ended
    nodes: str | None  # n[1-2]
    run_time: str  # 0:42, as days-hours:minutes:seconds
    time_limit: str
    start: str | None  # when it began or is expected to

    @property
    def is_active(self) -> bool:
        return self.state in ACTIVE


@dataclass(frozen=True)
class Partition:
    name: str
    limit_s: int | None  # None: none
    nodes: int


def submit(script: Path) -> str:
    """Queue a job script; its id. Raises LaunchError with Slurm's words where it is refused, or would wait for ever."""
    job = _ask("sbatch", "--parsable", str(script)).strip().partition(";")[0]
    found = status(job)
    if (
        found is not None
        and found.state == "PENDING"
        and found.reason is not None
        and IN_VAIN.search(found.reason)
    ):
        cancel(job)
        raise LaunchError(f"Slurm would keep the job waiting: {found.reason}; it was cancelled")
    return job


def try_out(script: str) -> str:
    """What Slurm says it would do with a job script, which it does not queue. Raises LaunchError with its words where it would refuse."""
    return re.sub(
        r"^sbatch: ", "", _run("sbatch", "--test-only", said=script).stderr.strip().splitlines()[-1]
    )


def status(job: str) -> Status | None:
    """None for a job that Slurm has forgotten, some minutes after its end."""
    try:
        line = _ask("scontrol", "show", "job", "-o", job)
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    return _status(job, _fields(line))


def statuses() -> dict[str, Status]:
    """Of all jobs that Slurm knows, by id, and by ARRAY_TASK too where they are of an array: one question for many runs."""
    found: dict[str, Status] = {}
    for line in _ask("scontrol", "show", "job", "-o").splitlines():
        if (fields := _fields(line)).get("JobId"):
            job, of_array = fields["JobId"], f"{fields.get('ArrayJobId')}_{fields.get('ArrayTaskId')}"
            found |= {name: _status(name, fields) for name in (job, of_array)}
    return found


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(.*?)(?= \w+[:\w/]*=|$)", line.strip()))


def _status(job: str, found: dict[str, str]) -> Status:
    def said(name: str) -> str | None:
        return None if found.get(name) in (None, "", "None", "(null)", "Unknown", "N/A") else found[name]

    return Status(
        id=job,
        state=found["JobState"],
        reason=reason.replace("_", " ") if (reason := said("Reason")) is not None else None,
        nodes=said("NodeList"),
        run_time=found["RunTime"],
        time_limit=found["TimeLimit"],
        start=said("StartTime"),
    )


def cancel(job: str) -> None:
    _ask("scancel", job)


def requeue_without(job: str, node: str) -> bool:
    """Queue a job again if its first node is gone, and with it the script; whether it is. With --no-kill Slurm (22.05) would keep the job
    as it is, with nothing that runs in it. Raises LaunchError."""
    found = dict(re.findall(r"(\w+)=(\S*)", _ask("scontrol", "show", "node", "-o", node)))
    try:
        socket.create_connection((found["NodeAddr"], int(found.get("Port", SLURMD))), timeout=NODE_S).close()
    except OSError:
        _ask("scontrol", "requeue", job)
        return True
    return False


def partitions() -> list[Partition]:
    """The default first."""
    lines = [line.split("|") for line in _ask("sinfo", "--noheader", "-o", "%P|%l|%D").split()]
    nodes: dict[str, int] = {}
    for name, _, count in lines:
        nodes[name] = nodes.get(name, 0) + int(count)
    limits = {name: None if limit in ("infinite", "n/a") else seconds(limit) for name, limit, _ in lines}
    default_first = sorted(nodes, key=lambda name: not name.endswith("*"))
    return [Partition(name.removesuffix("*"), limits[name], nodes[name]) for name in default_first]


def check(job: Job, site: Site) -> None:
    """Raises LaunchError for what Slurm would refuse, or keep waiting for ever where it is not told to refuse."""
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "there is no sbatch on PATH: submit where Slurm is, or train here with paceline train; --dry-run shows the script"
        )
    if tasks := os.environ.get("SBATCH_ARRAY_INX"):
        raise LaunchError(
            f"SBATCH_ARRAY_INX={tasks} makes job arrays, whose tasks would all train in one run folder; unset it"
        )
    asked_s = check_time(job.time, site)
    known = {found.name: found for found in partitions()}
    name = site.partition or next(iter(known), None)
    if name is None or "," in name:
        return
    if name not in known:
        raise LaunchError(f"Slurm: Invalid partition name specified: {name}{nearest(name, known)}")
    limit_s, nodes = known[name].limit_s, known[name].nodes
    if asked_s is not None and limit_s is not None and asked_s > limit_s:
        raise LaunchError(
            f"Slurm: PartitionTimeLimit: --time {job.time} is over the limit of partition {name}, {clock(limit_s)}"
        )
    if job.nodes > nodes:
        raise LaunchError(f"Slurm: PartitionNodeLimit: --nodes {job.nodes}, but partition {name} has {nodes}")


def check_time(time: str | None, site: Site) -> int | None:
    """The seconds of --time. Raises LaunchError for what is no time, or leaves none to save."""
    if time is None:
        return None
    asked_s = seconds(time)
    if asked_s <= site.notice_s:
        raise LaunchError(
            f"--time {time} leaves no room for notice_s={site.notice_s}, the seconds in which to save before its end"
        )
    return asked_s


def seconds(text: str) -> int:
    """A time as Slurm writes it: minutes, minutes:seconds, h:m:s, days-hours, days-hours:minutes, days-hours:minutes:seconds."""
    found = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text, re.ASCII)
    if found is None:
        raise LaunchError(
            f"--time {text!r} is no time; write it as 02:00:00 (hours:minutes:seconds), 90 (minutes) or 1-12 (days-hours)"
        )
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    hours, minutes, left = (
        [*numbers, 0, 0][:3] if days is not None or len(numbers) == 3 else [0, *numbers, 0][:3]
    )
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + left


def clock(duration_s: int) -> str:
    hours, rest = divmod(duration_s, 3600)
    return f"{hours:02}:{rest // 60:02}:{rest % 60:02}"


def _ask(*words: str) -> str:
    """What a command of Slurm printed. Raises LaunchError with its last words."""
    return _run(*words).stdout


def _run(*words: str, said: str = "") -> "subprocess.CompletedProcess[str]":
    environ = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=ANSWER_S, env=environ, input=said
        )
    except (FileNotFoundError, NotADirectoryError):
        raise LaunchError(f"there is no {words[0]} on PATH, so Slurm cannot be asked here") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Slurm did not answer {words[0]} within {ANSWER_S:.0f} s") from None
    if done.returncode:
        lines = [
            re.sub(rf"^({words[0]}|slurm_\w+)?:? ?(error: )?", "", line)
            for line in done.stderr.strip().splitlines()
        ]
        raise LaunchError(
            f"{words[0]}: {lines[-1] if lines else f'it failed with exit status {done.returncode}'}"
        )
    return done
