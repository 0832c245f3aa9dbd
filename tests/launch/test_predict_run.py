"""`paceline.predict` and `paceline predict`: a line for each sample under any ranks and plan.

The reference is a plain loop over single samples in float64 with the weights of the checkpoint.
"""

import itertools
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import paceline as package
from command import checkpoint_weights, paceline, start, succeed
from faults import replaced
from harness import ranks
from hf_folders import TEXT, build_config, write_folder
from paceline import DataError, PlanError, RunError, Spec, TaskError, World, train
from paceline.errors import SpecError
from paceline.run import create
from paceline.spec import Launch, Save, load_own, save
from paceline.task import load_task
from paceline.training.evaluation import predict_checkpoint
from paceline.training.evaluation.predict_checkpoint import split_samples
from pages import read_blocks

pytestmark = pytest.mark.processes

TASKS = """
import torch
import torch.nn.functional as F
from torch import nn

from paceline import Layout, Task
from paceline.tasks.text import Gpt

SIZES = {"train": 12, "validation": 7, "test": 11}


class Pairs:
    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        return tuple(column[index] for column in self.columns)


class Net(Task):
    def model(self):
        def block():
            return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5))

        return nn.Sequential(nn.Linear(5, 8), block(), block(), nn.Linear(8, 3))

    def dataset(self, split):
        if split not in SIZES:
            return None
        draw = torch.Generator().manual_seed(SIZES[split])
        return Pairs(*(torch.randn(SIZES[split], width, generator=draw) for width in (5, 3)))

    def loss(self, output, batch):
        return (output - batch[1]).square()


class Named(Net):
    def predict(self, output, batch):
        return {"largest": output.argmax(-1), "name": ["abc"[row.argmax()] for row in output], "all": output}

    def read_files(self, files):
        lines = [line for file in files for line in file.read_text().splitlines()]
        rows = [[float(word) for word in line.split()] for line in lines]
        return Pairs(torch.tensor(rows))


class Chars(Task):
    def model(self):
        return Gpt(width=8, depth=2, heads=2, context=8)

    def layout(self):
        return Layout(blocks=("blocks",))

    def dataset(self, split):
        if split not in SIZES:
            return None
        draw = torch.Generator().manual_seed(SIZES[split])
        tokens = torch.randint(0, 16, (SIZES[split], 9), generator=draw)
        return Pairs(tokens[:, :-1], tokens[:, 1:])

    def loss(self, output, batch):
        return F.cross_entropy(output.transpose(1, 2), batch[1], reduction="none")

    def read_files(self, files):
        return Pairs(torch.tensor([[ord(letter) % 16 for letter in file.read_text()[:8]] for file in files]))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    folder, made = tmp_path_factory.mktemp("runs"), {}
    file = folder / "my_tasks.py"
    file.write_text(TASKS)

    def get(name: str) -> Path:
        if name not in made:
            spec = Spec(
                task=f"{file}:{name}",
                batch=6,
                steps=3,
                seed=3,
                precision="fp64",
                threads=1,
                save=Save(every=1, keep=9, minutes=float("inf")),
            )
            run = create(folder / name, spec, Launch(plan="single", ranks=1, device="cpu"))
            list(train(spec, "single", World(), run=run, device="cpu"))
            made[name] = run.path
        return made[name]

    return get


def expected_outputs(run: Path, inputs: list[torch.Tensor]) -> np.ndarray:
    """Return the outputs of the model for single samples."""
    model = load_task(f"{run.parent / 'my_tasks.py'}:{run.name}", {}).model().double().eval()
    weights = {name: torch.from_numpy(array) for name, array in checkpoint_weights(run).items()}
    model.load_state_dict(weights)
    with torch.no_grad():
        return np.stack([model(x[None])[0].numpy() for x in inputs])


def inputs_of(run: Path, split: str) -> list[torch.Tensor]:
    dataset = load_task(f"{run.parent / 'my_tasks.py'}:{run.name}", {}).dataset(split)
    columns = [dataset[index][0] for index in range(len(dataset))]
    return [x.double() if x.is_floating_point() else x for x in columns]


def read_lines(file: Path) -> list:
    return [json.loads(line) for line in file.read_text().splitlines()]


def predict_on_this_rank(run: Path, files: list, out: Path, options: dict):
    return package.predict(run, files, out, **options)


CASES = [("Net", 2, "ddp", 6), ("Named", 2, "zero3", 3), ("Chars", 2, "tp=2", 6), ("Chars", 2, "cp=2", 5)]
SLOW_CASES = [
    *((name, 2, plan, 6) for name in ("Named", "Chars") for plan in ("zero1", "zero2")),
    *(
        (name, size, plan, batch)
        for name in ("Named", "Chars")
        for size, plan in [
            *((2, plan) for plan in ("ddp", "zero3", "pp=2", "pp=2,microbatches=2")),
            *((4, plan) for plan in ("hsdp", "zero3", "local-sgd,period=2", "ddp,uneven=1")),
            *((4, plan) for plan in ("pp=2", "dp=2,tp=2", "tp=2,pp=2", "dp=2,cp=2") if name == "Chars"),
        ]
        for batch in (1, 6, 64)
    ),
]


def check(lines: list, run: Path, inputs: list[torch.Tensor]) -> None:
    expected = expected_outputs(run, inputs)
    if run.name == "Named":
        assert [line["largest"] for line in lines] == expected.argmax(-1).tolist()
        assert [line["name"] for line in lines] == ["abc"[row.argmax()] for row in expected]
        lines = [line["all"] for line in lines]
    np.testing.assert_allclose(np.array(lines), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "size", "plan", "batch"),
    [*CASES, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES if case not in CASES]],
)
def test_lines_equal_a_plain_loop(name, size, plan, batch, runs, tmp_path) -> None:
    run, out = runs(name), tmp_path / "out.jsonl"
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    results = ranks(size)(predict_on_this_rank, run, [], out, {"plan": plan, "batch": batch, "split": "test"})
    check(read_lines(out), run, inputs_of(run, "test"))
    assert (results[0].samples, results[0].step, results[0].ranks, results[0].batch) == (11, 3, size, batch)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    ("size", "plan"), [(1, "single"), (2, "tp=2"), pytest.param(2, "pp=2", marks=pytest.mark.slow)]
)
def test_files(size, plan, runs, tmp_path) -> None:
    name = "Named" if plan == "single" else "Chars"
    run, files = runs(name), [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    for number, file in enumerate(files):
        file.write_text(
            "abcdefgh"[number:] * 3 if name == "Chars" else f"{number} 0.5 -1 2 {number}.25\n" * 2
        )
    options = {"plan": plan, "batch": 2}
    ranks(size)(predict_on_this_rank, run, files, tmp_path / "out", options)
    if name == "Chars":
        inputs = [torch.tensor([ord(letter) % 16 for letter in file.read_text()[:8]]) for file in files]
    else:
        inputs = [torch.tensor([n, 0.5, -1, 2, n + 0.25], dtype=torch.float64) for n in (0, 0, 1, 1, 2, 2)]
    check(read_lines(tmp_path / "out"), run, inputs)


def test_the_check_finds_another_order(runs, tmp_path) -> None:
    def reversed_parts(parts):
        return lambda *args: [part[::-1] for part in parts(*args)]

    with replaced(predict_checkpoint, "validation_parts", reversed_parts):
        package.predict(runs("Net"), out=tmp_path / "out", split="test")
    with pytest.raises(AssertionError):
        check(read_lines(tmp_path / "out"), runs("Net"), inputs_of(runs("Net"), "test"))


def test_an_interrupt_leaves_no_file(runs, tmp_path) -> None:
    """Also if the file had a content before, which stays."""

    def interrupted(predict):
        def patched(*args):
            yield from itertools.islice(predict(*args), 1)
            assert len([*tmp_path.iterdir()]) == 2
            raise KeyboardInterrupt

        return patched

    (tmp_path / "out").write_text("before")
    with replaced(predict_checkpoint, "_predict", interrupted), pytest.raises(KeyboardInterrupt):
        package.predict(runs("Net"), out=tmp_path / "out", split="test")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("out", "before")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("size", [1, 2])
def test_an_interrupted_command_leaves_no_file(size, number, runs, tmp_path) -> None:
    """The dataset waits when the first batches are written."""
    source = TASKS.replace(
        "        return tuple(column[index]", "        WAIT(index)\n        return tuple(column[index]"
    )
    waits = "def WAIT(index):\n    import time\n    while index == 10: time.sleep(0.1)\n"
    (tmp_path / "my_tasks.py").write_text(source + waits)
    copied = shutil.copytree(runs("Net"), tmp_path / "run")
    spec, launch = load_own(copied / "spec.toml", {})
    task = spec.task.replace(str(runs("Net").parent), str(tmp_path))
    save(copied / "spec.toml", spec.model_copy(update={"task": task}), launch)
    words = ("predict", copied, "--split", "test", "--batch", "2", "--ranks", str(size), "-o", "out.jsonl")
    with start(*words, at=tmp_path) as running:
        running.wait_until(
            lambda: any(path.stat().st_size for path in tmp_path.glob(".*.jsonl")), "writing its file"
        )
        running.process.send_signal(number)
        assert running.wait().status == 130
    assert not [*tmp_path.glob(".*.jsonl"), *tmp_path.glob("out.jsonl")]


def test_a_full_disk() -> None:
    request = SimpleNamespace(out=Path("out.jsonl"), temporary=Path("/dev/full"))
    with pytest.raises(RunError, match=r"^cannot write out\.jsonl: No space left on device$"):
        predict_checkpoint._write_lines(request, [{"a": 1.5}], "w")


def test_values_of_samples() -> None:
    def split(values):
        return split_samples(values, 2, "predict()")

    assert split(torch.tensor([[1, 2], [3, 4]])) == [[1, 2], [3, 4]]
    assert split(np.array([1.5, 2.5])) == [1.5, 2.5]
    assert split(["a", None]) == ["a", None]
    assert split({"x": torch.tensor([1, 2]), "y": [{"a": torch.tensor(True)}, {}]}) == [
        {"x": 1, "y": {"a": True}},
        {"x": 2, "y": {}},
    ]
    assert split((torch.tensor([1, 2]), torch.tensor([3, 4]))) == [[1, 3], [2, 4]]
    for values, words in [
        (torch.tensor(1.0), r"got shape \(\)"),
        (torch.zeros(3), r"each of the 2 samples of the batch, got shape \(3,\)"),
        ([1], "got 1 values"),
        (3, "got int"),
        ("ab", "got str"),
        ({"x": [1, 2, 3]}, r"'x' of predict\(\) must have a value for each"),
        ([object(), 1], "has a object, which JSON lacks"),
    ]:
        with pytest.raises(TaskError, match=words):
            split(values)


@pytest.mark.parametrize(
    ("error", "words", "files", "options"),
    [
        (DataError, r"dataset\('tests'\) returned None", [], {"split": "tests"}),
        (SpecError, "either files or a split", ["a"], {"split": "test"}),
        (TaskError, r"Net reads no files, because it has no method read_files\(files\)", ["a"], {}),
        (PlanError, "servers, which evaluate no samples", [], {"plan": "parameter-server"}),
        (RunError, "no such folder", [], {"out": "nowhere/out"}),
    ],
)
def test_bad_values(error, words, files, options, runs, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        package.predict(runs("Net"), files, **options)
    assert not list(tmp_path.iterdir())


def test_files_that_cannot_be_read(runs, tmp_path) -> None:
    for content, words in [
        (None, "no such file"),
        ("x\n", r"read_files\(\) raised ValueError"),
        ("", "is empty"),
    ]:
        if content is not None:
            (tmp_path / "a").write_text(content)
        with pytest.raises(DataError, match=words):
            package.predict(runs("Named"), [tmp_path / "a"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command_on_two_ranks(runs, tmp_path) -> None:
    run = runs("Net")
    result = succeed("predict", run, "--split", "test", "--ranks", "2", "-o", "out.jsonl", at=tmp_path)
    check(read_lines(tmp_path / "out.jsonl"), run, inputs_of(run, "test"))
    assert result.out.splitlines()[-1].startswith("out.jsonl: 11 lines of ")
    result = paceline("predict", run, "--split", "tests", at=tmp_path)
    assert (result.status, result.err.count("\n")) == (2, 1)


def test_example_in_the_documentation() -> None:
    names: dict = {}
    exec(read_blocks("docs/runs.md")["predict"], names)
    logits = torch.tensor([[0.0] * 9 + [1.0], [1.0] + [0.0] * 9])
    lines = split_samples(names["Named"].predict(None, logits, None), 2, "predict()")
    assert [line["digit"] for line in lines] == [9, 0]
    assert [len(line["scores"]) for line in lines] == [10, 10]


def test_classes_of_texts_in_files(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    names, words = ("bad", "fair", "good"), TEXT.split()
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: n for n, name in enumerate(names)}}
    folder = write_folder(tmp_path / "bert", "bert", "AutoModelForSequenceClassification", **labels)
    texts = [" ".join(words[: 1 + n % 4]) for n in range(7)]
    rows = [{"text": text, "label": names[n % 3]} for n, text in enumerate(texts)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.txt").write_text("\n".join(texts[:3]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[3:]))
    data = str(tmp_path / "train.jsonl")
    spec = Spec(task=f"hf:{folder}", set={"data": data}, batch=4, steps=2, precision="fp64", threads=1)
    run = create(tmp_path / "run", spec, Launch(plan="single", ranks=1, device="cpu"))
    list(train(spec, "single", World(), run=run, device="cpu"))
    package.predict(run, [tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "out", batch=3)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertForSequenceClassification(build_config("bert", **labels)).double().eval()
    model.load_state_dict(
        {key: torch.from_numpy(value) for key, value in checkpoint_weights(run.path).items()}
    )
    for line, text in zip(read_lines(tmp_path / "out"), texts, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.encode(text)])).logits[0]
        assert line["label"] == names[int(logits.argmax())]
        expected = dict(zip(names, logits.softmax(-1).tolist(), strict=True))
        assert line["scores"] == pytest.approx(expected, rel=1e-10)
