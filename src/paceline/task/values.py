"""What a task returns or contains, read with checks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from paceline.errors import TaskError
from paceline.task.interface import Task
from paceline.task.layout import Layout
from paceline.user_code import (
    UserCode,
)

if TYPE_CHECKING:
    pass


def read_layout(task: Task) -> Layout:
    """Return the task's layout. Raises TaskError."""
    with UserCode("layout()", task.layout):
        layout = task.layout()
    if not isinstance(layout, Layout):
        raise TaskError(f"layout() must return a paceline.Layout, got {type(layout).__name__}")
    return layout


def has_own_optimizer(task: Task) -> bool:
    """Return whether the task defines its optimizer, instead of that of the request."""
    return type(task).optimizer is not Task.optimizer


def has_figures(task: Task) -> bool:
    """Return whether the task defines `figures`."""
    return type(task).figures is not Task.figures


def field_values(task: Task) -> dict[str, Any]:
    """Return the fields of a task, by name. A field that is a table is a dict."""
    return {field.name: _as_table(getattr(task, field.name)) for field in dataclasses.fields(task)}


def _as_table(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    return value
