"""ModelFacts from running a task: operations are counted in a real pass, and real steps are timed."""

from dataclasses import replace

import torch

from paceline.bench.compute.step import prepare_step, time_step
from paceline.cluster.facts import Cluster
from paceline.data.fake import example_batch
from paceline.errors import TaskError
from paceline.plan.cost_model.optimizer_state import recipe_of_request
from paceline.plan.cost_model.predict import predict
from paceline.plan.model.facts import ModelFacts
from paceline.plan.plan import Plan, ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task, has_own_optimizer
from paceline.training.model_facts.describe import SAMPLES, count_facts, describe
from paceline.training.model_facts.op_counter import OpCounter

BUDGET_S = 5.0
# Parts of a predicted step that scale with the measured time.
COMPUTE_PARTS = ("products", "attention", "other operations", "computed again")


def measure(spec: Spec, task: Task, cluster: Cluster, device: torch.device) -> ModelFacts:
    """Return the facts of a task, with `slower` set so that predicted steps take as long as real steps.

    cluster: this machine.

    If the model cannot be described without running it, its operations are counted in a real pass.
    Raises TaskError if the task cannot be run.
    """
    with prepare_step(spec, task, device) as ready_step:
        try:
            facts = describe(spec, task)
        except TaskError:
            model = ready_step.prepared.model
            batch = example_batch(spec.model_copy(update={"batch": SAMPLES}), task, ResolvedPlan())
            facts = count_facts(OpCounter(model, task, {}), task, batch, SAMPLES)
            model.zero_grad()
        measured_s = time_step(ready_step, BUDGET_S).median_s
    expected = predict(
        facts,
        Plan(dp=1),
        cluster,
        spec.batch,
        recipe_of_request(spec, facts, has_own_optimizer(task)),
        ranks=1,
    )
    compute_s = sum(part.value for part in expected.time.parts if part.name in COMPUTE_PARTS)
    rest_s = expected.step_s - compute_s
    return replace(facts, source="measured", slower=max(measured_s - rest_s, 0.1 * measured_s) / compute_s)
