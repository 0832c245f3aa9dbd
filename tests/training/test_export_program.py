"""Whole models as programs of torch.export and ONNX, compared with the same model built by hand."""

import inspect
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from command import TASK, clean_environment, paceline, succeed, write_task
from paceline import Ragged, Spec, Task
from paceline.data.open_samples import open_training_samples
from paceline.errors import RunError
from paceline.task import load_task
from paceline.training.export import program as programs
from paceline.training.export.model import ModelInputs, choose_counts, read_inputs
from paceline.training.export.onnx import PACKAGES, write_onnx
from paceline.training.export.program import (
    describe_taken,
    export_model,
    run_model,
    write_program,
)
from pages import read_blocks


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under zero3 with BatchNorm and dropout, and a batch that the ranks divide unevenly."""
    folder = tmp_path_factory.mktemp("run")
    write_task(folder, TASK)
    words = "--steps 5 --batch 8 --ranks 2 --plan zero3 --device cpu --lr 0.05 --run-dir r"
    succeed("train", "my.py:Regression", *words.split(), at=folder)
    return folder


def build(folder: Path, weights: Path) -> nn.Module:
    model = load_task(f"{folder}/my.py:Regression", {}).model()
    model.load_state_dict(load_file(weights), strict=True)
    return model.eval()


@pytest.mark.processes
def test_program_of_a_run_computes_what_its_weights_compute(trained: Path, tmp_path: Path) -> None:
    result = succeed("export", trained / "r", "--format", "torch-export", "-o", "m.pt2", at=tmp_path)
    first, second = result.out.splitlines()
    assert first.startswith("m.pt2: Sequential of ")
    assert first.endswith(f"of {trained}/r/ckpt/step_5; checked")
    assert second == "it takes batches of any number of samples"
    succeed("export", trained / "r", "w.safetensors", at=tmp_path)
    model = build(trained, tmp_path / "w.safetensors")
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    for samples in (1, 2, 8, 31):
        x = torch.randn(samples, 6)
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6)
    assert set(loaded.state_dict()) == set(model.state_dict()), "weights keep the names of the model"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.pt2", "w.safetensors"]
    again = paceline("export", trained / "r", "--format", "torch-export", "-o", "m.pt2", at=tmp_path)
    assert (again.status, again.err) == (
        2,
        "paceline: m.pt2 exists already; name another file, or add --force\n",
    )


def test_the_file_contains_no_samples(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    inputs = [ModelInputs((torch.full((n, 2), 1234.5),), {}, n) for n in (4, 5)]
    write_program(export_model(model, inputs), run_model(model, inputs), tmp_path / "m.pt2")
    value = torch.full((2,), 1234.5).numpy().tobytes()
    with zipfile.ZipFile(tmp_path / "m.pt2") as archive:
        assert not any(value in archive.read(name) for name in archive.namelist())


class Texts:
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(3 + index % 5) + index


@dataclass
class Scores:
    scores: Tensor
    extra: dict[str, Any]


class Reader(nn.Module):
    """A model with keyword arguments in another order than its signature, and a dataclass as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.arange(8.0), persistent=False)

    def forward(self, ids: Tensor, mask: Tensor, rest: Any = None) -> Scores:
        mean = (self.embedding(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return Scores(self.head(mean * self.scale), {"mean": mean, "rest": rest})


class Read(Task):
    def model(self) -> nn.Module:
        return Reader()

    def dataset(self, split: str) -> Any:
        return Texts() if split == "train" else None

    def collate(self, samples: list[Tensor]) -> Any:
        return {
            "mask": Ragged([torch.ones(len(sample)) for sample in samples]),
            "ids": Ragged(samples),
        }

    def loss(self, output: Scores, batch: Any) -> Tensor:
        return output.scores.square()


def prepared(task: Task) -> tuple[nn.Module, list[ModelInputs]]:
    from paceline.training.export.model import _to_plain

    spec = Spec(batch=8)
    model = task.model().eval()
    model.register_forward_hook(lambda module, args, output: _to_plain(output))
    return model, read_inputs(spec, task, open_training_samples(task, spec), choose_counts(spec.batch))


def test_lengths_that_differ_between_batches_may_have_any_size(tmp_path: Path) -> None:
    model, inputs = prepared(Read())
    assert [each.samples for each in inputs] == [4, 5, 1]
    exported = export_model(model, inputs)
    taken = write_program(exported, run_model(model, inputs), tmp_path / "m.pt2")
    assert taken == inputs
    loaded = torch.export.load(tmp_path / "m.pt2").module()
    ids, mask = torch.randint(32, (3, 11)), torch.ones(3, 11)
    found, expected = loaded(ids=ids, mask=mask), model(ids, mask)
    assert found.keys() == {"scores", "extra"}
    assert found["extra"].keys() == {"mean"}
    torch.testing.assert_close(found, expected)


def images(*counts: int) -> list[ModelInputs]:
    return [ModelInputs((torch.randn(count, 6),), {}, count) for count in counts]


class Module(nn.Module):
    """A module with a given forward function."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def add_if_positive(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x


def test_model_that_fixes_the_number_of_samples(tmp_path: Path) -> None:
    model, inputs = (
        Module(lambda x: x.view(4, 2, 3) if len(x) == 4 else x.view(-1, 2, 3) + 1),
        images(4, 5, 1),
    )
    exported = export_model(model, inputs)
    taken = write_program(exported, run_model(model, inputs), tmp_path / "m.pt2")
    sentence = describe_taken(taken)
    assert sentence.startswith(
        "it takes only inputs of the shapes (4, 6): forward() fixes sizes, for example"
    )


def test_model_that_needs_two_samples(tmp_path: Path) -> None:
    def refuse_one(x: Tensor) -> Tensor:
        if x.shape[0] < 2:
            raise ValueError("two samples")
        return x[1:] - x[0]

    model, inputs = Module(refuse_one), images(4, 5, 1)
    exported = export_model(model, inputs)
    taken = write_program(exported, run_model(model, inputs), tmp_path / "m.pt2")
    assert describe_taken(taken) == "it takes batches of 2 or more samples"


def test_model_whose_steps_depend_on_values_is_refused() -> None:
    with pytest.raises(
        RunError, match=r"cannot export Module: its steps depend on the values of tensors"
    ) as e:
        export_model(Module(add_if_positive), images(4, 5))
    line = inspect.getsourcelines(add_if_positive)[1] + 1
    assert re.search(
        rf"test_export_program\.py, line {line}\); use torch\.where or torch\.cond", str(e.value)
    )


def test_output_of_another_type_is_refused() -> None:
    model, inputs = prepared(Read())
    model.register_forward_hook(lambda module, args, output: object())
    from paceline.training.export.model import _to_plain

    with pytest.raises(RunError, match="the model returns an object of type object"):
        _to_plain(model(**inputs[0].kwargs))


@pytest.mark.parametrize("fault", ["weight", "dtype", "fewer"])
def test_program_with_other_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    model, inputs = Module(lambda x: (x, x.double(), x.sum(1))), images(4, 5)
    exported, outputs = export_model(model, inputs), run_model(model, inputs)
    faults = {
        "weight": lambda x: (x + 1e-3, x.double(), x.sum(1)),
        "dtype": lambda x: (x, x, x.sum(1)),
        "fewer": lambda x: (x, x.double()),
    }
    messages = {
        "weight": "output 1 differs by up to 0.001",
        "dtype": "output 2 has shape",
        "fewer": "it returns 2 tensors in place of 3",
    }
    other = Module(faults[fault])
    other.load_state_dict(model.state_dict())
    planted, save = export_model(other, inputs), torch.export.save
    monkeypatch.setattr(programs.torch.export, "save", lambda program, file: save(planted, file))
    with pytest.raises(
        RunError, match=f"computes other values than the model, for 4 samples: {messages[fault]}"
    ):
        write_program(exported, outputs, tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_large", [False, True])
def test_onnx_graph_computes_what_the_model_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if is_large:  # torch writes large weights to a file of their own
        monkeypatch.setattr("torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD", 1)
    model, inputs = prepared(Read())
    outputs = run_model(model, inputs, draws=False)
    assert write_onnx(export_model(model, inputs), outputs, tmp_path / "m.onnx", False) == inputs
    assert (tmp_path / "m.onnx.data").exists() == is_large
    session = runtime.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    ids, mask = torch.randint(32, (3, 11)), torch.ones(3, 11)
    scores = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(scores), model(ids, mask)["scores"], rtol=1e-4, atol=1e-5)


def test_draws_in_evaluation(tmp_path: Path) -> None:
    """torch.export repeats the draws of a seed; ONNX does not."""
    model, inputs = Module(lambda x: x + torch.randn_like(x)), images(4, 5, 1)
    assert write_program(export_model(model, inputs), run_model(model, inputs), tmp_path / "m.pt2") == inputs
    with pytest.raises(
        RunError, match=r"Module draws random numbers in evaluation.*; use --format torch-export"
    ):
        run_model(model, inputs, draws=False)


@pytest.mark.parametrize("package", PACKAGES)
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in PACKAGES[: PACKAGES.index(package)]:
        monkeypatch.setitem(sys.modules, name, sys)
    monkeypatch.setitem(sys.modules, package, None)
    inputs = images(4, 5)
    with pytest.raises(
        RunError, match=rf"--format onnx requires {package}, .*; run: pip install 'paceline\[onnx\]'"
    ):
        write_onnx(export_model(nn.Linear(6, 6), inputs), [], tmp_path / "m.onnx", False)
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.slow
def test_program_of_the_page(tmp_path: Path) -> None:
    blocks = read_blocks("docs/export.md")
    (tmp_path / "use.py").write_text(blocks["use.py"])
    for line in blocks["commands"].splitlines():
        succeed(*shlex.split(line)[1:], at=tmp_path)
    used = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, env=clean_environment(), check=True, capture_output=True
    )
    assert len(re.findall(r"\d", used.stdout.decode().partition("]")[0])) == 3
