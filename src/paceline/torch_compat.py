"""Work-arounds for torch, each with the version that needs it."""

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

LOG_ERROR = 2  # a level of c10's log

# torch 2.13 renamed these functions and warns of the old names, the only ones that 2.11 has.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# torch 2.13: the profiler warns of each tensor that was allocated before a profile and is freed in it.
def set_log_level(level: int) -> int:
    """Set the level of torch's C++ log, and return the previous level."""
    with contextlib.suppress(OSError, ValueError):  # another platform, or another torch
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        variable = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
        before, variable.value = variable.value, level
        return before
    return level


# torch 2.13: FakeTensorMode keeps weak references to the tensors that it made, and swap_tensors, which the
# stages of a pipeline use, refuses tensors with weak references.
def make_fake_mode() -> "FakeTensorMode":
    """Return a mode in which tensors have shapes and no values, and can be swapped."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter.set_tensor_memo = lambda *_: None  # type: ignore[method-assign]
    return mode


# torch 2.13: the futures of the fake process group contain no tensors, which DDP reads from them.
def complete_fake_buckets(model: nn.Module) -> None:
    """Let DDP's buckets be reduced at once, on the fake process group. Other models stay as they are."""
    if not isinstance(model, DistributedDataParallel):
        return

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        dist.all_reduce(bucket.buffer())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)


# torch 2.13: under torchrun, RPC connects to a port where no process listens, since
# TORCHELASTIC_USE_AGENT_STORE makes every rank a client.
def register_store_for_rpc() -> str:
    """Return an address under which torch's RPC finds the store of the default process group."""
    with contextlib.suppress(RuntimeError):  # already registered
        dist.register_rendezvous_handler("paceline", _rendezvous)
    return "paceline://"


def _rendezvous(url: str, **options: object) -> Iterator[tuple[dist.Store, int, int]]:
    yield (
        dist.PrefixStore("rpc", dist.distributed_c10d._get_default_store()),
        dist.get_rank(),
        dist.get_world_size(),
    )


# torch 2.13: grouped_mm knows neither float64 nor fake tensors of another type than bfloat16.
def multiply_experts_of_all_dtypes() -> None:
    """Let models of transformers multiply the weights of experts in float64, and as fake tensors.

    Transformers has a slower operation for such cases. Does nothing in a process without such models.
    """
    experts: Any = sys.modules.get("transformers.integrations.moe")
    original = getattr(experts, "_can_use_grouped_mm", None)
    if original is None or original.__module__ == __name__:
        return
    if not hasattr(torch.ops.transformers, "grouped_mm_fallback"):
        return

    from torch._subclasses.fake_tensor import FakeTensor

    def can_use_grouped_mm(input: Tensor, weight: Tensor, offs: Tensor) -> bool:
        is_known = weight.dtype != torch.float64 and not isinstance(weight, FakeTensor)
        return is_known and bool(original(input, weight, offs))

    experts._can_use_grouped_mm = can_use_grouped_mm


# torch 2.13: a hook that is added to a compiled module lets it compile again. What is called in place of the
# compiled code is an attribute, which modules without compiled code have, too.
def intercept_calls(module: nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Let `call(run, …)` answer the calls of a module; `run` is the call as it was. Return what ends that."""
    attributes: dict[str, Any] = module.__dict__
    before = attributes.get("_compiled_call_impl")
    run = before if before is not None else module._call_impl
    attributes["_compiled_call_impl"] = partial(call, run)

    def end() -> None:
        if before is not None:
            attributes["_compiled_call_impl"] = before
        else:
            del attributes["_compiled_call_impl"]

    return end


# torch 2.13: nn.TransformerEncoder drops masked positions in its kernels of whole layers, so that shapes
# depend on values. These kernels call no attention that could be replaced, and ONNX lacks them.
@contextlib.contextmanager
def fused_layers_disabled() -> Iterator[None]:
    """Disable torch's kernels of whole layers for passes without gradients."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
