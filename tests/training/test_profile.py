"""Time and memory of a run: from a profiler's events, in real runs, and compared with predictions."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models
from clusters import make_cluster
from command import paceline, succeed
from harness import ranks
from paceline import Spec, events, train
from paceline.after_step import Ema, StepOperation
from paceline.bench.result import Result
from paceline.bench.to_cluster import update_cluster
from paceline.cli.inspect.profile import profile as command
from paceline.cluster import file
from paceline.cluster.facts import CalibrationRecord, Cluster, Device, Fact
from paceline.distributed.world import World
from paceline.errors import ClusterError, RunError, TaskError
from paceline.events import Event, Profiled, Started, Step
from paceline.plan.cost_model.compare import (
    MEMORY_PARTS,
    TIME_PARTS,
    ComparisonRow,
    compare_parts,
    find_largest_difference,
    measured_ratios,
)
from paceline.plan.cost_model.cost import CostPart
from paceline.plan.cost_model.memory import PART_NAMES
from paceline.plan.cost_model.predict import predict
from paceline.plan.cost_model.rates import device_rates
from paceline.plan.cost_model.step_time import PARTS
from paceline.plan.model.library import load_model
from paceline.plan.plan import parse
from paceline.plan.search.search import find_fastest, search_plans
from paceline.report.breakdown import break_down
from paceline.run import RunFolder
from paceline.training.profiling import torch_profiler
from paceline.training.profiling.peak_memory import Allocation, ProfiledState, measure_peak
from paceline.training.profiling.profiler import StepProfiler
from paceline.training.profiling.step_profile import Profile
from paceline.training.profiling.time_breakdown import (
    END,
    GRADIENTS,
    STEP,
    UPDATED,
    Op,
    measure_on_device,
    measure_on_host,
)

pytestmark = pytest.mark.processes

MS = 1_000_000
SPEC = Spec(batch=4, steps=8, profile=True, evaluate_every=100)
PLANS = [
    "ddp,microbatches=2",
    "zero1",
    "zero3",
    "tp=2",
    "pp=2,microbatches=2",
    "pp=2,stages=2,pp_schedule=interleaved,microbatches=2",
    "cp=2",
]
QUICK = ("ddp,microbatches=2", "tp=2", "pp=2,stages=2,pp_schedule=interleaved,microbatches=2")


def op(
    name: str, begin_ms: float, end_ms: float, thread: int | None = 1, launched_ms: float | None = None
) -> Op:
    launched = int(launched_ms * MS) if launched_ms is not None else None
    return Op(name, int(begin_ms * MS), int(end_ms * MS), thread, launched)


# A step from 0 to 100 ms: input until 10 ms, forward and backward until 80 ms, optimizer until 90 ms.
FRAME = [op(STEP, 0, 0), op(GRADIENTS, 80, 80), op(UPDATED, 90, 90), op(END, 100, 100)]


def test_collective_during_computing_is_hidden() -> None:
    busy = [op("aten::mm", 20, 60), op("aten::add", 60, 79)]
    result = measure_on_host([*FRAME, *busy, op("gloo:all_reduce", 25, 55, None)], [10 * MS])
    assert result[:7] == pytest.approx((0.1, 0.07, 0, 0, 0.01, 0.01, 0.01))


def test_rest_of_a_collective_after_computing_counts() -> None:
    busy = [
        op("autograd::engine::evaluate_function: X", 19, 61),
        op("aten::mm", 20, 60),
        op("aten::add", 75, 79),
    ]
    result = measure_on_host([*FRAME, *busy, op("gloo:all_reduce", 25, 74, None)], [10 * MS])
    assert result.communication == pytest.approx(0.014)
    assert result.compute == pytest.approx(0.056)


def test_wait_begins_at_the_call_of_a_collective() -> None:
    busy = [op("aten::mm", 20, 40), op("c10d::allreduce_", 50, 51), op("aten::add", 75, 79)]
    result = measure_on_host([*FRAME, *busy, op("gloo:all_reduce", 52, 70, None)], [10 * MS])
    assert result.communication == pytest.approx(0.02), "from its call on; Python before it is no waiting"


def test_average_through_shared_memory_is_communication() -> None:
    """Its copies count, as the copies of gloo's threads do, and not only the wait for the other ranks."""
    exchange = [
        op("paceline::average_through_memory_", 50, 75),
        op("aten::mul", 51, 54),
        op("c10d::allreduce_", 55, 56),
        op("aten::add", 71, 74),
    ]
    busy = [op("aten::mm", 20, 50), *exchange, op("aten::mm", 75, 80)]
    result = measure_on_host([*FRAME, *busy, op("gloo:all_reduce", 57, 70, None)], [10 * MS])
    assert result.communication == pytest.approx(0.025)
    assert result.compute == pytest.approx(0.045)


def test_pause_without_end_of_a_collective_is_no_waiting() -> None:
    busy = [op("aten::mm", 20, 30), op("aten::add", 60, 79)]
    result = measure_on_host([*FRAME, *busy, op("gloo:all_reduce", 25, 70, None)], [10 * MS])
    assert result.communication == 0


def test_end_that_is_recorded_late() -> None:
    busy = [op("aten::mm", 20, 30), op("aten::add", 60, 79)]
    result = measure_on_host([*FRAME, *busy, op("gloo:all_reduce", 31, 61, None)], [10 * MS])
    assert result.communication == pytest.approx(0.029), "until the thread continued"


def test_end_that_is_recorded_after_more_operations() -> None:
    busy = [op("aten::mm", 20, 30), *(op("aten::view", 60 + k / 4, 60.1 + k / 4) for k in range(5))]
    result = measure_on_host([*FRAME, *busy, op("gloo:all_reduce", 31, 61.2, None)], [10 * MS])
    assert result.communication == pytest.approx(0.029), "not only the pause in which it is recorded"


def test_waiting_in_the_optimizer_is_communication() -> None:
    result = measure_on_host(
        [*FRAME, op("aten::mm", 10, 80), op("gloo:broadcast", 81, 87, None), op("aten::add", 88, 90)],
        [10 * MS],
    )
    assert (result.communication, result.optimizer) == pytest.approx((0.006, 0.004))


def test_neighbours_in_a_pipeline() -> None:
    busy = [op("aten::mm", 30, 40), op("aten::mm", 45, 79)]
    result = measure_on_host(
        [*FRAME, *busy, op("gloo:recv", 12, 29, None), op("gloo:recv", 41, 44, None)], [10 * MS]
    )
    assert result.neighbours == pytest.approx(0.020)
    assert (result.waits, result.transfer) == (2, pytest.approx(0.003))


def test_device() -> None:
    kernels = [
        op("gemm", 12, 50, None, 11),
        op("ncclDevKernel_AllReduce", 40, 70, None, 30),
        op("adam", 70, 78, None, 85),
    ]
    result = measure_on_device([*FRAME, *kernels], [10 * MS])
    assert result.communication == pytest.approx(0.020)
    assert result.optimizer == pytest.approx(0.008)
    assert (result.input, result.other) == pytest.approx((0.010, 0.022))
    assert sum(result[1:7]) == pytest.approx(result.step)


def test_peak_memory() -> None:
    allocations = [
        Allocation(1, 100, 50),
        Allocation(2, 200, 30),
        Allocation(3, 100, -50),
        Allocation(4, 300, 40),
        Allocation(9, 200, -30),
    ]
    result = measure_peak((7, 11), {200: 30, 300: 40, 999: 5}, allocations, 0, 8, 10)
    assert (result.weights, result.optimizer) == (7, 11)
    assert result.gradients == 5 + 30, "those that stay, and those that live at the peak"
    assert result.total == 7 + 11 + 5 + 80


def test_blocks_released_by_another_thread() -> None:
    allocations = [Allocation(1, 100, 50), Allocation(2, 120, 10), Allocation(3, 90, 20)]
    assert measure_peak((0, 0), {}, allocations, 0, 9, 9).total == 50


def test_tables_have_all_parts() -> None:
    assert {part for parts in TIME_PARTS.values() for part in parts} == {*PARTS, "input", "save"}
    assert {part for parts in MEMORY_PARTS.values() for part in parts} | {"allocator", "process"} == set(
        PART_NAMES
    )


def test_errors_have_signs() -> None:
    rows = compare_parts(
        TIME_PARTS,
        {"compute": 2.0, "communication": 0.5, "bubble": 0.0, "input": 0.1},
        (CostPart("products", 1.0, 0.1), CostPart("jitter", 1.0)),
    )
    assert [(row.name, row.error) for row in rows] == [
        ("compute", -0.5),
        ("communication", 1.0),
        ("input", -1.0),
    ]
    assert find_largest_difference(rows) == ComparisonRow("compute", 2.0, 1.0, 0.1)


def make_profiler(total: int, enabled: bool | None = None) -> StepProfiler:
    training: Any = SimpleNamespace(servers=None, local=None, update=None)
    return StepProfiler(enabled, 0, total, training, parse("single"), World(), torch.device("cpu"))


@pytest.mark.parametrize(("total", "due"), [(100, False), (100_000, True)])
def test_only_long_runs_are_profiled_by_default(total: int, due: bool) -> None:
    step_profiler = make_profiler(total)
    for _ in range(4):
        step_profiler.add_measured_steps(0.01, 1)
    assert [step_profiler._is_due(step) for step in (2, 3)] == [False, due]
    assert make_profiler(total, enabled=False)._is_due(3) is False
    assert make_profiler(total, enabled=True)._is_due(3) is True


def test_profiles_end_when_one_percent_is_spent() -> None:
    step_profiler = make_profiler(1000)
    step_profiler.add_measured_steps(9.0, 1)
    step_profiler.add_measured_steps(0.1, 3)
    step_profiler.max_cost_s = 0.4
    assert step_profiler._is_due(3)
    step_profiler.spent_s = 0.7
    assert not step_profiler._is_due(3)


def stop_during_a_collective(wait_s: float) -> tuple[bool, bool]:
    """Stop a profile while rank 0 waits for rank 1 in a collective.

    Return whether it stopped, and whether the collective was over.
    """
    model = nn.Linear(2, 2)
    params = list(model.parameters())
    state = ProfiledState(model, [torch.optim.SGD(params)], params)
    dist.all_reduce(torch.ones(1))
    profile = Profile(state, lambda observe: None, torch.device("cpu"), 1, 0, False)
    if dist.get_rank() == 1:
        time.sleep(0.3)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    torch_profiler.STOP_S = wait_s
    stopped, is_over = profile.stop(), work.is_completed()
    torch_profiler.STOP_S = 10.0
    work.wait()
    assert stopped or profile.stop()
    return stopped, is_over


def test_a_profile_stops_after_its_collectives() -> None:
    """torch would write the end of a collective into the profile's memory after freeing it."""
    assert ranks(2)(stop_during_a_collective, 10.0) == [(True, True), (True, True)]
    assert ranks(2)(stop_during_a_collective, 0.0)[0] == (False, False), "the profile goes on"


def train_events(task: Any, spec: Spec, plan: str) -> list[Event]:
    return list(train(spec, parse(plan), task=task))


def losses(result: list[Event]) -> list[float]:
    return [event.loss for event in result if isinstance(event, Step)]


def profiles(result: list[Event]) -> list[Profiled]:
    return [event for event in result if isinstance(event, Profiled)]


@pytest.mark.parametrize(
    "plan", [plan if plan in QUICK else pytest.param(plan, marks=pytest.mark.slow) for plan in PLANS]
)
def test_every_plan(plan: str) -> None:
    task = models.ShortText(depth=4 if "stages" in plan else 2)
    first, second = ranks(2)(train_events, task, SPEC, plan)
    [profiled] = profiles(first)[:1]
    assert profiled.seconds.keys() == {"compute", "communication", "bubble", "input", "optimizer", "other"}
    assert sum(profiled.seconds.values()) == pytest.approx(profiled.step_s)
    assert min(profiled.seconds.values()) >= 0
    assert profiled.seconds["compute"] > 0
    assert profiled.seconds["communication"] > 0
    assert (profiled.seconds["bubble"] > 0) == ("pp" in plan)
    assert [event.seconds for event in profiles(second)] == [event.seconds for event in profiles(first)]
    assert sum(break_down(first).seconds.values()) == pytest.approx(break_down(first).step_s)
    without = ranks(2)(train_events, task, SPEC.model_copy(update={"profile": False}), plan)[0]
    assert not profiles(without)
    assert losses(without) == losses(first), "profiling changes a result"


def test_profile_covers_a_round_of_local_sgd() -> None:
    spec = SPEC.model_copy(update={"steps": 12})
    [profiled] = profiles(ranks(2)(train_events, models.Points(), spec, "local-sgd,period=4")[0])[:1]
    assert profiled.num_steps == 4
    assert profiled.seconds["communication"] > 0
    assert not profiles(ranks(2)(train_events, models.Points(), spec, "local-sgd,period=40")[0])


def test_memory_of_tensors() -> None:
    task = models.ShortText()
    [profiled] = profiles(ranks(1)(train_events, task, SPEC, "single")[0])[:1]
    weights = sum(parameter.numel() * 4 for parameter in task.model().parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in task.model().buffers())
    assert profiled.memory["weights"] == weights + buffers
    assert 2 * weights <= profiled.memory["optimizer"] < 2 * weights + 1000, (
        "AdamW has two moments, and a count of steps"
    )
    [cut] = profiles(ranks(2)(train_events, task, SPEC, "zero3")[0])[:1]
    assert cut.memory["optimizer"] == pytest.approx(profiled.memory["optimizer"] / 2, rel=0.1)
    half = SPEC.model_copy(update={"batch": 2})
    [smaller] = profiles(ranks(1)(train_events, task, half, "single")[0])[:1]
    assert smaller.memory["activations"] == pytest.approx(profiled.memory["activations"] / 2, rel=0.1)


class AveragedText(models.ShortText):
    def after_step(self) -> list[StepOperation]:
        return [Ema(0.9)]


def test_memory_of_moving_averages() -> None:
    [plain] = profiles(ranks(2)(train_events, models.ShortText(), SPEC, "zero3")[0])[:1]
    [averaged] = profiles(ranks(2)(train_events, AveragedText(), SPEC, "zero3")[0])[:1]
    added = averaged.memory["weights"] - plain.memory["weights"]
    weights = sum(parameter.numel() * 4 for parameter in models.ShortText().model().parameters())
    assert added == pytest.approx(weights / 2, rel=0.02)


class SlowRows(models.Points):
    """Each sample takes 0.01 s to read."""

    def dataset(self, split: str) -> Any:
        return (
            Slow(x=models.random_normal(29, 5), y=models.random_normal(29, 3, seed=1))
            if split == "train"
            else None
        )


class Slow(models.Pairs):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return super().__getitem__(index)


def test_slow_input_is_found() -> None:
    result = break_down(ranks(2)(train_events, SlowRows(), SPEC, "ddp")[0])
    assert max(result.seconds, key=lambda name: result.seconds[name]) == "input"


class SlowRanks(models.Points):
    first: int = 0

    def model(self) -> nn.Module:
        return Sleepy(super().model(), self.first)


class Sleepy(nn.Module):
    """Sleeps on ranks from `first` on."""

    def __init__(self, inner: nn.Module, first: int):
        super().__init__()
        self.inner, self.first = inner, first

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and torch.distributed.get_rank() >= self.first:
            time.sleep(0.3)
        return self.inner(x)


TRIES = 3  # on busy cores, the end of a collective may be recorded long after the wait


def test_slow_rank_is_named() -> None:
    tried = (break_down(ranks(2)(train_events, SlowRanks(first=1), SPEC, "ddp")[0]) for _ in range(TRIES))
    result = next(result for result in tried if result.straggler == 1)
    assert result.seconds["communication"] > result.step_s / 4, "half of the ranks wait for most of the step"
    assert break_down(ranks(2)(train_events, SlowRanks(), SPEC, "ddp")[0]).straggler is None


class SlowStages(models.ShortText):
    def model(self) -> nn.Module:
        result = super().model()
        for block in result.blocks:
            block.register_forward_hook(lambda *_: time.sleep(0.02))
        return result


def test_bubble() -> None:
    """Two stages, two micro-batches: each stage is idle for a third of the forward pass."""
    for _ in range(3):  # if other programs delay both ranks, the pauses are a small part of the step
        result = break_down(
            ranks(2)(train_events, SlowStages(), SPEC, "pp=2,microbatches=2,pp_schedule=gpipe")[0]
        )
        if result.seconds["bubble"] > max(result.step_s / 10, result.seconds["communication"]):
            return
    raise AssertionError(f"bubble {result.seconds['bubble']:.3f} s of a step of {result.step_s:.3f} s")


def started(**changes: Any) -> Started:
    facts = {
        "task": "text",
        "plan": "ddp",
        "ranks": 2,
        "batch": 4,
        "step": 0,
        "steps": 20,
        "samples": 9,
        "parameters": 9,
    }
    return Started(**{**facts, "device": "cpu", "precision": "fp32", "threads": 1, "time": 5.0, **changes})


def step(number: int, step_s: float = 0.1) -> Step:
    return Step(
        step=number, samples=4, loss=1.0, grad_norm=1.0, lr=1.0, step_s=step_s, data_s=0.01, samples_per_s=40
    )


def profile(number: int, compute: float, communication: float, slowest: int = 0) -> Profiled:
    seconds = {
        "compute": compute,
        "communication": communication,
        "bubble": 0.0,
        "input": 0.01,
        "optimizer": 0.0,
        "other": 0.0,
    }
    total = sum(seconds.values())
    facts = {
        "step": number,
        "num_steps": 1,
        "step_s": total,
        "seconds": seconds,
        "input_s": 0.01,
        "costs_s": 0.1,
    }
    return Profiled(**facts, slowest=slowest, slowest_s=2.0, busy_s=1.0, fullest=0, memory={"weights": 8})


def test_mean_leaves_out_first_and_profiled_steps() -> None:
    steps = [step(k, 9.0 if k in (1, 2, 3, 5) else 0.1) for k in range(1, 11)]
    result = break_down([started(), *steps[:5], profile(5, 0.3, 0.1), *steps[5:]])
    assert result.step_s == pytest.approx(0.1)
    assert result.seconds["compute"] == pytest.approx(0.09 * 3 / 4)
    assert result.seconds["input"] == pytest.approx(0.01)
    assert (result.steps, result.straggler) == (6, 0)


def test_profiles_represent_steps_until_the_next_profile() -> None:
    steps = [step(k) for k in range(1, 21)]
    result = break_down([started(), *steps, profile(4, 0.1, 0.3, slowest=1), profile(8, 0.3, 0.1)])
    assert result.seconds["compute"] == pytest.approx(0.09 * (4 * 1 / 4 + 12 * 3 / 4) / 16)
    assert result.straggler is None, "each rank is slow once"


def test_only_steps_like_the_last_start_count() -> None:
    before = [started(), *(step(k, 5.0) for k in range(1, 11)), profile(4, 0.3, 0.1)]
    with pytest.raises(RunError, match="none of its steps was profiled"):
        break_down([*before, started(step=10, plan="zero3"), *(step(k) for k in range(11, 20))])
    assert break_down(
        [*before, started(step=10), *(step(k, 5.0) for k in range(11, 20))]
    ).step_s == pytest.approx(5.0)


def test_event_round_trip(tmp_path: Path) -> None:
    event = profile(4, 0.1, 0.3)
    assert events.loads(events.dumps(event)) == event


HERE = make_cluster(8)
GPT2 = load_model("gpt2", seq=128)


def record(run: str, factor: float, plan: str = "ddp", ranks_: int = 4) -> CalibrationRecord:
    cost = predict(GPT2, parse(plan), HERE, 32, ranks=ranks_)
    ratio = {"compute": Fact(value=factor, source="measured")}
    return CalibrationRecord(
        run=run, plan=plan, ranks=ranks_, parts=tuple(part.name for part in cost.time.parts), ratios=ratio
    )


def part(cost: Any, name: str) -> CostPart:
    return next(part for part in cost.time.parts if part.name == name)


def test_runs_narrow_predictions() -> None:
    raw = predict(GPT2, parse("ddp"), HERE, 32, ranks=4)
    values, errors = [], []
    for runs in range(1, 5):
        calibrated = HERE.updated(calibrations=[record(str(k), 1.05) for k in range(runs)])
        result = part(predict(GPT2, parse("ddp"), calibrated, 32, ranks=4), "products")
        values.append(result.value / part(raw, "products").value)
        errors.append(result.error)
    assert values == pytest.approx([1.05 ** (n / (n + 1)) for n in range(1, 5)])
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < part(raw, "products").error


def test_runs_that_disagree_widen_predictions() -> None:
    calibrated = HERE.updated(calibrations=[record("a", 0.5), record("b", 2.0)])
    raw, result = (
        part(predict(GPT2, parse("ddp"), where, 32, ranks=4), "products") for where in (HERE, calibrated)
    )
    assert result.value == pytest.approx(raw.value)
    assert result.error > raw.error


def test_a_run_counts_once() -> None:
    twice = HERE.updated(calibrations=[record("a", 0.5)]).updated(calibrations=[record("a", 0.7)])
    assert [record.ratios["compute"].value for record in twice.calibrations] == [0.7]


def test_extrapolation_is_reported() -> None:
    calibrated = HERE.updated(calibrations=[record("a", 1.1)])
    assert not predict(GPT2, parse("ddp"), HERE, 32, ranks=4).time.guesses
    more = predict(GPT2, parse("ddp"), calibrated, 32, ranks=8).time.guesses
    other = predict(GPT2, parse("tp=4"), calibrated, 32, ranks=4).time.guesses
    assert not predict(GPT2, parse("ddp"), calibrated, 32, ranks=4).time.guesses
    assert "8 ranks are more than the 4 of any run here" in more
    assert any("tensor parallel" in words for words in other)


def test_search_uses_calibrations() -> None:
    ratio = {
        "communication": Fact(value=30.0, source="measured"),
        "compute": Fact(value=0.1, source="measured"),
    }
    row = record("a", 1.0).model_copy(update={"parts": tuple(PARTS), "ratios": ratio})
    calibrated = HERE.updated(calibrations=[row])
    best = search_plans(GPT2, calibrated, 32).fitting[0]
    assert best[0] != search_plans(GPT2, HERE, 32).fitting[0][0]
    assert find_fastest(GPT2, device_rates(calibrated), 8, 32) == best


def test_ratios_leave_out_small_parts() -> None:
    cost = predict(GPT2, parse("ddp"), HERE, 32, ranks=4)
    seconds = {"compute": 2 * cost.step_s, "communication": 0.0, "optimizer": 1e-9, "input": 1.0}
    assert list(measured_ratios(seconds, cost)) == ["compute"]


def test_new_measurements_discard_calibrations() -> None:
    calibrated = HERE.updated(calibrations=[record("a", 1.1)])
    assert update_cluster(calibrated, [Result(kind="storage")]).calibrations == calibrated.calibrations
    assert update_cluster(calibrated, [Result(kind="overlap")]).calibrations == ()
    assert update_cluster(calibrated, [Result(kind="host")]).calibrations == ()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("profile")
    small = [word for name in ("width=16", "depth=2", "context=8") for word in ("--set", name)]
    succeed(
        "train",
        "text",
        *small,
        "--ranks",
        "2",
        "--batch",
        "4",
        "--steps",
        "12",
        "--profile",
        "--run-dir",
        "a",
        at=at,
    )
    [device] = {json.loads((at / "a" / "provenance.json").read_text())["processor"]}
    facts = Device(
        name=device, kind="cpu", memory_bytes=Fact(value=2**30), peaks_flops={"fp32": Fact(value=1e11)}
    )
    file.write(at / "cluster.json", Cluster(name="here", device=facts))
    return at / "a"


def test_profile_command_updates_the_cluster(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, figures, picture = run.parent / "cluster.json", run.parent / "a.json", run.parent / "a.svg"
    for _ in range(2):
        command(run, str(where), update=True, json=figures, plot=picture)
    output = capsys.readouterr().out
    result = json.loads(figures.read_text())
    parts = {name: row["measured"] for name, row in result["time_s"].items()}
    assert sum(parts.values()) == pytest.approx(2 * parts["step"])
    assert result["time_s"]["compute"]["predicted"] > 0
    assert f"worst: {result['worst']}, predicted" in output
    assert "now has 1 run (this run replaced its earlier record)" in output
    assert picture.read_text().startswith("<?xml")
    assert json.loads(RunFolder(run).profile.read_text()) == result  # the live page reads it
    [row] = file.read(where).calibrations
    assert {fact.source for fact in row.ratios.values()} == {"measured"}
    before = result["time_s"]["step"]["predicted"]
    command(run, str(where), json=figures)
    assert json.loads(figures.read_text())["time_s"]["step"]["predicted"] == before, (
        "a run does not calibrate its own prediction"
    )


def test_without_a_prediction(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(run, "a100-80g:8", measured=True)
    assert "not predicted" in capsys.readouterr().out


def test_errors_are_one_sentence(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"ran on .*, but the cluster has .*; name the cluster of the run with --cluster"
    ):
        command(run, "a100-80g:8")
    with pytest.raises(ClusterError, match="there is no file a100-80g:8"):
        command(run, "a100-80g:8", update=True)
    with pytest.raises(RunError, match=r"no such run: .*/b"):
        command(run.parent / "b")
    gone = tmp_path / "gone"
    shutil.copytree(run, gone)
    spec, launch = RunFolder(gone).request()
    RunFolder(gone).write_request(spec.model_copy(update={"task": f"{tmp_path}/gone.py:Net"}), launch)
    with pytest.raises(TaskError, match="show measured values with --measured"):
        command(gone, str(run.parent / "cluster.json"))


def test_a_run_that_was_not_profiled(run: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    shutil.copytree(run, short)
    lines = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (short / "events.jsonl").write_text("".join(line for line in lines if '"profiled"' not in line))
    result = paceline("profile", short, at=tmp_path)
    assert result.status == 2
    assert "none of its steps was profiled; train at least 5 steps with --profile" in result.err
    assert "Traceback" not in result.err
