"""Spec and Launch: the request of a training, as frozen values.

They are read from TOML and overridden by `key=value`. A contradiction is an error; values are never repaired.
"""

from paceline.spec.batch_schedule import StepBatches
from paceline.spec.guard import WeightGuard
from paceline.spec.keys import KEYS, TABLES, keys, set_key
from paceline.spec.launch import Launch, parse_monitor
from paceline.spec.loading import Loading, MixtureWeights
from paceline.spec.messages import abbreviate, describe_error, suggest
from paceline.spec.optimizer import Optimizer, ParamGroup
from paceline.spec.request import apply_overrides, build, load, load_own, save
from paceline.spec.saving import Save, Stop
from paceline.spec.schedule import SCHEDULE_OWNERS, Schedule
from paceline.spec.toml_values import (
    check_same_value,
    parse_overrides,
    parse_value,
    read_toml,
    replace_length,
)
from paceline.spec.training import DEFAULT_EPOCHS, HF_PREFIX, HF_TASK, Spec
from paceline.spec.values import TOO_LARGE, Value, check_printable, list_keys

__all__ = [
    "DEFAULT_EPOCHS",
    "HF_PREFIX",
    "HF_TASK",
    "KEYS",
    "SCHEDULE_OWNERS",
    "TABLES",
    "TOO_LARGE",
    "Launch",
    "Loading",
    "MixtureWeights",
    "Optimizer",
    "ParamGroup",
    "Save",
    "Schedule",
    "Spec",
    "StepBatches",
    "Stop",
    "Value",
    "WeightGuard",
    "abbreviate",
    "apply_overrides",
    "build",
    "check_printable",
    "check_same_value",
    "describe_error",
    "keys",
    "list_keys",
    "load",
    "load_own",
    "parse_monitor",
    "parse_overrides",
    "parse_value",
    "read_toml",
    "replace_length",
    "save",
    "set_key",
    "suggest",
]
