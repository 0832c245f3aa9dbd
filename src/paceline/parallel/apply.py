"""The one place where a model meets a plan."""

import os
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map

from paceline.distributed.mesh import build_mesh, data_mesh
from paceline.errors import LaunchError, PlanError, TaskError
from paceline.plan.plan import TWICE, Plan
from paceline.spec import nearest
from paceline.task import Layout

if TYPE_CHECKING:
    from paceline.parallel.tensor.apply import Splits


def parallelize(
    model: nn.Module,
    layout: Layout,
    plan: Plan,
    device: torch.device,
    fill: Callable[[nn.Module], None],
    compile: bool = False,
    mesh: DeviceMesh | None = None,
    splits: "Splits | None" = None,
    gathered: Sequence[str] | None = None,
) -> nn.Module:
    """Lay `model`, which is on the meta device, out as `plan` says; `fill` gives a laid-out model its weights.

    gathered: names of the modules that `fully_shard` gathers on their own; None: the blocks.

    Returns what is to be called in place of `model`. The order matters: split weights, split the sequence, recompute, compile, shard,
    fill, replicate.
    """
    units = blocks(model, layout)
    if splits is not None:
        from paceline.parallel.tensor.apply import split

        assert mesh is not None
        split(model, splits, mesh["tp"])
    if plan.cp > 1:
        from paceline.parallel.context.apply import split_sequence

        split_sequence(model, units, plan, device)
    if plan.recompute != "none":
        for unit in units or [model]:
            recompute(unit, plan)
    if compile and plan.zero < 2 and any(map(_is_torchs, units)):
        compile_units([model])
    elif compile:
        compile_units(units or [model])
    if plan.zero >= 2 or (plan.is_mixed and plan.data_ranks > 1):
        if gathered is not None:
            units = [model.get_submodule(name) for name in gathered]
        _shard(model, units, plan, data_mesh(mesh if mesh is not None else build_mesh(plan, device)))
        fill(model)
        return model
    fill(model)
    if plan.data_ranks == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return replicate(model)


def refuse_compiled(plan: Plan) -> None:
    """Raise PlanError for a plan under which blocks cannot be compiled."""
    if plan.cp > 1:
        raise PlanError(f"plan {plan}: attention that goes round a ring of ranks cannot be compiled yet; leave --compile or cp out")
    if plan.tp > 1 and plan.recompute != "none":  # torch's compiler keeps the mesh of split weights as if it were a tensor (2.13)
        raise PlanError(f"plan {plan}: split weights whose blocks run again cannot be compiled yet; leave --compile, recompute or tp out")
    if plan.schedule in TWICE:
        raise PlanError(
            f"schedule={plan.schedule} puts off the gradients of weights, and a compiled block computes all of its gradients at once; "
            "use schedule=1f1b or interleaved, or leave --compile out"
        )


def recompute(module: nn.Module, plan: Plan) -> None:
    """Forget the activations inside of `module` and compute them again in the backward pass; selective: but keep the results of
    products and attention, which are dear (Korthikanti et al., Reducing activation recomputation, 2022)."""
    from torch.utils.checkpoint import checkpoint

    inner = module.forward
    selective = plan.recompute == "selective"
    options: dict[str, Any] = {"context_fn": partial(_selective, again=plan.schedule in TWICE)} if selective else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **options, **kwargs)

    module.forward = forward


def _selective(again: bool) -> tuple[Any, Any]:
    """What runs around a forward pass, and around its recomputation; `again`: of which there may be several."""
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    keeping, giving = create_selective_checkpoint_contexts(DEAR)
    return keeping, _Again(giving) if again else giving


@dataclass
class _Again:
    """Gives what was kept in each backward pass. torch's context gives a result once, and forgets it (2.13)."""

    giving: Any

    def __enter__(self) -> None:
        self.kept = {operation: copy(results) for operation, results in self.giving.storage.items()}
        self.giving.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.giving.__exit__(*error)
        self.giving.storage.update(self.kept)


ATEN = torch.ops.aten
DEAR = [
    op.default
    for op in (
        ATEN.mm,
        ATEN.addmm,
        ATEN.bmm,
        ATEN.convolution,
        ATEN._scaled_dot_product_flash_attention,
        ATEN._scaled_dot_product_flash_attention_for_cpu,
        ATEN._scaled_dot_product_efficient_attention,
        ATEN._scaled_dot_product_cudnn_attention,
    )
]


def compile_units(units: list[nn.Module]) -> None:
    """Compile each unit, which is quick where they are alike. (The whole model where they are single layers of torch's own, unless it
    is cut at them.) Raises LaunchError where the compiler's cache is somebody else's."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    owner = os.stat(cache_dir()).st_uid
    if owner not in (os.geteuid(), 0):  # its code would run here; torch takes whatever lies in /tmp under the name of this user
        raise LaunchError(f"torch's compiler keeps its code in {cache_dir()}, which is of user {owner}; set TORCHINDUCTOR_CACHE_DIR")
    for module in units:
        inner = module.forward

        def forward(*args: Any, inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        # Dynamo does not look into a forward of torch's own that is called first, and counts recompilations by code object.
        forward.__code__ = forward.__code__.replace()
        module.forward = torch.compile(forward if _is_torchs(module) else inner)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def replicate(model: nn.Module, find_unused: bool = False) -> DistributedDataParallel:
    """`model` on every data rank, with averaged gradients. The weights are equal already, so nothing is broadcast."""
    return DistributedDataParallel(
        model,
        init_sync=False,
        **NO_BUFFER_SYNC,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
    )


def release(model: nn.Module) -> None:
    """Let go of the process group. DDP's reducer would else destroy it last, while it holds Python's lock that one of the
    group's threads may wait for: a deadlock at the end of a training, now and then (torch 2.13, gloo)."""
    if isinstance(model, DistributedDataParallel):
        del model.logger, model.reducer


# torch 2.13 has another name for it, and 2.11 only the old one.
NO_BUFFER_SYNC: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in signature(DistributedDataParallel).parameters else "broadcast_buffers": False
}


def _shard(model: nn.Module, units: list[nn.Module], plan: Plan, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard  # 0.7 s to import

    for unit in [*units, model]:
        unit.register_forward_hook(own_memory)
    whole = scalars(model)
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=plan.zero == 3, ignored_params=whole)
    # The root is gathered again at once by the backward pass, so that to reshard it would be in vain.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=whole)


def own_memory(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook: outputs that are views are copied. An operation in place on one would drop `fully_shard`'s hook for the backward
    pass, and with it the gathering of weights (torch 2.13 warns of it)."""

    def is_view(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._is_view()

    return tree_map(lambda leaf: leaf.clone() if is_view(leaf) else leaf, output) if any(map(is_view, tree_leaves(output))) else None


def scalars(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that `fully_shard` cannot cut: each rank keeps them whole."""
    return {parameter for parameter in model.parameters() if not parameter.dim()}


@torch.no_grad()
def average_scalars_(params: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average the gradients of scalars over the data ranks, as `fully_shard` does with what it cuts. None stays where all have None."""
    own = [parameter.grad for parameter in params]
    sums = torch.tensor([[0.0, float(grad is not None)] for grad in own], dtype=torch.float64, device=params[0].device)
    for row, grad in zip(sums, own, strict=True):
        if grad is not None:
            row[0] = grad
    for axis in range(mesh.ndim):
        dist.all_reduce(sums, group=mesh.get_group(axis))
    for (total, holders), parameter in zip(sums, params, strict=True):
        if parameter.grad is not None or holders:
            parameter.grad = (total / mesh.size()).to(parameter.dtype)


def blocks(model: nn.Module, layout: Layout) -> list[nn.Module]:
    """The units of sharding and compilation. Blocks that share a parameter with another part belong to the root."""
    if layout.blocks is None:
        found = _longest_list(model)
    else:
        found = []
        for path in layout.blocks:
            try:
                module = model.get_submodule(path)
            except AttributeError:
                known = [name for name, _ in model.named_modules() if name]
                raise TaskError(f"layout().blocks names {path!r}, which the model has not{nearest(path, known)}") from None
            found += list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else [module]
    return not_shared(model, found)


def not_shared(model: nn.Module, modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Of `modules` those with parameters that no other part of `model` uses."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return [
        block
        for block in modules
        if not isinstance(block, (nn.ModuleList, nn.ModuleDict))
        and (own := [id(parameter) for parameter in block.parameters()])
        and all(uses[parameter] == sum(parameter == id(p) for m in block.modules() for p in m._parameters.values()) for parameter in own)
    ]


def _longest_list(model: nn.Module) -> list[nn.Module]:
    lists = [
        [child for child in module.children() if any(True for _ in child.parameters())]
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
    ]
    return max(lists, key=len, default=[])


def check_splits(plan: Plan, optimizer: torch.optim.Optimizer) -> None:
    """Raise PlanError for an optimizer whose update of a shard is not the shard of its update."""
    if plan.zero >= 2 and not plan.dp == plan.cp == 1 and type(optimizer).__name__ not in ELEMENTWISE:
        raise PlanError(
            f"plan {plan} cuts the weights, and {type(optimizer).__name__} is not known to update each element on its own; "
            f"use ddp or zero1, or one of {', '.join(sorted(ELEMENTWISE))}"
        )


ELEMENTWISE = frozenset({"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"})
