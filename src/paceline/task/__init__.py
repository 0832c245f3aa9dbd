"""Task and Layout: what a user writes; importing, building and checking a task."""

from paceline.task.importing import BUILT_IN, check_not_importing, import_task_class
from paceline.task.interface import AFTERWARDS, METHODS, MapDataset, Task, draw_by_sample
from paceline.task.layout import BufferSum, Layout
from paceline.task.load import build_task, check_task_class, keep_received, load_task, load_task_class
from paceline.task.pretrained import PretrainedSource, PretrainedTensor
from paceline.task.reference import (
    check_reference,
    portable_reference_to,
    reference_to,
    resolve_reference,
    storable_fields,
)
from paceline.task.values import field_values, has_figures, has_own_optimizer, read_layout

__all__ = [
    "AFTERWARDS",
    "BUILT_IN",
    "METHODS",
    "BufferSum",
    "Layout",
    "MapDataset",
    "PretrainedSource",
    "PretrainedTensor",
    "Task",
    "build_task",
    "check_not_importing",
    "check_reference",
    "check_task_class",
    "draw_by_sample",
    "field_values",
    "has_figures",
    "has_own_optimizer",
    "import_task_class",
    "keep_received",
    "load_task",
    "load_task_class",
    "portable_reference_to",
    "read_layout",
    "reference_to",
    "resolve_reference",
    "storable_fields",
]
