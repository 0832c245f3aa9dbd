"""ShortRequest: what short trainings train, and how a plan for them is chosen and predicted."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from paceline.cluster.facts import Cluster
from paceline.errors import LaunchError, PlanError, TaskError
from paceline.plan.cost_model.cost import Cost
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import Plan, parse
from paceline.plan.search.best_plans import find_best_plans
from paceline.plan.search.constraints import Constraint
from paceline.spec import Launch, Spec
from paceline.task import Task
from paceline.training.model_facts.model_analysis import validate_plan
from paceline.training.planning.auto_plan import find_trainable, shorten_plan


@dataclass(frozen=True)
class ShortRequest:
    """What short trainings train.

    launch: how ranks are started; plan and number of ranks are added to it. cluster: for predictions.
    """

    spec: Spec
    launch: Launch
    task: Task
    facts: ModelFacts
    recipe: Recipe
    cluster: Cluster

    def launch_on(self, ranks: int) -> Launch:
        """Return the launch of this many ranks. Raises LaunchError if they do not fill the nodes."""
        if self.launch.launcher in (None, "local") or self.launch.ranks == ranks:
            return self.launch.model_copy(update={"ranks": ranks})
        each = self.cluster.ranks_per_node
        if ranks > each and ranks % each:
            raise LaunchError(f"{ranks} ranks do not fill nodes of {each}; use {ranks // each * each}")
        return self.launch.model_copy(update={"ranks": ranks, "nodes": -(-ranks // each)})

    def with_batch(self, batch: int) -> "ShortRequest":
        """Return the same request with another batch."""
        return replace(self, spec=self.spec.model_copy(update={"batch": batch}))

    def predict(self, plan: Plan, ranks: int, cluster: Cluster | None = None) -> Cost:
        """Return the cost of a plan. Raises PlanError if it cannot be predicted."""
        found = find_best_plans(
            self.facts, self._size(ranks, cluster), self.spec.batch, str(plan), self.recipe, ranks
        )
        return found.plans[0][1]

    def list_plans(
        self, ranks: int, plan: str | None = None, where: Sequence[Constraint] = ()
    ) -> Iterator[tuple[Plan, Cost]]:
        """Yield plans that can train the task on this many ranks, with their predicted costs, fastest first.

        plan: only this plan. Raises PlanError or TaskError if there is none.
        """
        if plan is not None:
            requested = parse(plan)
            validate_plan(self.spec, requested.resolve(ranks), self.task)
            yield requested, self.predict(requested, ranks)
            return
        found = find_best_plans(
            self.facts, self._size(ranks), self.spec.batch, recipe=self.recipe, ranks=ranks, where=where
        )
        refused: list[str] = []
        is_any = False
        for candidate, cost in find_trainable(found.plans, self.spec, self.task, ranks, refused):
            is_any = True
            yield shorten_plan(candidate, ranks), cost
        if not is_any:
            raise PlanError(f"no plan that fits can train this task: {refused[0]}")

    def find_plan(self, ranks: int, plan: str | None = None) -> tuple[Plan, Cost]:
        """Return the plan, or the fastest predicted one that can train the task. Raises PlanError."""
        try:
            return next(self.list_plans(ranks, plan))
        except TaskError as error:
            raise PlanError(str(error)) from error

    def _size(self, ranks: int, cluster: Cluster | None = None) -> Cluster:
        """Return the cluster with as many nodes as this many ranks need."""
        cluster = cluster or self.cluster
        if self.launch.launcher in (None, "local"):
            return cluster
        return cluster.model_copy(update={"nodes": max(cluster.nodes, -(-ranks // cluster.ranks_per_node))})
