"""A training as a JobSet (kubernetes-sigs/jobset) or a TrainJob (Kubeflow Trainer): a pod per node.

Each pod runs torchrun, which starts the ranks of its node. The request travels as an environment variable.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import tomli_w

from paceline.launch.kubernetes.cluster import REQUEST, KubernetesCluster
from paceline.spec import Launch, Spec

JOBSET, TRAINJOB = "jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1"
PORT = 29500
MAX_NAME = 40  # of the manifest: names of pods are longer, and their limit is 63


@dataclass(frozen=True)
class PodTraining:
    """A training on pods."""

    name: str  # of the run folder
    spec: Spec
    launch: Launch
    nodes: int
    ranks_per_node: int


def render_manifest(training: PodTraining, cluster: KubernetesCluster) -> str:
    """Return the manifest as JSON, which kubectl reads."""
    build = _build_jobset if cluster.kind == "jobset" else _build_trainjob
    return json.dumps(build(training, cluster), indent=2) + "\n"


def object_name(name: str) -> str:
    """Return a name that Kubernetes accepts: lower-case letters, digits and dashes."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if plain == name and len(name) <= MAX_NAME and name[0].isalpha():
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]  # two names stay different
    if not plain[:1].isalpha():  # the service of a JobSet has its name, and must begin with a letter
        plain = f"run-{plain}"
    stem = plain[: MAX_NAME - 9].strip("-")
    return f"{stem}-{digest}"


def _metadata(training: PodTraining, cluster: KubernetesCluster) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "paceline"}
    if cluster.queue is not None:
        labels["kueue.x-k8s.io/queue-name"] = cluster.queue
    space = {"namespace": cluster.namespace} if cluster.namespace is not None else {}
    return {"name": object_name(training.name), **space, "labels": labels}


def _environment(training: PodTraining, cluster: KubernetesCluster) -> list[dict[str, str]]:
    launch = training.launch.model_copy(
        update={"ranks": None, "nodes": 1, "least_nodes": None, "launcher": None, "run": None, "restarts": 0}
    )
    tree = launch.model_dump(exclude_none=True) | training.spec.model_dump(exclude_none=True)
    values = {**cluster.environment, REQUEST: tomli_w.dumps(tree)}
    return [{"name": name, "value": _escape(value)} for name, value in values.items()]


def _escape(text: str) -> str:
    """Return a text in which Kubernetes replaces nothing: it replaces $(NAME), and $$ by $."""
    return text.replace("$", "$$")


def _command(training: PodTraining, cluster: KubernetesCluster, torchrun: str) -> list[str]:
    """Return a command that trains, or continues after a restart of the pods."""
    script = (
        f'printf %s "${REQUEST}" > /tmp/request.toml || exit\n'
        'if [ -e "$1/spec.toml" ]; then set -- resume "$1"\n'
        'else set -- train /tmp/request.toml --run-dir "$1"; fi\n'
        f'exec torchrun {torchrun} -m paceline "$@"'
    )
    return ["bash", "-c", script, "paceline", _escape(f"{cluster.mount}/{training.name}")]


def _resources(cluster: KubernetesCluster) -> dict[str, Any]:
    limits = {
        cluster.gpu_resource: cluster.gpus_per_node,
        "cpu": cluster.cpus_per_node,
        "memory": cluster.memory,
    }
    return {"limits": {name: str(value) for name, value in limits.items() if value is not None}}


def _volumes(cluster: KubernetesCluster) -> list[dict[str, Any]]:
    return [
        {"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": cluster.shared_memory}},
    ]


def _mounts(cluster: KubernetesCluster) -> list[dict[str, str]]:
    return [
        {"name": "runs", "mountPath": cluster.mount},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]


def _build_jobset(training: PodTraining, cluster: KubernetesCluster) -> dict[str, Any]:
    metadata = _metadata(training, cluster)
    name = metadata["name"]
    torchrun = (
        f"--nnodes={training.nodes} --nproc-per-node={training.ranks_per_node} "
        f'--node-rank="$JOB_COMPLETION_INDEX" --master-addr={name}-nodes-0-0.{name} --master-port={PORT}'
    )
    container = {
        "name": "ranks",
        "image": cluster.image,
        "command": _command(training, cluster, torchrun),
        "env": _environment(training, cluster),
        "resources": _resources(cluster),
        "volumeMounts": _mounts(cluster),
    }
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": _volumes(cluster)}
    job = {
        "parallelism": training.nodes,
        "completions": training.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a pod that fails ends the ranks of all; the set restarts them together
        "template": {"spec": pod},
    }
    return {
        "apiVersion": JOBSET,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True},
            "failurePolicy": {"maxRestarts": training.launch.restarts},
            "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _build_trainjob(training: PodTraining, cluster: KubernetesCluster) -> dict[str, Any]:
    """Return a TrainJob. Its runtime sets the variables PET_… that torchrun reads."""
    patch = {
        "name": "node",
        "template": {
            "spec": {
                "template": {
                    "spec": {
                        "volumes": _volumes(cluster),
                        "containers": [{"name": "node", "volumeMounts": _mounts(cluster)}],
                    }
                }
            }
        },
    }
    return {
        "apiVersion": TRAINJOB,
        "kind": "TrainJob",
        "metadata": _metadata(training, cluster),
        "spec": {
            "runtimeRef": {"name": cluster.runtime},
            "trainer": {
                "image": cluster.image,
                "command": _command(training, cluster, ""),
                "env": _environment(training, cluster),
                "numNodes": training.nodes,
                "numProcPerNode": training.ranks_per_node,
                "resourcesPerNode": _resources(cluster),
            },
            "runtimePatches": [
                {
                    "manager": "paceline.dev/submit",
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
                }
            ],
        },
    }
