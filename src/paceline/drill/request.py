"""The folder of one training of a drill: a task that logs the samples it consumes, and the request."""

from pathlib import Path

from paceline import spec as specs
from paceline.cluster.limits import usable_cores
from paceline.drill.faults import choose_save_every
from paceline.drill.training import PACE, SAMPLE_LOG
from paceline.errors import SpecError
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Launch, Spec, Stop, WeightGuard

TASK, REQUEST = "sample_log_task.py", "request.toml"
SOURCE = '''"""The task of a drill."""

from pathlib import Path

from paceline.drill.sample_log_task import SampleLog, wrap_task
from paceline.task import import_task_class

{name} = wrap_task(
    import_task_class({task!r}),
    SampleLog(Path({log!r}), Path({pace!r}), samples={samples}, microbatches={microbatches}),
)
'''


def write_request(
    folder: Path,
    spec: Spec,
    launch: Launch,
    plan: ResolvedPlan,
    timeout_s: float | None = None,
    guard: WeightGuard | None = None,
) -> None:
    """Create a folder with task and request.

    spec: has the task with its whole path, and the number of steps.
    timeout_s: replaces the timeout of `spec`. guard: of the training; by default it has none."""
    assert spec.steps is not None
    if not spec.batches.is_constant:
        raise SpecError("a drill requires one batch; leave out batch_schedule and batch_warmup")
    (folder / SAMPLE_LOG).mkdir(parents=True)
    folder = folder.absolute()
    name = spec.task.rpartition(":")[2]
    name = name if name.isidentifier() else "Wrapped"
    log, pace = str(folder / SAMPLE_LOG), str(folder / PACE)
    samples, microbatches = spec.batch // plan.dp, plan.microbatches
    (folder / TASK).write_text(
        SOURCE.format(
            name=name, task=spec.task, log=log, pace=pace, samples=samples, microbatches=microbatches
        ),
        encoding="utf-8",
    )
    save = spec.save.model_copy(update={"every": choose_save_every(spec.steps), "minutes": float("inf")})
    # The same in all trainings, since they are compared bit by bit.
    threads = spec.threads or max(1, usable_cores() // (launch.ranks or 1))
    changes = {
        "threads": threads,
        "task": f"{folder / TASK}:{name}",
        "profile": False,
        "save": save,
        "max_time": None,
        "stop": Stop(),
        "evaluate_splits": (),
        "timeout_s": timeout_s or spec.timeout_s,
        "guard": guard or WeightGuard(),
    }
    specs.save(folder / REQUEST, spec.model_copy(update=changes), launch)
