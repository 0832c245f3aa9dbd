"""Plans whose steps were measured rank before the others, whatever is predicted for those."""

import pytest

from paceline.cluster.published import find
from paceline.plan.model.library import load_model
from paceline.plan.plan import parse
from paceline.plan.report.plan import as_tree, build_tables, describe_measured
from paceline.plan.search.best_plans import BestPlans, find_best_plans
from paceline.plan.search.measured_plans import MeasuredStep, count_maybe_faster, rank_measured


def predict() -> BestPlans:
    return find_best_plans(load_model("gpt2"), find("h100:8"), 64, ranks=8, tokens=1e9, price=2.0)


def measure(found: BestPlans, index: int, factor: float, error: float = 0.02) -> MeasuredStep:
    """Return a training under a predicted plan that took `factor` times the time predicted for the first."""
    plan, cost = found.plans[index]
    return MeasuredStep(plan, cost, factor * found.plans[0][1].step_s, error)


def test_measured_plans_come_first_by_their_measured_times() -> None:
    found = predict()
    ranked = rank_measured(found, [measure(found, 0, 3.0), measure(found, 2, 2.0)])
    names = [str(plan) for plan, _ in found.plans]
    assert [str(plan) for plan, _ in ranked.plans[:4]] == [names[2], names[0], names[1], names[3]]
    assert len(ranked.plans) == len(names)
    best, first = ranked.plans[0][1], found.plans[0][1]
    assert best.step_s == pytest.approx(2.0 * first.step_s)
    assert best.step_s > ranked.plans[2][1].step_s, "an unmeasured plan is predicted to be faster"
    assert best.time.error == pytest.approx((0.05**2 + 0.02**2) ** 0.5)
    assert best.peak_bytes == found.plans[2][1].peak_bytes
    bill, predicted = ranked.bill(best), found.bill(found.plans[2][1])
    assert bill is not None
    assert predicted is not None
    assert bill.seconds / predicted.seconds == pytest.approx(best.step_s / found.plans[2][1].step_s)
    assert count_maybe_faster(ranked) > 0
    assert [row["is_measured"] for row in as_tree(ranked, 3)["plans"]] == [True, True, False]
    table = build_tables(ranked, 3, with_explanation=False)[0]
    assert [row[-1] for row in table.rows] == ["measured", "measured", "predicted"]  # type: ignore[union-attr]


def test_short_names_and_plans_that_do_not_train() -> None:
    """A short training names a plan without the keys that follow from the ranks."""
    found = predict()
    names = [str(plan) for plan, _ in found.plans]
    short = MeasuredStep(parse("ddp"), found.plans[0][1], 1e-6, 0.01)
    ranked = rank_measured(found, [short], [found.plans[0][0]])
    expected = next(name for name in names if name == str(parse("ddp,dp=8,microbatches=1")))
    assert str(ranked.plans[0][0]) == expected
    assert names[0] == expected or names[0] not in {str(plan) for plan, _ in ranked.plans}
    assert count_maybe_faster(ranked) == 0
    assert "none of which is faster" in describe_measured(ranked, 0)


def test_predictions_alone_do_not_name_their_origin() -> None:
    table = build_tables(predict(), 3, with_explanation=False)[0]
    assert "step is" not in table.names  # type: ignore[union-attr]
