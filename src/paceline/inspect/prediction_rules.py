"""Rules that compare a run with its prediction: the distance to the roofline."""

from paceline.inspect.contention import find_contention
from paceline.inspect.facts import RunFacts
from paceline.inspect.finding import Evidence, Missing, Outcome
from paceline.units import format_seconds

SLOWER = 2.0  # than predicted; predictions of single parts are wrong by up to a half
MIN_DEVIATIONS = 3.0  # of the prediction
MIN_SHARE, MIN_S = 0.15, 2e-3  # of the step


def check_roofline(facts: RunFacts) -> Outcome:
    """Computing that takes much longer than the device needs for the operations of the model."""
    prediction = facts.prediction
    if prediction is None:
        return Missing(facts.why_not_predicted)
    if prediction.cost is None:
        return Missing(f"the run cannot be predicted: {prediction.unpredicted}")
    if facts.is_cpu and (reason := find_contention(facts)) is not None:
        return Missing(reason)
    row = next((row for row in prediction.time if row.name == "compute"), None)
    if row is None or not row.predicted:
        return Missing("the profile of the run has no time of computing")
    slower_s = row.measured - row.predicted
    step_s = prediction.measured.step_s
    if (
        row.measured < SLOWER * row.predicted
        or slower_s < MIN_DEVIATIONS * row.spread
        or slower_s < max(MIN_S, MIN_SHARE * step_s)
    ):
        return []
    values = {"compute_s": row.measured, "predicted_s": row.predicted, "spread_s": row.spread}
    peak = ""
    if prediction.cost.time.peak_flops:
        values["mfu"] = prediction.cost.time.flops / (step_s * prediction.cost.time.peak_flops)
        peak = f", at {values['mfu']:.1%} of its peak"
    return [
        Evidence(
            f"computing takes {format_seconds(row.measured)} a step, {row.measured / row.predicted:.1f} "
            f"times the {format_seconds(row.predicted)} that {prediction.cluster} needs{peak}",
            values,
            slower_s / step_s,
            f"{facts.again} --compile; or find slow operations: paceline profile {facts.path}",
        )
    ]
