"""Flight: a training that is asked for, and what follows from that; each part is worked out when it is first asked for."""

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
from paceline.plan.cost_model.framework_profiles import recipe_of_precision
from paceline.plan.plan import AUTO, Plan, ResolvedPlan, read_plan
from paceline.run import choose_path
from paceline.spec import Launch, Spec

if TYPE_CHECKING:
    from paceline.cluster.facts import Cluster
    from paceline.plan.cost_model.cost import Cost
    from paceline.plan.model.facts import ModelFacts
    from paceline.training.setup import TrainingData


@dataclass(frozen=True)
class PreflightContext:
    """Every part raises the Error of what cannot be."""

    spec: Spec
    launch: Launch
    time: str | None  # in Slurm's words
    site_file: Path | None
    target: str | None  # the cluster, in words or as a file; None: cluster.json here, or this machine

    @cached_property
    def site(self) -> Site:
        """With a site file that cannot be read: one that asks for nothing."""
        with contextlib.suppress(SpecError):
            return read_site(self.site_file)
        return Site()

    @cached_property
    def job(self) -> Job:
        """With any folder for its run."""
        return build_job(self.launch, self.site, Path("preflight"), self.time)

    @cached_property
    def run(self) -> Path:
        return choose_path(self.launch.run, self.spec.task)

    @cached_property
    def task(self) -> tasks.Task:
        return tasks.load_task(self.spec.task, self.spec.set)

    @cached_property
    def data(self) -> TrainingData:
        from paceline.training.setup import open_data

        return open_data(self.spec, self.task)

    @cached_property
    def cluster(self) -> Cluster:
        """That of the job: nodes like this one, where none is said."""
        from paceline.cluster import local_cluster
        from paceline.cluster.published import find

        if self.target is not None:
            return find(self.target)
        found = local_cluster.load_cluster(self.launch.device)
        return found.model_copy(update={"nodes": max(found.nodes, self.launch.nodes)})

    @cached_property
    def plan(self) -> Plan:
        """As it is said; of auto, the one that is chosen."""
        if self.launch.plan != AUTO:
            return read_plan(self.launch.plan, self.job.ranks, self.spec.batch)[0]
        from paceline.training.auto_plan import choose_plan

        self._check_devices()
        return choose_plan(
            self.spec, self.task, self.job.ranks, self.launch.device, self.launch.nodes, self.cluster
        ).plan

    @cached_property
    def on(self) -> ResolvedPlan:
        """The plan on the ranks of the job."""
        return self.plan.resolve(self.job.ranks)

    @cached_property
    def facts(self) -> ModelFacts:
        from paceline.training.model_facts.describe import describe

        return describe(self.spec, self.task)

    @cached_property
    def cost(self) -> Cost:
        """What a step of the plan is predicted to take."""
        from paceline.plan.search.best_plans import find_best_plans

        self._check_devices()
        recipe = recipe_of_precision(self.spec.precision)
        return find_best_plans(
            self.facts, self.cluster, self.spec.batch, str(self.plan), recipe, self.job.ranks
        ).plans[0][1]

    def _check_devices(self) -> None:
        """Raises ClusterError where jobs get GPUs, and which is not known here."""
        said = self.site.gres or self.site.gpus_per_node
        if said and self.target is None and self.launch.device != "cpu" and self.cluster.device.kind == "cpu":
            example = f"--cluster a100-80g:4x{self.launch.nodes}"
            raise ClusterError(
                f"jobs get GPUs ({said} a node), and there are none here: say what they are, as in {example}"
            )

    @cached_property
    def checkpoint_bytes(self) -> int:
        from paceline.training.dry_run.checkpoint_size import compute_state_bytes

        return compute_state_bytes(self.spec, self.task)
