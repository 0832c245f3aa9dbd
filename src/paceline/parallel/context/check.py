"""Checks of context parallelism before any rank starts, and their messages."""

import contextlib

import torch
from torch import nn

from paceline.batch import move
from paceline.data.loader import batches
from paceline.data.open_samples import open_training_samples
from paceline.errors import DataError, PlanError, TaskError
from paceline.parallel.context.replace_attention import replace_attention
from paceline.parallel.context.stacks import find_stacks
from paceline.parallel.context.trial_attention import WholeTrial
from paceline.parallel.loss.forward import call_model
from paceline.plan.plan import Plan
from paceline.spec import Spec
from paceline.task import Task, read_layout
from paceline.user_code import UserCode

MIN_POSITIONS = 2  # of a slice: models may treat a single query as the next one of a generated sequence


def check_context_parallel(task: Task, spec: Spec, plan: Plan, model: nn.Module) -> None:
    """Raise PlanError if one sample without values shows, before a rank starts, that cp is impossible.

    The sample passes through the model on the meta device. A model that reads values, or fails, ends this
    pass early; the error then comes from its first step.
    """
    training = open_training_samples(task, spec)
    try:
        [batch] = batches(training, [([0], [0])], torch.device("cpu"), 0, 1)
    except (DataError, TaskError):  # of user code: the first step reports it
        return
    recorder = WholeTrial()
    units = [unit for stack in find_stacks(model, read_layout(task)) for unit in stack]
    previous = [vars(unit).get("forward") for unit in units]
    for unit in units:
        unit.forward = replace_attention(recorder)(unit.forward)
    batch = move(batch, "meta")
    passed = False
    suppressed = contextlib.suppress(Exception)  # but not SystemExit or KeyboardInterrupt
    with (
        UserCode("the forward pass without values", task.model),
        suppressed,
        torch.no_grad(),
        torch.device("meta"),
    ):
        call_model(task, model, batch)
        passed = True
    for unit, forward in zip(units, previous, strict=True):
        del unit.forward
        vars(unit).update({} if forward is None else {"forward": forward})
    if passed and not recorder.lengths:
        raise PlanError(no_attention_message(plan, type(model).__name__))
    if recorder.lengths:
        check_sequence_length(plan, max(recorder.lengths))


def no_attention_message(plan: Plan, model: str) -> str:
    return (
        f"plan {plan}: cp splits the sequence that attention runs over, and {model} calls no "
        "F.scaled_dot_product_attention in its blocks (nn.MultiheadAttention does, and Hugging Face with "
        "attn_implementation='sdpa' or 'eager'); use a plan without cp, or name its blocks in layout()"
    )


def check_sequence_length(plan: Plan, length: int) -> None:
    """Raise PlanError if sequences are too short for `plan.cp` slices."""
    if length < MIN_POSITIONS * plan.cp:
        raise PlanError(
            f"plan {plan}: sequences of {length} positions are too short for cp={plan.cp}, which requires "
            "two positions per rank; "
            + (f"use cp={length // 2} or less" if length >= 4 else "use a plan without cp")
        )
