"""Where this process runs: a Slurm job, a container, with which modules. The environment is read here and nowhere else in this package."""

import re
from collections.abc import Mapping
from pathlib import Path

from paceline.cluster.machine import Slurm

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/.singularity.d": "apptainer"}


def slurm(env: Mapping[str, str]) -> Slurm | None:
    """The allocation, from its variables. None outside of a job."""
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
        ends=_number(env.get("SLURM_JOB_END_TIME")),
    )


def container(env: Mapping[str, str], marks: frozenset[str], cgroup: str = "") -> str | None:
    """`marks`: which of MARKS are there. `cgroup`: /proc/1/cgroup, which names the engine where the host shows it."""
    image = env.get("APPTAINER_CONTAINER") or env.get("SINGULARITY_CONTAINER")
    if image:
        return f"apptainer, {Path(image).name}"
    engine = next((MARKS[mark] for mark in MARKS if mark in marks), None)
    if engine is None and (found := re.search(r"/(docker|libpod|lxc|containerd)\b", cgroup)):
        engine = {"libpod": "podman"}.get(found[1], found[1])
    if "KUBERNETES_SERVICE_HOST" in env or "kubepods" in cgroup:
        return f"kubernetes, {engine}" if engine else "kubernetes"
    return engine


def visible(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """The GPUs that this process may use, where somebody has said so."""
    said = next((env[name] for name in VISIBLE if name in env), None)
    return None if said is None else tuple(word.strip() for word in said.split(",") if word.strip())


def here_container(env: Mapping[str, str]) -> str | None:
    return container(
        env, frozenset(mark for mark in MARKS if Path(mark).exists()), _text(Path("/proc/1/cgroup"))
    )


def modules(env: Mapping[str, str]) -> tuple[str, ...]:
    """Those that are loaded, of Environment Modules or Lmod."""
    return tuple(name for name in env.get("LOADEDMODULES", "").split(":") if name)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
