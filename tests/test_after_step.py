"""The operations that a task declares."""

import re
from typing import Any

import pytest

from paceline import after_step
from paceline.after_step import Clamp, CopyTo, Ema, Normalize, Polyak
from paceline.errors import TaskError


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Ema, {"decay": 1.0}, "Ema: decay must be at least 0 and below 1, got 1.0"),
        (Ema, {"decay": "0.9"}, "Ema: decay must be at least 0 and below 1, got '0.9'"),
        (Ema, {"every": 0}, "Ema: every must be an integer, at least 1, got 0"),
        (
            Polyak,
            {"source": "a", "target": "b", "tau": 0},
            "Polyak: tau must be above 0 and at most 1, got",
        ),
        (Polyak, {"source": "a", "target": "b", "every": True}, "Polyak: every must be an integer"),
        (CopyTo, {"source": "a", "target": "b", "every": 1.5}, "CopyTo: every must be an integer"),
        (Clamp, {"params": "*"}, "Clamp requires low, high or both"),
        (Clamp, {"params": "*", "low": 1, "high": 0}, "Clamp: low=1 exceeds high=0; swap them"),
        (Clamp, {"params": "*", "low": float("nan")}, "Clamp: low must be finite, got nan"),
        (Normalize, {"params": "*", "norm": 0}, "Normalize: norm must be above 0, got 0"),
        (Normalize, {"params": "*", "dim": 0.5}, "Normalize: dim must be an integer or None, got 0.5"),
    ],
)
def test_values_that_are_refused(kind: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=re.escape(message)):
        kind(**values)


def test_names() -> None:
    assert {*after_step.__all__} == {"Clamp", "CopyTo", "Ema", "Normalize", "StepOperation", "Polyak", "Swa"}
    for name in after_step.__all__:
        assert getattr(after_step, name).__doc__.split("\n")[0].endswith(".")
