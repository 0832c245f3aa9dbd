"""A requested training and the values that follow from the request, each computed at its first use."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import task as tasks
from paceline.errors import ClusterError, SpecError
from paceline.launch.slurm.job_script import Job, build_job
from paceline.launch.slurm.site import Site, read_site
from paceline.plan.cost_model.optimizer_state import recipe_of_request
from paceline.plan.plan import AUTO, Plan, ResolvedPlan, read_plan
from paceline.run import choose_path
from paceline.spec import Launch, Spec

if TYPE_CHECKING:
    from paceline.cluster.facts import Cluster
    from paceline.plan.cost_model.cost import Cost
    from paceline.plan.model.facts import ModelFacts
    from paceline.training.training_data import TrainingData


@dataclass(frozen=True)
class PreflightContext:
    """A requested training. Each property raises the Error that makes its value impossible."""

    spec: Spec
    launch: Launch
    time: str | None  # as Slurm writes it
    site_file: Path | None
    target: str | None  # the cluster, as text or file; None: cluster.json in this folder, or this machine

    @cached_property
    def site(self) -> Site:
        """The site file; without any request if it cannot be read."""
        with contextlib.suppress(SpecError):
            return read_site(self.site_file)
        return Site()

    @cached_property
    def job(self) -> Job:
        """The Slurm job, with an arbitrary run folder."""
        return build_job(self.launch, self.site, Path("preflight"), self.time)

    @cached_property
    def run(self) -> Path:
        return choose_path(self.launch.run, self.spec.task)

    @cached_property
    def task(self) -> tasks.Task:
        return tasks.load_task(self.spec.task, self.spec.set)

    @cached_property
    def data(self) -> TrainingData:
        from paceline.training.training_data import open_data

        return open_data(self.spec, self.task)

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster of the job; nodes like this machine if none is specified."""
        from paceline.cluster import local_cluster
        from paceline.cluster.published import find

        if self.target is not None:
            return find(self.target)
        local = local_cluster.load_cluster(self.launch.device)
        return local.model_copy(update={"nodes": max(local.nodes, self.launch.nodes)})

    @cached_property
    def plan(self) -> Plan:
        """The specified plan, or the plan that auto chooses."""
        if self.launch.plan != AUTO:
            return read_plan(self.launch.plan, self.job.ranks, self.spec.batch)[0]
        from paceline.training.planning.auto_plan import choose_plan

        self._check_device_is_known()
        return choose_plan(
            self.spec, self.task, self.job.ranks, self.launch.device, self.launch.nodes, self.cluster
        ).plan

    @cached_property
    def resolved_plan(self) -> ResolvedPlan:
        """The plan on the ranks of the job."""
        return self.plan.resolve(self.job.ranks)

    @cached_property
    def facts(self) -> ModelFacts:
        from paceline.training.model_facts.describe import describe

        return describe(self.spec, self.task)

    @cached_property
    def cost(self) -> Cost:
        """The predicted cost of a step of the plan."""
        from paceline.plan.search.best_plans import find_best_plans

        self._check_device_is_known()
        recipe = recipe_of_request(self.spec, self.facts, tasks.has_own_optimizer(self.task))
        return find_best_plans(
            self.facts, self.cluster, self.spec.batch, str(self.plan), recipe, self.job.ranks
        ).plans[0][1]

    def _check_device_is_known(self) -> None:
        """Raise ClusterError if jobs get GPUs of an unknown kind."""
        gpus = self.site.gres or self.site.gpus_per_node
        if gpus and self.target is None and self.launch.device != "cpu" and self.cluster.device.kind == "cpu":
            raise ClusterError(
                f"jobs get GPUs ({gpus} per node), but this machine has none; "
                f"specify the cluster, e.g. --cluster a100-80g:4x{self.launch.nodes}"
            )

    @cached_property
    def checkpoint_bytes(self) -> int:
        from paceline.training.dry_run.checkpoint_size import compute_state_bytes

        return compute_state_bytes(self.spec, self.task)
