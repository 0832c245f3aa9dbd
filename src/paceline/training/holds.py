"""What must hold of a plan whose update is not that of one process, in place of equality."""

from dataclasses import replace

from paceline.plan.plan import Plan
from paceline.training.server import STALENESS


def what_must_hold(plan: Plan) -> list[str]:
    """A sentence each; none for a plan that computes what one process computes, which is checked instead."""
    if plan.servers is not None:
        return _of_servers(plan)
    return _of_local_sgd(plan) if plan.period is not None else []


def same_update(plan: Plan) -> Plan | None:
    """The nearest plan that computes what one process computes, so that the same machinery can be compared with it; None for one
    that does so itself. Local SGD with period=1 does for SGD, momentum or not, without weights of items, BatchNorm and clipping."""
    if plan.servers is not None:
        return replace(plan, staleness=0) if plan.staleness != 0 else None
    return replace(plan, period=1) if plan.period not in (None, 1) else None


def _of_local_sgd(plan: Plan) -> list[str]:
    start = f"step {plan.switch}" if plan.switch else "the start"
    until = [f"Until step {plan.switch} losses and weights are those of ddp, to the last bit."] if plan.switch else []
    return [
        *until,
        f"After every {plan.period} steps from {start} on the weights of all ranks are equal, to the last bit.",
        "With period=1 and SGD, momentum or not, the weights are those of ddp within 1e-12 in float64.",
        "Evaluations and checkpoints change nothing: stopped and resumed on the same ranks, it is bit-equal to one that never stopped.",
        "It learns the digits task to the accuracy of ddp within 1 %.",
    ]


def _of_servers(plan: Plan) -> list[str]:
    staleness = plan.staleness if plan.staleness is not None else STALENESS
    ahead = f"No worker is more than {staleness} steps ahead of the slowest."
    if not staleness:
        ahead = "Losses, norms and weights are those of one process within 1e-12 in float64, but for BatchNorm and dropout."
    return [
        ahead,
        "With staleness=0 several servers make the weights of one server, to the last bit, where gradients are not clipped.",
        "Gradients that were acknowledged are in an update, also when their worker dies; the others go on.",
        "It learns the digits task to the accuracy of ddp within 1 %.",
    ]
