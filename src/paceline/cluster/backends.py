"""PyTorch's back ends; `python -m paceline.cluster.backends` prints them as JSON."""

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

# A BackendFacts of machine.py as a dict: a probe waits for this process, which therefore imports only torch.
Row = dict[str, Any]

# The flags of each back end, by name. A flag that this version of PyTorch does not have is left out.
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
    "cusparselt": (),
    "mps": (),
    "mkl": (),
    "mkldnn": ("enabled", "deterministic", "allow_tf32"),
    "openmp": (),
    "opt_einsum": ("enabled", "strategy"),
    "xeon": (),
}
MISSING = {
    "gloo": "build PyTorch with USE_GLOO=1; the wheels have it",
    "nccl": "install a PyTorch for your GPUs: pytorch.org/get-started",
    "mpi": "build PyTorch with an MPI, no wheel has it; bench uses mpi4py",
    "ucc": "build PyTorch with USE_UCC=1, no wheel has it",
    "xccl": "oneCCL, for GPUs of Intel: install a PyTorch for XPU",
}


def start() -> subprocess.Popen[str]:
    """Start the process that prints the back ends as JSON."""
    words = [sys.executable, "-m", __name__]
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def describe() -> Row:
    """Return a Torch of machine.py as a dict. This imports torch.

    It creates no context on a device: CUDA is queried through NVML.
    """
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
        note = "launcher: python -m torch.backends.xeon.run_cpu" if usable else "requires Linux with lscpu"
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
        return "built into PyTorch, but no device was found"
    return "not in this build of PyTorch"


def _version(torch: Any, name: str) -> str | None:
    if name == "cuda":
        return torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None)
    if name == "cudnn":
        number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return str(number) if number else None
    if name == "cusparselt":
        return format_cusparselt(torch.backends.cusparselt.version())
    if name == "mps":
        return (
            torch.backends.mps.get_name()
            if torch.backends.mps.is_available() and hasattr(torch.backends.mps, "get_name")
            else None
        )
    if name == "opt_einsum":
        return _installed("opt_einsum")
    return versions(torch.__config__.show()).get(name)


def format_cusparselt(number: int | None) -> str | None:
    """Return the version of cuSPARSELt in the number of its library: 602 -> `"0.6.2"`."""
    return f"{number // 1000}.{number // 100 % 10}.{number % 100}" if number else None


def versions(config: str) -> dict[str, str]:
    """Return the versions of MKL, oneDNN and OpenMP in the text of `torch.__config__.show()`."""
    patterns = {
        "mkl": r"Math Kernel Library Version (\S+?)-Product",
        "mkldnn": r"MKL-DNN v(\S+)",
        "openmp": r"OpenMP \d+ \(a\.k\.a\. OpenMP ([\d.]+)\)",
    }
    return {name: match[1] for name, pattern in patterns.items() if (match := re.search(pattern, config))}


def _flags(module: Any, names: tuple[str, ...]) -> dict[str, Any]:
    flags = {}
    for name in names:
        value: Any = module
        try:
            for part in name.removesuffix("()").split("."):
                value = getattr(value, part)
            flags[name.removesuffix("()")] = value() if name.endswith("()") else value
        except (AttributeError, RuntimeError):
            continue
    return {name: value for name, value in flags.items() if value is not None}


def communication() -> list[Row]:
    """Return the back ends for communication, each with a note about how to install it if it is missing."""
    import torch
    import torch.distributed as dist

    rows = []
    for name, missing in MISSING.items():
        # A PyTorch built without torch.distributed lacks these functions.
        check = getattr(dist, f"is_{name}_available", None)
        available = check is not None and check()
        version = ".".join(map(str, torch.cuda.nccl.version())) if available and name == "nccl" else None
        label = "rccl" if name == "nccl" and torch.version.hip else name
        note = "" if available else missing
        rows.append({"name": label, "available": available, "version": version, "note": note})
    return rows


def _installed(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # about flags that newer versions renamed
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # devices of other manufacturers are not described here
    # torch 2.13: the kernels of the meta device take a quarter of the import, and this process computes
    # nothing.
    sys.modules["torch._meta_registrations"] = ModuleType("torch._meta_registrations")
    print(json.dumps(describe()))
