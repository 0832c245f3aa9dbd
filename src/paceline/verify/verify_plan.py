"""`paceline.verify_plan`: check one plan from Python."""

from paceline import task as tasks
from paceline.errors import TaskError
from paceline.plan.plan import Plan, parse
from paceline.spec import Spec
from paceline.task import Task
from paceline.verify.run import Verdict, Verification


def verify_plan(
    spec: Spec,
    plan: Plan | str,
    ranks: int = 2,
    *,
    task: Task | None = None,
    steps: int = 3,
    timeout_s: float = 120.0,
) -> Verdict:
    """Check that a plan computes the same training as one process, on `ranks` processes of this machine.

    Both train `steps` steps in float64 on the CPU, without dropout. Losses, gradients, norms, parameters
    and buffers are compared. The processes import the module that defines the task, so a script that
    calls this needs `if __name__ == "__main__":`.

        verdict = paceline.verify_plan(paceline.Spec(task="digits", batch=64), "zero3")
        assert verdict.same, verdict.first

    spec: the task, its global batch (samples) and the optimizer.
    plan: a Plan, or its text on the command line.
    ranks: number of processes.
    task: an instance, instead of the task that `spec` names.
    steps: number of steps to compare.
    timeout_s: seconds after which a plan that does not end has failed.

    Returns a `Verdict`: `same`, the largest relative differences by step (`rows`) and the `first`
    difference. Raises PlanError for a plan that these ranks, the batch or the model cannot have, and for
    local-sgd and parameter-server plans, whose update differs by design; TaskError for an error in the
    task; RankError if a process fails.
    """
    if task is not None:
        spec = spec.model_copy(update={"task": _reference_to(task), "set": tasks.field_values(task)})
    tasks.load_task(spec.task, spec.set)
    update = {"task": tasks.resolve_reference(spec.task), "steps": steps, "epochs": None}
    parsed = parse(plan) if isinstance(plan, str) else plan
    with Verification(spec.model_copy(update=update), ranks, timeout_s) as verification:
        return verification.verify(parsed)


def _reference_to(task: Task) -> str:
    """Return a reference by which other processes find the class of `task`."""
    reference = tasks.portable_reference_to(task)
    module, _, name = reference.partition(":")
    if module == "__main__":
        raise TaskError(
            f"task {name} is defined in an interactive session, which other processes cannot import; "
            "save it in a file"
        )
    return reference
