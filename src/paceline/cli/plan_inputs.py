"""What the commands that plan share: the facts of a task, the cluster, a peak that was said."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.cluster.facts import Cluster
    from paceline.plan.cost_model.framework_profiles import Recipe
    from paceline.plan.model.facts import ModelFacts


def counted(
    target: str, batch: int | None, precision: str | None, set: list[str], on: "Cluster | None" = None
) -> "tuple[ModelFacts, Recipe, int]":
    """What planning needs of a task, how a step of it goes, and its batch. `on`: it is run here, and this is what is known of here."""
    from paceline.cli.launching import read
    from paceline.plan.cost_model.framework_profiles import of_precision
    from paceline.task import load_task

    spec, _ = read(target, {"batch": batch, "precision": precision}, set)
    recipe = of_precision(spec.precision)
    task = load_task(spec.task, spec.set)
    if on is not None:
        from paceline.bench.measured_facts import measure
        from paceline.cli.bench.single import device_for
        from paceline.plan.cost_model.defaults import assuming

        return (
            measure(spec, task, assuming(on)[0], device_for("cpu" if on.device.kind == "cpu" else None)),
            recipe,
            spec.batch,
        )
    from paceline.training.model_facts.describe import describe

    return describe(spec, task), recipe, spec.batch


def cluster_of(said: str | None) -> "Cluster":
    """The cluster that was named, or cluster.json here, or this machine."""
    if said is not None:
        from paceline.cluster.published import find

        return find(said)
    from paceline.cluster import local_cluster

    return local_cluster.known()


def with_peak(cluster: "Cluster", peak: float | None) -> "Cluster":
    """10¹² FLOP/s, in the type that is trained in where there is a choice."""
    if peak is None:
        return cluster
    from paceline.cluster.facts import Fact

    flops = Fact(value=peak * 1e12, note="--peak")
    peaks = {"fp32": flops} if cluster.device.kind == "cpu" else {"bf16": flops, "fp16": flops, "fp32": flops}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"peaks_flops": peaks})})
