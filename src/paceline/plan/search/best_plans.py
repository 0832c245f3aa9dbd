"""BestPlans: the best plans for a request, or the cost of one plan, and what was assumed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.cluster.facts import Cluster
from paceline.errors import PlanError
from paceline.plan.cost_model.cost import CURRENCY, Bill, Cost, compute_bill
from paceline.plan.cost_model.defaults import add_assumptions
from paceline.plan.cost_model.framework_profiles import Recipe
from paceline.plan.cost_model.interruptions import Interruptions, guess_save_s
from paceline.plan.cost_model.predict import predict
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import Plan, parse
from paceline.plan.search.constraints import Constraint
from paceline.plan.search.search import MARGIN, RejectedPlan, SearchResult, no_fit_error, search_plans


@dataclass(frozen=True)
class BestPlans:
    """Plans with their predicted costs.

    plans: fastest first; or only the requested plan, and then `others` are the plans to compare it with.
    rejected: plans that do not fit, leanest first. assumed: sentences. tokens: of the whole training. price:
    of a device's hour, in `currency`. co2_g_per_kWh: emitted for a kWh. interruptions: that the bill
    includes.
    """

    facts: ModelFacts
    cluster: Cluster
    ranks: int
    batch: int
    plans: list[tuple[Plan, Cost]]
    rejected: list[RejectedPlan]
    assumed: tuple[str, ...]
    tokens: float | None = None
    price: float | None = None
    others: list[tuple[Plan, Cost]] | None = None
    co2_g_per_kWh: float | None = None
    interruptions: Interruptions | None = None
    currency: str = CURRENCY

    @property
    def pool(self) -> list[tuple[Plan, Cost]]:
        """All plans that are known to fit, fastest first."""
        return self.plans if self.others is None else self.others

    def with_costs(
        self,
        currency: str,
        co2_g_per_kWh: float | None = None,
        interrupted_every_h: float | None = None,
        save_s: float | None = None,
    ) -> "BestPlans":
        """Return the same plans with what their bills include; save_s: of a checkpoint [default: a guess]."""
        interruptions = None
        if interrupted_every_h is not None:
            guess = save_s or guess_save_s(self.facts.params, self.cluster.nodes)
            interruptions = Interruptions(3600 * interrupted_every_h, guess)
        return replace(self, currency=currency, co2_g_per_kWh=co2_g_per_kWh, interruptions=interruptions)

    def bill(self, cost: Cost) -> Bill | None:
        """Return the bill of the whole training, or None if its tokens are not specified."""
        return bill_training(
            self.cluster,
            cost,
            self.ranks,
            self.tokens,
            self.price,
            self.co2_g_per_kWh,
            self.interruptions.slowdown if self.interruptions else 1.0,
            self.currency,
        )


def bill_training(
    cluster: Cluster,
    cost: Cost,
    ranks: int,
    tokens: float | None,
    price: float | None,
    co2_g_per_kWh: float | None = None,
    slowdown: float = 1.0,
    currency: str = CURRENCY,
) -> Bill | None:
    """Return the bill of a training of `tokens` tokens, or None if they are not specified.

    `price`: of a device's hour; None: the price in the cluster's description. slowdown: by interruptions.
    """
    if tokens is None:
        return None
    power = cluster.device.power_W if cluster.device.kind != "cpu" else None
    declared = cluster.price_per_device_hour.value if cluster.price_per_device_hour else None
    paid = price if price is not None else declared
    return compute_bill(
        slowdown * cost.step_s,
        tokens / cost.time.tokens,
        ranks,
        power.value if power else None,
        paid,
        co2_g_per_kWh=co2_g_per_kWh,
        currency=currency,
    )


def find_best_plans(
    facts: ModelFacts,
    cluster: Cluster,
    batch: int,
    plan: str | None = None,
    recipe: Recipe | None = None,
    ranks: int | None = None,
    tokens: float | None = None,
    price: float | None = None,
    others: bool = False,
    where: Sequence[Constraint] = (),
    search_s: float | None = None,
) -> BestPlans:
    """Return the plans that fit, fastest first, or the cost of `plan`.

    others: also return the plans to compare `plan` with. where: what these plans and those that are searched
    must satisfy. search_s: after which the search ends with the plans that have a price.

    Raises PlanError for a plan that is impossible, if no plan fits, and if too little is known of the
    machine.
    """
    count = ranks or cluster.devices
    if cluster.device.kind != "cpu" and count > cluster.devices:
        raise PlanError(
            f"{count} ranks, but {cluster.name} has {cluster.devices} devices; use --ranks "
            f"{cluster.devices} or less"
        )
    cluster, assumed = add_assumptions(cluster)
    whole = BestPlans(facts, cluster, count, batch, [], [], assumed, tokens, price)
    if plan is not None:
        requested = parse(plan)
        _check_plan(facts, requested)
        whole = replace(
            whole, plans=[(requested, predict(facts, requested, cluster, batch, recipe, count))], others=[]
        )
        if not others:
            return whole
    found = search_plans(facts, cluster, batch, MARGIN, recipe, count, where, search_s)
    if found.skipped:
        whole = replace(whole, assumed=(*assumed, _describe_skipped(found, search_s or 0.0)))
    if plan is not None:
        return replace(whole, others=found.fitting, rejected=found.rejected)
    if where and not found.fitting:
        rule = ",".join(map(str, where))
        if not found.rejected:
            raise PlanError(
                f"no plan for {count} ranks and a batch of {batch} satisfies --where {rule}; loosen it"
            )
        raise PlanError(
            f"no plan with {rule} fits; the leanest, {found.rejected[0].plan}, {found.rejected[0].reason}; "
            f"loosen --where"
        )
    if not found.fitting:
        raise no_fit_error(found, facts, cluster, batch, recipe, count)
    return replace(whole, plans=found.fitting, rejected=found.rejected)


def _describe_skipped(found: SearchResult, search_s: float) -> str:
    whole = len(found.fitting) + len(found.rejected) + found.skipped
    return (
        f"the search ended after {search_s:g} s: {found.skipped:,} of {whole:,} plans have no price, most of "
        "them with a higher lower bound of their time"
    )


def _check_plan(facts: ModelFacts, plan: Plan) -> None:
    if facts.is_data_parallel_only and (plan.tp * plan.pp * plan.cp > 1 or plan.is_asynchronous):
        raise PlanError(
            f"plan {plan}: updates() of {facts.name} runs several optimizers in a step, which this plan does "
            "not support; use single, ddp, zero1, zero2, zero3 or hsdp"
        )
    if plan.tp not in facts.tp_degrees:
        if len(facts.tp_degrees) == 1:
            raise PlanError(
                f"tp={plan.tp} cannot split {facts.name}, whose heads and widths are unknown; leave tp out"
            )
        shared, degrees = (
            " or ".join(map(str, found)) for found in (sorted(set(facts.heads)), facts.tp_degrees[:8])
        )
        raise PlanError(f"tp={plan.tp} does not divide the heads of {facts.name}, {shared}; use tp={degrees}")
    if plan.pp * (plan.stages or 1) > facts.blocks:
        raise PlanError(
            f"plan {plan} has more stages than {facts.name} has blocks, {facts.blocks}; use a smaller pp"
        )
    if plan.ep > 1 and facts.experts % plan.ep:
        raise PlanError(
            f"ep={plan.ep} does not divide the experts of {facts.name}, {facts.experts}; use another ep"
            if facts.experts > 1
            else f"ep={plan.ep} divides experts, and {facts.name} has none that are known; leave ep out"
        )
    if plan.cp > 1 and (facts.sequence is None or facts.sequence < 2 * plan.cp):
        sequences = f"sequences of {facts.sequence} tokens" if facts.sequence else "no sequences"
        raise PlanError(
            f"cp={plan.cp} requires sequences of at least {2 * plan.cp} tokens, and {facts.name} has "
            f"{sequences}; use cp=1"
        )
