"""Manifests for Kubernetes: their content, their names, and their schemas if these are at hand.

PACELINE_CRDS names a folder with the published custom resource definitions jobset.yaml
(kubernetes-sigs/jobset, config/components/crd/bases) and trainjob.yaml (kubeflow/trainer,
manifests/base/crds). Without it, the test of the schemas is skipped.
"""

import copy
import dataclasses
import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from command import paceline
from paceline.errors import SpecError
from paceline.launch.kubernetes.cluster import KubernetesCluster, read_kubernetes
from paceline.launch.kubernetes.manifest import PodTraining, object_name, render_manifest
from paceline.spec import Launch, Spec, load
from pages import read_blocks

SPEC = Spec(task="digits", steps=5, batch=16, set={"text": "costs $(HOME) $$ and 'quotes'"})
TRAINING = PodTraining("digits-1", SPEC, Launch(plan="zero3", nodes=2, ranks=8, restarts=3), 2, 4)
CLUSTER = KubernetesCluster(
    image="registry/paceline:1",
    claim="runs",
    namespace="physics",
    gpus_per_node=4,
    cpus_per_node=16,
    memory="64Gi",
    queue="students",
    environment={"A": "1"},
)
TRAINJOB = CLUSTER.model_copy(update={"kind": "trainjob"})


def build(training: PodTraining, cluster: KubernetesCluster) -> dict[str, Any]:
    return json.loads(render_manifest(training, cluster))


def find_container(manifest: dict[str, Any]) -> dict[str, Any]:
    if manifest["kind"] == "TrainJob":
        return manifest["spec"]["trainer"]
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return job["template"]["spec"]["containers"][0]


def expand(value: str, known: dict[str, str]) -> str:
    """Expand a value as Kubernetes does: $(NAME) if it is known, $$ as $."""
    result, at = "", 0
    while at < len(value):
        if value.startswith("$$", at):
            result, at = result + "$", at + 2
        elif value.startswith("$(", at) and (end := value.find(")", at)) > 0:
            name = value[at + 2 : end]
            result, at = result + known.get(name, value[at : end + 1]), end + 1
        else:
            result, at = result + value[at], at + 1
    return result


@pytest.mark.parametrize("cluster", [CLUSTER, TRAINJOB], ids=["jobset", "trainjob"])
def test_the_request_arrives_in_the_pod(cluster: KubernetesCluster, tmp_path: Path) -> None:
    """The pod's command writes the same request, also if its values look like variables."""
    container = find_container(build(TRAINING, cluster))
    env = {entry["name"]: expand(entry["value"], {"HOME": "/wrong"}) for entry in container["env"]}
    (tmp_path / "request.toml").write_text(env["PACELINE_REQUEST"])
    spec, launch = load(tmp_path / "request.toml", {})
    assert spec == SPEC
    assert (launch.plan, launch.ranks, launch.nodes, launch.restarts) == ("zero3", None, 1, 0)
    assert env["A"] == "1"


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("cluster", [CLUSTER, TRAINJOB], ids=["jobset", "trainjob"])
def test_the_command_trains_and_continues(
    cluster: KubernetesCluster, is_started: bool, tmp_path: Path
) -> None:
    cluster = cluster.model_copy(update={"mount": str(tmp_path / "runs")})
    command = find_container(build(TRAINING, cluster))["command"]
    run = tmp_path / "runs/digits-1"
    if is_started:
        run.mkdir(parents=True)
        (run / "spec.toml").touch()
    stub = tmp_path / "bin/torchrun"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\necho "$@"\n')
    stub.chmod(0o755)
    command = [word.replace("/tmp/request.toml", str(tmp_path / "request.toml")) for word in command]
    env = {
        "PATH": f"{stub.parent}:{os.environ['PATH']}",
        "PACELINE_REQUEST": "text",
        "JOB_COMPLETION_INDEX": "1",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert (tmp_path / "request.toml").read_text() == "text"
    words = done.stdout.split()
    expected = (
        ["resume", str(run)]
        if is_started
        else ["train", str(tmp_path / "request.toml"), "--run-dir", str(run)]
    )
    assert words[words.index("-m") :] == ["-m", "paceline", *expected]
    if cluster.kind == "jobset":
        assert words[: words.index("-m")] == [
            "--nnodes=2",
            "--nproc-per-node=4",
            "--node-rank=1",
            "--master-addr=digits-1-nodes-0-0.digits-1",
            "--master-port=29500",
        ]


def test_pods_of_a_jobset() -> None:
    manifest = build(TRAINING, CLUSTER)
    assert manifest["metadata"] == {
        "name": "digits-1",
        "namespace": "physics",
        "labels": {"app.kubernetes.io/managed-by": "paceline", "kueue.x-k8s.io/queue-name": "students"},
    }
    assert manifest["spec"]["failurePolicy"] == {"maxRestarts": 3}
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    assert find_container(manifest)["resources"] == {
        "limits": {"nvidia.com/gpu": "4", "cpu": "16", "memory": "64Gi"}
    }
    claims = [volume.get("persistentVolumeClaim") for volume in job["template"]["spec"]["volumes"]]
    assert {"claimName": "runs"} in claims


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("digits-1", "digits-1"),
        ("My_Run", "my-run-"),
        ("x" * 90, "x" * 31 + "-"),
        ("...", "run-"),
        ("2026-11-28", "run-2026-11-28-"),  # a service, which a JobSet has, must begin with a letter
        ("é中", "run-"),
    ],
)
def test_names_of_objects(name: str, expected: str) -> None:
    found = object_name(name)
    assert found.startswith(expected)
    assert len(found) <= 40
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", found)
    assert object_name("My_Run") != object_name("my_run") != object_name("my-run")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('image = "i"', "k.toml lacks claim; image and claim are required"),
        (
            'image = "i"\nclaim = "A_b"',
            "claim must be lower-case letters, digits, dots and dashes, got 'A_b'",
        ),
        (
            'image = "i"\nclaim = "a"\nmount = "runs"',
            "mount must be an absolute path such as '/runs', got 'runs'",
        ),
        ('image = "i"\nclaim = "a"\nkind = "pod"', "kind must be 'jobset' or 'trainjob', got 'pod'"),
        *(
            (f'image = "i"\nclaim = "a"\n{key} = "{value}"', f"{key} must {what}")
            for key, value, what in (
                ("memory", "64 GB", "be a quantity such as 64Gi, got '64 GB'"),
                ("memory", "-1", "be a quantity"),
                ("shared_memory", "8gb", "be a quantity such as 8Gi"),
                ("gpu_resource", "nvidia.com/", "be the name of a resource such as nvidia.com/gpu"),
                ("namespace", "a.b", "be lower-case letters, digits and dashes"),
                ("queue", "x" * 64, "be lower-case letters, digits and dashes"),
                ("mount", "/a:b", "be an absolute path"),
                ("mount", "/a/../dev", "be an absolute path"),
                ("mount", "/", "be an absolute path"),
                ("mount", "/dev/shm", "not be in /dev or /tmp, which the pods use"),
            )
        ),
        ('image = "-x y"\nclaim = "a"', "image must be the address of an image"),
        (
            'image = "i"\nclaim = "a"\n[environment]\nPACELINE_REQUEST = "1"',
            "environment must not have PACELINE_REQUEST",
        ),
    ],
)
def test_invalid_settings_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "k.toml").write_text(text)
    with pytest.raises(SpecError) as refused:
        read_kubernetes(tmp_path / "k.toml")
    assert message in str(refused.value), str(refused.value)


def test_settings_that_kubernetes_accepts() -> None:
    for key, value in (
        ("memory", "1.5Ti"),
        ("memory", "64e9"),
        ("gpu_resource", "amd.com/gpu"),
        ("gpu_resource", "nvidia.com/mig-1g.10gb"),
        ("claim", "team.runs-1"),
        ("image", "localhost:5000/a/b_c@sha256:" + "0" * 64),
        ("mount", "/mnt/my runs"),
    ):
        assert (
            getattr(CLUSTER.model_validate({**CLUSTER.model_dump(), key: value}, strict=False), key) == value
        )


@pytest.mark.parametrize("cluster", [CLUSTER, TRAINJOB], ids=["jobset", "trainjob"])
def test_names_that_look_like_variables_stay(cluster: KubernetesCluster) -> None:
    odd = dataclasses.replace(TRAINING, name="$(HOME) $$ 'x'")
    command = find_container(build(odd, cluster))["command"]
    assert expand(command[-1], {"HOME": "/wrong"}) == "/runs/$(HOME) $$ 'x'"


def test_submit_prints_the_manifest(tmp_path: Path) -> None:
    page = read_blocks("docs/runs.md")
    (tmp_path / "kubernetes.toml").write_text(page["kubernetes.toml"])
    words = shlex.split(page["manifest"].partition("|")[0])
    printed = json.loads(paceline(*words[1:], at=tmp_path).out)
    assert "--nproc-per-node=4" in find_container(printed)["command"][2]
    (tmp_path / "kubernetes.toml").rename(tmp_path / "k.toml")
    (tmp_path / "k.toml").write_text('image = "i"\nclaim = "runs"\ngpus_per_node = 2\n')
    done = paceline(
        "submit", "digits", "--nodes", "2", "--kubernetes", "k.toml", "--batch", "64", at=tmp_path
    )
    assert done.status == 0, done.all
    assert "--nproc-per-node=2" in find_container(json.loads(done.out))["command"][2]
    refused = paceline("submit", "digits", "--kubernetes", "k.toml", "--time", "1:00", at=tmp_path)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"k.toml"}


def find_unknown(schema: dict[str, Any], value: Any, path: str = "") -> list[str]:
    """Return the fields of a value that its schema does not have: Kubernetes would drop them."""
    unknown: list[str] = []
    if isinstance(value, list):
        for at, item in enumerate(value):
            unknown += find_unknown(schema["items"], item, f"{path}[{at}]")
    elif isinstance(value, dict) and "properties" in schema:
        for name, item in value.items():
            if name in schema["properties"]:
                unknown += find_unknown(schema["properties"][name], item, f"{path}.{name}")
            else:
                unknown.append(f"{path}.{name}")
    return unknown


@pytest.mark.skipif("PACELINE_CRDS" not in os.environ, reason="PACELINE_CRDS names no folder with schemas")
@pytest.mark.parametrize("cluster", [CLUSTER, TRAINJOB], ids=["jobset", "trainjob"])
def test_manifests_follow_the_published_schemas(cluster: KubernetesCluster) -> None:
    yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
    text = (Path(os.environ["PACELINE_CRDS"]) / f"{cluster.kind}.yaml").read_text()
    crd = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    manifest = build(TRAINING, cluster)
    name = manifest["apiVersion"].rpartition("/")[2]
    [version] = [version for version in crd["spec"]["versions"] if version["name"] == name]
    schema = version["schema"]["openAPIV3Schema"]
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(manifest)] == []
    assert find_unknown(schema["properties"]["spec"], manifest["spec"]) == []
    wrong = copy.deepcopy(manifest)
    if cluster.kind == "jobset":
        wrong["spec"]["replicatedJobs"][0]["replicas"] = "one"
    else:
        wrong["spec"]["trainer"]["numNodes"] = "two"
    assert list(validator.iter_errors(wrong))
    wrong["spec"]["replicaJobs"] = []
    assert find_unknown(schema["properties"]["spec"], wrong["spec"])
