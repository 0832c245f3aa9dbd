"""KubernetesCluster: the settings that pods need, from a file such as kubernetes.toml."""

import re
from pathlib import Path, PurePosixPath
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from paceline.errors import SpecError
from paceline.spec import Value, check_printable, describe_error, list_keys, read_toml

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)  # RFC 1123
SUBDOMAIN = re.compile(rf"(?=.{{1,253}}$){LABEL.pattern}(\.{LABEL.pattern})*", re.ASCII)
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", re.ASCII)
RESOURCE = re.compile(rf"({SUBDOMAIN.pattern}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?", re.ASCII)
QUANTITY = re.compile(r"\d{1,15}(\.\d{1,9})?([kMGTPE]|[KMGTPE]i|e\d{1,2})?", re.ASCII)
REQUEST = "PACELINE_REQUEST"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class KubernetesCluster(Value):
    """Settings of the pods of a training. Only image and claim are required."""

    image: str  # with torch and paceline
    claim: str  # volume that all pods can write, with the run folders
    kind: Literal["jobset", "trainjob"] = "jobset"
    mount: str = "/runs"  # where the pods see the claim
    namespace: str | None = None
    gpus_per_node: int | None = Field(None, ge=1)
    gpu_resource: str = "nvidia.com/gpu"
    cpus_per_node: int | None = Field(None, ge=1)
    memory: str | None = None  # per pod, in the syntax of Kubernetes: 64Gi
    queue: str | None = None  # local queue of Kueue
    runtime: str = "torch-distributed"  # of a trainjob
    shared_memory: str = "8Gi"  # limit of /dev/shm
    environment: dict[str, str] = Field({})

    @model_validator(mode="after")
    def _names_are_valid(self) -> Self:
        check_printable(self, *type(self).model_fields)
        for key, pattern, what in (
            ("claim", SUBDOMAIN, "lower-case letters, digits, dots and dashes"),
            ("runtime", SUBDOMAIN, "lower-case letters, digits, dots and dashes"),
            ("namespace", LABEL, "lower-case letters, digits and dashes"),
            ("queue", LABEL, "lower-case letters, digits and dashes"),
            ("image", IMAGE, "the address of an image such as registry.example.org/paceline:1"),
            ("gpu_resource", RESOURCE, "the name of a resource such as nvidia.com/gpu"),
            ("memory", QUANTITY, "a quantity such as 64Gi"),
            ("shared_memory", QUANTITY, "a quantity such as 8Gi"),
        ):
            text = getattr(self, key)
            if text is not None and not pattern.fullmatch(text):
                raise ValueError(f"{key} must be {what}, got {text!r}")
        folder = PurePosixPath(self.mount)
        if not folder.is_absolute() or len(folder.parts) < 2 or {"..", ":"} & {*folder.parts, *self.mount}:
            raise ValueError(f"mount must be an absolute path such as '/runs', got {self.mount!r}")
        if folder.is_relative_to("/dev") or folder.is_relative_to("/tmp"):
            raise ValueError(f"mount must not be in /dev or /tmp, which the pods use, got {self.mount!r}")
        if bad := next((name for name in self.environment if not VARIABLE.fullmatch(name)), None):
            raise ValueError(f"environment must have names of variables, got {bad!r}")
        if REQUEST in self.environment:
            raise ValueError(f"environment must not have {REQUEST}, by which the pods get the request")
        return self


def read_kubernetes(path: Path) -> KubernetesCluster:
    """Return the settings of a file. Raises SpecError."""
    try:
        return KubernetesCluster.model_validate(read_toml(path))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "missing":
            raise SpecError(f"{path} lacks {first['loc'][0]}; image and claim are required") from error
        raise SpecError(f"{path}: {describe_error(error, list_keys(KubernetesCluster))}") from error
