"""Inputs of the commands that predict: facts of a task, the cluster, and its peak."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.cli.options.plan_options import Priced
    from paceline.cluster.facts import Cluster
    from paceline.plan.cost_model.framework_profiles import Recipe
    from paceline.plan.model.facts import ModelFacts
    from paceline.spec import Spec
    from paceline.task import Task


def read_task_facts(
    target: str, batch: int | None, precision: str | None, set: list[str], on: "Cluster | None" = None
) -> "tuple[ModelFacts, Recipe, Spec, Task]":
    """Return the facts of a task, its recipe, its request and the task.

    on: if given, steps are measured on this machine, which these facts describe; else nothing runs.
    """
    from paceline.cli.options.launching import read_request
    from paceline.plan.cost_model.optimizer_state import recipe_of_request
    from paceline.task import has_own_optimizer, load_task

    spec, _ = read_request(target, {"batch": batch, "precision": precision}, set)
    task = load_task(spec.task, spec.set)
    if on is not None:
        from paceline.bench.device import choose_bench_device
        from paceline.bench.measured_facts import measure
        from paceline.plan.cost_model.defaults import add_assumptions

        device = choose_bench_device("cpu" if on.device.kind == "cpu" else None)
        facts = measure(spec, task, add_assumptions(on)[0], device)
    else:
        from paceline.training.model_facts.describe import describe

        facts = describe(spec, task)
    return facts, recipe_of_request(spec, facts, has_own_optimizer(task)), spec, task


def find_cluster(name: str | None) -> "Cluster":
    """Return the named cluster, else that of cluster.json in this folder, else this machine."""
    if name is not None:
        from paceline.cluster.published import find

        return find(name)
    from paceline.cluster import local_cluster

    return local_cluster.load_cluster()


def list_clusters(machines: "Sequence[Priced]", peak: float | None) -> "list[Cluster]":
    """Return the facts of each machine; of several, those of instances have the name of the instance."""
    found = [with_peak(find_cluster(machine.cluster), peak) for machine in machines]
    if len(machines) == 1:
        return found
    return [
        cluster.model_copy(update={"name": machine.instance}) if machine.instance is not None else cluster
        for machine, cluster in zip(machines, found, strict=True)
    ]


def with_peak(cluster: "Cluster", peak: float | None) -> "Cluster":
    """Return the cluster with this peak of its devices in 10¹² FLOP/s: fp32 on CPUs, all types on GPUs."""
    if peak is None:
        return cluster
    from paceline.cluster.facts import Fact

    flops = Fact(value=peak * 1e12, note="--peak")
    peaks = {"fp32": flops} if cluster.device.kind == "cpu" else {"bf16": flops, "fp16": flops, "fp32": flops}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update={"peaks_flops": peaks})})
