"""Parameters with sparse gradients: which plans and optimizers support them."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from paceline.errors import PlanError, TaskError
from paceline.plan.plan import ResolvedPlan

REFUSE_SPARSE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def find_sparse_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters whose gradients are sparse, by name."""
    sparse = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    }
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in sparse and parameter.requires_grad
    }


def check_sparse(plan: ResolvedPlan, model: nn.Module) -> None:
    """Raise PlanError if the model has sparse gradients and the plan shards or averages dense tensors."""
    names = list(find_sparse_parameters(model))
    if names and (plan.zero or plan.splits_model or plan.cp > 1 or plan.is_asynchronous):
        raise PlanError(
            f"plan {plan}: the gradient of {names[0]} is sparse, which only single and ddp support; "
            "use one of these plans, or sparse=False"
        )


def check_sparse_support(optimizer: torch.optim.Optimizer, sparse: Mapping[str, nn.Parameter]) -> None:
    """Raise TaskError if one of torch's optimizers refuses sparse gradients, or would have sparse state.

    sparse: the parameters with sparse gradients, by name.
    """
    ids = {id(parameter): name for name, parameter in sparse.items()}
    for group in optimizer.param_groups:
        if name := next((ids[id(parameter)] for parameter in group["params"] if id(parameter) in ids), None):
            kind, decays = type(optimizer), bool(group.get("weight_decay"))
            refuses = kind in REFUSE_SPARSE or (kind is torch.optim.SGD and bool(group["momentum"]))
            if refuses or (decays and kind in (torch.optim.SGD, torch.optim.Adagrad)):
                raise TaskError(
                    f"the gradient of {name} is sparse, which {kind.__name__} does not support with its "
                    "settings; use --optimizer sgd with optimizer.momentum=0 and optimizer.weight_decay=0, "
                    "Adagrad in optimizer(), or sparse=False"
                )


def coalesce_(params: Iterable[nn.Parameter]) -> None:
    """Sum the duplicate rows of sparse gradients."""
    for parameter in params:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
