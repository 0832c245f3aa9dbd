"""PyTorch's back ends and ways to communicate; `python -m paceline.cluster.backends` prints them as JSON."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

Row = dict[
    str, Any
]  # a Backend of machine.py: plain, since this process is what a probe waits for, and imports nothing but torch

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
MISSING = {
    "gloo": "build PyTorch with USE_GLOO=1; the wheels have it",
    "nccl": "get a PyTorch for your GPUs: pytorch.org/get-started",
    "mpi": "build PyTorch beside an MPI, no wheel has it; bench uses mpi4py",
    "ucc": "build PyTorch with USE_UCC=1, no wheel has it",
}


def begin() -> subprocess.Popen[str]:
    """The process that prints them."""
    words = [sys.executable, "-m", __name__]
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def describe() -> Row:
    """A Torch of machine.py. Imports torch. Makes no context on a device: what is asked of CUDA is asked through NVML."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    backends = [_backend(torch, name) for name in FLAGS]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "backends": backends,
        "communication": communication(),
    }


def _backend(torch: Any, name: str) -> Row:
    module = import_module(f"torch.backends.{name}")
    if name == "xeon":  # a launcher that binds processes to cores
        usable = sys.platform == "linux" and shutil.which("lscpu") is not None
        note = "launcher: python -m torch.backends.xeon.run_cpu" if usable else "needs Linux with lscpu"
        return {"name": name, "available": usable, "note": note}
    available = torch.cuda.is_available() if name == "cuda" else module.is_available()
    flags = _flags(module, FLAGS[name]) if available else {}
    note = "" if available else _missing(module, name)
    return {
        "name": name,
        "available": available,
        "version": _version(torch, name),
        "flags": flags,
        "note": note,
    }


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
        return (
            torch.backends.mps.get_name()
            if torch.backends.mps.is_available() and hasattr(torch.backends.mps, "get_name")
            else None
        )
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


def communication() -> list[Row]:
    """What processes can talk through; for what is missing, how to get it."""
    import torch
    import torch.distributed as dist

    rows = []
    for name, missing in MISSING.items():
        available = getattr(
            dist, f"is_{name}_available", None
        )  # there is none where PyTorch was built without all of it
        there = available is not None and available()
        version = ".".join(map(str, torch.cuda.nccl.version())) if there and name == "nccl" else None
        shown = "rccl" if name == "nccl" and torch.version.hip else name
        rows.append({"name": shown, "available": there, "version": version, "note": "" if there else missing})
    return rows


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of flags that have other names in newer versions
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # of other makers' devices, which are not told of here
    # Kernels of the meta device take a quarter of the import (torch 2.13), and this process computes nothing.
    sys.modules["torch._meta_registrations"] = ModuleType("torch._meta_registrations")
    print(json.dumps(describe()))
