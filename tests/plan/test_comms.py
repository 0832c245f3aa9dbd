"""A dry run predicts what the ranks of a real training send, entry by entry."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn

import models
import sequences
from command import paceline, succeed, write_task
from harness import ranks
from paceline import Spec, Task
from paceline.errors import LaunchError, PlanError, TaskError
from paceline.plan.comm_volume import MODEL, PACELINE, CommVolume, Entry, axis_of
from paceline.plan.plan import RECOMPUTE, Plan, parse
from paceline.plan.report.comm_volume import build_tables
from paceline.plan.schedules import RUNNABLE_SCHEDULES
from paceline.spec import Optimizer
from paceline.training.dry_run.comm_counter import CommCounter
from paceline.training.dry_run.dry_run import compute_comm_volume
from paceline.training.prepared import PreparedTraining
from volumes import Fault, check_volumes, make_spec, measure_step, predict_volumes

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning"),
]  # by torch itself, for zero1
PLANS = ("ddp", "zero1", "zero2", "zero3", "hsdp")


TASKS = (
    models.Text,
    models.NormedImages,
    models.Frozen,
    models.Shared,
    models.Weighed,
    models.OwnOptimizer,
    models.Unrecorded,
)
RECIPES = (
    make_spec(),
    make_spec(precision="fp64", optimizer=Optimizer(clip=1.0)),
    make_spec(precision="fp16"),
    make_spec(precision="bf16"),
)
# Each plan with each task and half of the recipes.
ALL: list[tuple[int, str, int, type[Task], int]] = []
# Mostly on 2 ranks: each plan, task and recipe.
FEW: list[tuple[int, str, int, type[Task], int]] = []
for size, (p, plan), microbatches, (t, task), recipe in product(
    (2, 4), enumerate(PLANS), (1, 2), enumerate(TASKS), range(len(RECIPES))
):
    index = microbatches + recipe + p + t
    ALL += [(size, plan, microbatches, task, recipe)] if index % 2 == 0 else []
    is_quick = index == 8 and (p + t) % 2 == 0 and microbatches == 1 + t % 2 and size == 2 + 2 * (p == 4)
    FEW += ALL[-1:] if is_quick else []


@pytest.mark.parametrize(("size", "plan", "microbatches", "task", "recipe"), FEW)
def test_dry_run_matches_real_ranks(
    task: type[Task], size: int, plan: str, microbatches: int, recipe: int
) -> None:
    check_volumes(size, f"{plan},microbatches={microbatches}", task(), RECIPES[recipe])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "plan", "microbatches", "task", "recipe"), [case for case in ALL if case not in FEW]
)
def test_all_combinations_send_the_predicted_volume(
    task: type[Task], size: int, plan: str, microbatches: int, recipe: int
) -> None:
    check_volumes(size, f"{plan},microbatches={microbatches}", task(), RECIPES[recipe])


class Wide(models.Points):
    """More than one bucket of DistributedDataParallel."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 600), nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 3))


def test_buckets_of_ddp() -> None:
    volume = check_volumes(2, "ddp", Wide(), make_spec())
    of_model = CommVolume(
        0, tuple(entry for entry in volume.of("all-reduce").entries if entry.module != PACELINE)
    )
    assert of_model.bytes == 4 * (6 * 600 + 2 * 601 * 600 + 601 * 3)
    assert of_model.calls == 2  # one of 1 MiB and a little more, and the rest


def test_parameters_without_gradient() -> None:
    """DDP then sends which parameters were used, one int32 each."""
    results = ranks(2)(measure_step, models.Idle(), make_spec(), "ddp")
    expected = predict_volumes(2, "ddp", models.Idle(), make_spec())
    assert [volume for volume, _ in results] == expected
    numbers, count = 4 * 30 + 5 * 3 + 3 + 9, 11
    assert Entry("all-reduce", "replicate", 2, MODEL, 2, 4 * (numbers + count)) in expected[0].entries


@contextmanager
def add_all_reduce(training: PreparedTraining) -> Iterator[None]:
    handle = training.model[2].register_forward_hook(
        lambda module, args, output: dist.all_reduce(torch.zeros(3))
    )
    yield
    handle.remove()


@contextmanager
def keep_gathered(training: PreparedTraining) -> Iterator[None]:
    training.model[2].set_reshard_after_forward(False)
    yield
    training.model[2].set_reshard_after_forward(True)


@pytest.mark.parametrize(
    ("plan", "fault", "more"),
    [
        ("ddp", add_all_reduce, Entry("all-reduce", "replicate", 2, "2", 1, 12)),
        ("zero3", add_all_reduce, Entry("all-reduce", "shard", 2, "2", 1, 12)),
        ("zero3", keep_gathered, Entry("all-gather", "shard", 2, "2", -1, -4 * (4 * 7 + 4))),
    ],
)
def test_planted_differences_are_found(plan: str, fault: Fault, more: Entry) -> None:
    (volume, _), _ = ranks(2)(measure_step, models.Points(), make_spec(), plan, fault)
    expected = predict_volumes(2, plan, models.Points(), make_spec())[0]
    assert volume != expected
    before = {replace(entry, calls=0, bytes=0): entry for entry in expected.entries}
    differing = [entry for entry in volume.entries if entry not in expected.entries]
    assert len(differing) == 1
    predicted = before.get(replace(differing[0], calls=0, bytes=0), replace(more, calls=0, bytes=0))
    assert (
        replace(more, calls=predicted.calls + more.calls, bytes=predicted.bytes + more.bytes) == differing[0]
    )


SHAPES = ((7, 5), (7,), (3, 7), (3,), (3, 3), (3,))  # of the weights of models.Points
WHOLE = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)


def padded(parts: int) -> int:
    """Return the bytes with the first dim of each parameter padded to a multiple of the shards."""
    return 4 * sum(-(-shape[0] // parts) * parts * torch.Size(shape[1:]).numel() for shape in SHAPES)


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.slow), 8, pytest.param(24, marks=pytest.mark.slow)]
)
def test_bytes_match_formulas(size: int) -> None:
    def of(plan: str, collective: str, axis: str) -> int:
        volume = compute_comm_volume(Spec(batch=24), parse(plan), size, task=models.Points())
        return sum(entry.bytes for entry in volume.of(collective, axis).entries if entry.module != PACELINE)

    assert of("ddp", "all-reduce", "replicate") == WHOLE
    assert of("ddp,microbatches=1", "broadcast", "replicate") == 0
    assert of("zero1", "broadcast", "replicate") == WHOLE
    assert of("zero2", "all-gather", "shard") == of("zero2", "reduce-scatter", "shard") == padded(size)
    assert of("zero3", "all-gather", "shard") == 2 * padded(size)
    assert of("zero3", "reduce-scatter", "shard") == padded(size)
    if size > 2:
        assert of("hsdp", "all-gather", "shard") == 2 * padded(size // 2)
        assert of("hsdp", "all-reduce", "replicate") == padded(size // 2) // (size // 2)


def test_sent_bytes_of_rings() -> None:
    sent = {
        name: Entry(name, "world", 4, "", 1, 100).sent_bytes
        for name in ("all-reduce", "all-gather", "reduce-scatter", "broadcast")
    }
    assert sent == {"all-reduce": 150, "all-gather": 75, "reduce-scatter": 75, "broadcast": 100}
    assert Entry("all-reduce", "self", 1, "", 1, 100).sent_bytes == 0


@pytest.mark.parametrize(
    ("plan", "size", "group", "axis"),
    [
        ("ddp", 4, range(4), "replicate"),
        ("zero3", 4, range(4), "shard"),
        ("hsdp", 4, range(4), "world"),
        ("hsdp", 4, (2, 3), "shard"),
        ("hsdp", 4, (1, 3), "replicate"),
        ("dp=2,tp=2,pp=2", 8, (4, 5), "tp"),
        ("dp=2,tp=2,pp=2", 8, (4, 6), "replicate"),
        ("dp=2,tp=2,pp=2", 8, (1, 5), "pp"),
        ("dp=2,tp=2,pp=2,zero=3", 8, (4, 6), "shard"),
        ("dp=2,tp=2,pp=2", 8, (0, 1, 2, 3), "replicate×tp"),
        ("dp=2,cp=2", 4, (2, 3), "cp"),
        ("dp=2,cp=2", 4, range(4), "replicate"),
        ("tp=4", 4, (1,), "self"),
    ],
)
def test_axis_of_groups(plan: str, size: int, group: range, axis: str) -> None:
    assert axis_of(parse(plan).resolve(size), group) == axis


def count_other_collectives() -> tuple[CommVolume, CommVolume]:
    """Return the volumes of all collectives of torch.distributed, and of DTensor in forward and backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan, rank = Plan(tp=2).resolve(2), dist.get_rank()
    small, both, parts = torch.zeros(3), torch.zeros(6), [torch.zeros(3), torch.zeros(3)]
    with CommCounter(nn.Module(), plan) as result:
        dist.reduce(small, 0)
        dist.all_gather(parts, small)
        dist.gather(small, parts if rank == 0 else None)
        dist.scatter(small, parts if rank == 0 else None)
        dist.all_to_all_single(both, both.clone())
        dist.barrier()
        operations = [
            dist.P2POp(dist.isend, small, 1 - rank),
            dist.P2POp(dist.irecv, torch.empty(3), 1 - rank),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    mlp = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    whole = nn.Sequential(mlp, nn.LayerNorm(4))
    parallelize_module(
        mlp,
        init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)),
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )
    with CommCounter(whole, plan) as split:
        whole(torch.randn(5, 4, requires_grad=True)).sum().backward()
    return result.volume(), split.volume()


def test_other_collectives() -> None:
    for result, split in ranks(2)(count_other_collectives):
        sizes = {
            entry.collective: (entry.axis, entry.module, entry.calls, entry.bytes) for entry in result.entries
        }
        expected_bytes = {
            "reduce": 12,
            "all-gather": 24,
            "gather": 24,
            "scatter": 24,
            "all-to-all": 24,
            "barrier": 0,
            "send": 12,
            "recv": 12,
        }
        assert sizes == {name: ("tp", PACELINE, 1, size) for name, size in expected_bytes.items()}
        forward = Entry("all-reduce", "tp", 2, "0.2", 1, 4 * 5 * 4)
        backward = Entry("all-reduce", "tp", 2, "0.0", 1, 4 * 5 * 4)
        assert split.entries == (backward, forward)


def test_thousand_ranks() -> None:
    """A thousand ranks; all send the same."""
    spec = Spec(task="digits", batch=1024)
    first, last = (compute_comm_volume(spec, parse("hsdp,replicate=4"), 1024, rank) for rank in (0, 1023))
    assert first.entries == last.entries
    assert {(entry.axis, entry.ranks) for entry in first.entries} == {
        ("shard", 256),
        ("replicate", 4),
        ("world", 1024),
    }


def test_equal_blocks_share_a_line() -> None:
    console = Console(width=100)
    with console.capture() as shown:
        console.print(
            *build_tables([compute_comm_volume(Spec(batch=8), parse("zero3"), 4, task=models.Text())])
        )
    lines = [" ".join(line.split()) for line in shown.get().splitlines()]
    assert f"blocks.* × 3 6 {6 * 1440 / 1024:.1f} KiB {6 * 1440 * 0.75 / 1024:.1f} KiB" in lines
    assert lines[-1].startswith("total 13 ")


def test_model_that_needs_values_is_refused() -> None:
    with pytest.raises(TaskError, match="Routed uses values that depend on its weights"):
        compute_comm_volume(Spec(batch=8), parse("ddp"), 4, task=models.Routed())


def test_bad_input() -> None:
    with pytest.raises(PlanError, match="32 ranks for 29 training samples"):
        compute_comm_volume(Spec(batch=32), parse("ddp"), 32, task=models.Points())
    with pytest.raises(PlanError, match=r"plan local-sgd: .* the steps of this plan are not equal; use"):
        compute_comm_volume(Spec(batch=8), parse("local-sgd"), 4, task=models.Points())
    with pytest.raises(PlanError, match="plan pp=2,cp=2: with pp and cp, ranks make trial passes"):
        compute_comm_volume(Spec(batch=8), parse("pp=2,cp=2"), 4, task=models.Text())
    for message in ranks(2)(count_in_a_rank):
        assert "this process is already a rank" in message


def count_in_a_rank() -> str:
    with pytest.raises(LaunchError) as raised:
        compute_comm_volume(Spec(batch=8), parse("ddp"), 4, task=models.Points())
    return str(raised.value)


def test_comms_command_prints_and_writes_the_volume(tmp_path: Path) -> None:
    write_task(tmp_path)
    words = (
        "comms",
        "my.py:Regression",
        "--ranks",
        "6",
        "--plan",
        "hsdp",
        "--batch",
        "48",
        "--set",
        "width=12",
        "--set",
        "norm=false",
    )
    result = succeed(*words, "--json", "found.json", at=tmp_path)
    assert result.err == ""
    heading, *_, total = result.out.splitlines()
    assert heading == "my.py:Regression: one step of plan hsdp on 6 ranks, batch 48 (8 per data rank), fp32"
    read = json.loads((tmp_path / "found.json").read_text())
    assert {key: read[key] for key in ("plan", "ranks", "batch")} == {"plan": "hsdp", "ranks": 6, "batch": 48}
    (stage,) = read["stages"]
    assert total.split()[:2] == ["total", str(stage["calls"])]
    assert stage["bytes"] == sum(entry["bytes"] for entry in stage["entries"])
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"my.py", "found.json"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "comms requires a number of ranks; add --ranks"),
        (("--ranks", "7"), "batch 64 is not divisible"),
        (("--ranks", "4", "--plan", "zero4"), "zero4"),
        (("--ranks", "4", "--json", "no/found.json"), "no such folder: no"),
        (("--ranks", "4", "--set", "widht=3"), "did you mean width?"),
    ],
)
def test_errors_are_one_sentence(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    write_task(tmp_path)
    result = paceline("comms", "my.py:Regression", *words, at=tmp_path)
    assert result.status == 2, result.all
    assert message in result.err
    assert len(result.err.splitlines()) == 1, result.err


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        pytest.param(2, "tp=2", marks=pytest.mark.slow),
        pytest.param(4, "tp=2", marks=pytest.mark.slow),
        (4, "tp=2,zero=3"),
    ],
)
def test_tensor_parallel_matches_real_ranks(size: int, plan: str) -> None:
    """Including a split vocabulary, whose cross entropy sends the largest logits and the sums."""
    check_volumes(size, plan, models.ShortText(), make_spec())


class UnevenSlices(models.ShortText):
    """Slices of unequal lengths, whose keys and values are gathered."""

    context: int = 7


# Ranks, plan, task. Text has tied weights, whose gradients the stages exchange, and weights of items.
PP_AND_CP = [
    (2, "pp=2,pp_schedule=interleaved,recompute=full", models.Text),
    (2, "pp=2,pp_schedule=zbv", models.ShortText),
    (2, "cp=2", models.ShortText),
    (2, "cp=2", UnevenSlices),
    (2, "cp=2", sequences.Translation),
]
PP_AND_CP_MORE = [
    (3, "cp=3", UnevenSlices),
    (2, "cp=2", sequences.SharedBias),
    (4, "dp=2,cp=2", sequences.Translation),
    (2, "pp=2", models.Text),
    (4, "pp=2,zero=2", models.Text),
    (4, "cp=2", models.ShortText),
    *(
        (2, f"pp=2,pp_schedule={schedule}", task)
        for schedule in RUNNABLE_SCHEDULES
        for task in (models.Text, models.ShortText)
    ),
    *((2, f"pp=2,pp_schedule={schedule}", models.NormedImages) for schedule in ("gpipe", "1f1b")),
    *(
        (4, f"pp=2,zero={zero},pp_schedule={schedule}", models.Text)
        for schedule in ("gpipe", "1f1b", "zero-bubble")
        for zero in (0, 2, 3)
    ),
    *((4, f"pp=2,tp=2,pp_schedule={schedule}", models.ShortText) for schedule in RUNNABLE_SCHEDULES),
    *(
        (4, f"{plan},recompute={how}", models.ShortText)
        for plan in ("pp=2,tp=2", "cp=2,tp=2", "cp=2,zero=3")
        for how in RECOMPUTE
    ),
    (4, "pp=4", models.ShortText),
    (4, "cp=4", models.ShortText),
]


@pytest.mark.parametrize(("size", "plan", "task"), PP_AND_CP)
def test_pp_and_cp_match_real_ranks(size: int, plan: str, task: type[Task]) -> None:
    check_volumes(size, plan, task(), make_spec())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", range(len(RECIPES)))
@pytest.mark.parametrize(("size", "plan", "task"), PP_AND_CP_MORE)
def test_pp_and_cp_whole_product(size: int, plan: str, task: type[Task], recipe: int) -> None:
    check_volumes(size, plan, task(), RECIPES[recipe])


@contextmanager
def reduce_twice(training: PreparedTraining) -> Iterator[None]:
    """Reduce a gradient that both stages have a second time."""
    kept = list(training.step.after_backward)
    training.step.after_backward.append(lambda: dist.all_reduce(training.model.tokens.weight.grad))
    yield
    training.step.after_backward[:] = kept


@contextmanager
def rotate_by_all_to_all(training: PreparedTraining) -> Iterator[None]:
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method("alltoall")
    yield
    set_rotate_method("allgather")


@pytest.mark.parametrize(
    ("plan", "task", "fault", "more"),
    [
        ("pp=2", models.Text, reduce_twice, {("all-reduce", "tokens"): 4 * 11 * 6}),
        (
            "cp=2",
            models.ShortText,
            rotate_by_all_to_all,
            {("all-gather", f"blocks.{at}"): -2 * 2 * 4 * (8 * 8 * 16) for at in (0, 1)},
        ),
    ],
)
def test_planted_differences_under_pp_and_cp_are_found(
    plan: str, task: type[Task], fault: Fault, more: dict[tuple[str, str], int]
) -> None:
    def sizes(of: CommVolume) -> dict[tuple[str, str], int]:
        return {
            (entry.collective, entry.module): entry.bytes
            for entry in of.entries
            if entry.collective != "all-to-all"
        }

    (volume, _), _ = ranks(2)(measure_step, task(), make_spec(), plan, fault)
    real, dry = sizes(volume), sizes(predict_volumes(2, plan, task(), make_spec())[0])
    assert {
        key: real.get(key, 0) - dry.get(key, 0) for key in {*real, *dry} if real.get(key) != dry.get(key)
    } == more


def test_any_number_of_ranks(tmp_path: Path) -> None:
    """More ranks than this machine could start."""
    assert (
        "on 1,024 ranks" in succeed("comms", "digits", "--batch", "1024", "--ranks", "1024", at=tmp_path).out
    )
