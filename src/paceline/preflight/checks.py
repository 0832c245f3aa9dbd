"""What is looked at before a training is queued, in this order."""

from paceline.preflight import model_checks, resource_checks, site_checks
from paceline.preflight.finding import Check

PLANNED = frozenset({"task", "data", "plan"})
CHECKS = {
    "site": Check(site_checks.site),
    "ranks": Check(model_checks.ranks),
    "slurm": Check(site_checks.queue, needs=frozenset({"site", "ranks"})),
    "task": Check(model_checks.task),
    "weights": Check(model_checks.weights, needs=frozenset({"task"})),
    "data": Check(model_checks.data, needs=frozenset({"task"})),
    "plan": Check(model_checks.plan, needs=frozenset({"ranks"})),
    "build": Check(model_checks.built, needs=PLANNED),
    "memory": Check(resource_checks.memory, needs=PLANNED | {"build"}),
    "room": Check(resource_checks.room, needs=frozenset({"task", "ranks"})),
    "time": Check(resource_checks.time, needs=PLANNED | {"build"}),
}
