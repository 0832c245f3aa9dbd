"""`paceline diff`: the first setting, step and tensor in which two runs differ."""

import json
import math
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from command import TASK, Result, checkpoint_weights, paceline, succeed, write_task
from paceline.debug import tensors
from paceline.debug.diff import diff_runs
from paceline.debug.tensors import measure_difference
from paceline.errors import CheckpointError, RunError
from paceline.events import EventWriter, Started, Step, nan_to_null
from paceline.run import RunFolder, create
from paceline.spec import Launch, Optimizer, Spec
from paceline.training.checkpoint import stored
from paceline.training.checkpoint.integrity import checksum
from pages import read_blocks

LOSSES = [3.0, 2.5, 2.25, 2.0, 1.75, 1.5]


def write_run(
    path: Path,
    losses: list[float] = LOSSES,
    norms: list[float | None] | None = None,
    plan: str = "ddp",
    ranks: int = 2,
    spec: Spec | None = None,
    precision: str = "fp32",
) -> RunFolder:
    """Write a run without training: its request, a start and steps."""
    run = create(path, spec or Spec(steps=6), Launch(plan=plan, ranks=ranks))
    writer = EventWriter(run.events)
    writer.write(
        Started(
            task="digits",
            plan=plan,
            ranks=ranks,
            batch=4,
            step=0,
            steps=6,
            samples=24,
            parameters=9,
            device="cpu",
            precision=precision,
            threads=1,
        )
    )
    write_steps(writer, losses, norms or [1.0] * len(losses))
    writer.close()
    return run


def write_steps(writer: EventWriter, losses: list[float], norms: list[float | None], begin: int = 1) -> None:
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), begin):
        writer.write(
            Step(
                step=step,
                samples=4 * step,
                loss=loss,
                grad_norm=norm,
                lr=0.1,
                step_s=0.1,
                data_s=0.0,
                samples_per_s=40.0,
            )
        )


def write_checkpoint(
    run: RunFolder, step: int, state: Mapping[str, Tensor], identity: Mapping[str, str] | None = None, **more
) -> None:
    """Write a checkpoint without training. `state`: by names in the checkpoint."""
    path = run.checkpoint(step)
    with warnings.catch_warnings(action="ignore"):  # torch warns that one process saves
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)
    names = [name.removeprefix("model/") for name in state if name.startswith("model/")]
    index = {
        "step": step,
        "samples": 4 * step,
        "epoch_samples": 24,
        "task": "digits",
        "set": {},
        "plan": "ddp",
        "ranks": 2,
        "seed": 0,
        "shapes": {name: list(state[f"model/{name}"].shape) for name in names},
        "tied": {},
        "identity": dict(identity or {}),
        "files": {file.name: checksum(file) for file in path.iterdir()},
    }
    (path / "checkpoint.json").write_text(json.dumps(index | more))


def make_state() -> dict[str, Tensor]:
    """Return the state of a model whose order is not that of the alphabet."""
    draw = torch.Generator().manual_seed(1)
    weights = {"z.weight": (5, 4), "a.bias": (3,), "m.weight": (2, 3)}
    state = {f"model/{name}": torch.randn(shape, generator=draw) for name, shape in weights.items()}
    for name, shape in weights.items():
        state |= {f"optimizer/{name}/exp_avg": torch.randn(shape, generator=draw)}
        state |= {f"optimizer/{name}/step": torch.tensor(3.0)}
    return state | {"model/count": torch.tensor(3)}


def diff(at: Path, *words: str) -> tuple[Result, dict]:
    result = paceline("diff", "a", "b", "--json", "found.json", *words, at=at)
    assert result.err == "", result.all
    return result, json.loads((at / "found.json").read_text())


# Steps


def test_equal_runs(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for run in (a, b):
        write_checkpoint(run, 3, make_state())
    found = diff_runs(a, b)
    assert (found.is_equal, found.tolerance, found.settings, found.notes) == (True, 0.0, (), ())
    assert (found.steps.count, found.steps.first_unequal, found.steps.max_relative) == (6, None, 0.0)
    [checkpoint] = found.checkpoints
    assert [(group.group, group.num_tensors, group.largest) for group in checkpoint.groups] == [
        ("weights", 4, None),
        ("optimizer", 6, None),
    ]


@pytest.mark.parametrize(
    ("step", "quantity"), [(1, "loss"), (4, "loss"), (4, "grad_norm"), (6, "loss")], ids=str
)
def test_the_first_step_that_differs(tmp_path, step, quantity):
    losses, norms = [*LOSSES], [1.0] * 6
    for at in range(step - 1, 6):
        (losses if quantity == "loss" else norms)[at] *= 1 + 2**-20
    found = diff_runs(write_run(tmp_path / "a"), write_run(tmp_path / "b", losses, norms))
    assert not found.is_equal
    assert (found.steps.first_different, found.steps.first_unequal) == (step, step)
    [entry] = found.steps.differences
    assert (entry.quantity, entry.relative) == (quantity, pytest.approx(2**-20, rel=1e-5))
    assert found.steps.max_relative == 0.0


def test_rounding_is_equal_if_the_plans_differ(tmp_path):
    losses = [loss * (1 + 1e-6) for loss in LOSSES]
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", losses, plan="zero3", ranks=4)
    found = diff_runs(a, b)
    assert found.is_equal
    assert found.tolerance == 1e-3
    assert found.reason == "rounding of fp32, because plan, ranks differ"
    other = write_run(tmp_path / "other", losses, plan="zero3")
    assert diff_runs(a, other).reason == "rounding of fp32, because plan differs"
    assert (found.steps.first_unequal, found.steps.first_different) == (1, None)
    assert found.steps.max_relative == pytest.approx(1e-6, rel=1e-3)
    assert [(entry.key, entry.a, entry.b) for entry in found.settings] == [
        ("plan", "ddp", "zero3"),
        ("ranks", 2, 4),
    ]
    assert not diff_runs(a, b, tolerance=1e-7).is_equal
    # negative control: a difference beyond rounding is found under other plans too
    worse = [*losses[:3], losses[3] * 1.01, *losses[4:]]
    other = diff_runs(a, write_run(tmp_path / "c", worse, plan="zero3", ranks=4))
    assert (other.is_equal, other.steps.first_unequal, other.steps.first_different) == (False, 1, 4)


def test_the_later_of_two_lines_of_a_step_counts(tmp_path):
    """A run that was resumed at step 2 repeats steps 3 to 6."""
    wrong = [*LOSSES[:2], 9.0, 9.0, 9.0, 9.0]
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", wrong)
    assert diff_runs(a, b).steps.first_different == 3
    writer = EventWriter(b.events)
    write_steps(writer, LOSSES[2:5], [1.0] * 3, begin=3)
    writer.close()
    found = diff_runs(a, b)
    assert found.is_equal
    assert (found.steps.count, found.steps.end) == (5, 5)
    assert found.notes == (f"1 of 6 steps are only in {a.path}",)


def test_skipped_updates_and_numbers_that_are_not_finite(tmp_path):
    a = write_run(tmp_path / "a", norms=[None] + [1.0] * 5)
    same = write_run(tmp_path / "b", norms=[None] + [1.0] * 5)
    other = write_run(tmp_path / "c")
    assert diff_runs(a, same).is_equal
    found = diff_runs(a, other)
    [entry] = found.steps.differences
    assert (entry.a, entry.b, entry.relative) == (None, 1.0, math.inf)
    assert nan_to_null(asdict(found))["steps"]["differences"][0]["relative"] is None


def test_settings_of_request_start_and_code(tmp_path):
    specs = [
        Spec(steps=6, set={"width": width}, optimizer=Optimizer(lr=lr)) for width, lr in ((8, 0.1), (9, 0.2))
    ]
    runs = [write_run(tmp_path / name, spec=spec) for name, spec in zip("ab", specs, strict=True)]
    for run, code in zip(runs, "xy", strict=True):
        write_checkpoint(
            run,
            3,
            make_state(),
            {"code of loss()": code, "code of the task's file": code, "field width": "8"},
        )
    found = diff_runs(*runs)
    assert {(entry.source, entry.key, entry.a, entry.b) for entry in found.settings} == {
        ("request", "set.width", 8, 9),
        ("request", "optimizer.lr", 0.1, 0.2),
        ("code", "code of loss()", "x", "y"),
    }
    assert found.is_equal, "settings alone make no difference"


def test_runs_without_a_common_step(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", [])
    with pytest.raises(RunError, match=r"neither a step nor a checkpoint in common: .*a has steps 1–6"):
        diff_runs(a, b)
    b.events.unlink()
    with pytest.raises(RunError, match="b has no steps and no checkpoint"):
        diff_runs(a, b)


# Tensors


def both(tmp_path: Path, mine: Mapping[str, Tensor], other: Mapping[str, Tensor], **more):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    write_checkpoint(a, 3, mine, **more)
    write_checkpoint(b, 3, other, **more)
    return diff_runs(a, b)


def test_the_first_tensor_in_the_order_of_the_model(tmp_path):
    """z.weight is first in the model, a.bias in the alphabet; both differ, and so does optimizer state."""
    state, changed = make_state(), make_state()
    changed["model/z.weight"][3, 1] += 0.25
    changed["model/a.bias"] += 9.0
    changed["optimizer/m.weight/exp_avg"][1, 2] = math.nan
    [checkpoint] = both(tmp_path, state, changed).checkpoints
    weights, optimizer = checkpoint.groups
    largest = max(changed["model/z.weight"].abs().max(), state["model/z.weight"].abs().max()).item()
    assert (weights.num_different, weights.first.name, weights.first.index) == (2, "z.weight", (3, 1))
    assert weights.first.relative == pytest.approx(0.25 / max(largest, 0.01 * 10), rel=1e-5)
    assert weights.first.a == state["model/z.weight"][3, 1].item()
    assert weights.first.b == changed["model/z.weight"][3, 1].item()
    assert weights.largest == "a.bias"
    assert (optimizer.num_different, optimizer.first.name) == (1, "m.weight/exp_avg")
    assert (optimizer.first.index, optimizer.first.relative) == ((1, 2), math.inf)


def test_averages_of_weights_are_a_group(tmp_path):
    state, changed = make_state(), make_state()
    for stored_state in (state, changed):
        stored_state |= {"ema/z.weight": torch.ones(5, 4), "ema/a.bias": torch.zeros(3)}
    changed["ema/a.bias"][1] = 0.5
    [checkpoint] = both(tmp_path, state, changed).checkpoints
    assert [group.group for group in checkpoint.groups] == ["weights", "averages", "optimizer"]
    assert [group.num_different for group in checkpoint.groups] == [0, 1, 0]
    assert checkpoint.groups[1].first.name == "a.bias"


@pytest.mark.parametrize("step", [3, 5])
def test_the_first_checkpoint_that_differs(tmp_path, step):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for saved in (2, 3, 5):
        changed = make_state()
        changed["model/a.bias"] += 1e-3 * (saved >= step)
        write_checkpoint(a, saved, make_state())
        write_checkpoint(b, saved, changed)
    write_checkpoint(a, 6, make_state())
    found = diff_runs(a, b)
    assert [checkpoint.step for checkpoint in found.checkpoints] == [2, 3, 5][: [2, 3, 5].index(step) + 1]
    assert [checkpoint.is_equal for checkpoint in found.checkpoints][-1] is False
    assert found.notes == (f"checkpoint 6 only in {a.path}",)


def test_tensors_that_do_not_correspond(tmp_path):
    state, changed = make_state(), make_state()
    changed["model/a.bias"] = torch.zeros(4)
    del changed["optimizer/a.bias/exp_avg"]
    changed["optimizer/a.bias/momentum"] = torch.zeros(3)
    [checkpoint] = both(tmp_path, state, changed).checkpoints
    weights, optimizer = checkpoint.groups
    assert (weights.first.name, weights.first.reason) == ("a.bias", "shape (3,) and (4,)")
    assert (optimizer.first.name, optimizer.first.reason) == ("a.bias/exp_avg", "only in a")
    assert optimizer.num_different == 2


def test_the_state_of_single_ranks(tmp_path):
    state = make_state() | {f"rank/{rank}/model/a.bias": torch.ones(3) for rank in range(2)}
    changed = {name: tensor.clone() for name, tensor in state.items()}
    changed["rank/1/model/a.bias"][0] = 2.0
    [checkpoint] = both(tmp_path, state, changed, own=True).checkpoints
    assert [group.group for group in checkpoint.groups if group.first is not None] == ["ranks"]
    assert checkpoint.groups[-1].first.name == "1/model/a.bias"


def test_few_tensors_are_read_at_once(tmp_path, monkeypatch):
    """At most READ_BYTES of both checkpoints, or one larger tensor; blocks give the same result."""
    state, changed = make_state(), make_state()
    changed["model/z.weight"][4, 3] += 1.0
    expected = both(tmp_path, state, changed).checkpoints
    read = []
    read_tensors = stored.read_tensors

    def record(path, metadata, wanted, **options):
        read.append(sum(tensor.nbytes for tensor in wanted.values()))
        read_tensors(path, metadata, wanted, **options)

    monkeypatch.setattr(stored, "read_tensors", record)
    monkeypatch.setattr(tensors, "READ_BYTES", 64)
    monkeypatch.setattr(tensors, "BLOCK_ELEMENTS", 3)
    found = diff_runs(RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b"))
    assert max(read) == state["model/z.weight"].nbytes
    assert len(read) > 6
    assert sum(read) == 2 * sum(tensor.nbytes for tensor in state.values())
    assert found.checkpoints == expected


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([math.nan, math.inf], [math.nan, math.inf], 0.0),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
        ([math.nan, 1.0], [0.0, 1.0], math.inf),
        ([0.0], [-0.0], 0.0),
        ([], [], 0.0),
        ([2**60], [2**60 + 1], 1.0),
        ([True, False], [True, True], 1.0),
        ([1 + 2j], [1 + 4j], 2.0),
    ],
    ids=str,
)
def test_measured_differences(a, b, difference):
    assert measure_difference(torch.tensor(a), torch.tensor(b)).difference == difference


def test_differences_equal_those_of_numpy():
    draw = np.random.default_rng(0)
    a = draw.normal(size=(7, 11)).astype(np.float32)
    b = (a + draw.normal(size=a.shape) * 1e-3).astype(np.float32)
    found = measure_difference(torch.from_numpy(a), torch.from_numpy(b))
    errors = np.abs(a.astype(np.float64) - b)
    assert (found.difference, found.at) == (errors.max(), errors.argmax())
    assert found.largest == max(np.abs(a).max(), np.abs(b).max())


def test_damaged_checkpoint_is_refused(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    for run in (a, b):
        write_checkpoint(run, 3, make_state())
    file = next(b.checkpoint(3).glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-9] + b"123456789")
    with pytest.raises(CheckpointError, match=r"step_3 is damaged: .* has another checksum"):
        diff_runs(a, b)


# The command, on trained runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with the run a: one process, 6 steps in float64, checkpoints of steps 3 and 6."""
    at = tmp_path_factory.mktemp("diff")
    write_task(at, TASK)
    train(at, "a")
    return at


def train(at: Path, run: str, *words: str) -> None:
    fixed = ("my.py:Regression", "--run-dir", run, "--steps", "6", "--batch", "12", "--save-every", "3")
    options = ("--precision", "fp64", "--set", "dropout=0.0", "--set", "spec.threads=1", "--clip", "1.0")
    succeed("train", *fixed, *options, "--device", "cpu", *words, at=at)


def compare(at: Path, run: str) -> tuple[Result, dict]:
    result = paceline("diff", "a", run, "--json", "found.json", at=at)
    assert result.err == "", result.all
    return result, json.loads((at / "found.json").read_text())


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        "--plan zero3 --ranks 2",
        pytest.param("--plan tp=2 --ranks 2", marks=pytest.mark.slow),
        pytest.param("--plan pp=2,microbatches=2 --ranks 2", marks=pytest.mark.slow),
        pytest.param("--plan zero1 --ranks 2", marks=pytest.mark.slow),
        pytest.param("--plan zero2,tp=2 --ranks 4", marks=pytest.mark.slow),
        pytest.param("--plan ddp --ranks 4", marks=pytest.mark.slow),
    ],
)
def test_plans_compute_the_same(trained, words):
    norm = ("--set", "norm=false") if "pp" in words or "tp" in words else ()
    if norm:
        train(trained, "a-norm", *norm) if not (trained / "a-norm").exists() else None
    name = re.sub(r"\W+", "-", words).strip("-")
    train(trained, name, *words.split(), *norm)
    result = paceline("diff", "a-norm" if norm else "a", name, "--json", "found.json", at=trained)
    found = json.loads((trained / "found.json").read_text())
    assert result.status == 0, result.all
    assert found["tolerance"] == 1e-9
    assert found["steps"]["max_relative"] < 1e-10
    assert {"plan", "ranks"} <= {entry["key"] for entry in found["settings"]}
    assert [checkpoint["step"] for checkpoint in found["checkpoints"]] == [3, 6]
    assert [group["group"] for group in found["checkpoints"][0]["groups"]] == ["weights", "optimizer"]
    assert result.out.rstrip().endswith("the runs are equal within the tolerance")


@pytest.mark.processes
def test_a_resume_with_another_learning_rate(trained):
    """The planted fault is the learning rate of step 4: checkpoint 3 is equal, and checkpoint 6 differs."""
    shutil.copytree(trained / "a", trained / "b")
    shutil.rmtree(trained / "b/ckpt/step_6")
    before = {path: path.read_bytes() for path in (trained / "a").rglob("*") if path.is_file()}
    succeed("resume", "b", "--lr", "0.002", at=trained)
    result, found = compare(trained, "b")
    assert result.status == 1, result.all
    assert (found["steps"]["first_different"], found["steps"]["count"]) == (4, 6)
    assert [entry["quantity"] for entry in found["steps"]["differences"]] == ["lr"]
    assert [checkpoint["step"] for checkpoint in found["checkpoints"]] == [3, 6]
    weights = found["checkpoints"][1]["groups"][0]
    mine, other = (checkpoint_weights(trained / run, 6) for run in "ab")
    unequal = [name for name in mine if (mine[name] != other[name]).any()]
    assert weights["first"]["name"] == "0.weight"
    assert "0.weight" in unequal
    assert weights["num_different"] == len(unequal)
    assert "step 4 is the first that differs" in result.out
    assert "optimizer.lr" in result.out
    assert {path: path.read_bytes() for path in before} == before, "a run was changed"


@pytest.mark.processes
@pytest.mark.slow
def test_commands_of_the_page(tmp_path):
    blocks = read_blocks("docs/debug.md")
    for line in (blocks["equal"] + blocks["different"] + blocks["replay"]).splitlines():
        program, *words = shlex.split(line.partition("#")[0])
        if program == "paceline":
            result = paceline(*words, at=tmp_path)
            differs = words == ["diff", "runs/a", "runs/c"]
            assert result.status == (1 if differs else 0), result.all
            assert not differs or "step 11 is the first that differs" in result.out
        else:
            subprocess.run([program, *words], cwd=tmp_path, check=True)
    assert "step 13 on one process, from the checkpoint of step 10" in result.out


def test_text_shows_names_of_any_origin_without_control_characters(tmp_path):
    state = {"model/a\x1b[31m": torch.zeros(2)}
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    write_checkpoint(a, 3, state)
    write_checkpoint(b, 3, {"model/a\x1b[31m": torch.ones(2)})
    result, _ = diff(tmp_path)
    assert result.status == 1
    assert "\x1b" not in result.out
