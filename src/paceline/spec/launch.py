"""Launch: where and how a training runs."""

import math
import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from paceline.spec.messages import abbreviate
from paceline.spec.values import Value, check_printable


def parse_monitor(value: Any, hint: str) -> float | Literal["off"]:
    """Return the seconds between samples of a node, or "off". Raises ValueError with a hint."""
    if value == "off":
        return "off"
    try:
        seconds = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        seconds = math.nan
    if not MIN_MONITOR_S <= seconds <= MAX_MONITOR_S:
        raise ValueError(
            f"monitor must be off, or seconds between samples from {MIN_MONITOR_S:g} to {MAX_MONITOR_S:g}, "
            f"got {abbreviate(value)}; {hint}"
        )
    return seconds


class Launch(Value):
    """The part of a request that does not determine the result: plan, ranks and how they are started.

        Launch(plan="zero3", ranks=8, nodes=2, restarts=3)

    In a TOML file, these keys are at the top level, next to those of Spec. Errors are raised as by Spec.
    """

    plan: str | None = Field(
        default=None,
        description="plan, or auto for the fastest that fits [default: single on one rank, else ddp]",
    )
    chosen: str | None = Field(default=None, description="written by Paceline: why it chose this plan")
    asked: str | None = Field(
        default=None, description="written by Paceline: the requested plan, if it chose another"
    )
    asked_ranks: int | None = Field(
        default=None, ge=1, le=10**6, description="written by Paceline: the ranks for which it was requested"
    )
    ranks: int | None = Field(
        default=None, ge=1, le=10**6, description="number of processes [default: one per GPU, or 1]"
    )
    nodes: int = Field(
        default=1,
        ge=1,
        le=10**6,
        description="number of nodes of Slurm or Ray; the ranks are distributed evenly over them",
    )
    least_nodes: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="minimum number of nodes to continue with after others were lost [default: all]",
    )
    launcher: Literal["local", "slurm", "ray"] | None = Field(
        default=None, description="what starts the ranks [default: slurm with several nodes, else local]"
    )
    restarts: int = Field(
        default=0, ge=0, le=10**6, description="maximum number of restarts after a rank fails"
    )
    run: str | None = Field(default=None, description="run folder [default: runs/TASK-TIME]")
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="device of the ranks [default: cuda if available, else cpu]"
    )
    report: bool = Field(
        default=True,
        description="write report.html into the run folder at the end",
    )
    nsys: bool = Field(
        default=False,
        description="start each rank under Nsight Systems; the reports are in the folder nsys of the run",
    )
    monitor: float | Literal["off"] = Field(
        default=1.0,
        description="seconds between samples of processors, memory and GPUs of each node, or off",
    )

    mlflow: str | None = Field(
        default=None, description="address of an MLflow server or database to which the run is sent"
    )

    @field_validator("mlflow")
    @classmethod
    def _mlflow_is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return value
        match = re.fullmatch(r"([a-z][a-z0-9+.-]*)://([^/@\s]*)(/[^@]*)?", value)
        is_local = match is not None and (match[1] == "file" or match[1].startswith("sqlite"))
        depth = "//" if match is not None and match[1].startswith("sqlite") else "/"
        is_whole = match is not None and (
            (match[3] or "").startswith(depth) and not match[2] if is_local else match[2] != ""
        )
        if not is_whole:
            raise ValueError(
                f"mlflow must be an address such as http://HOST:5000 or sqlite:////ABSOLUTE/PATH.db, without "
                f"a password, got {abbreviate(value.partition('@')[2] or value)}; MLflow reads the password "
                "from MLFLOW_TRACKING_PASSWORD"
            )
        return value

    @field_validator("monitor", mode="before")
    @classmethod
    def _monitor_is_seconds_or_off(cls, value: Any) -> Any:
        return parse_monitor(value, "write --monitor 1 or --monitor off")

    @model_validator(mode="after")
    def _names_are_printable(self) -> Self:
        check_printable(self, "plan", "asked", "run", "mlflow")
        return self

    @model_validator(mode="after")
    def _least_nodes_need_restarts(self) -> Self:
        if self.least_nodes is not None and self.least_nodes > self.nodes:
            raise ValueError(
                f"--nodes must be MINIMUM:MAXIMUM, got {self.least_nodes}:{self.nodes};"
                f" write {self.nodes}:{self.least_nodes}"
            )
        if self.least_nodes is not None and self.least_nodes < self.nodes and not self.restarts:
            raise ValueError(
                f"--nodes {self.least_nodes}:{self.nodes} requires restarts, to continue on fewer nodes;"
                " specify their maximum number: --restarts 3"
            )
        return self

    @property
    def can_grow(self) -> bool:
        """Whether nodes may join while fewer than `nodes` work."""
        return self.is_elastic and self.least_nodes is not None and self.least_nodes < self.nodes

    @property
    def is_elastic(self) -> bool:
        """Whether an agent on each of several nodes restarts the ranks."""
        return self.nodes > 1 and self.restarts > 0


MIN_MONITOR_S, MAX_MONITOR_S = 0.1, 3600.0  # seconds between samples
