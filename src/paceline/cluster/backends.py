"""PyTorch's back ends and ways to communicate; `python -m paceline.cluster.backends` prints them as JSON."""

import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from paceline.cluster.machine import Backend, Torch

# What is read of each back end, and shown under this name. A flag that this version of PyTorch does not have is left out.
FLAGS: Mapping[str, tuple[str, ...]] = {
    "cuda": (
        "matmul.allow_tf32",
        "matmul.allow_fp16_reduced_precision_reduction",
        "matmul.allow_bf16_reduced_precision_reduction",
        "flash_sdp_enabled()",
        "mem_efficient_sdp_enabled()",
        "cudnn_sdp_enabled()",
        "math_sdp_enabled()",
    ),
    "cudnn": ("enabled", "benchmark", "deterministic", "allow_tf32"),
    "mps": (),
    "mkl": (),
    "mkldnn": ("enabled", "deterministic", "allow_tf32"),
    "openmp": (),
    "opt_einsum": ("enabled", "strategy"),
    "xeon": (),
}
GET_CUDA = "get a PyTorch for your GPUs: pytorch.org/get-started"
GET_MPI = "build PyTorch beside an MPI, no wheel has it; bench uses mpi4py"
GET_UCC = "build PyTorch with USE_UCC=1, no wheel has it"
GET_GLOO = "build PyTorch with USE_GLOO=1; the wheels have it"


def describe() -> Torch:
    """Imports torch. Makes no context on a device: what is asked of CUDA is asked through NVML."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    backends = tuple(_backend(torch, name) for name in FLAGS)
    return Torch(
        version=torch.__version__, cuda=torch.version.cuda, rocm=torch.version.hip, backends=backends, communication=communication()
    )


def _backend(torch: Any, name: str) -> Backend:
    module = import_module(f"torch.backends.{name}")
    if name == "xeon":  # a launcher that binds processes to cores
        usable = sys.platform == "linux" and shutil.which("lscpu") is not None
        return Backend(
            name=name, available=usable, note="launcher: python -m torch.backends.xeon.run_cpu" if usable else "needs Linux with lscpu"
        )
    available = torch.cuda.is_available() if name == "cuda" else module.is_available()
    flags = _flags(module, FLAGS[name]) if available else {}
    return Backend(
        name=name, available=available, version=_version(torch, name), flags=flags, note="" if available else _missing(module, name)
    )


def _missing(module: Any, name: str) -> str:
    if name == "opt_einsum":
        return "pip install opt_einsum"
    if hasattr(module, "is_built") and module.is_built():
        return "PyTorch has it, and finds no device"
    return "not in this build of PyTorch"


def _version(torch: Any, name: str) -> str | None:
    if name == "cuda":
        return torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None)
    if name == "cudnn":
        number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return str(number) if number else None
    if name == "mps":
        return torch.backends.mps.get_name() if torch.backends.mps.is_available() and hasattr(torch.backends.mps, "get_name") else None
    if name == "opt_einsum":
        return _installed("opt_einsum")
    return versions(torch.__config__.show()).get(name)


def versions(config: str) -> dict[str, str]:
    """Of MKL, oneDNN and OpenMP, from what `torch.__config__.show()` says."""
    patterns = {
        "mkl": r"Math Kernel Library Version (\S+?)-Product",
        "mkldnn": r"MKL-DNN v(\S+)",
        "openmp": r"OpenMP \d+ \(a\.k\.a\. OpenMP ([\d.]+)\)",
    }
    return {name: found[1] for name, pattern in patterns.items() if (found := re.search(pattern, config))}


def _flags(module: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for name in names:
        value: Any = module
        try:
            for part in name.removesuffix("()").split("."):
                value = getattr(value, part)
            found[name.removesuffix("()")] = value() if name.endswith("()") else value
        except (AttributeError, RuntimeError):
            continue
    return {name: value for name, value in found.items() if value is not None}


def communication() -> tuple[Backend, ...]:
    """What processes can talk through; for what is missing, how to get it."""
    import torch
    import torch.distributed as dist

    def row(name: str, available: Callable[[], bool], missing: str, number: str | None = None) -> Backend:
        there = dist.is_available() and available()
        return Backend(name=name, available=there, version=number if there else None, note="" if there else missing)

    nccl = "rccl" if torch.version.hip else "nccl"
    return (
        row("gloo", dist.is_gloo_available, GET_GLOO),
        row(nccl, dist.is_nccl_available, GET_CUDA, _nccl(torch)),
        row("mpi", dist.is_mpi_available, GET_MPI),
        row("ucc", dist.is_ucc_available, GET_UCC),
    )


def _nccl(torch: Any) -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    return ".".join(str(number) for number in torch.cuda.nccl.version())


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of flags that have other names in newer versions
    print(json.dumps(describe().model_dump()))
