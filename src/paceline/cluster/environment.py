"""The environment of this process: Slurm job, container, modules. No other file of this package reads it."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from paceline.cluster.machine import Slurm
from paceline.units import is_whole_number

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
NO_END = 2**32 - 2  # seconds since the epoch with which Slurm says that a job has no end
DEVICE = re.compile(r"\d{1,6}|(GPU|MIG)-[\w/.-]+", re.ASCII)  # numbers, or identifiers and their beginnings
MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/.singularity.d": "apptainer"}


def read_slurm(env: Mapping[str, str]) -> Slurm | None:
    """Return the Slurm allocation from its environment variables, or None outside of a job."""
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")
    if job is None:
        return None
    return Slurm(
        job=job
        if "SLURM_ARRAY_TASK_ID" not in env
        else f"{env.get('SLURM_ARRAY_JOB_ID', job)}_{env['SLURM_ARRAY_TASK_ID']}",
        nodes=_number(env.get("SLURM_JOB_NUM_NODES") or env.get("SLURM_NNODES")),
        node_list=env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST"),
        tasks=_number(env.get("SLURM_NTASKS")),
        cpus_per_task=_number(env.get("SLURM_CPUS_PER_TASK")),
        gpus_per_node=env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_GPUS_PER_NODE"),
        partition=env.get("SLURM_JOB_PARTITION"),
        ends=ends if (ends := _number(env.get("SLURM_JOB_END_TIME"))) and ends < NO_END else None,
    )


def find_container(env: Mapping[str, str], marks: frozenset[str], cgroup: str = "") -> str | None:
    """Return the container engine, or None outside of a container.

    marks: the files of MARKS that exist. cgroup: text of /proc/1/cgroup, which may name the engine.
    """
    image = env.get("APPTAINER_CONTAINER") or env.get("SINGULARITY_CONTAINER")
    if image:
        return f"apptainer, {Path(image).name}"
    engine = next((MARKS[mark] for mark in MARKS if mark in marks), None)
    if engine is None and (match := re.search(r"/(docker|libpod|lxc|containerd)\b", cgroup)):
        engine = {"libpod": "podman"}.get(match[1], match[1])
    if "KUBERNETES_SERVICE_HOST" in env or "kubepods" in cgroup:
        return f"kubernetes, {engine}" if engine else "kubernetes"
    return engine


def visible_devices(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the GPUs that this process may use, or None if no variable restricts them.

    As in CUDA, the first name that is not one of a device, such as -1 or NoDevFiles, ends the list.
    """
    value = next((env[name] for name in VISIBLE if name in env), None)
    if value is None:
        return None
    return tuple(itertools.takewhile(DEVICE.fullmatch, (word.strip() for word in value.split(","))))


def find_own_container(env: Mapping[str, str]) -> str | None:
    """Return the container engine of this process, or None outside of a container."""
    return find_container(
        env, frozenset(mark for mark in MARKS if Path(mark).exists()), _text(Path("/proc/1/cgroup"))
    )


def loaded_modules(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the loaded modules of Environment Modules or Lmod."""
    return tuple(name for name in env.get("LOADEDMODULES", "").split(":") if name)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and is_whole_number(text) else None
