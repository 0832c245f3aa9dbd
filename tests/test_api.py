"""The public names of `paceline`: the exported names, their signatures, and their use from Python."""

import inspect
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import models
import paceline
from harness import ranks
from paceline import Cluster, Plan, PlanError, RunFolder, Spec, Started, Step, TaskError
from paceline.cluster.published import find

ROOT = Path(__file__).parents[1]
EVENTS = {
    *("Event", "Started", "Step", "Noted", "Profiled", "NoiseMeasured", "Evaluated", "Saved", "Failed"),
    *("Stalled", "Ended"),
}
ERRORS = {
    *("Error", "SpecError", "TaskError", "DataError", "PlanError", "ClusterError", "LaunchError"),
    *("RunError", "CheckpointError", "CorruptionError", "DivergedError", "RankError", "BenchError"),
}
FUNCTIONS = {
    "train": "spec plan=None world=None *ranks=None *task=None *run=None *device=None *restarts=0 *stop=None"
    " *observe=None *monitor=1.0",
    "find_plans": "spec ranks=None cluster=None *plan=None *task=None *tokens=None *price=None",
    "verify_plan": "spec plan ranks=2 *task=None *steps=3 *timeout_s=120.0",
    "describe": "spec task=None",
    "setup": "model optimizer=None plan=None *layout=None *whole=() *unused_parameters=False *run=None"
    " *monitor=1.0",
    "tune": "space metric=min loss *trials=None *sampler=random *seed=0 *journal=None",
    "spawn": "function ranks args *timeout_s=None",
    "evaluate": "run split=validation checkpoint=last *ranks=None *plan=None *batch=None *device=None",
    "predict": "run files=() out=predictions.jsonl checkpoint=last *split=None *ranks=None *plan=None"
    " *batch=None *device=None",
    "generate": "run prompts checkpoint=last *max_new_tokens=None *temperature=None *top_k=None *top_p=None"
    " *beams=None *seed=0 *ranks=None *plan=None *batch=1 *device=None",
}
CLASSES = {
    "BufferSum",
    "Cluster",
    "Layout",
    "Plan",
    "Ragged",
    "RunFolder",
    "SampleRng",
    "Spec",
    "Task",
    "Trainer",
    "Update",
    "World",
}


def signature(function) -> str:
    """Return names and defaults of the parameters; keyword-only ones are marked by a star."""
    parameters = inspect.signature(function).parameters.values()
    return " ".join(
        ("*" if p.kind is p.KEYWORD_ONLY else "") + p.name + ("" if p.default is p.empty else f"={p.default}")
        for p in parameters
    )


def test_exported_names() -> None:
    assert {*paceline.__all__} == {*dir(paceline)} == {"__version__", *EVENTS, *ERRORS, *CLASSES, *FUNCTIONS}
    namespace: dict[str, object] = {}
    exec("from paceline import *", namespace)
    assert {*namespace} - {"__builtins__"} == {*paceline.__all__}
    packages = {path.parent.name for path in Path(paceline.__file__).parent.glob("*/__init__.py")}
    assert not packages & {*paceline.__all__}  # a package of that name would hide the function


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures(name: str) -> None:
    assert signature(getattr(paceline, name)) == FUNCTIONS[name]


@pytest.mark.parametrize("name", [*FUNCTIONS, *sorted(CLASSES | EVENTS | ERRORS)])
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(paceline, name)
    assert thing.__name__ == name
    text = inspect.getdoc(thing)
    assert text
    assert text.split("\n")[0].endswith((".", ":"))
    if name in ERRORS:
        assert issubclass(thing, paceline.Error)
    if name in EVENTS:
        assert issubclass(thing, paceline.Event)
    if name in FUNCTIONS:
        assert "Raises" in text
        assert "spec" in text or "spec" not in FUNCTIONS[name].split()


def test_help_names_everything() -> None:
    text = pydoc.render_doc(paceline, renderer=pydoc.plaintext)
    assert all(name in text for name in {*paceline.__all__} - {"__version__"})
    assert paceline.__version__ in text


def test_the_example_in_the_docstring_trains(tmp_path: Path) -> None:
    code = inspect.cleandoc(paceline.__doc__ or "").split("\n\nThe command line")[0].partition(":\n\n")[2]
    (tmp_path / "mine.py").write_text(inspect.cleandoc(code))
    task = f"{tmp_path / 'mine.py'}:Mine"
    events = list(paceline.train(Spec(task=task, batch=10, steps=3), device="cpu"))
    assert [event.step for event in events if isinstance(event, Step)] == [1, 2, 3]


def started_plan(spec: Spec, plan: Plan | str, run: Path) -> str:
    events = paceline.train(spec, plan, task=models.Points(), run=RunFolder(run), device="cpu")
    return next(event.plan for event in events if isinstance(event, Started))


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["zero3", Plan(zero=3), "zero1,microbatches=2", "ddp"])
def test_train_takes_a_plan_or_its_text(plan: Plan | str, tmp_path: Path) -> None:
    assert ranks(2)(started_plan, Spec(batch=12, steps=1), plan, tmp_path) == [str(plan)] * 2


@pytest.mark.parametrize(("plan", "words"), [("zerro3", "zerro3"), (3, "got int"), ("", "plan")])
def test_train_refuses_invalid_plans(plan: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        next(paceline.train(Spec(batch=12, steps=1), plan, task=models.Points(), device="cpu"))


def test_find_plans_sorts_by_time_and_prices() -> None:
    cluster = find("a100-80g:2x8@25")
    assert isinstance(cluster, Cluster)
    best = paceline.find_plans(Spec(task="text", batch=64), 16, cluster, tokens=1e9, price=2.0)
    times = [cost.step_s for _, cost in best.plans]
    assert times == sorted(times)
    bill = best.bill(best.plans[0][1])
    assert bill is not None
    single_plan = paceline.find_plans(Spec(task="text", batch=64), 16, cluster, plan="zero3")
    assert [str(plan) for plan, _ in single_plan.plans] == ["zero3"]
    with pytest.raises(PlanError, match="tp=3"):
        paceline.find_plans(Spec(task="text", batch=64), 15, cluster, plan=Plan(tp=3))


def test_describe_takes_an_instance_or_a_reference() -> None:
    of_instance = paceline.describe(Spec(batch=12), models.Points())
    of_reference = paceline.describe(Spec(task="models:Points", batch=12))
    assert (of_instance.params, of_instance.blocks, of_instance.name) == (
        of_reference.params,
        of_reference.blocks,
        of_reference.name,
    )
    assert of_instance.params == sum(p.numel() for p in models.Points().model().parameters())
    with pytest.raises(TaskError, match="nowhere"):
        paceline.describe(Spec(task="nowhere.py:Task"))


RANK_DEPENDENT = """
import os
import torch
from torch import nn
import paceline

class Mine(paceline.Task):
    wrong: bool = False

    def model(self):
        return nn.Linear(6, 3)

    def dataset(self, split):
        draw = torch.Generator().manual_seed(1)
        x, y = torch.randn(64, 6, generator=draw), torch.randn(64, 3, generator=draw)
        return torch.utils.data.TensorDataset(x, y)

    def loss(self, output, batch):
        size = int(os.environ.get("WORLD_SIZE", 1)) if self.wrong else 1
        return (output - batch[1]).square() * size

if __name__ == "__main__":
    spec = paceline.Spec(batch=16, seed=3)
    same = paceline.verify_plan(spec, "zero3", task=Mine())
    other = paceline.verify_plan(spec, paceline.Plan(zero=1), task=Mine(wrong=True))
    print(same.same, len(same.rows), other.same, other.first is not None)
    try:
        paceline.verify_plan(spec, "local-sgd,period=2", task=Mine())
    except paceline.PlanError as error:
        print("PlanError", error)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_verify_plan_in_a_script(tmp_path: Path) -> None:
    """The task is defined in the script itself, which the ranks import. A wrong one is found."""
    script = tmp_path / "mine.py"
    script.write_text(RANK_DEPENDENT)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=200, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "True 3 False True"
    assert second.startswith("PlanError")
    assert "local-sgd" in second


@pytest.mark.slow
def test_a_typed_task_passes_mypy_strict(tmp_path: Path) -> None:
    example = (ROOT / "examples/lstm.py").read_text()
    (tmp_path / "lstm.py").write_text(example)
    (tmp_path / "loop.py").write_text(
        "import paceline\n\n"
        "def losses(spec: paceline.Spec) -> list[float]:\n"
        "    return [event.loss for event in paceline.train(spec, 'ddp') if isinstance(event, "
        "paceline.Step)]\n\n"
        "best = paceline.find_plans(paceline.Spec(task='digits', batch=64), 4)\n"
        "plan, cost = best.plans[0]\n"
        "seconds: float = cost.step_s\n"
        "same: bool = paceline.verify_plan(paceline.Spec(task='digits'), plan).same\n"
        "name: str = paceline.describe(paceline.Spec(task='digits')).name\n"
        "reveal_type(paceline.__version__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "loop.py", "lstm.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    assert "Any" not in done.stdout
