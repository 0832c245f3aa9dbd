"""The folder of one training of a drill: the task that notes what it consumes, and the request."""

from pathlib import Path

from paceline import spec as specs
from paceline.cluster.limits import usable_cores
from paceline.drill.faults import save_every
from paceline.drill.training import PACE, SAMPLE_LOG
from paceline.plan.plan import ResolvedPlan
from paceline.spec import Launch, Spec

TASK, REQUEST = "sample_log_task.py", "request.toml"
SOURCE = '''"""The task of a drill."""

from pathlib import Path

from paceline.drill.sample_log_task import SampleLog, watched
from paceline.task import import_task_class

{name} = watched(import_task_class({task!r}), SampleLog(Path({log!r}), Path({pace!r}), samples={samples}, microbatches={microbatches}))
'''


def write(
    folder: Path, spec: Spec, launch: Launch, plan: ResolvedPlan, timeout_s: float | None = None
) -> None:
    """A new folder. The task in `spec` by its whole path, steps and data degree said. `timeout_s`: another than in `spec`."""
    assert spec.steps is not None
    (folder / SAMPLE_LOG).mkdir(parents=True)
    folder = folder.absolute()
    name = spec.task.rpartition(":")[2]
    name = name if name.isidentifier() else "Watched"
    log, pace = str(folder / SAMPLE_LOG), str(folder / PACE)
    samples, microbatches = spec.batch // plan.dp, plan.microbatches
    (folder / TASK).write_text(
        SOURCE.format(
            name=name, task=spec.task, ledger=log, pace=pace, samples=samples, microbatches=microbatches
        ),
        encoding="utf-8",
    )
    save = spec.save.model_copy(update={"every": save_every(spec.steps), "minutes": float("inf")})
    threads = spec.threads or max(
        1, usable_cores() // (launch.ranks or 1)
    )  # the same in all trainings, which are compared by the bit
    own = {
        "threads": threads,
        "task": f"{folder / TASK}:{name}",
        "profile": False,
        "save": save,
        "timeout_s": timeout_s or spec.timeout_s,
    }
    specs.save(folder / REQUEST, spec.model_copy(update=own), launch)
