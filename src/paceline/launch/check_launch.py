"""Check a request before anything starts: ranks, plan and task."""

from paceline import task as tasks
from paceline.distributed.world import World
from paceline.errors import LaunchError
from paceline.launch.launchers import LAUNCHERS, find_launcher
from paceline.launch.slurm.job_script import check_even_split
from paceline.plan.plan import AUTO, Plan, ResolvedPlan, read_plan
from paceline.report.mlflow_process import check_mlflow
from paceline.spec import Launch, Spec


def check_launch(spec: Spec, launch: Launch, me: World, task: tasks.Task | None = None) -> Launch:
    """Return the launch with its ranks and plan filled in.

    task: an instance, instead of the task that `spec` names.
    Raises an Error for whatever is wrong before the start.
    """
    check_mlflow(launch.mlflow)
    if launch.nsys and (me.launcher is not None or find_launcher(launch) is not LAUNCHERS["local"]):
        raise LaunchError(
            "--nsys requires that Paceline starts the ranks on this machine; with another launcher, leave it "
            "out and start each rank by nsys: mpirun -np 2 nsys profile paceline train …"
        )
    if me.launcher is None:
        find_launcher(launch).check(launch)
    launch, plan, task = resolve_launch(spec, launch, me, task)
    if me.launcher is None and (plan.splits_model or plan.cp > 1):  # these depend on the modules of the model
        from paceline.training.model_facts.model_analysis import validate_plan

        validate_plan(spec, plan, task)
    return launch


def resolve_launch(
    spec: Spec, launch: Launch, me: World, task: tasks.Task | None = None
) -> tuple[Launch, ResolvedPlan, tasks.Task]:
    """Return the launch with its ranks and plan filled in, the plan with all degrees, and the task.

    Builds no model.
    """
    if me.launcher is not None and launch.ranks not in (None, me.size):
        raise LaunchError(
            f"--ranks {launch.ranks}, but {me.launcher} started {me.size} ranks; leave --ranks out, "
            f"or start {launch.ranks} ranks with {me.launcher}"
        )
    task = task if task is not None else tasks.load_task(spec.task, spec.set)
    ranks = (
        me.size if me.launcher is not None else launch.ranks or launch.nodes * count_devices(launch.device)
    )
    if me.launcher is None:
        check_even_split(ranks, launch.nodes)
    if launch.plan == AUTO and me.launcher is None:
        from paceline.training.planning.auto_plan import choose_plan

        choice = choose_plan(spec, task, ranks, launch.device)
        launch = launch.model_copy(update={"plan": str(choice.plan), "chosen": choice.why, "asked": AUTO})
    if launch.plan == AUTO:  # the ranks choose the plan together
        return launch.model_copy(update={"ranks": ranks}), Plan().resolve(ranks), task
    plan, resolved = read_plan(launch.plan, ranks, spec.batch)
    return launch.model_copy(update={"ranks": ranks, "plan": str(plan)}), resolved, task


def count_devices(device: str | None) -> int:
    """Return the ranks that a node has by default: one per GPU, or 1."""
    import torch

    return max(1, torch.cuda.device_count()) if device != "cpu" else 1
