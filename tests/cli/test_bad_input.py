"""Bad input prints one sentence with the value and the fix, exits with status 2, and leaves no files."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

import command
from command import Result, events_of_kind, paceline, set_sample_delay, start, write_task
from harness import ranks
from paceline import Error, Spec, World, cli, train
from paceline.errors import DataError, DivergedError, PlanError, SpecError, TaskError
from paceline.events import Failed, Started, Step
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import TOO_LARGE, Loading, Optimizer, Save, Schedule
from paceline.task import load_task

pytestmark = pytest.mark.processes

TASKS = (
    command.TASK
    + '''

class Clash(Regression):
    weights: float = 0.5


class NoLoss(Task):
    def model(self):
        return nn.Linear(6, 3)

    def dataset(self, split):
        return Points(5)


class Changed(Regression):
    """A task whose samples depend on the rank or the index."""

    fate: str = "none"

    def dataset(self, split):
        if split != "train":
            return Points(7) if self.fate == "nan metric" else None
        if self.fate == "none at all":
            return None
        if self.fate == "empty":
            return []
        if self.fate == "a generator":
            return (i for i in range(3))
        if self.fate == "uneven":
            return Points(50 + int(os.environ["RANK"]))
        if self.fate == "no folder":
            raise FileNotFoundError(2, "No such file or directory", "/data/points")
        return Fateful(self.samples, self.fate)

    def model(self):
        if self.fate == "model raises":
            raise ValueError("a width of 10 is unheard of")
        if self.fate == "no module":
            return lambda x: x
        if self.fate == "frozen":
            return super().model().requires_grad_(False)
        return super().model()

    def loss(self, output, batch):
        if self.fate == "loss raises":
            raise KeyError("labels")
        if self.fate == "a number":
            return 3.0
        if self.fate == "diverges":
            factor = float("nan") if batch[1].isinf().any() else 1.0
            return super().loss(output, batch) * batch[1].new_tensor(factor)
        return super().loss(output, batch)


class Fateful(Points):
    def __init__(self, count, fate):
        super().__init__(count)
        self.fate = fate

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        if index == 31 and self.fate == "raises":
            raise OSError("the disk has a hole")
        if index == 31 and self.fate == "raises without a word":
            raise AssertionError
        if index == 31 and self.fate == "another shape":
            return x[:3], y
        if index == 31 and self.fate == "diverges":
            return x, y * float("inf")
        if index == 31 and self.fate == "dies" and os.environ.get("RANK", "1") == "1":
            print("these are my last words", flush=True)
            os._exit(7)
        return x, y
'''
)
LINE_OF_HOLE = next(at for at, line in enumerate(TASKS.splitlines(), 1) if "the disk has a hole" in line)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with bad.py, in which no file may remain."""
    folder = tmp_path_factory.mktemp("bad")
    write_task(folder, TASKS, "bad.py")
    return folder


def refused(*words: str | Path, at: Path, status: int = 2, **env: str) -> str:
    """Run a command that must be refused, and return its sentence."""
    before = {*at.iterdir()} | {at / "__pycache__"}
    result = paceline(*words, at=at, **env)
    assert result.status == status, result.all
    assert result.err.startswith("paceline: "), result.all
    assert result.err.count("\n") == 1, result.all
    assert "Traceback" not in result.out
    assert {*at.iterdir()} <= before, "files remain"
    return result.err.removeprefix("paceline: ").rstrip("\n")


# Through the command line, before anything starts

REACHED = "bad.py:Regression has no field {}; a key of the request is set by --set {}=VALUE"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train nowhere.py:Task", "no such file: nowhere.py; available: bad.py"),
        ("train bed.py:Regression", "no such file: bed.py; did you mean bad.py?"),
        ("train bad.py:Regresion", "bad.py has no class Regresion; did you mean Regression?"),
        ("train bad.py:Points", "Points in bad.py is not a subclass of paceline.Task"),
        ("train bad.py:NoLoss", "bad.py:NoLoss has no method loss; a task requires model, dataset, loss"),
        (
            "train bad.py",
            "bad.py has 4 tasks (Regression, Clash, NoLoss, Changed); specify the class: bad.py:NAME",
        ),
        (
            "train digit",
            "no such task: 'digit'; expected bigearthnet, cifar10, cifar100, digits, imagefolder, lm, mnist, "
            "text, a file my.py:Class, a module package.module:Class or a Hugging Face model hf:FOLDER; did "
            "you mean digits?",
        ),
        ("train no.such:Thing", "cannot import 'no.such', named by no.such:Thing: No module named 'no'"),
        ("train run.toml", "cannot read run.toml: No such file or directory"),
        (
            "train bad.py:Regression --set widht=3",
            "bad.py:Regression has no field widht; did you mean width?",
        ),
        (
            "train bad.py:Regression --set width=wide",
            "bad.py:Regression: width must be an integer, got 'wide'",
        ),
        ("train bad.py:Regression --set width", "--set must be NAME=VALUE, got 'width'"),
        (
            "train bad.py:Regression --set optimizer.momentun=0.5",
            "unknown key optimizer.momentun; did you mean optimizer.momentum?",
        ),
        ("train bad.py:Regression --set threads=1", REACHED.format("threads", "spec.threads")),
        ("train bad.py:Regression --set lr=1", REACHED.format("lr", "optimizer.lr")),
        (
            "train bad.py:Regression --set save.seed=1",
            "unknown key save.seed; available: every, minutes, keep, best",
        ),
        (
            "train bad.py:Clash",
            "bad.py:Clash: the field 'weights' has the name of a method of Task; rename the field",
        ),
        (
            "train bad.py:Clash --keys",
            "bad.py:Clash: the field 'weights' has the name of a method of Task; rename the field",
        ),
        (
            "train bad.py:Regression --timeout 1e30",
            "timeout_s must be less than or equal to 1000000, got 1e+30",
        ),
        (
            "train bad.py:Regression --epochs 1e308",
            "epochs must be less than or equal to 1000000000, got 1e+308",
        ),
        (
            "train bad.py:Regression --batch 999999999999999",
            "batch must be less than or equal to 1000000000, got 999999999999999",
        ),
        ("train bad.py:Regression --set width=nan", "bad.py:Regression: width must be an integer, got nan"),
        ("train bad.py:Regression --batch 0", "batch must be greater than or equal to 1, got 0"),
        ("train bad.py:Regression --ranks 0", "ranks must be greater than or equal to 1, got 0"),
        ("train bad.py:Regression --lr -0.1", "optimizer.lr must be greater than 0, got -0.1"),
        ("train bad.py:Regression --epochs inf", "epochs must be a finite number, got inf"),
        (
            "train bad.py:Regression --epochs 2 --steps 5",
            "epochs=2 and steps=5 contradict each other; specify either of them",
        ),
        ("train bad.py:Regression --optimizer adamq", "unknown optimizer 'adamq'; did you mean adam?"),
        (
            "train bad.py:Regression --precision fp8",
            "precision must be 'auto', 'fp64', 'fp32', 'tf32', 'bf16' or 'fp16', got 'fp8'",
        ),
        ("train bad.py:Regression --device gpu", "device must be 'cpu' or 'cuda', got 'gpu'"),
        (
            "train bad.py:Regression --schedule step",
            "schedule.every is required by step (samples between two decays) and cosine-restarts (samples of "
            "the first cycle), and only by them; got name='step', every=None",
        ),
        (
            "train bad.py:Regression --plan zerro3",
            "plan 'zerro3': there is no plan 'zerro3'; did you mean zero3?",
        ),
        (
            "train bad.py:Regression --plan single --ranks 2",
            "plan single is for 1 rank, got 2: use --ranks 1 or another plan: ddp, zero1, zero2, zero3",
        ),
        (
            "train bad.py:Regression --plan hsdp --device cpu",
            "plan hsdp keeps 2 copies, which does not divide 1 rank: use single",
        ),
        (
            "train bad.py:Regression --batch 10 --ranks 4",
            "batch 10 is not divisible by ranks × microbatches = 4 × 1 = 4: use --batch 12 or 8",
        ),
        (
            "train bad.py:Regression --batch 10 --ranks 2 --plan zero3,microbatches=2",
            "batch 10 is not divisible by ranks × microbatches = 2 × 2 = 4: use --batch 12 or 8",
        ),
        (
            f"train bad.py:Regression --run-dir {os.devnull}",
            f"{os.devnull} already exists; choose another --run-dir (it is not a run)",
        ),
        (
            f"train bad.py:Regression --ranks 2 --run-dir {os.devnull}/r",
            f"cannot create the run folder {os.devnull}/r: Not a directory",
        ),
        (
            "train --set epochs=3 digits",
            "digits has no field epochs; a key of the request is set by --set spec.epochs=VALUE",
        ),
        ("export nowhere w.safetensors", "no such run: nowhere"),
        ("show nowhere", "no such run: nowhere"),
        ("resume nowhere", "no such run: nowhere"),
        ("resume .", ". is not a run folder: it has no spec.toml"),
    ],
    ids=lambda value: (
        value.replace(" ", "_") if value.startswith(("train", "resume", "show", "export")) else ""
    ),
)
def test_bad_input_prints_one_sentence_and_leaves_no_files(words, sentence, here, monkeypatch, capsys):
    """In this process: a new process would take a second."""
    before = {*here.iterdir()} | {here / "__pycache__"}
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", ["paceline", *words.split(" ")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert (left.value.code, capsys.readouterr()) == (2, ("", f"paceline: {sentence}\n"))
    assert {*here.iterdir()} <= before, "files remain"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train nowhere.py:Task", "no such file: nowhere.py; available: bad.py"),
        ("train bad.py:NoLoss", "bad.py:NoLoss has no method loss; a task requires model, dataset, loss"),
        (
            "train bad.py:Regression --set widht=3",
            "bad.py:Regression has no field widht; did you mean width?",
        ),
        (
            "train bad.py:Regression --batch 9 --ranks 2",
            "batch 9 is not divisible by ranks × microbatches = 2 × 1 = 2: use --batch 10 or 8",
        ),
        ("resume .", ". is not a run folder: it has no spec.toml"),
    ],
    ids=lambda value: (
        value.replace(" ", "_") if value.startswith(("train", "resume", "show", "export")) else ""
    ),
)
def test_bad_input_of_a_new_process_prints_one_sentence(words, sentence, here):
    assert refused(*words.split(" "), at=here) == sentence


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("train --rnaks 2", "--ranks"),
        ("train --ranks two", "--ranks"),
        ("train --batch 3.5", "--batch"),
        ("train --lr", "--lr"),
        ("trian digits", "trian"),
        ("train digits more", "more"),
        ("export runs", "file"),
    ],
)
def test_unknown_options_are_refused(words, part, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["paceline", *words.split(" ")])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert part in capsys.readouterr().err


def test_errors_in_a_request_file_are_reported(here, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('task = "bad.py:Regression"\nbatch = "many"\n')
    assert refused("train", file, at=here) == "batch must be an integer, got 'many'"
    file.write_text('task = "bad.py:Regression"\n[optimizer]\nlr = 0.1\nmomentun = 0.9\n')
    assert (
        refused("train", file, at=here) == "unknown key optimizer.momentun; did you mean optimizer.momentum?"
    )
    file.write_text("batch = \n")
    assert refused("train", file, at=here).startswith(
        f"{file} is not TOML: Invalid value (at line 1, column 9)"
    )


def test_an_existing_run_is_refused(here, tmp_path):
    RunFolder(tmp_path).spec.touch()
    expected = (
        f"{tmp_path} already exists; choose another --run-dir (to continue it: paceline resume {tmp_path})"
    )
    assert refused("train", "bad.py:Regression", "--run-dir", tmp_path, "--ranks", "2", at=here) == expected


def test_debug_shows_the_traceback(here):
    for words in (("train", "nowhere.py:Task", "--debug"), ("--debug", "show", "nowhere")):
        result = paceline(*words, at=here)
        assert result.status != 0
        assert "Traceback (most recent call last)" in result.err
        assert "paceline.errors." in result.err.splitlines()[-1]


def test_ranks_must_match_those_of_the_launcher(here):
    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    sentence = refused("train", "bad.py:Regression", "--ranks", "4", at=here, **started)
    assert (
        sentence
        == "--ranks 4, but torchrun started 2 ranks; leave --ranks out, or start 4 ranks with torchrun"
    )
    assert refused("train", at=here, **started | {"RANK": "2"}).startswith("RANK=2 is outside WORLD_SIZE=2: ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_refused(here):
    sentence = f"device=cuda, but torch {torch.__version__} finds no CUDA device here; use --device cpu"
    assert refused("train", "bad.py:Regression", "--device", "cuda", at=here) == sentence


# Tasks that cannot be loaded, in this process


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "{at}/bad.py:Nothing",
            "{at}/bad.py has no class Nothing; available: Regression, Clash, NoLoss, Changed",
        ),
        (
            "{at}/bad.py:",
            "{at}/bad.py has 4 tasks (Regression, Clash, NoLoss, Changed); specify the class: "
            "{at}/bad.py:NAME",
        ),
        ("{at}/bad.py:os", "os in {at}/bad.py is not a subclass of paceline.Task"),
        ("{at}/bad.py:Task", "{at}/bad.py:Task has no method model; a task requires model, dataset, loss"),
        ("{at}:Task", "cannot import '{at}', named by {at}:Task: No module named '{at}'"),
        (
            "",
            "no such task: ''; expected bigearthnet, cifar10, cifar100, digits, imagefolder, lm, mnist, "
            "text, a file my.py:Class, a module package.module:Class or a Hugging Face model hf:FOLDER",
        ),
        ("json:JSONDecoder", "JSONDecoder in json is not a subclass of paceline.Task"),
        ("json:Task", "json has no class Task"),
        (":Task", "cannot import '', named by :Task: Empty module name"),
    ],
)
def test_unknown_task_references_are_refused(reference, message, here):
    with pytest.raises(TaskError) as caught:
        load_task(reference.format(at=here), {})
    assert str(caught.value) == message.format(at=here)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def model(:\n", "{path}, line 1: invalid syntax"),
        ("import torhc\n", "cannot import {path}: No module named 'torhc'"),
        (
            "from paceline import Tsak\n",
            "cannot import {path}: cannot import name 'Tsak' from 'paceline'",
        ),
        (
            "import os\n\n1 / 0\n",
            "cannot import {path}: ZeroDivisionError: division by zero ({path}, line 3)",
        ),
        (
            "from paceline import Task\nclass My(Task):\n    width: int\n",
            "{path} has no method model; a task requires model, dataset, loss",
        ),
        ("x = 1\n", "{path} has no task; define a subclass of paceline.Task there"),
        ("", "{path} has no task; define a subclass of paceline.Task there"),
    ],
)
def test_files_without_a_task_are_refused(source, message, tmp_path):
    path = write_task(tmp_path, source, "mine.py")
    with pytest.raises(TaskError) as caught:
        load_task(str(path), {})
    assert str(caught.value).startswith(message.format(path=path))
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "mine.py").mkdir()
    for reference in (f"{tmp_path}/mine.py", f"{tmp_path}/mine.py:Net"):
        with pytest.raises(TaskError) as caught:
            load_task(reference, {})
        assert str(caught.value) == f"{tmp_path}/mine.py is a folder; specify a Python file"
    with pytest.raises(TaskError, match="no such file"):  # and does not suggest the folder
        load_task(f"{tmp_path}/mime.py", {})


FIELDS = """
from typing import Literal
from paceline import Task

class Fields(Task):
    must: int
    width: int = 3
    rate: float = 0.1
    flag: bool = False
    sizes: tuple[int, ...] = (1, 2)
    act: Literal["relu", "gelu"] = "relu"
    name: str | None = None

    def model(self): ...
    def dataset(self, split): ...
    def loss(self, output, batch): ...
"""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "field must has no value; specify it with --set must=VALUE"),
        ({"must": "one"}, "must must be an integer, got 'one'"),
        ({"must": 1.5}, "must must be an integer, got 1.5"),
        ({"must": 1, "flag": 1}, "flag must be a boolean, got 1"),
        ({"must": 1, "rate": "fast"}, "rate must be a number, got 'fast'"),
        ({"must": 1, "act": "tanh"}, "act must be 'relu' or 'gelu', got 'tanh'"),
        ({"must": 1, "sizes": 3}, "sizes must be an array, got 3"),
        ({"must": 1, "sizes": [1, "two"]}, "sizes.1 must be an integer, got 'two'"),
        ({"must": 1, "name": 3}, "name must be a string, got 3"),
    ],
)
def test_invalid_fields_are_refused(fields, message, tmp_path):
    path = write_task(tmp_path, FIELDS, "fields.py")
    with pytest.raises(TaskError) as caught:
        load_task(f"{path}:Fields", fields)
    assert str(caught.value) == f"{path}:Fields: {message}"


def test_valid_fields_are_converted(tmp_path):
    path = write_task(tmp_path, FIELDS, "fields.py")
    task = load_task(f"{path}:Fields", {"must": 1, "rate": 2, "sizes": [3], "act": "gelu", "name": "a"})
    assert vars(task) == {
        "must": 1,
        "width": 3,
        "rate": 2.0,
        "flag": False,
        "sizes": (3,),
        "act": "gelu",
        "name": "a",
    }


def test_an_unknown_field_names_the_nearest(tmp_path):
    path = write_task(tmp_path, FIELDS, "fields.py")
    with pytest.raises(TaskError, match=r"has no field widht; did you mean width\?"):
        load_task(f"{path}:Fields", {"must": 1, "widht": 3})


# Tasks, data and plans that cannot be trained


def make_spec(here: Path, fate: str = "none", **more) -> Spec:
    settings = {"steps": 12, "batch": 8, "save": Save(minutes=float("inf"))} | more
    return Spec(task=f"{here}/bad.py:Changed", set={"fate": fate}, **settings)


def failing(spec: Spec, plan: str | None = None, run: RunFolder | None = None) -> Error:
    """Return the error that ends a training on this rank."""
    with pytest.raises(Error) as caught:
        for _ in train(
            spec, parse(plan) if plan else None, World() if "RANK" not in os.environ else None, run=run
        ):
            pass
    assert str(caught.value), "the message must not be empty"
    return caught.value


@pytest.mark.parametrize(
    ("fate", "kind", "message"),
    [
        (
            "none at all",
            DataError,
            "Changed.dataset('train') returned None; it must return the training samples",
        ),
        ("empty", DataError, "Changed.dataset('train') is empty"),
        (
            "a generator",
            DataError,
            "Changed.dataset('train') must have len() and [i], got generator; wrap it in a Stream",
        ),
        ("no module", TaskError, "model() must return a torch.nn.Module, got function"),
        ("frozen", TaskError, "the model has no parameter to train: all of them have requires_grad=False"),
        ("a number", TaskError, "loss() must return a tensor, got float"),
        (
            "raises",
            DataError,
            f"sample 31 of 'train' raised OSError: the disk has a hole ({{here}}/bad.py, line "
            f"{LINE_OF_HOLE})",
        ),
        (
            "raises without a word",
            DataError,
            f"sample 31 of 'train' raised AssertionError ({{here}}/bad.py, line {LINE_OF_HOLE + 2})",
        ),
    ],
)
def test_invalid_results_of_a_task_are_reported(fate, kind, message, here):
    error = failing(make_spec(here, fate))
    assert (type(error), str(error)) == (kind, message.replace("{here}", str(here)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_raises_is_named(workers, here):
    """The error has its location in each reading process, and its original as the cause for --debug."""
    error = failing(make_spec(here, "raises", data=Loading(workers=workers)))
    assert (
        str(error)
        == f"sample 31 of 'train' raised OSError: the disk has a hole ({here}/bad.py, line {LINE_OF_HOLE})"
    )
    assert f'File "{here}/bad.py", line' in str(error.__cause__)


def test_samples_of_different_shapes_are_named(here):
    message = str(failing(make_spec(here, "another shape")))
    assert message.startswith("one of the samples [")
    assert "31" in message
    assert "of 'train' raised RuntimeError: stack expects each tensor to be equal size" in message


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"schedule": Schedule(warmup=97)},
            "schedule.warmup=97 samples is longer than the training, 96 samples; use a shorter warm-up, or "
            "train longer",
        ),
        ({"batch": 9}, "batch 9 is not divisible by microbatches=2: use --batch 10 or 8"),
    ],
)
def test_contradictory_requests_are_refused(more, message, here):
    error = failing(make_spec(here, **more), "single,microbatches=2")
    assert (type(error) in (SpecError, PlanError), str(error)) == (True, message)


def refusal_here(spec: Spec, plan: str) -> str:
    return str(failing(spec, plan))


@pytest.mark.parametrize(
    ("fate", "samples", "plan", "message"),
    [
        (
            "uneven",
            50,
            "ddp",
            "dataset('train') has 50 samples on rank 0 and 51 on rank 1; every rank must see the whole "
            "dataset, ",
        ),
        ("none", 1, "zero3", "2 ranks for 1 training samples; use at most --ranks 1"),
        (
            "none",
            50,
            "single",
            "plan single is for 1 rank, got 2: use --ranks 1 or another plan: ddp, zero1, zero2, zero3",
        ),
        (
            "none",
            50,
            "hsdp,replicate=3",
            "plan hsdp,replicate=3 keeps 3 copies, which does not divide 2 ranks: use replicate=2, or zero3",
        ),
    ],
)
def test_requests_that_several_ranks_cannot_train(fate, samples, plan, message, here):
    spec = make_spec(here).model_copy(update={"set": {"fate": fate, "samples": samples}})
    for found in ranks(2)(refusal_here, spec, plan):
        assert found.startswith(message)


def test_loss_that_is_not_finite_is_reported_with_its_step(here, tmp_path):
    """The message has the step, the last finite loss and the fix."""
    run = RunFolder(tmp_path)
    spec = make_spec(here, "diverges", save=Save(every=1, minutes=float("inf")))
    seen = []
    with pytest.raises(DivergedError) as caught:
        seen.extend(event for event in train(spec, world=World(), run=run) if isinstance(event, Step))
    assert f" at step {seen[-1].step + 1}; the last finite loss was {seen[-1].loss:.6g}; " in str(
        caught.value
    )
    assert str(caught.value).startswith("the loss is nan at step ")
    assert f"go back to step {run.checkpoints()[-1]} with: paceline resume {tmp_path} --lr SMALLER" in str(
        caught.value
    )


def test_a_loss_that_is_not_finite_before_any_checkpoint(here):
    error = failing(make_spec(here, "diverges"))
    assert isinstance(error, DivergedError)
    assert "; the last finite loss was " in str(error)
    assert str(error).endswith(
        "no checkpoint was written yet; try a smaller --lr, --set schedule.warmup=SAMPLES or --clip NORM"
    )
    first = failing(make_spec(here, "diverges", batch=53))
    assert str(first).startswith("the loss is nan at step 1; there was no finite loss before; ")


def test_gradient_that_is_not_finite_is_reported(here):
    error = failing(make_spec(here, optimizer=Optimizer(name="sgd", lr=1e30), steps=50))
    assert isinstance(error, DivergedError)
    assert " at step " in str(error)


def test_an_unknown_metric_is_refused(here):
    spec = make_spec(here, "nan metric", save=Save(best="max acuracy"))
    assert str(failing(spec)) == "save.best='max acuracy', but the evaluation has no acuracy; available: loss"


# Ranks that fail


def train_two(here: Path, at: Path, fate: str, *words: str, **env: str) -> Result:
    common = ("--set", f"fate={fate}", "--batch", "8", "--steps", "12", "--ranks", "2", "--run-dir", at / "r")
    return paceline("train", f"{here}/bad.py:Changed", *common, *words, at=at, **env)


@pytest.mark.slow
def test_a_refused_training_leaves_no_files(here, tmp_path):
    result = train_two(here, tmp_path, "uneven")
    assert result.status == 2
    assert result.err.startswith("paceline: dataset('train') has 50 samples on rank 0 and 51 on rank 1; ")
    assert result.err.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_oversized_values_give_one_short_sentence(here):
    for words, message in (
        (("--ranks", "999999", "--batch", "999999"), "--ranks must be at most "),
        (("--nodes", "9" * 5000), "(5,002 characters); write 4, or 2:4 for 2 to 4 nodes"),
        (("--set", f"width={'9' * 5000}"), f"(5,000 characters): {TOO_LARGE}"),
        (("--set", f"width={'[' * 5000}"), f"(5,000 characters): {TOO_LARGE}"),
        (("--set", f"{'w' * 5000}=1"), "(5,000 characters); available: width, depth"),
    ):
        sentence = refused("train", "bad.py:Regression", *words, at=here)
        assert message in sentence
        assert len(sentence) < 300


def test_a_sample_that_raises_on_one_of_two_ranks(here, tmp_path):
    """One sentence although two ranks fail; the events have it, and --debug shows the line."""
    result = train_two(here, tmp_path, "raises", "--save-every", "1", "--workers", "2")
    sentence = (
        f"rank 1: sample 31 of 'train' raised OSError: the disk has a hole ({here}/bad.py, line "
        f"{LINE_OF_HOLE})"
    )
    assert (result.status, result.err) == (2, f"paceline: {sentence}\n"), result.all
    failed = [event for event in events_of_kind(tmp_path / "r", Failed) if not event.lost_peer]
    assert [event.message for event in failed] == [sentence]
    shown = paceline("show", "r", at=tmp_path)
    assert "sample 31 of 'train' raised OSError: the disk has a hole" in shown.out
    assert "continue with: paceline resume r" in shown.out


@pytest.mark.slow
def test_debug_shows_the_line_of_the_task_on_another_rank(here, tmp_path):
    result = train_two(here, tmp_path, "raises", "--debug")
    assert f'File "{here}/bad.py", line' in result.err, result.all
    assert "the disk has a hole" in result.err


def test_a_rank_that_dies_is_named(here, tmp_path):
    result = train_two(here, tmp_path, "dies", "--save-every", "1", "--workers", "0")
    steps = max(event.step for event in events_of_kind(tmp_path / "r", Step))
    kept = RunFolder(tmp_path / "r").checkpoints()[-1]
    first, *rest = result.err.splitlines()
    assert result.status == 2
    hint = f"continue from step {kept} with: paceline resume {tmp_path}/r"
    assert first == f"paceline: rank 1 failed: ended with exit status 7, after step {steps}; {hint}"
    assert rest == [f"The end of {tmp_path}/r/ranks/1.log:", "  these are my last words"]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_its_signal(here, tmp_path):
    slow = set_sample_delay(tmp_path / "slow", 0.02)
    words = (
        "train",
        f"{here}/bad.py:Regression",
        "--batch",
        "8",
        "--steps",
        "200",
        "--ranks",
        "2",
        "--run-dir",
        "r",
    )
    with start(*words, at=tmp_path, SLOW=str(slow)) as running:
        running.wait_for_step(tmp_path / "r", 3)
        running.ranks()[1].send_signal(signal.SIGSEGV)
        result = running.wait()
    first, _, second, *stacks = result.err.splitlines()
    assert result.status == 2
    assert first.startswith("paceline: rank 1 was killed by SIGSEGV, after step ")
    assert second == "  Fatal Python error: Segmentation fault"
    assert stacks[0].startswith("  Current thread ")
    assert any("/paceline/" in line for line in stacks), result.err
    assert first.endswith("; no checkpoint was written yet")
    [failed] = [event for event in events_of_kind(tmp_path / "r", Failed) if not event.lost_peer]
    assert (failed.rank, failed.message) == (1, first.removeprefix("paceline: "))


@pytest.mark.slow
def test_the_error_is_that_of_the_last_start(here, tmp_path):
    """In the first start rank 0 is killed and rank 1 reports the loss; in the second start the reverse."""
    slow, run = set_sample_delay(tmp_path / "slow", 0.02), tmp_path / "r"
    words = (
        "train",
        f"{here}/bad.py:Regression",
        "--batch",
        "8",
        "--steps",
        "200",
        "--ranks",
        "2",
        "--run-dir",
        "r",
        "--restarts",
        "1",
    )
    with start(*words, at=tmp_path, SLOW=str(slow)) as running:
        for start_number, rank in ((1, 0), (2, 1)):
            running.wait_until(
                lambda n=start_number: len(events_of_kind(run, Started)) == n, f"started {start_number} times"
            )
            running.wait_for_step(run, 3)
            running.ranks()[rank].kill()
        result = running.wait()
    assert result.status == 2
    assert result.err.startswith("paceline: rank 1 was killed by SIGKILL, after step "), result.all


@pytest.mark.slow
def test_a_rank_that_fails_at_its_start_is_named(tmp_path):
    """The other rank waits where no signal reaches it, until it is killed."""
    source = command.TASK + '\n\nif os.environ.get("RANK") == "1":\n    os._exit(7)\n'
    write_task(tmp_path, source)
    result = paceline("train", "my.py:Regression", "--ranks", "2", at=tmp_path)
    assert result.status == 2
    assert result.err.startswith(
        "paceline: rank 1 failed: ended with exit status 7, after step 0; no checkpoint was written yet\n"
    )
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("model raises", "model() raised ValueError: a width of 10 is unheard of"),
        ("loss raises", "loss() raised KeyError: 'labels'"),
    ],
)
def test_an_error_in_the_task_is_one_sentence(fate, words, here, tmp_path):
    """The sentence has the line of the user's code."""
    spec = (
        "train",
        f"{here}/bad.py:Changed",
        "--set",
        f"fate={fate}",
        "--batch",
        "8",
        "--steps",
        "12",
        "--run-dir",
        "r",
    )
    result = paceline(*spec, at=tmp_path)
    assert result.status == 2
    assert result.err.startswith(f"paceline: {words} ({here}/bad.py, line "), result.all
    assert result.err.count("\n") == 1
    assert (tmp_path / "r").exists() == (fate == "loss raises"), (
        "the folder remains only if the training had started"
    )


def test_an_error_in_the_task_on_several_ranks(here, tmp_path):
    result = train_two(here, tmp_path, "model raises")
    assert result.status == 2
    assert result.err.startswith(
        f"paceline: model() raised ValueError: a width of 10 is unheard of ({here}/bad.py, line "
    ), result.all
    assert result.err.count("\n") == 1
    assert not (tmp_path / "r").exists()
