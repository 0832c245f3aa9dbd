"""torch's process-wide settings for a training: threads and TF32."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from paceline.distributed.process_group import count_free_threads, threads_per_rank
from paceline.distributed.world import World
from paceline.errors import SpecError
from paceline.report.run_view import glance
from paceline.run import RunFolder
from paceline.spec import Spec
from paceline.training.start_facts import NATIVE, computes_in


@contextlib.contextmanager
def torch_settings(spec: Spec, world: World) -> Iterator[None]:
    """Apply the threads and the TF32 setting of `spec`, and restore the former settings at the end."""
    threads = torch.get_num_threads()
    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.set_num_threads(threads_per_rank(world.local_size, spec.threads))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = spec.tf32
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


def set_free_threads(spec: Spec, world: World, run: RunFolder | None, device: torch.device) -> Sequence[str]:
    """Set torch's threads to the number of free cores, and return notes for the user. A collective.

    A run that resumes keeps its former number of threads: another number rounds sums differently.
    """
    if spec.threads is not None or device.type != "cpu" or run is None:
        return ()
    share = threads_per_rank(world.local_size, None)
    free, busy = count_free_threads(world)
    started = glance(run).summary.started if world.rank == 0 and run.events.exists() else None
    before = torch.tensor([started.threads if started is not None and started.ranks == world.size else 0])
    if world.size > 1:
        dist.broadcast(before, 0)
    had = int(before)
    threads = had if 0 < had <= share else free
    torch.set_num_threads(threads)
    notes = [busy] if busy is not None else []
    if had and threads != had:
        notes.append(f"threads={threads} on each rank instead of {had} before, which rounds sums differently")
    elif threads < share:
        notes.append(
            f"threads={threads} on each rank {'as before' if had else f'in place of {share}'}; "
            f"--set spec.threads={share} sets them"
        )
    return notes


def ineffective_options(spec: Spec, device: torch.device) -> Sequence[str]:
    """Return a note for each option that has no effect on this device."""
    if device.type != "cpu":
        return []
    options = {"tf32": spec.tf32, "nvtx": spec.nvtx}
    return [
        f"{name} has no effect: it applies to CUDA devices, and this training runs on the CPU"
        for name, is_set in options.items()
        if is_set
    ]


def check_precision(spec: Spec) -> None:
    """Raise SpecError for a precision that was not chosen yet: all ranks must use the same."""
    if spec.precision == "auto":
        raise SpecError("precision=auto must be chosen before the ranks start; specify bf16, fp16 or fp32")


def describe_slow_precision(spec: Spec, device: torch.device) -> Sequence[str]:
    """Return a note if the device does not compute in the requested precision."""
    if spec.precision not in NATIVE or computes_in(spec.precision, device) is not False:
        return []
    what = "this CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)
    slow = ", which was up to 7 times slower than fp32" if device.type == "cpu" else ""
    return [f"{what} has no units for {spec.precision} and converts each value{slow}; use --precision fp32"]
