"""What the commands that plan share: the facts of a task, the cluster, a peak that was said."""

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.spec import Spec

if TYPE_CHECKING:
    from paceline.cluster.facts import Cluster
    from paceline.plan.facts import ModelFacts
    from paceline.plan.recipe import Recipe
    from paceline.task import Task


def counted(target: str, batch: int | None, precision: str | None, set: list[str]) -> "tuple[ModelFacts, Recipe, int]":
    """What planning needs of a task, how a step of it goes, and its batch."""
    from paceline.cli.start import read
    from paceline.task import load_task

    spec, _ = read(target, {"batch": batch, "precision": precision}, set)
    return *described(spec, load_task(spec.task, spec.set)), spec.batch


def described(spec: Spec, task: "Task") -> "tuple[ModelFacts, Recipe]":
    """Raises PlanError for a precision that nothing is known of."""
    from paceline.errors import PlanError
    from paceline.plan.recipe import FLOAT32, PACELINE, PACELINE_FP16
    from paceline.training.describe import describe

    recipes = {"fp32": FLOAT32, "bf16": PACELINE, "fp16": PACELINE_FP16}
    if spec.precision not in recipes:
        raise PlanError(f"what a step in {spec.precision} takes is not predicted; use --precision fp32, bf16 or fp16")
    return describe(spec, task), recipes[spec.precision]


def cluster_of(said: str | None) -> "Cluster":
    """The cluster that was named, or cluster.json here, or this machine."""
    from paceline.cluster import file
    from paceline.cluster.published import find

    if said is not None:
        return find(said)
    if (path := cluster_file()) is not None:
        return file.read(path)
    from paceline.cluster import here
    from paceline.cluster.probe import probe

    return here.cluster(probe())


def cluster_file() -> Path | None:
    """The cluster.json of this folder."""
    return next((path for path in (Path("cluster.json"), Path("bench/cluster.json")) if path.exists()), None)


def with_peak(cluster: "Cluster", peak: float | None) -> "Cluster":
    """10¹² FLOP/s, in the type that is trained in where there is a choice."""
    if peak is None:
        return cluster
    from paceline.cluster.facts import Fact

    flops = Fact(value=peak * 1e12, note="--peak")
    peaks = {"fp32": flops} if cluster.device.kind == "cpu" else {"bf16": flops, "fp16": flops, "fp32": flops}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"peaks_flops": peaks})})
