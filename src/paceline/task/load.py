"""Build a task from its reference and its fields, with checks of its methods."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from paceline.errors import TaskError
from paceline.spec import HF_PREFIX, HF_TASK, KEYS, TABLES, abbreviate, describe_error, set_key, suggest
from paceline.task.importing import import_task_class
from paceline.task.interface import METHODS, REQUIRED, Task, takes_rng
from paceline.user_code import (
    UserCode,
    describe_exception,
    find_user_line,
    relative_path,
)

if TYPE_CHECKING:
    pass


_received: dict[str, Task] = {}  # tasks that another process sent to this one, by reference


def keep_received(reference: str, task: Task) -> None:
    """Let `load_task` return a task that another process sent, for the rest of this process."""
    _received[reference] = task


def load_task(reference: str, fields: Mapping[str, Any]) -> Task:
    """Return the task that `reference` names, with these fields. Raises TaskError."""
    if reference in _received:
        return _received[reference]
    return build_task(load_task_class(reference), reference, fields)


def build_task(kind: type[Task], reference: str, fields: Mapping[str, Any]) -> Task:
    """Return a task of a class, with these fields. `reference` names it in errors. Raises TaskError."""
    known = [field.name for field in dataclasses.fields(kind)]
    if reference == HF_TASK and isinstance(fields.get("folder"), str):
        reference = HF_PREFIX + relative_path(fields["folder"])
    for name, value in fields.items():
        if name not in known:
            raise TaskError(
                f"{reference} has no field {abbreviate(name, str)}{_suggest_field(name, value, known)}"
            )
    with UserCode(kind.__name__, kind.__init__):  # the fields may have validators
        try:
            # As JSON, because strict validation accepts a list for a tuple only there.
            return TypeAdapter(kind).validate_json(json.dumps(dict(fields), default=str))
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")  # raised by a validator of the task
            why = (
                describe_exception(cause)
                if isinstance(cause, Exception) and find_user_line(cause) is not None
                else describe_error(error, known, "field")
            )
            raise TaskError(f"{reference}: {why}") from error


def load_task_class(reference: str) -> type[Task]:
    """Return the class that `reference` names, after a check of its methods and fields. Raises TaskError."""
    kind = import_task_class(reference)
    check_task_class(kind, reference)
    return kind


def check_task_class(kind: type[Task], reference: str) -> None:
    """Raise TaskError if a class lacks methods or has unsuitable fields. `reference` names it in errors."""
    defined = {name for name in METHODS if getattr(kind, name) is not getattr(Task, name)}
    defined_or_replaced = defined | ({"loss"} if {"global_loss", "updates"} & defined else set())
    if missing := [name for name in REQUIRED if name not in defined_or_replaced]:
        raise TaskError(f"{reference} has no method {missing[0]}; a task requires {', '.join(REQUIRED)}")
    for name, hint in (
        ("loss", "keep loss if it is a mean over samples, or else global_loss"),
        ("weights", "apply the weights in global_loss"),
        ("loss_weights", "apply the weights in global_loss"),
        ("auxiliary_loss", "add it in global_loss"),
        ("updates", "give each Update a loss by item"),
    ):
        if {name, "global_loss"} <= defined:
            raise TaskError(f"{reference} defines both global_loss and {name}; {hint}")
    if {"updates", "auxiliary_loss"} <= defined:
        raise TaskError(f"{reference} defines both updates and auxiliary_loss; define one of them")
    for name, other in (("batch_sums", "auxiliary_loss"), ("auxiliary_loss", "batch_sums")):
        if name in defined and other not in defined:
            raise TaskError(f"{reference} defines {name} without {other}; define both")
    for name, what in (("transform", "sample"), ("batch_transform", "batch")):
        if name in defined and not takes_rng(getattr(kind, name)):
            raise TaskError(f"{reference}: {name} has no parameter rng; define {name}(self, {what}, rng)")
    if clashing := [field.name for field in dataclasses.fields(kind) if field.name in METHODS]:
        raise TaskError(
            f"{reference}: the field {clashing[0]!r} has the name of a method of Task; rename the field"
        )


def _suggest_field(name: str, value: Any, fields: list[str]) -> str:
    """Return a hint for an unknown field: the nearest field, or the key of the request with that name."""
    hint = suggest(name, fields)
    first, _, rest = name.partition(".")
    if rest and first in fields:  # --set makes a table of such a name, a dict in Python does not
        return f"; write {{{first!r}: {{{rest!r}: …}}}}"
    if isinstance(value, dict) and not hint.startswith("; did"):  # of a dotted name, such as optimiser.lr
        table = suggest(name, sorted(TABLES - {"set"}))
        return f"{table[:-1]}.{next(iter(value), '')}?" if table.startswith("; did") else hint
    keys = [set_key(key) for key in KEYS if key.rpartition(".")[2] == name and key not in TABLES]
    return (
        f"; a key of the request is set by --set {keys[0]}=VALUE"
        if keys and not hint.startswith("; did")
        else hint
    )
