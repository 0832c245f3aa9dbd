"""What is asked of plans whose update is another one than that of one process."""

from paceline.plan.plan import Plan


def what_must_hold(plan: Plan) -> str:
    """Of local SGD and of a parameter server, in a sentence; nothing of it is checked here yet."""
    if plan.period is not None:
        what = f"each rank trains alone for {plan.period} steps; what must hold is that all ranks are equal after each average"
    else:
        what = "updates come late; what must hold is equality at staleness=0, and the same accuracy in the end"
    return f"plan {plan} is another update than that of one process: {what}; verify does not check that yet"
