"""The checks of a training before it is queued, in order."""

from paceline.preflight import model_checks, resource_checks, site_checks
from paceline.preflight.finding import Check

PLANNED = frozenset({"task", "data", "plan"})
CHECKS = {
    "site": Check(site_checks.check_site),
    "ranks": Check(model_checks.check_ranks),
    "slurm": Check(site_checks.check_slurm, needs=frozenset({"site", "ranks"})),
    "task": Check(model_checks.check_task),
    "weights": Check(model_checks.check_weights, needs=frozenset({"task"})),
    "data": Check(model_checks.check_data, needs=frozenset({"task"})),
    "plan": Check(model_checks.check_plan, needs=frozenset({"ranks"})),
    "build": Check(model_checks.check_build, needs=PLANNED),
    "memory": Check(resource_checks.check_memory, needs=PLANNED | {"build"}),
    "room": Check(resource_checks.check_room, needs=frozenset({"task", "ranks"})),
    "time": Check(resource_checks.check_time, needs=PLANNED | {"build"}),
}
