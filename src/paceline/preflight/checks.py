"""The checks of a training before it is queued, in order."""

from paceline.preflight import (
    cache_check,
    model_checks,
    resource_checks,
    room_check,
    site_checks,
    usage_check,
)
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
    "room": Check(room_check.check_room, needs=frozenset({"task", "ranks"})),
    "usage": Check(usage_check.check_usage, needs=frozenset({"data", "room"})),
    "cache": Check(cache_check.check_cache, needs=frozenset({"data"})),
    "time": Check(resource_checks.check_time, needs=PLANNED | {"build"}),
}
