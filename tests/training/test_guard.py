"""Flipped bits are found, located and attributed; healthy trainings raise no alarm."""

import os
import random
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from command import checkpoint_weights, succeed
from harness import ranks, train_on_ranks
from paceline import RunFolder, Spec, Task, train
from paceline.after_step import Ema, StepOperation, Swa
from paceline.distributed.dtensor import local_tensor
from paceline.drill.bit_flip import MANTISSA_BITS, flip_bit
from paceline.errors import CorruptionError, DivergedError, PlanError, TaskError
from paceline.events import Noted
from paceline.plan.plan import parse
from paceline.spec import Optimizer, Save, WeightGuard
from paceline.training import resume
from paceline.training.checkpoint.index import read_index
from paceline.training.guard.check import find_copy, has_replicas
from paceline.training.guard.digest import SMALL, WIDTH, digest
from paceline.training.guard.recompute import find_wrong_losses
from paceline.training.guard.suspects import Suspect, read_suspects, record_suspects
from paceline.training.guard.verdict import Corruption, RankRecord, find_common_change, find_corruption
from paceline.training.loop import TrainingLoop
from paceline.training.step.step import TrainingStep
from pages import read_blocks
from run_lines import folder, started, step

STEPS = 12

# Digests

SHAPES = [(), (1,), (3, 5), (WIDTH * 2 + 7,), (SMALL + 3,), (2, 3, 4, 5)]


def fill(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    tensors = [fill(dtype, shape, seed) for seed, shape in enumerate(SHAPES)]
    expected, rng = int(digest(tensors)), random.Random(1)
    assert int(digest([tensor.clone() for tensor in tensors])) == expected
    for tensor in tensors:
        raw = tensor.view(-1).numpy(force=True) if dtype != torch.bfloat16 else None
        raw = (raw if raw is not None else tensor.view(-1).view(torch.int16).numpy()).view(np.uint8)
        for _ in range(20):
            at, bit = rng.randrange(raw.size), 1 << rng.randrange(8)
            raw[at] ^= bit
            assert int(digest(tensors)) != expected
            raw[at] ^= bit
    assert int(digest(tensors)) == expected


def test_order_and_exchanged_elements_change_the_digest() -> None:
    values = fill(torch.float32, (64,), 3)
    exchanged = values.clone()
    exchanged[:2] = values[:2].flip(0)
    assert int(digest([values])) != int(digest([exchanged]))
    assert int(digest([values[:32], values[32:]])) != int(digest([values[32:], values[:32]]))
    assert int(digest([])) == 0


def test_views_and_formats_of_memory_have_digests() -> None:
    """Parts of a buffer that begin between words, and weights in channels_last."""
    buffer = fill(torch.float32, (SMALL + 9,), 4)
    assert int(digest([buffer[1 : SMALL + 8]])) == int(digest([buffer[1 : SMALL + 8].clone()]))
    images = fill(torch.float32, (4, 3, 5, 5), 5).to(memory_format=torch.channels_last)
    changed = images.clone()
    changed[1, 2, 3, 4] += 1
    assert int(digest([images])) == int(digest([images.clone()])) != int(digest([changed]))


@pytest.mark.parametrize("dtype", list(MANTISSA_BITS), ids=lambda dtype: str(dtype)[6:])
def test_a_flip_changes_one_bit_and_stays_finite(dtype: torch.dtype) -> None:
    before = fill(dtype, (3, 4), 6) + 1
    after = before.clone()
    assert flip_bit([torch.zeros(3, dtype=torch.int64), after], random.Random(2)) is not None
    assert int((after != before).sum()) == 1
    assert after.isfinite().all()
    assert flip_bit([torch.zeros(3, dtype=torch.int64)], random.Random(2)) is None


# Verdicts


def record(weights: int, gradients: str = "", updated: str = "", **fields: int) -> RankRecord:
    return RankRecord(
        weights=weights, gradients=tuple(map(ord, gradients)), updated=tuple(map(ord, updated)), **fields
    )


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([record(1, copy=0)] * 4, []),
        (
            [record(1, copy=0), record(2, copy=0), record(1, copy=0)],
            [Corruption((1,), None, "rank 1 holds other weights than ranks 0, 2")],
        ),
        (
            [record(1, copy=0), record(2, copy=0)],
            [Corruption((0, 1), None, "ranks 0, 1 hold different weights, and none is in the majority")],
        ),
        (
            [
                record(3, "abd", "rsu", copy=0),
                record(2, "abc", "rst", copy=0),
                record(2, "abc", "rst", copy=0),
            ],
            [Corruption((0,), 13, "rank 0 holds other gradients than ranks 1, 2 since step 13")],
        ),
        (
            [
                record(2, "abc", "rst", copy=0),
                record(3, "abc", "rzz", copy=0),
                record(2, "abc", "rst", copy=0),
            ],
            [Corruption((1,), 12, "rank 1 holds other weights than ranks 0, 2 since step 12")],
        ),
        (
            [record(1, copy=0), record(2, copy=0, changed_in=7)],
            [
                Corruption(
                    (1,), 7, "the weights of rank 1 changed outside of an update, before the update of step 7"
                )
            ],
        ),
        ([record(1, copy=0), record(2, copy=1), record(1, copy=0), record(2, copy=1)], []),
        (
            [record(1, copy=0)] * 3 + [record(5, copy=0), record(6, copy=0)],
            [Corruption((3, 4), None, "ranks 3, 4 hold other weights than ranks 0, 1, 2")],
        ),
        (
            [record(1, copy=0, optimizer=5), record(1, copy=0, optimizer=6), record(1, copy=0, optimizer=5)],
            [Corruption((1,), None, "rank 1 holds other optimizer state than ranks 0, 2")],
        ),
        (
            [record(1, copy=0, buffers=5), record(2, copy=1, buffers=5), record(1, copy=0, buffers=6)],
            [
                Corruption(
                    (0, 2), None, "ranks 0, 2 hold different buffers or averages, and none is in the majority"
                )
            ],
        ),
    ],
    ids=[
        *("healthy", "majority", "pair", "gradient", "weights", "noticed", "groups", "two"),
        *("optimizer", "buffers"),
    ],
)
def test_verdict(records: list[RankRecord], expected: list[Corruption]) -> None:
    assert find_corruption(records, 11) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [((0, 0), None), ((3, 3), 3), ((3, 0), None), ((3, 4), None), ((3,), None)],
    ids=["none", "all", "one", "steps", "alone"],
)
def test_memory_does_not_fail_on_all_ranks_at_once(changes: tuple[int, ...], expected: int | None) -> None:
    assert find_common_change([record(1, copy=0, changed_in=step) for step in changes]) == expected


@pytest.mark.parametrize(
    ("plan", "size", "replicas"),
    [
        ("ddp", 3, [{0, 1, 2}]),
        ("zero1", 2, [{0, 1}]),
        ("zero3", 4, []),
        ("hsdp", 4, [{0, 2}, {1, 3}]),
        ("hsdp,replicate=4", 4, [{0, 1, 2, 3}]),
        ("tp=2", 2, []),
        ("tp=2", 4, [{0, 2}, {1, 3}]),
        ("cp=2", 4, [{0, 1, 2, 3}]),
        ("pp=2,microbatches=2", 4, [{0, 1}, {2, 3}]),
        ("hsdp,tp=2", 8, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]),
        ("local-sgd,period=2", 2, []),
    ],
)
def test_replicas_of_a_plan(plan: str, size: int, replicas: list[set[int]]) -> None:
    resolved = parse(plan).resolve(size)
    assert has_replicas(resolved) == bool(replicas)
    groups: dict[object, set[int]] = {}
    for rank in range(size if replicas else 0):
        groups.setdefault(find_copy(resolved, rank), set()).add(rank)
    assert [*groups.values()] == replicas


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([(1, 1, 2), (2, 2, 3), (3, 3, 1)], []),
        ([(9, 1, 2), (2, 2, 3), (3, 3, 1)], [(0,)]),
        ([(1, 1, 2), (2, 9, 3), (3, 3, 1)], [(1,)]),
        ([(1, 1, 2), (2, 2, 9), (3, 3, 1)], [(1, 2)]),
    ],
    ids=["healthy", "original", "repeated", "other"],
)
def test_losses_that_are_not_repeated_name_ranks(rows: list, named: list) -> None:
    assert [corruption.ranks for corruption in find_wrong_losses(rows, 3)] == named


def test_suspects_are_kept_in_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert read_suspects(run) == []
    suspect = Suspect(rank=3, host="n1", step=7, certain=True, what="rank 3 holds other weights", time=5.0)
    record_suspects(run, [suspect])
    with run.suspects.open("a") as file:
        file.write('damaged\n{"rank": "x"}\n')
    record_suspects(run, [suspect])
    assert read_suspects(run) == [suspect, suspect]


def test_show_and_doctor_name_ranks_and_nodes(tmp_path: Path) -> None:
    """Also of a training that continued after a restart."""
    run = folder(tmp_path / "r", [started(0, 1.7e9), step(1, 1.7e9, random.Random(0))])
    pair = "ranks 0, 3 hold different weights, and none is in the majority"
    record_suspects(run, [Suspect(rank=1, host="n2", step=7, certain=True, what="rank 1 changed")])
    for rank, host in ((0, "n1"), (3, "n4")):
        record_suspects(run, [Suspect(rank=rank, host=host, step=9, certain=False, what=pair)])
    for command in ("show", "doctor"):
        printed = succeed(command, "r", at=tmp_path).out
        assert "silent corruption on n2, rank 1, found after step 7: rank 1 changed\n" in printed
        assert f"silent corruption on n1 or n4, ranks 0, 3, found after step 9: {pair}\n" in printed


# Trainings on ranks


def request(guard: WeightGuard | None = None, **fields: Any) -> Spec:
    return Spec(
        steps=STEPS,
        batch=24,
        seed=3,
        optimizer=Optimizer(lr=1e-2),
        save=Save(every=4, minutes=float("inf")),
        threads=1,
        guard=guard or WeightGuard(),
        **fields,
    )


@contextmanager
def flipped(what: str, rank: int, step: int, seed: int) -> Any:
    """Flip a bit on a rank: of a weight in a forward pass, or of a gradient after its reduction."""
    rng, original, update = random.Random(seed), TrainingStep.backward, TrainingStep.update

    def backward(self: TrainingStep, batches: Any, done: int) -> Any:
        if what == "weight" and done == step and os.environ["RANK"] == str(rank):
            assert flip_bit(self.params, rng) is not None
        return original(self, batches, done)

    def change(self: TrainingStep, *arguments: Any) -> Any:
        if what == "gradient" and self.steps_seen == step and os.environ["RANK"] == str(rank):
            assert flip_bit([parameter.grad for parameter in self.params], rng, lasts=False) is not None
        self.steps_seen += 1
        return update(self, *arguments)

    TrainingStep.steps_seen = 0  # type: ignore[attr-defined]
    TrainingStep.backward, TrainingStep.update = backward, change  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainingStep.backward, TrainingStep.update = original, update  # type: ignore[method-assign]
        del TrainingStep.steps_seen  # type: ignore[attr-defined]


def train_with_flip(
    plan: str,
    what: str,
    rank: int,
    step: int,
    seed: int,
    spec: Spec,
    run: Path | None = None,
    task: Task | None = None,
) -> tuple[str, int]:
    """Return the message of the error, and the number of steps that were done; "" without an error."""
    done = 0
    with flipped(what, rank, step, seed):
        try:
            for event in train(
                spec,
                parse(plan),
                task=task or models.Points(),
                run=RunFolder(run) if run is not None else None,
            ):
                done = max(done, getattr(event, "step", 0))
        except CorruptionError as error:
            return str(error), done
    return "", done


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan", "what", "guard", "expected"),
    [
        (3, "ddp", "gradient", WeightGuard(every=4), "rank 1 holds other weights than ranks 0, 2;"),
        (
            3,
            "ddp",
            "gradient",
            WeightGuard(every=4, locate=True),
            "rank 1 holds other weights than ranks 0, 2 since step 6;",
        ),
        (2, "ddp", "gradient", WeightGuard(every=4), "ranks 0, 1 hold different weights, and none is in"),
        *(
            (
                2,
                plan,
                "weight",
                WeightGuard(every=4, locate=True),
                "the weights of rank 1 changed outside of an update, before the update of step 6;",
            )
            for plan in ("ddp", "zero1", "zero2", "zero3")
        ),
    ],
    ids=["majority", "located", "pair", "ddp", "zero1", "zero2", "zero3"],
)
def test_flips_are_found_at_the_next_comparison(
    size: int, plan: str, what: str, guard: WeightGuard, expected: str, tmp_path: Path
) -> None:
    spec = request(guard)
    results = ranks(size)(train_with_flip, plan, what, 1, 5, 1, spec, tmp_path)
    for message, done in results:
        assert message.startswith(f"silent corruption, found after step 8: {expected}")
        assert "at step 4 nothing was wrong" in message
        assert done <= 8
    run = RunFolder(tmp_path)
    assert run.checkpoints() == [4], "no checkpoint has corrupted weights"
    assert {suspect.rank for suspect in read_suspects(run)} == ({0, 1} if "ranks 0, 1" in expected else {1})


@pytest.mark.processes
def test_the_flip_is_not_found_without_comparisons() -> None:
    """A negative control: the same flip changes the training, and nothing else notices."""
    assert [message for message, _ in ranks(2)(train_with_flip, "ddp", "weight", 1, 5, 1, request())] == [
        "",
        "",
    ]


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["ddp", "zero3", "ddp,microbatches=2"])
def test_comparisons_change_nothing(plan: str) -> None:
    guard = WeightGuard(every=2, locate=True, recompute=True)
    task = models.NormedImages()
    plain = train_on_ranks(2, task, request(precision="fp64"), plan)
    guarded = train_on_ranks(2, task, request(guard, precision="fp64"), plan)
    assert plain.losses == guarded.losses
    for name, value in plain.weights.items():
        np.testing.assert_array_equal(value, guarded.weights[name])


class Averaged(models.NormedImages):
    """BatchNorm, and an average of the weights."""

    def after_step(self) -> list[Ema]:
        return [Ema(0.9)]


class Clamped(models.Points):
    """The first layer limits its own weights before it uses them."""

    in_secret: bool = False  # through .data

    def model(self) -> nn.Module:
        model, in_secret = super().model(), self.in_secret

        def clamp(layer: Any, args: Any) -> None:
            with torch.no_grad():
                (layer.weight.data if in_secret else layer.weight).clamp_(-0.2, 0.2)

        model[0].register_forward_pre_hook(clamp)
        return model


def train_with_change(task: Task, plan: str, spec: Spec, change: str, at: tuple[int, int]) -> str:
    """Return the error of a training in which a bit of a tensor flips on a rank before a step.

    change: "optimizer", "buffer", "average", "exponent" (of a weight), or "" for nothing. at: rank and step.
    """
    original = TrainingLoop._run_step

    def run_step(self: TrainingLoop, source: Any) -> Any:
        if change and (self.world.rank, self.step) == at:
            optimizer, model = self.prepared.optimizers[0], self.prepared.model
            tensor = {
                "optimizer": lambda: next(iter(optimizer.state.values()))["exp_avg"],
                "buffer": lambda: next(value for value in model.buffers() if value.dim()),
                "average": lambda: next(iter(self.prepared.operations.averages.values())),
                "exponent": lambda: next(model.parameters()),
            }[change]()
            bits = local_tensor(tensor).detach().view(-1).view(torch.int32)
            bits[0] = bits[0] | 0x7F800000 if change == "exponent" else bits[0] ^ (1 << 20)
        return original(self, source)

    TrainingLoop._run_step = run_step  # type: ignore[method-assign]
    try:
        notes = [event.message for event in train(spec, parse(plan), task=task) if isinstance(event, Noted)]
    except (CorruptionError, DivergedError, TaskError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        TrainingLoop._run_step = original  # type: ignore[method-assign]
    return " ".join(notes)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("optimizer", "rank 1 holds other"),  # optimizer state, or also weights
        ("buffer", "rank 1 holds other buffers or averages than ranks 0, 2;"),
        ("average", "rank 1 holds other buffers or averages than ranks 0, 2;"),
        ("", ""),
    ],
)
def test_state_beside_weights_is_compared(change: str, expected: str) -> None:
    spec = request(WeightGuard(every=4))
    for message in ranks(3)(train_with_change, Averaged(), "ddp", spec, change, (1, 5)):
        found = f"CorruptionError: silent corruption, found after step 8: {expected}" if change else ""
        assert message.startswith(found), message
        assert bool(message) == bool(change), message


@pytest.mark.processes
def test_an_infinite_weight_is_named_before_the_loss() -> None:
    """With a negative control: without a guard, the training only reports that its loss is not finite."""
    named = "the weights of rank 1 changed outside of an update, before the update of step 5;"
    for guard, expected in ((WeightGuard(every=50, locate=True), named), (WeightGuard(), "DivergedError: ")):
        messages = ranks(2)(train_with_change, models.Points(), "ddp", request(guard), "exponent", (1, 4))
        assert all(expected in message for message in messages), messages


@pytest.mark.processes
@pytest.mark.parametrize(
    ("task", "plan", "change", "expected"),
    [
        (Clamped(), "ddp", "", "forward() or loss() changes 0.weight, so guard.locate does not follow that"),
        (Clamped(), "zero1", "exponent", "DivergedError: "),
        (
            Clamped(in_secret=True),
            "ddp",
            "",
            "TaskError: the weights of all ranks changed outside of an update, before the update of step 2",
        ),
        (
            Clamped(),
            "zero3",
            "",
            "TaskError: plan zero3,dp=2,microbatches=1 would lose what forward() changes",
        ),
    ],
    ids=["followed", "not followed", "secretly", "sharded"],
)
def test_weights_that_the_task_changes_raise_no_alarm(
    task: Task, plan: str, change: str, expected: str
) -> None:
    spec = request(WeightGuard(every=4, locate=True))
    messages = ranks(2)(train_with_change, task, plan, spec, change, (1, 5))
    assert all(message.startswith(expected) for message in messages), messages


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["hsdp", "tp=2", "pp=2,microbatches=2", "cp=2"])
def test_replicas_of_parts_are_compared(plan: str) -> None:
    """Without guard.locate: gradients and optimizer state of a rank that another rank has, too."""
    spec = request(WeightGuard(every=4))
    for change in ("", "optimizer"):
        messages = ranks(4)(train_with_change, models.ShortText(), plan, spec, change, (1, 5))
        assert all(bool(message) == bool(change) for message in messages), messages
        assert all(message.startswith("CorruptionError: ") for message in messages if change), messages


class Averaging(models.ShortText):
    """An average of the weights, which evaluations use."""

    operation: str = "ema"

    def after_step(self) -> list[StepOperation]:
        return [Ema(0.9) if self.operation == "ema" else Swa(3)]


TEXT, EMA, SWA = models.ShortText(), Averaging(), Averaging(operation="swa")
HEALTHY: list[tuple[str, str, Task, dict[str, Any]]] = [
    *((plan, name, TEXT, {}) for name in ("lion", "adafactor", "muon", "lamb") for plan in ("ddp", "zero3")),
    *(("zero2", name, TEXT, {}) for name in ("adafactor", "muon")),
    *((plan, "sgd", EMA, {}) for plan in ("ddp", "zero2")),
    *((plan, "adamw", SWA, {}) for plan in ("zero1", "zero3")),
    *((plan, "adamw", TEXT, {"precision": "fp16"}) for plan in ("ddp", "zero2", "tp=2")),
    *((plan, "adamw", TEXT, {}) for plan in ("tp=2", "pp=2,microbatches=2", "cp=2")),
    *((f"{plan},uneven=1", "adamw", TEXT, {"batch": 25}) for plan in ("zero2", "zero3")),
]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "name", "task", "fields"),
    HEALTHY,
    ids=[f"{plan} {name} {getattr(task, 'operation', '')}{fields}" for plan, name, task, fields in HEALTHY],
)
def test_healthy_trainings_raise_no_alarm(plan: str, name: str, task: Task, fields: dict[str, Any]) -> None:
    """Nor do they stop to follow weights that an evaluation has gathered: a planted flip is found."""
    size = 3 if "uneven" in plan else 2
    spec = request(WeightGuard(every=4, locate=True))
    spec = spec.model_copy(update={"optimizer": Optimizer(name=name, lr=1e-3), **fields})
    assert ranks(size)(train_with_change, task, plan, spec, "", (0, 0)) == [""] * size
    for message, _ in ranks(size)(train_with_flip, plan, "weight", size - 1, 5, 1, spec, None, task):
        assert message.startswith(
            f"silent corruption, found after step 8: the weights of rank {size - 1} changed outside of an "
            "update, before the update of step 6;"
        )


class WrongOnce(models.Points):
    """A loss that one rank computes wrongly in one step, as after a flipped activation."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        loss = super().loss(output, batch)
        if torch.is_grad_enabled() and type(loss.data) is Tensor and loss.device.type != "meta":
            WrongOnce.calls += 1
            if os.environ.get("RANK") == "1" and WrongOnce.calls == 8:
                return loss * (1 + 1e-6)
        return loss

    calls = 0


def train_wrongly(plan: str, spec: Spec) -> str:
    WrongOnce.calls = 0
    try:
        list(train(spec, parse(plan), task=WrongOnce()))
    except CorruptionError as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_a_loss_that_another_rank_cannot_repeat_is_found(plan: str) -> None:
    for guard, is_found in (
        (WeightGuard(every=1, recompute=True), True),
        (WeightGuard(every=1, locate=True), False),
    ):
        messages = ranks(2)(train_wrongly, plan, request(guard))
        assert all(("rank 1 did not repeat its loss of step" in message) == is_found for message in messages)


@pytest.mark.parametrize(
    ("plan", "guard", "message"),
    [
        (
            "zero3",
            WeightGuard(every=5),
            "guard.every=5 compares replicas, and plan zero3 has a single copy of each weight; add "
            "guard.locate=true, which finds weights that change between two updates",
        ),
        (
            "local-sgd,period=2",
            WeightGuard(every=5),
            "guard.every=5 compares weights, and plan local-sgd,period=2 has other weights on each rank; "
            "leave it out",
        ),
        (
            "tp=2",
            WeightGuard(every=5, recompute=True),
            "guard.recompute=true requires data ranks that hold the whole model, which plan tp=2 does not "
            "have; leave it out",
        ),
    ],
    ids=["zero3", "local-sgd", "tp"],
)
@pytest.mark.processes
def test_impossible_comparisons_are_errors(plan: str, guard: WeightGuard, message: str) -> None:
    assert ranks(2)(find_error, plan, request(guard)) == [message, message]


def find_error(plan: str, spec: Spec) -> str:
    try:
        list(train(spec, parse(plan), task=models.Points()))
    except PlanError as error:
        return str(error)
    return ""


# Checkpoints


def resume_run(plan: str, spec: Spec, run: Path, flips: bool) -> str:
    """Continue a run, after a bit of the loaded weights flipped on the last rank. Return the error."""
    load_ = resume.load_

    def load_flipped_(path: Path, model: Any, *rest: Any) -> Any:
        result = load_(path, model, *rest)
        if flips and os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
            assert flip_bit(list(model.parameters())[:1], random.Random(1)) is not None
        return result

    resume.load_ = load_flipped_
    try:
        list(train(spec, parse(plan), task=models.Points(), run=RunFolder(run)))
    except CorruptionError as error:
        return str(error)
    finally:
        resume.load_ = load_
    return ""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "written", "read", "flips", "guard"),
    [
        (2, "ddp", "zero3", False, WeightGuard(every=4)),
        (2, "zero3", "ddp", False, WeightGuard(every=4, locate=True)),
        (3, "zero3", "zero2", True, WeightGuard(every=4, locate=True)),
        (2, "ddp", "ddp", True, WeightGuard(every=4)),
        (2, "ddp", "ddp", True, WeightGuard()),
    ],
    ids=["to zero3", "to ddp", "zero3 flipped", "ddp flipped", "no guard"],
)
def test_loaded_weights_are_compared_with_those_before_the_save(
    size: int, written: str, read: str, flips: bool, guard: WeightGuard, tmp_path: Path
) -> None:
    assert ranks(size)(resume_run, written, request(guard), tmp_path, False) == [""] * size
    longer = request().model_copy(update={"steps": STEPS + 2})
    for message in ranks(2)(resume_run, read, longer, tmp_path, flips):
        is_found = flips and guard.every is not None
        assert ("other bits of 0.weight than the training had at step 12" in message) == is_found, message


def sum_positions(whole: np.ndarray) -> int:
    """Return the digest of a whole tensor, in Python's integers."""
    bits = whole.reshape(-1).view({4: np.int32, 8: np.int64}[whole.itemsize]).tolist()
    factor = 0x9E3779B97F4A7C15
    total = sum(value * ((at * factor) | 1) for at, value in enumerate(bits)) % 2**64
    return total - 2**64 if total >= 2**63 else total


def resume_text(plan: str, spec: Spec, run: Path, flipped_name: str = "") -> str:
    """Continue a run, after a bit of a loaded weight flipped where a rank has a part. Return the error."""
    load_ = resume.load_

    def load_flipped_(path: Path, model: Any, *rest: Any) -> Any:
        result = load_(path, model, *rest)
        parameter = dict(model.named_parameters()).get(flipped_name)
        if parameter is not None and parameter.device.type != "meta":
            assert flip_bit([parameter], random.Random(1)) is not None
        return result

    resume.load_ = load_flipped_
    try:
        list(train(spec, parse(plan), task=models.ShortText(), run=RunFolder(run)))
    except CorruptionError as error:
        return str(error)
    finally:
        resume.load_ = load_
    return ""


SPLITS = [(2, plan) for plan in ("tp=2", "pp=2,microbatches=2", "cp=2", "zero3")] + [
    (4, plan) for plan in ("zero3,tp=2", "tp=2", "zero3,pp=2,microbatches=2", "cp=2,tp=2", "hsdp")
]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize(("size", "plan"), SPLITS, ids=[f"{plan} on {size}" for size, plan in SPLITS])
def test_digests_of_split_weights_are_those_of_the_whole(size: int, plan: str, tmp_path: Path) -> None:
    """The reference reads the checkpoint on one process, and sums with Python's integers.

    Another plan resumes the run; a flip in a loaded weight is found under both.
    """
    spec = request(WeightGuard(every=4, locate=True)).model_copy(update={"steps": 4})
    assert ranks(size)(resume_text, plan, spec, tmp_path) == [""] * size
    run = RunFolder(tmp_path)
    digests = read_index(run.checkpoint(4)).digests
    weights = checkpoint_weights(tmp_path, 4)
    assert {name for name, _ in models.ShortText().model().named_parameters()} == set(digests)
    assert {name: value for name, (value, _) in digests.items()} == {
        name: sum_positions(weights[name]) for name in digests
    }
    longer = spec.model_copy(update={"steps": 5, "guard": WeightGuard()})
    for name in (next(iter(digests)), list(digests)[-1]):
        for on, read in ((size, plan), (2, "ddp")):
            messages = ranks(on)(resume_text, read, longer, tmp_path, name)
            assert all(f"other bits of {name} than" in message for message in messages), messages
    assert ranks(2)(resume_text, "zero2", longer, tmp_path) == ["", ""]


@pytest.mark.processes
@pytest.mark.slow
def test_the_command_of_the_page(tmp_path: Path) -> None:
    words = shlex.split(read_blocks("docs/runs.md")["guard"])
    done = succeed(*words[1:], "--run-dir", "r", at=tmp_path)
    run = RunFolder(tmp_path / "r")
    assert run.request()[0].guard == WeightGuard(every=10, locate=True)
    assert "done" in done.out
    assert read_suspects(run) == []


# Long sweeps


def count_alarms(plan: str, steps: int, guard: WeightGuard) -> str:
    spec = request(guard).model_copy(update={"steps": steps, "save": Save(minutes=float("inf"))})
    try:
        list(train(spec, parse(plan), task=models.Points()))
    except CorruptionError as error:
        return str(error)
    return ""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", ["ddp", "zero3"])
def test_ten_thousand_healthy_steps_raise_no_alarm(plan: str) -> None:
    guard = WeightGuard(every=10, locate=True, recompute=True)
    assert ranks(2)(count_alarms, plan, 10_000, guard, timeout_s=500.0) == ["", ""]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3"])
def test_all_flipped_weights_are_found(plan: str) -> None:
    guard = WeightGuard(every=4, locate=True)
    for seed in range(25):
        step, rank = 1 + seed % 6, seed % 2
        for message, done in ranks(2)(train_with_flip, plan, "weight", rank, step, seed, request(guard)):
            assert f"the weights of rank {rank} changed" in message, (seed, message)
            assert f"before the update of step {step + 1};" in message
            assert done <= step + 4
