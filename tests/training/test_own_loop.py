"""`paceline.setup`: a loop of the user's own computes the update of one process, under each plan.

The reference is a plain loop on the whole batches, in one process.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from command import TORCHRUN, Result, paceline, start, succeed
from harness import ranks
from paceline import CheckpointError, PlanError, TaskError, setup
from paceline.events import Profiled
from pages import read_blocks

pytestmark = pytest.mark.processes

PLANS = ("ddp", "zero1", "zero2", "zero3")
SLOW = pytest.mark.slow
STEPS, ROWS = 5, 9  # the rows of a batch are divided unevenly


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.frozen = nn.Parameter(torch.full((2,), 2.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).tanh() * self.frozen[0]


class Net(nn.Module):
    """With BatchNorm, tied weights, a frozen parameter and a scalar."""

    def __init__(self, width: int = 8, is_tied: bool = True):
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.middle, self.after = nn.Linear(width, width), nn.Linear(width, width)
        if is_tied:
            self.after.weight = self.middle.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.leave(self.after(self.middle(x).tanh())) * self.scale


def make(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net().double()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [model.scale], "lr": 0.01}]  # type: ignore[attr-defined]
    others = [parameter for name, parameter in model.named_parameters() if name != "scale"]
    return torch.optim.AdamW([*groups, {"params": others}], lr=0.02, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 9, generator=draw, dtype=torch.float64)
    return x[:, :6], x[:, 6:]


def train_alone(optimizer: Callable, clip: float | None, steps: int = STEPS) -> dict[str, Tensor]:
    model = make(0)
    updates = optimizer(model)
    for step in range(steps):
        x, y = batch(step)
        updates.zero_grad()
        (model(x) - y).square().mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        updates.step()
    return model.state_dict()


def train_here(
    plan: str,
    optimizer: Callable,
    clip: float | None = None,
    tells_samples: bool = True,
    saves: Path | None = None,
    loads: Path | None = None,
    steps: int = STEPS,
) -> tuple[dict[str, Tensor], int]:
    """Train on this rank; each rank starts with other weights, which those of rank 0 replace."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make(rank)
    trainer = setup(model, optimizer(model), plan, whole=["enter.*"] if loads is None else ())
    first = trainer.load(loads) if loads is not None else 0
    for step in range(first, steps):
        x, y = (part.tensor_split(size)[rank] for part in batch(step))
        loss = (trainer.model(x) - y).square().mean()
        trainer.backward(loss, samples=len(x) if tells_samples else None)
        trainer.step(clip)
    if saves is not None:
        trainer.save(saves)
    return trainer.weights(), first


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys() - {"after.weight"}
    return max((found[name] - expected[name]).abs().max().item() for name in found)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(
    ("optimizer", "clip", "size"),
    [
        (adamw, 0.3, 2),
        pytest.param(sgd, 0.3, 4, marks=SLOW),
        pytest.param(sgd, None, 2, marks=SLOW),
    ],
)
def test_the_update_is_that_of_one_process(plan: str, optimizer: Callable, clip: float | None, size: int):
    expected = train_alone(optimizer, clip)
    for weights, _ in ranks(size)(train_here, plan, optimizer, clip):
        assert largest_difference(weights, expected) < 1e-10


def test_means_of_uneven_parts_differ() -> None:
    """Negative control: without the numbers of samples, the mean of the means is another loss."""
    weights, _ = ranks(2)(train_here, "ddp", sgd, None, False)[0]
    assert largest_difference(weights, train_alone(sgd, None)) > 1e-5


def test_a_checkpoint_continues_under_another_plan(tmp_path: Path) -> None:
    expected = train_alone(adamw, None)
    ranks(2)(train_here, "zero3", adamw, None, True, tmp_path / "a", None, 3)
    assert [path.name for path in (tmp_path / "a" / "ckpt").iterdir()] == ["step_3"]
    for size, plan in ((2, "zero1"), (2, "zero3"), (1, "single")):
        for weights, first in ranks(size)(train_here, plan, adamw, None, True, None, tmp_path / "a"):
            assert first == 3
            assert largest_difference(weights, expected) < 1e-10
    assert ranks(1)(train_here, "single", sgd, None, True, None, tmp_path / "b", 0)[0][1] == 0


def look_here(plan: str, resets: bool = True) -> dict[str, Tensor]:
    """Train, and call the model between backward and step."""
    model = make(0)
    trainer = setup(model, sgd(model), plan)
    if not resets:
        trainer._sharded = []
    for step in range(3):
        x, y = (part.tensor_split(dist.get_world_size())[dist.get_rank()] for part in batch(step))
        trainer.backward((trainer.model(x) - y).square().mean(), samples=len(x))
        trainer.model.eval()
        with torch.no_grad():
            trainer.model(x)
        trainer.model.train()
        trainer.step(1e9)
    return trainer.weights()


@pytest.mark.parametrize("plan", ["zero2", *(pytest.param(plan, marks=SLOW) for plan in ("ddp", "zero3"))])
def test_a_forward_pass_before_the_step_changes_nothing(plan: str) -> None:
    expected = train_alone(sgd, None, 3)
    for weights in ranks(2)(look_here, plan):
        assert largest_difference(weights, expected) < 1e-10


def test_weights_that_stay_gathered_are_stale() -> None:
    """Negative control."""
    weights = ranks(2)(look_here, "zero2", False)[0]
    assert largest_difference(weights, train_alone(sgd, None, 3)) > 1e-5


def accumulate_here(plan: str) -> tuple[dict[str, Tensor], list[tuple]]:
    rank = dist.get_rank()
    model = make(0)
    trainer = setup(model, sgd(model), plan)
    x, y = batch(0)
    for rows in ([0, 1, 2, 3], [4, 5, 6, 7]):  # two micro-batches, each over both ranks
        mine = rows[2 * rank : 2 * rank + 2]
        trainer.backward((trainer.model(x[mine]) - y[mine]).square().mean() / 2)
    shapes = [
        (name, parameter.grad is not None, parameter.grad is None or parameter.grad.shape == parameter.shape)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    trainer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    return trainer.weights(), shapes


@pytest.mark.parametrize(
    "plan", ["ddp", "zero3", *(pytest.param(plan, marks=SLOW) for plan in ("zero1", "zero2"))]
)
def test_gradients_add_up_until_the_step(plan: str) -> None:
    model = make(0)
    updates = sgd(model)
    x, y = batch(0)
    for rows in ([0, 1, 2, 3], [4, 5, 6, 7]):
        ((model(x[rows]) - y[rows]).square().mean() / 2).backward()
    updates.step()
    for weights, shapes in ranks(2)(accumulate_here, plan):
        assert largest_difference(weights, model.state_dict()) < 1e-10
        assert all(has_gradient and fits for _, has_gradient, fits in shapes)


def leave_out_here(plan: str, unused_parameters: bool) -> dict[str, Tensor]:
    model = nn.ModuleDict({name: nn.Linear(6, 3).double() for name in ("a", "b")})
    trainer = setup(model, sgd(model), plan, unused_parameters=unused_parameters)
    module = trainer.model.module if hasattr(trainer.model, "module") else trainer.model
    names = ["a", "b"]
    module.forward = lambda x: sum(model[name](x) for name in names)  # type: ignore[method-assign]
    before = trainer.weights()
    for _ in range(2):
        del names[1:]  # after the first step, b is not used
        trainer.backward(trainer.model(batch(0)[0]).square().mean())
        trainer.step()
    after = trainer.weights()
    return {name: (after[name] - before[name]).abs().max() for name in after}


def test_steps_may_leave_out_parameters() -> None:
    changes = ranks(2)(leave_out_here, "ddp", True)[0]
    assert changes["a.weight"] > 0
    assert changes["b.weight"] == 0
    with pytest.raises(PlanError, match=r"'b.weight' has no gradient on rank \d.*unused_parameters=True"):
        raise _error(leave_out_here, "ddp", False)


def _error(function: Callable, *args: object) -> BaseException:
    return ranks(2)(_catch, function, *args)[0]


def _catch(function: Callable, *args: object) -> BaseException:
    try:
        function(*args)
    except (PlanError, TaskError, CheckpointError) as error:
        return error
    raise AssertionError("no error")


def refuse_here(plan: str, how: str) -> None:
    model = Net(is_tied=False)
    optimizer = sgd(model)
    match how:
        case "meta":
            model = model.to("meta")
            optimizer = sgd(model)
        case "foreign":
            optimizer = sgd(Net())
        case "late":
            sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
        case "lbfgs":
            optimizer = torch.optim.LBFGS(model.parameters())
        case "twice":
            setup(model, optimizer, plan)
    whole = ["norm"] if how == "whole" else []
    trainer = setup(model, None if how == "none" else optimizer, plan, whole=whole)
    if how == "scalar":
        trainer.backward(trainer.model(batch(0)[0].float()))
    if how == "nobody":
        trainer.backward(trainer.model(batch(0)[0].float()).mean() * 0, samples=0)
    if how == "nowhere":
        trainer.backward(trainer.model(batch(0)[0].float()).mean())
        trainer.step()
        trainer.save("/dev/null/nowhere")
    trainer.save("nowhere") if how == "unsaved" else trainer.step()


@pytest.mark.parametrize(
    ("plan", "how", "words"),
    [
        ("pp=2", "", "needs a task, .* zero3 and hsdp"),
        ("tp=2", "", "needs a task"),
        ("cp=2", "", "needs a task"),
        ("local-sgd,period=2", "", "needs a task"),
        ("ddp,microbatches=2", "", "leave out microbatches"),
        ("ddp,dp=4", "", "ranks"),
        ("zero3", "lbfgs", "LBFGS does not update each element independently"),
        ("ddp", "meta", "is on the meta device"),
        ("ddp", "foreign", "tensors that are not parameters of the model"),
        ("ddp", "late", "has state of earlier steps"),
        ("zero3", "twice", "is distributed already"),
        ("ddp", "scalar", r"loss must be a scalar, got shape \(9, 3\)"),
        ("ddp", "none", r"step\(\) requires an optimizer"),
        ("ddp", "unsaved", r"save\(\) requires"),
        ("ddp", "nobody", "no rank has samples"),
        ("zero3", "nowhere", "cannot create /dev/null/nowhere/ckpt: Not a directory"),
        ("zero3", "whole", "whole: no parameter matches 'norm'; available: scale"),
    ],
)
def test_refused(plan: str, how: str, words: str) -> None:
    with pytest.raises((PlanError, TaskError, CheckpointError), match=words) as raised:
        raise _error(refuse_here, plan, how)
    assert "\n" not in str(raised.value)


def test_the_program_of_the_page(tmp_path: Path) -> None:
    blocks = read_blocks("docs/python.md")
    end = '    trainer.save("runs/own")\n'
    batch = "    batch = torch.randn(64, 9)\n"
    (tmp_path / "loop.py").write_text(blocks["loop"].replace(end, batch + blocks["profile"] + end))
    result = succeed("python", "loop.py", at=tmp_path)
    assert "time of the step: " in result.out
    assert "2.weight" in result.out
    assert result.err == ""
    assert [path.name for path in (tmp_path / "runs/own/ckpt").iterdir()] == ["step_21"]


READ_S = 0.4  # for the batches of rank 1


def profile_here(plan: str, is_profiled: bool) -> tuple[dict[str, Tensor], Profiled | None, str]:
    """Train five steps of two backward passes each, and profile the fourth and fifth step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make(rank)
    trainer = setup(model, sgd(model), plan)

    def step(number: int) -> None:
        if rank == 1 and number > 2 and is_profiled:
            time.sleep(READ_S)
        for half in range(2):
            x, y = (part.tensor_split(size)[rank] for part in batch(2 * number + half))
            trainer.backward((trainer.model(x) - y).square().mean() / 2, samples=len(x))
        trainer.step(0.3)

    for number in range(3):
        step(number)
    if not is_profiled:
        step(3)
        step(4)
        return trainer.weights(), None, ""
    with trainer.profile(steps=2) as profile:
        step(3)
        step(4)
    return trainer.weights(), profile.event, str(profile)


@pytest.mark.parametrize(
    "plan", ["ddp", "zero3", *(pytest.param(plan, marks=SLOW) for plan in ("zero1", "zero2"))]
)
def test_a_profile_adds_up_and_changes_nothing(plan: str) -> None:
    expected = ranks(2)(profile_here, plan, False)
    found = ranks(2)(profile_here, plan, True)
    for (weights, event, text), (unprofiled, _, _) in zip(found, expected, strict=True):
        assert event is not None
        assert all(torch.equal(weights[name], unprofiled[name]) for name in weights)
        assert sum(event.seconds.values()) == pytest.approx(event.step_s)
        assert min(event.seconds[part] for part in ("compute", "communication", "optimizer")) > 0
        assert event.seconds["input"] >= READ_S / 2, "the mean of a rank that reads and one that does not"
        assert (event.slowest, event.num_steps) == (1, 2)
        assert text.startswith("mean time of 2 steps: ")
        assert "rank 1 is busy for " in text
    model = make(0)
    whole = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    memory = found[0][1].memory
    assert memory["weights"] == whole if plan in ("ddp", "zero1") else memory["weights"] < 0.8 * whole
    assert memory["gradients"] > 0
    assert memory["optimizer"] > 0


def profile_wrongly(how: str) -> None:
    model = make(0)
    trainer = setup(model, sgd(model), "ddp")
    with trainer.profile(steps=0 if how == "none" else 2):
        for step in range(3 if how == "many" else 1):
            x, y = batch(step)
            trainer.backward((trainer.model(x) - y).square().mean())
            trainer.step()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("none", "steps must be an integer from 1 to"),
        ("few", r"called trainer.step\(\) 1 times; call it 2 times, or use profile\(steps=1\)"),
        ("many", "more than 2 times"),
    ],
)
def test_a_profile_of_another_number_of_steps_is_refused(how: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        raise _error(profile_wrongly, how)
    assert largest_difference(ranks(2)(train_here, "ddp", sgd)[0][0], train_alone(sgd, None)) < 1e-10


LOOP = """
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import paceline


def wait_for(file):
    while os.path.exists(file):
        time.sleep(0.1)


def is_over():
    count = torch.tensor([float(os.path.exists("over"))])
    if dist.is_initialized():
        dist.all_reduce(count)
    return count.item() > 0


def read_batch(rank):
    if rank == 1:
        wait_for("stuck")
    return torch.randn(4, 6)


def train():
    model = nn.Linear(6, 3)
    trainer = paceline.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), "ddp", run="own")
    while not is_over():
        trainer.backward(trainer.model(read_batch(trainer.rank)).square().mean())
        trainer.step()
        time.sleep(0.01)


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        paceline.spawn(train, 2)
"""


@SLOW
@pytest.mark.parametrize("launcher", ["spawn", "torchrun"])
def test_doctor_names_the_rank_that_an_own_loop_waits_for(tmp_path: Path, launcher: str) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    program = TORCHRUN[:-2] if launcher == "torchrun" else (sys.executable,)
    with start("loop.py", at=tmp_path, program=program) as running:

        def diagnose() -> Result:
            return paceline("doctor", "own", at=tmp_path)

        running.wait_until(lambda: "own: healthy: step " in diagnose().out, "healthy")
        (tmp_path / "stuck").touch()
        running.wait_until(lambda: diagnose().status == 1, "stuck")
        out = diagnose().out
        assert "rank 1 is in wait_for (loop.py:" in out, out
        assert "; rank 0 waits in " in out, out
        (tmp_path / "stuck").unlink()
        running.wait_until(lambda: "own: healthy: step " in diagnose().out, "healthy again")
        if launcher == "spawn":
            second = paceline("loop.py", at=tmp_path, program=(sys.executable,), RANK="0", WORLD_SIZE="1")
            assert "own is being trained by process " in second.err
        (tmp_path / "over").touch()
        assert running.wait().status == 0
    assert diagnose().out.startswith("own is not running: its ranks have ended\n")
    # One sampler for both ranks, which ended with them.
    [samples] = (tmp_path / "own/monitor").glob("*.csv")
    assert "rank0 cpu" in samples.read_text()
    assert "rank1 cpu" in samples.read_text()
    assert samples.read_text().count("# paceline samples") == 1
