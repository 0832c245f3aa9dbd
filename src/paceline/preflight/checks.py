"""What is looked at before a training is queued, in this order."""

from paceline.preflight import build, centre, means
from paceline.preflight.finding import Check

PLANNED = frozenset({"task", "data", "plan"})
CHECKS = {
    "site": Check(centre.site),
    "ranks": Check(build.ranks),
    "slurm": Check(centre.queue, needs=frozenset({"site", "ranks"})),
    "task": Check(build.task),
    "weights": Check(build.weights, needs=frozenset({"task"})),
    "data": Check(build.data, needs=frozenset({"task"})),
    "plan": Check(build.plan, needs=frozenset({"ranks"})),
    "build": Check(build.built, needs=PLANNED),
    "memory": Check(means.memory, needs=PLANNED | {"build"}),
    "room": Check(means.room, needs=frozenset({"task", "ranks"})),
    "time": Check(means.time, needs=PLANNED | {"build"}),
}
