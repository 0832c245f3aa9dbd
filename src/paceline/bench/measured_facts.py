"""ModelFacts of a task that is run: one real pass is counted, and real steps on this process are timed."""

from dataclasses import replace

import torch

from paceline.bench.compute.step import ready, time_step
from paceline.cluster.facts import Cluster
from paceline.data.fake import example_batch
from paceline.errors import TaskError
from paceline.plan.cost_model.framework_profiles import of_precision
from paceline.plan.cost_model.predict import predict
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import Plan, ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task
from paceline.training.model_facts.describe import SAMPLES, count_facts, describe
from paceline.training.model_facts.op_counter import OpCounter

BUDGET_S = 5.0
COMPUTED = (
    "products",
    "attention",
    "other operations",
    "computed again",
)  # parts of a step that scale with what was measured


def measure(spec: Spec, task: Task, cluster: Cluster, device: torch.device) -> ModelFacts:
    """`cluster` is this machine, whose prediction for one process is held against the real steps. A model that cannot be described is
    counted in a real pass. Raises TaskError for one that cannot be run."""
    with ready(spec, task, device) as stepping:
        try:
            facts = describe(spec, task)
        except TaskError:
            model = stepping.laid.model
            batch = example_batch(spec.model_copy(update={"batch": SAMPLES}), task, ResolvedPlan())
            facts = count_facts(OpCounter(model, task, {}), task, batch, SAMPLES)
            model.zero_grad()
        took_s = time_step(stepping, BUDGET_S).median_s
    expected = predict(facts, Plan(dp=1), cluster, spec.batch, of_precision(spec.precision), ranks=1)
    computing = sum(part.value for part in expected.time.parts if part.name in COMPUTED)
    rest = expected.step_s - computing
    return replace(facts, source="measured", slower=max(took_s - rest, 0.1 * took_s) / computing)
