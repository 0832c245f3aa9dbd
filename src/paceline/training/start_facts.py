"""Numbers about the machine and the model of a rank, which findings about a run need (`Started.facts`)."""

import torch
from torch import nn

from paceline.cluster.cpu import read_cpu
from paceline.cluster.limits import memory_limit, usable_cores
from paceline.errors import ClusterError

CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Extensions of a CPU that compute in a type; without them each operation converts to float32 and back.
NATIVE = {
    "bf16": {"AVX-512 BF16", "AMX BF16", "BF16", "SME", "SME2"},
    "fp16": {"AVX-512 FP16", "AMX FP16", "NEON", "SVE", "SVE2", "SME", "SME2"},
}
BF16_CAPABILITY, FP16_CAPABILITY = 80, 70  # the first compute capabilities with these types in Tensor Cores


def collect_start_facts(
    model: nn.Module, device: torch.device, precision: str, local_ranks: int
) -> dict[str, float]:
    """Return the facts of this rank. Unknown facts are absent."""
    convolutions = [module for module in model.modules() if isinstance(module, CONVOLUTIONS)]
    facts: dict[str, float] = {
        "cores": usable_cores(),
        "local_ranks": local_ranks,
        "convolutions": len(convolutions),
        "channels_last": float(any(map(_is_channels_last, convolutions))),
        "cudnn_benchmark": float(torch.backends.cudnn.benchmark),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        facts["capability"] = 10 * major + minor
        facts["memory_bytes"] = torch.cuda.get_device_properties(device).total_memory
    elif (limit := memory_limit()) is not None:
        facts["memory_bytes"] = limit
    if precision in NATIVE and (is_native := computes_in(precision, device)) is not None:
        facts["native_precision"] = float(is_native)
    return facts


def _is_channels_last(module: nn.Module) -> bool:
    """Return whether the weight of a convolution is in the format, and its size makes that unambiguous."""
    weight = module.weight
    if not isinstance(weight, torch.Tensor) or weight.dim() not in (4, 5):  # a shard has one dimension
        return False
    layout = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    return weight.is_contiguous(memory_format=layout) and not weight.is_contiguous()


def computes_in(precision: str, device: torch.device) -> bool | None:
    """Return whether the device computes in a reduced precision; None if that is unknown."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return None
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor >= (BF16_CAPABILITY if precision == "bf16" else FP16_CAPABILITY)
    try:
        cpu = read_cpu()
    except ClusterError:
        return None
    extensions = {*cpu.vector, *cpu.matrix}
    return bool(extensions & NATIVE[precision]) if extensions else None
