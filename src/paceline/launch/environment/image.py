"""An image of Apptainer for the trainings of a project: its definition file, a pure function.

The image has Paceline as it is installed here, torch, and what the project requires, in the versions of this
environment. Task files are not in it: a job sees the current folder. Sources: Apptainer's user guide,
"Definition Files"; the images of Python and ROCm.
"""

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path
from typing import Literal

from paceline.errors import LaunchError
from paceline.files import check_target, reason, write_whole
from paceline.launch.environment.installed import check_pins, list_extras, normalize
from paceline.launch.environment.wheel import is_editable, pack_wheel

ImageDevice = Literal["cuda", "rocm", "cpu"]
DEVICES: tuple[ImageDevice, ...] = ("cuda", "rocm", "cpu")
# torch's own wheels contain the libraries of CUDA and ROCm; the driver is that of the node
PYTHON_IMAGE = "docker.io/library/python:{python}-slim-bookworm"
ROCM_IMAGE = "docker.io/rocm/pytorch:latest"  # has its own torch
TORCH_INDEX = "https://download.pytorch.org/whl/"
BASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", re.ASCII)  # REGISTRY/NAME:TAG or NAME@sha256:DIGEST
# torch installs its own versions of these
OF_TORCH = re.compile(r"torch|triton.*|pytorch-triton.*|nvidia-.*|cuda-.*")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.sif", re.ASCII)
PLACE = "/opt/paceline"


@dataclass(frozen=True)
class ImageContents:
    """What an image for one kind of device contains."""

    device: ImageDevice
    python: str  # 3.11
    torch: str  # version, with a local label such as 2.13.0+cu130
    constraints: tuple[str, ...]  # NAME==VERSION
    requirements: tuple[str, ...]
    base: str | None = None  # address of another base image, or the path of a .sif file

    def __post_init__(self) -> None:
        if self.base is not None and not self.is_base_local and not BASE.fullmatch(self.base):
            raise LaunchError(
                "--image-base must be an address such as docker.io/rocm/pytorch:latest, or a .sif file, got "
                f"{self.base!r}"
            )
        for text in (self.base or "", *self.constraints, *self.requirements):
            if not text.isprintable() or "{{" in text:  # Apptainer replaces {{ NAME }}
                raise LaunchError(f"a definition file must have lines of printable text, got {text!r}")

    @property
    def is_base_local(self) -> bool:
        """Whether the base image is a file."""
        return self.base is not None and self.base.endswith(".sif")

    @property
    def label(self) -> str:
        """The local label of torch's version: cpu, cu130, rocm7.1, or empty."""
        return self.torch.partition("+")[2]

    @property
    def origin(self) -> tuple[str, str]:
        """How Apptainer gets the base image, and its address."""
        if self.base is not None:
            return ("localimage" if self.is_base_local else "docker"), self.base
        if self.device == "rocm" and not self.label.startswith("rocm"):
            return "docker", ROCM_IMAGE
        return "docker", PYTHON_IMAGE.format(python=self.python)

    @property
    def torch_words(self) -> list[str]:
        """The arguments of pip that install torch for the device, unless the base image has it."""
        version = self.torch.partition("+")[0]
        prefix = {"cuda": "cu", "rocm": "rocm", "cpu": "cpu"}[self.device]
        index = self.label if self.label.startswith(prefix) else "cpu" if self.device == "cpu" else None
        return [f"torch=={version}", *(["--index-url", f"{TORCH_INDEX}{index}"] if index is not None else [])]


def render_definition(contents: ImageContents, folder: str) -> str:
    """Return the definition file. `folder` has the lists and wheels, from the folder of the build."""
    bootstrap, address = contents.origin
    return f"""Bootstrap: {bootstrap}
From: {address}

%files
    {folder} {PLACE}

%post
    set -eu
    cd {PLACE}
    # Keep the torch of the base image, if it has one.
    python -c 'import torch' 2> /dev/null || \\
        python -m pip install --no-cache-dir {shlex.join(contents.torch_words)}
    python -c 'import torch; print("torch==" + torch.__version__)' >> constraints.txt
    python -m pip install --no-cache-dir --find-links wheels \\
        --constraint constraints.txt --requirement requirements.txt
    rm -r wheels

%environment
    export LC_ALL=C.UTF-8 PYTHONNOUSERSITE=1

%test
    python -c 'import paceline, torch'

%labels
    paceline.device {contents.device}
"""


def render_lists(contents: ImageContents) -> dict[str, str]:
    """Return the lists of an image by file name."""
    return {
        "constraints.txt": "".join(f"{line}\n" for line in contents.constraints),
        "requirements.txt": "".join(f"{line}\n" for line in contents.requirements),
    }


def describe_image(
    device: ImageDevice,
    requirements: list[str] | None,
    installed: Mapping[str, Distribution],
    base: str | None = None,
) -> ImageContents:
    """Return the contents of an image like this environment. Raises LaunchError, SpecError.

    requirements: of the project; None: it has no list of them.
    """
    check_pins(requirements or (), installed)
    extras = f"[{','.join(names)}]" if (names := list_extras(installed)) else ""
    pinned = {
        name: package
        for name, package in installed.items()
        if not OF_TORCH.fullmatch(name) and name != "paceline" and not is_editable(package)
    }
    version = ".".join(platform.python_version_tuple()[:2])
    return ImageContents(
        device,
        version,
        installed["torch"].version,
        tuple(f"{name}=={pinned[name].version}" for name in sorted(pinned)),
        (f"paceline{extras}=={installed['paceline'].version}", *(requirements or ())),
        base,
    )


def check_image_name(image: Path) -> None:
    """Raise LaunchError unless an image can be built under this name."""
    if not IMAGE.fullmatch(image.name):
        raise LaunchError(
            "the image must be a file such as paceline.sif, of letters, digits, ., - and _, got "
            f"{image.name!r}"
        )
    if os.path.lexists(image):
        raise LaunchError(f"{image} exists; delete it to build it again, or name another in site.toml")


def write_image_files(image: Path, contents: ImageContents, installed: Mapping[str, Distribution]) -> Path:
    """Write the definition file of an image, and a folder next to it. Return the file. Raises LaunchError."""
    definition = image.with_suffix(".def")
    folder = image.with_suffix(".files")
    check_target(definition, LaunchError)
    try:
        (folder / "wheels").mkdir(parents=True, exist_ok=True)
        for old in (folder / "wheels").glob("*.whl"):
            old.unlink()
    except OSError as error:
        raise LaunchError(f"cannot write {folder}: {reason(error)}; choose another image") from error
    for name, content in render_lists(contents).items():
        write_whole(folder / name, content, LaunchError)
    needed = {"paceline", *(normalize(name) for name, row in installed.items() if is_editable(row))}
    for name in sorted(needed):  # no index has their sources
        pack_wheel(installed[name], folder / "wheels")
    write_whole(definition, render_definition(contents, folder.name), LaunchError)
    return definition


def build(image: Path, definition: Path) -> None:
    """Build an image by Apptainer, which prints its progress. Raises LaunchError."""
    folder = definition.absolute().parent
    command = ["apptainer", "build", image.name, definition.name]
    hint = f"cd {shlex.quote(str(folder))} && {shlex.join(command)}"
    try:
        status = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL).returncode
    except FileNotFoundError:
        print(f"apptainer is not installed here; where it is, and the network, run: {hint}")
        return
    if status:
        raise LaunchError(
            f"apptainer ended with exit status {status}, see its output above; change {definition} and run: "
            f"{hint}"
        )
