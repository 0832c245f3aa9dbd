"""Train shortly under the plans that are predicted to be fastest, and choose the fastest measured one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.table import Table

from paceline.errors import LaunchError, PlanError, RankError, RunError
from paceline.plan.cost_model.cost import Cost
from paceline.plan.plan import Plan
from paceline.plan.search.best_plans import BestPlans
from paceline.plan.search.constraints import Constraint
from paceline.plan.search.measured_plans import MeasuredStep, rank_measured
from paceline.short_runs.request import ShortRequest
from paceline.short_runs.training import ShortRun, count_steps, train_shortly
from paceline.units import format_seconds


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan with its predicted cost and its short training."""

    plan: Plan
    predicted: Cost
    run: ShortRun


@dataclass(frozen=True)
class MeasuredPlans:
    """Plans, the fastest measured first. failed: plans that did not train, with the reason."""

    plans: tuple[MeasuredPlan, ...]
    failed: tuple[tuple[Plan, str], ...]

    @property
    def best(self) -> MeasuredPlan:
        return self.plans[0]

    def describe_failures(self) -> list[str]:
        """Return a sentence for each plan that did not train."""
        return [f"plan {plan}: {reason}" for plan, reason in self.failed]

    def rank(self, found: BestPlans) -> BestPlans:
        """Return predicted plans with the measured ones first, without those that did not train."""
        steps = [
            MeasuredStep(each.plan, each.predicted, each.run.step_s, each.run.error) for each in self.plans
        ]
        return rank_measured(found, steps, [plan for plan, _ in self.failed])

    def as_tree(self) -> list[dict[str, object]]:
        """Return the measurements for JSON; docs/json.md lists the keys."""
        return [
            {
                "plan": str(each.plan),
                "step_s": each.run.step_s,
                "step_error": each.run.error,
                "steps": each.run.steps,
                "predicted_s": each.predicted.step_s,
            }
            for each in self.plans
        ]

    def describe_choice(self) -> str:
        """Return a sentence that says which plan is fastest, and by how much."""
        best = self.best
        begin = f"plan {best.plan}: {format_seconds(best.run.step_s)} a step measured"
        if len(self.plans) == 1:
            return f"{begin}; no other plan was measured"
        second = self.plans[1]
        slower = second.run.step_s / best.run.step_s - 1
        margin = (best.run.error**2 + second.run.error**2) ** 0.5
        end = f"the next best, {second.plan}, takes {slower:.0%} more"
        return f"{begin}; {end}" + (", within the error" if slower < margin else "")


def measure_plans(
    request: ShortRequest,
    ranks: int,
    count: int,
    show: Callable[[str], None],
    where: Sequence[Constraint] = (),
) -> MeasuredPlans:
    """Train shortly under the `count` plans that are predicted to be fastest, of those that can train.

    show: called with what is trained now. Raises PlanError if none of them trained.
    """
    launch = request.launch_on(ranks)
    measured, failed = [], []
    for plan, cost in islice(request.list_plans(ranks, where=where), count):
        show(f"plan {plan}")
        try:
            run = train_shortly(
                request.spec, launch, plan, count_steps(cost.step_s), lambda state: show(f"job: {state}")
            )
        except (PlanError, LaunchError, RankError, RunError) as error:
            failed.append((plan, str(error)))
            continue
        measured.append(MeasuredPlan(plan, cost, run))
    if not measured:
        raise PlanError("none of the plans could train: plan {}: {}".format(*failed[0]))
    measured.sort(key=lambda each: each.run.step_s)
    return MeasuredPlans(tuple(measured), tuple(failed))


def build_table(found: MeasuredPlans) -> Table:
    """Return the table of measured and predicted times."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("plan")
    for name in ("measured", "±", "predicted", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found.plans:
        table.add_row(
            str(each.plan),
            format_seconds(each.run.step_s),
            f"{each.run.error:.0%}",
            format_seconds(each.predicted.step_s),
            f"{each.predicted.step_s / each.run.step_s - 1:+.0%}",
        )
    return table
