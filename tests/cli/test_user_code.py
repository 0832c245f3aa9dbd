"""Exceptions in the code of a task become one sentence with file and line, on any number of ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command import Result, paceline, write_task
from harness import ranks
from paceline import Error, Spec, World, train
from paceline.errors import DataError, TaskError
from paceline.plan.plan import parse
from paceline.spec import Loading
from paceline.task import load_task
from paceline.training.dry_run.dry_run import compute_comm_volume
from paceline.training.model_facts.describe import describe
from paceline.user_code import UserCode

SOURCE = """
import os
import torch
from torch import nn
from paceline import Layout, Task


class Odd(BaseException):
    pass


class Unreadable(Exception):
    def __str__(self):
        raise ValueError("no text")


def fail(how):
    if os.environ.get("RANK", "0") != os.environ.get("ONLY_ON", os.environ.get("RANK", "0")):
        return
    if how == "KeyError":
        raise KeyError("labels")  # LINE
    if how == "zero":
        1 / 0  # LINE
    if how == "exit":
        raise SystemExit(0)  # LINE
    if how == "sys.exit":
        import sys
        sys.exit()  # LINE
    if how == "odd":
        raise Odd("strange")  # LINE
    if how == "interrupt":
        raise KeyboardInterrupt  # LINE
    if how == "generator":
        raise GeneratorExit("over")  # LINE
    if how == "stop":
        raise StopIteration  # LINE
    if how == "peer":
        raise ConnectionResetError("connection reset by the user's own server")  # LINE
    if how == "unreadable":
        raise Unreadable  # LINE
    if how == "library":
        torch.randn(3) @ torch.randn(4)  # LINE


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how):
        ctx.how = how
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        fail(ctx.how)
        return grad, None


class Net(nn.Module):
    def __init__(self, fate, how):
        super().__init__()
        self.fate, self.how = fate, how
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        if self.fate == "forward":
            fail(self.how)
        for block in self.blocks:
            x = block(x).tanh()
        x = self.last(x)
        return Backward.apply(x, self.how) if self.fate == "backward" else x


class Points:
    def __init__(self, fate, how, count=24):
        self.fate, self.how, self.count = fate, how, count

    def __len__(self):
        if self.fate == "__len__":
            fail(self.how)
        return self.count

    def __getitem__(self, index):
        if self.fate == "__getitem__" and index == 5:
            fail(self.how)
        draw = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=draw), torch.randn(3, generator=draw)


class Batches(Points):
    def batch_of(self, indices):
        if 5 in indices:
            fail(self.how)
        return torch.zeros(len(indices), 6), torch.zeros(len(indices), 3)


class Steps(torch.optim.SGD):
    def __init__(self, params, how):
        self.how = how
        super().__init__(params, lr=0.1)

    def step(self, closure=None):
        fail(self.how)


class Bad(Task):
    fate: str = "none"
    how: str = "KeyError"

    def __post_init__(self):
        self.perhaps("__post_init__")

    def perhaps(self, where):
        if self.fate == where:
            fail(self.how)

    def model(self):
        self.perhaps("model")
        return nn.Sequential(nn.Linear(5, 3)) if self.fate == "shape" else Net(self.fate, self.how)

    def dataset(self, split):
        self.perhaps("dataset")
        kind = Batches if self.fate == "batch_of" else Points
        if split == "train":
            return kind(self.fate, self.how)
        return Points(self.fate, self.how, 8)

    def inputs(self, batch):
        self.perhaps("inputs")
        return batch[0]

    def loss(self, output, batch):
        self.perhaps("loss")
        loss = (output - batch[1]).square()
        return loss.detach() if self.fate == "detached" else loss

    def weights(self, batch):
        self.perhaps("weights")
        return torch.ones_like(batch[1])

    def metrics(self, output, batch):
        self.perhaps("metrics")
        return {}

    def layout(self):
        self.perhaps("layout")
        return Layout()

    def optimizer(self, params):
        self.perhaps("optimizer")
        return Steps([parameter for _, parameter in params], self.how) if self.fate == "step" else None

    def pretrained(self):
        self.perhaps("pretrained")
        return None
"""
HOWS = {
    "KeyError": "KeyError: 'labels'",
    "zero": "ZeroDivisionError: division by zero",
    "exit": "SystemExit: 0",
    "sys.exit": "SystemExit",
    "odd": "Odd: strange",
    "interrupt": "KeyboardInterrupt",
    "generator": "GeneratorExit: over",
    "stop": "StopIteration",
    "peer": "ConnectionResetError: connection reset by the user's own server",
    "unreadable": "Unreadable, whose text cannot be read: its __str__ raised ValueError",
    "library": "RuntimeError: ",
}
LINES = dict(
    zip(HOWS, [at for at, line in enumerate(SOURCE.splitlines(), 1) if line.endswith("# LINE")], strict=True)
)
WHERE = {
    "dataset": "dataset('train') raised",
    "__len__": "the length of dataset('train') raised",
    "__getitem__": "sample 5 of 'train' raised",
    "batch_of": "one of the samples [",
    "model": "model() raised",
    "layout": "layout() raised",
    "pretrained": "pretrained() raised",
    "optimizer": "optimizer() raised",
    "inputs": "inputs() raised",
    "forward": "the forward pass raised",
    "loss": "loss() raised",
    "weights": "weights() raised",
    "backward": "the backward pass raised",
    "step": "the step of the optimizer raised",
    "metrics": "metrics() raised",
}


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("user_code")
    write_task(folder, SOURCE, "bad.py")
    return folder


def ended(path: str, fate: str, how: str, plan: str = "single", workers: int = 0) -> tuple[str, str]:
    """Return how a training of 3 steps ends on this rank."""
    spec = Spec(
        task=f"{path}:Bad", set={"fate": fate, "how": how}, steps=3, batch=8, data=Loading(workers=workers)
    )
    world = World() if "RANK" not in os.environ else None
    try:
        for _ in train(spec, parse(plan), world):
            pass
    except Error as error:
        return type(error).__name__, str(error)
    return "", "it did not fail"


def meant(message: str, fate: str, how: str) -> bool:
    return (
        message.startswith(WHERE[fate])
        and HOWS[how] in message
        and f"bad.py, line {LINES[how]})" in message
        and "\n" not in message
    )


def test_every_method_and_every_exception(here):
    """All methods with SystemExit and KeyError, and all exceptions in some methods."""
    cases = [(fate, how) for fate in WHERE for how in ("KeyError", "exit")]
    cases += [(fate, how) for fate in ("model", "__getitem__", "forward", "loss", "backward") for how in HOWS]
    wrong = {}
    for fate, how in cases:
        kind, message = ended(f"{here}/bad.py", fate, how)
        expected = "DataError" if fate in ("dataset", "__len__", "__getitem__", "batch_of") else "TaskError"
        if kind != expected or not meant(message, fate, how):
            wrong[fate, how] = kind, message
    assert not wrong
    assert ended(f"{here}/bad.py", "none", "exit") == ("", "it did not fail")


@pytest.mark.parametrize("fate", ["__getitem__", "batch_of"])
def test_in_data_workers(fate, here):
    for how in ("exit", "odd", "unreadable"):
        kind, message = ended(f"{here}/bad.py", fate, how, workers=1)
        assert (kind, meant(message, fate, how)) == ("DataError", True), message


def on_two(path: str) -> list[str]:
    return [
        f"{plan} {fate}: {message}"
        for plan in ("zero3", "ddp")
        for fate in ("forward", "loss", "backward")
        if not meant(message := ended(path, fate, "exit", plan)[1], fate, "exit")
    ]


def test_under_torch_engines(here):
    assert ranks(2)(on_two, f"{here}/bad.py") == [[], []]


def test_in_a_pipeline(here, tmp_path):
    words = (
        "train",
        f"{here}/bad.py:Bad",
        "--batch",
        "8",
        "--steps",
        "3",
        "--ranks",
        "2",
        "--plan",
        "pp=2,microbatches=2",
    )
    check_one_sentence(paceline(*words, "--set", "fate=backward", "--set", "how=odd", at=tmp_path), "odd")


def test_loss_without_gradient_is_reported(here):
    kind, message = ended(f"{here}/bad.py", "detached", "")
    assert kind == "TaskError"
    assert "does not require grad" in message
    assert "detach()" in message


def test_an_error_inside_torch_names_the_model(here):
    kind, message = ended(f"{here}/bad.py", "shape", "")
    assert (kind, message.split(":")[0]) == ("TaskError", "the forward pass raised RuntimeError")
    assert "mat1 and mat2 shapes cannot be multiplied" in message
    assert f"model() is at {here}/bad.py, line" in message


def test_in_passes_on_fake_tensors(here):
    """comms, preflight and plan run these passes."""
    for fate in ("model", "forward", "loss", "layout"):
        for how in ("KeyError", "exit", "odd"):
            task = load_task(f"{here}/bad.py:Bad", {"fate": fate, "how": how})
            for ask in (
                lambda spec, task: describe(spec, task),
                lambda spec, task: compute_comm_volume(spec, parse("ddp"), 2, 0, task),
            ):
                with pytest.raises((TaskError, DataError)) as caught:
                    ask(Spec(task=f"{here}/bad.py:Bad", batch=8), task)
                assert f"bad.py, line {LINES[how]})" in str(caught.value), (fate, how, str(caught.value))
                assert HOWS[how] in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sys\nsys.exit(0)\n", "cannot import {path}: SystemExit: 0 ({path}, line 2)"),
        (
            "class Odd(BaseException): pass\n\nraise Odd('x y')\n",
            "cannot import {path}: Odd: x y ({path}, line 3)",
        ),
        ("raise KeyboardInterrupt\n", "cannot import {path}: KeyboardInterrupt ({path}, line 1)"),
        ("from other import x\n", "cannot import {path}: No module named 'other' ({path}, line 1)"),
        ("import torn_module\n", "{at}/torn_module.py, line 2: invalid syntax"),
        (
            "def f(): f()\nf()\n",
            "cannot import {path}: RecursionError: maximum recursion depth exceeded ({path}, line 1)",
        ),
        ("x = '\x00'\n", "cannot import {path}: source code string cannot contain null bytes"),
    ],
)
def test_at_import(source, message, tmp_path):
    """A second import fails in the same way: no half-imported module remains."""
    path = write_task(tmp_path, source, "mine.py")
    write_task(tmp_path, "\ndef model(:\n", "torn_module.py")
    for _ in range(2):
        with pytest.raises(TaskError) as caught:
            load_task(str(path), {})
        assert str(caught.value) == message.format(path=path, at=tmp_path)
    sys.path.remove(str(tmp_path))


def test_error_in_a_field_validator_is_located(here):
    for how in ("KeyError", "exit", "peer"):
        with pytest.raises(TaskError) as caught:
            load_task(f"{here}/bad.py:Bad", {"fate": "__post_init__", "how": how})
        assert HOWS[how] in str(caught.value)
        assert f"bad.py, line {LINES[how]})" in str(caught.value)


def check_one_sentence(result: Result, how: str, rank: int | None = None) -> None:
    """Check that a failed command prints one sentence. `rank`: the rank that failed, if there are several."""
    assert result.status != 0, result.all
    lines = [line for line in (result.out + result.err).splitlines() if HOWS[how] in line]
    assert len(lines) == 1, result.all
    assert f"bad.py, line {LINES[how]})" in lines[0], result.all
    if rank is not None:
        assert f"rank {rank}: " in lines[0] if rank else "rank " not in lines[0], result.all
    assert "Traceback" not in result.out + result.err, result.all


@pytest.mark.parametrize(
    ("only_on", "fate"),
    [
        ("1", "__getitem__"),
        pytest.param("0", "__getitem__", marks=pytest.mark.slow),
        pytest.param("0", "loss", marks=pytest.mark.slow),
    ],
)
def test_exit_with_status_0_on_one_of_two_ranks(only_on, fate, here, tmp_path):
    words = (
        "train",
        f"{here}/bad.py:Bad",
        "--batch",
        "8",
        "--steps",
        "9",
        "--save-every",
        "1",
        "--ranks",
        "2",
        "--run-dir",
        "r",
    )
    result = paceline(*words, "--set", f"fate={fate}", "--set", "how=exit", at=tmp_path, ONLY_ON=only_on)
    check_one_sentence(result, "exit", int(only_on))
    log = (tmp_path / "r" / "ranks" / f"{only_on}.log").read_text()
    assert "Traceback" in log, "the log of the rank has it"
    assert f'bad.py", line {LINES["exit"]}' in log


@pytest.mark.parametrize(
    "words",
    ["train", "verify --ranks 1 --plan single", "preflight", "comms --plan ddp --ranks 2", "plan --ranks 2"],
)
def test_every_command(words, here, tmp_path):
    command, *more = words.split(" ")
    at_commands = {
        "train": "loss",
        "verify": "forward",
        "preflight": "model",
        "comms": "loss",
        "plan": "forward",
    }
    result = paceline(
        command,
        f"{here}/bad.py:Bad",
        *more,
        "--set",
        f"fate={at_commands[command]}",
        "--set",
        "how=exit",
        at=tmp_path,
    )
    check_one_sentence(result, "exit")


def test_debug_shows_the_traceback(here, tmp_path):
    words = (
        "train",
        f"{here}/bad.py:Bad",
        "--batch",
        "8",
        "--steps",
        "3",
        "--set",
        "fate=loss",
        "--set",
        "how=exit",
        "--debug",
    )
    result = paceline(*words, at=tmp_path)
    assert result.status != 0
    assert f'bad.py", line {LINES["exit"]}, in fail' in result.err
    assert "SystemExit: 0" in result.err


def test_a_signal_is_not_an_error_of_the_task():
    """A KeyboardInterrupt passes unchanged in a busy loop and in a blocking call, as do Paceline's errors."""
    source = (
        "import os, signal, threading, time\n"
        "from paceline.user_code import UserCode\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "with UserCode('loss()'):\n"
        "    while True: {wait}\n"
    )
    for wait in ("pass", "time.sleep(9)"):
        found = subprocess.run(
            [sys.executable, "-c", source.format(wait=wait)], capture_output=True, text=True, check=False
        )
        assert found.stderr.splitlines()[-1] == "KeyboardInterrupt", found.stderr
        assert "TaskError" not in found.stderr
        assert found.returncode == -signal.SIGINT
    with pytest.raises(DataError, match="mine"), UserCode("loss()"):
        raise DataError("mine")


INPUTS = """
import torch
from torch import nn
from paceline import Task


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(4, 3)

    def forward(self, x, y):
        return (self.last(x) - y).square()


class Whole(Task):
    ragged: bool = False

    def model(self):
        return Two()

    def dataset(self, split):
        if split != "train":
            return None
        return [(torch.ones(4 + self.ragged * i), torch.ones(3)) for i in range(8)]

    def inputs(self, batch):
        return batch

    def loss(self, output, batch):
        return output
"""


def test_inputs_may_return_a_list(tmp_path):
    """default_collate yields lists."""
    path = write_task(tmp_path, INPUTS, "whole.py")
    spec = Spec(task=f"{path}:Whole", steps=2, batch=4)
    assert list(train(spec, "single,microbatches=2", World()))
    with pytest.raises(DataError) as caught:
        list(train(spec.model_copy(update={"set": {"ragged": True}}), "single", World()))
    assert "stack expects each tensor to be equal size" in str(caught.value)
    assert "define collate(samples) in the task" in str(caught.value)
    assert "\n" not in str(caught.value)
