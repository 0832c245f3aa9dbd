"""Reads the updates that `Task.updates` declares, and assigns the parameters of the model to them."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from paceline.errors import PlanError, SpecError, TaskError
from paceline.parallel.loss.named_losses import REPORTED
from paceline.plan.plan import ResolvedPlan
from paceline.task import Task, draw_by_sample
from paceline.updates import Update
from paceline.user_code import UserCode

SUPPORTED = "single, ddp, zero1, zero2, zero3 or hsdp"


def read_updates(task: Task, plan: ResolvedPlan, precision: str = "fp32") -> tuple[Update, ...]:
    """Return the updates that the task declares; empty if it declares none.

    Raises TaskError, PlanError for a plan that cannot run them as one process does, and SpecError for fp16.
    """
    if type(task).updates is Task.updates:
        return ()
    with UserCode("updates()", task.updates):
        returned = task.updates()
    if not isinstance(returned, Sequence) or isinstance(returned, str):
        raise TaskError(
            "updates() must return a list of updates, such as [Update('critic', 'critic.*')], got "
            f"{type(returned).__name__}"
        )
    updates = tuple(returned)
    names = [_name_of(update) for update in updates]
    if not updates:
        raise TaskError("updates() returned no update, so nothing would be trained; return one or more")
    if repeated := [name for at, name in enumerate(names) if name in names[:at]]:
        raise TaskError(f"updates() returned two updates named {repeated[0]!r}; rename one of them")
    if reserved := [name for name in names if name in REPORTED]:
        raise TaskError(
            f"updates() returned an update named {reserved[0]!r}, under which each step reports another "
            "value; rename it"
        )
    if type(task).optimizer is not Task.optimizer:
        raise TaskError(
            "the task defines both updates and optimizer; give each Update an optimizer= and remove optimizer"
        )
    for update in updates:
        own = update.optimizer
        if own is not None and (own.ema is not None or own.swa is not None or own.on_nan != "stop"):
            raise TaskError(
                f"Update {update.name}: ema, swa and on_nan of its optimizer apply to the whole training; "
                "set them in the request, as in --set optimizer.ema=0.999"
            )
    without_loss = [update.name for update in updates if update.loss is None]
    if without_loss and type(task).loss is Task.loss:
        raise TaskError(
            f"Update {without_loss[0]} has no loss, and the task has no method loss; give it a loss="
        )
    if not without_loss and type(task).loss_weights is not Task.loss_weights:
        raise TaskError(
            "loss_weights() has the weights of loss(), which no update minimizes; remove it, and multiply in "
            "the losses of the updates"
        )
    if plan.is_asynchronous or plan.model_degree > 1:
        raise PlanError(
            f"plan {plan}: updates() runs several optimizers in a step, which this plan does not support; "
            f"use {SUPPORTED}"
        )
    if not any(update.every == 1 and update.start == 0 for update in updates):
        raise TaskError(
            "updates() returned no update that runs in each step; let one of them have every=1 and start=0"
        )
    if precision == "fp16":
        raise SpecError(
            "precision fp16 does not support updates() of the task, since each loss needs its own scale; "
            "use bf16 or fp32"
        )
    return updates


def _name_of(update: Any) -> str:
    if not isinstance(update, Update):
        raise TaskError(f"updates() must return objects of paceline.Update, got {type(update).__name__}")
    return update.name


def assign_parameters(updates: Sequence[Update], model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the trained parameters of each update, by the name of the update.

    Raises TaskError if an update has none, or if a trained parameter does not belong to exactly one update.
    """
    parameters = dict(model.named_parameters())
    assigned: dict[str, list[str]] = {update.name: [] for update in updates}
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        owners = [update.name for update in updates if update.matches(name)]
        if len(owners) > 1:
            raise TaskError(
                f"parameter {name} belongs to two updates, {owners[0]} and {owners[1]}; change a pattern"
            )
        if not owners:
            raise TaskError(
                f"parameter {name} belongs to no update, so it would not be trained; add it to the params of "
                "one, or call requires_grad_(False) on it in model()"
            )
        assigned[owners[0]].append(name)
    for update in updates:
        if assigned[update.name]:
            continue
        if frozen := next((name for name in parameters if update.matches(name)), None):
            raise TaskError(
                f"Update {update.name}: {frozen} has requires_grad=False, and no trained parameter matches "
                f"{update.params!r}"
            )
        raise TaskError(
            f"Update {update.name}: no parameter of the model matches {update.params!r}; its parameters are "
            f"{', '.join([*parameters][:4])}{', …' if len(parameters) > 4 else ''}"
        )
    return assigned


def task_of(task: Task, update: Update) -> Task:
    """Return the task with the loss and the inputs of an update in place of its own."""
    if update.loss is None:
        return task
    derived = copy.copy(task)
    object.__setattr__(derived, "loss", _with_rng(update.loss, f"{update.name}/loss"))  # a task is frozen
    object.__setattr__(derived, "loss_weights", dict)  # those of the task's own loss do not apply
    if update.inputs is not None:
        object.__setattr__(derived, "inputs", _with_rng(update.inputs, f"{update.name}/inputs"))
    return derived


def _with_rng(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the method with an `rng` for its batch, if it takes one and does not get it already."""
    takes_rng = "rng" in inspect.signature(method).parameters
    return draw_by_sample(method, name) if takes_rng and not hasattr(method, "draws_by_sample") else method


def tasks_of_passes(task: Task, updates: Sequence[Update]) -> list[Task]:
    """Return the task of each forward pass of a step, in their order."""
    tasks = [task_of(task, update) for update in updates if update.loss is not None]
    return [task, *tasks] if not updates or len(tasks) < len(updates) else tasks


def refuse_updates(task: Task, what: str, hint: str) -> None:
    """Raise TaskError if the task declares updates. what: a command or a number that does not know them."""
    if type(task).updates is not Task.updates:
        raise TaskError(f"{what} does not support updates() of {type(task).__name__}; {hint}")
