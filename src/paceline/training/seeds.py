"""Random streams as pure functions of what they are for, so that nothing of them has to be stored to resume exactly."""

import hashlib

import torch


def derive(seed: int, *purpose: object) -> int:
    """A 63-bit seed for one purpose: `derive(7, "dropout", step, rank)`."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def start_stream(seed: int, device: torch.device) -> None:
    """Let torch draw from this seed, on the CPU and on `device`. (`torch.manual_seed` asks every back end there is: 90 µs.)"""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
