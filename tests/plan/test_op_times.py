"""Time of a CPU rank: between measured sizes, on shared cores, with the overhead of engines."""

import dataclasses

import pytest

from paceline.bench.result import Result
from paceline.bench.to_cluster import update_cluster
from paceline.cluster.facts import Cluster, Device, Engine, Fact, Link, Pace
from paceline.cluster.published import find
from paceline.plan.cost_model.constants import CPU
from paceline.plan.cost_model.cpu import build_op_times, describe_host
from paceline.plan.cost_model.cpu_compute_time import step_operations_s
from paceline.plan.cost_model.framework_profiles import FLOAT32
from paceline.plan.cost_model.op_times import KINDS, MAX_SLOWDOWN, OpTimeTable
from paceline.plan.cost_model.predict import predict
from paceline.plan.cost_model.rates import device_rates
from paceline.plan.cost_model.step_time import share_cores
from paceline.plan.model.facts import BlockFacts, Product
from paceline.plan.model.operations import Operation
from paceline.plan.plan import parse
from paceline.spec import Spec
from paceline.tasks.text import Text
from paceline.training.model_facts.describe import describe

FACTS = describe(Spec(task="text"), Text(width=16, depth=2, heads=2, context=8))


def machine(**more: object) -> Cluster:
    device = Device(name="a CPU", kind="cpu", memory_bytes=Fact(value=8e9), memory_Bps=Fact(value=2e10))
    links = (
        Link(
            axis="node",
            beta_Bps=Fact(value=1e9, source="measured"),
            alpha_s=Fact(value=1e-4, source="measured"),
        ),
    )
    return Cluster(device=device, cores_per_node=4, links=links, **more)  # type: ignore[arg-type]


def measured(threads: int, seconds: float) -> tuple[Pace, ...]:
    kinds = [name for kind in KINDS for name in (kind, f"{kind} backward")]
    return tuple(
        Pace(
            operation=kind,
            threads=threads,
            sizes=(1.0, 1e6),
            seconds=(seconds, 100 * seconds),
            source="measured",
        )
        for kind in kinds
    )


def step_s(cluster: Cluster, plan: str, ranks: int) -> float:
    return predict(FACTS, parse(plan), cluster, 16, FLOAT32, ranks).step_s


def test_interpolation_between_sizes() -> None:
    paces = OpTimeTable({"move": ((10.0, 1.0), (1000.0, 100.0))})
    assert paces.seconds("move", 1.0) == 1.0
    assert paces.seconds("move", 100.0) == pytest.approx(10.0)
    assert paces.seconds("move", 5000.0) == pytest.approx(500.0)
    assert paces.seconds("draw backward", 5.0) == 0.0


def test_measured_steps_slow_all_operations() -> None:
    """A step takes longer than the sum of its operations, and so do predictions; noise is limited."""

    def slowed(*ratios: float) -> float:
        sizes = (1e-3, 1e-2)[: len(ratios)]
        seconds = tuple(size * ratio for size, ratio in zip(sizes, ratios, strict=True))
        steps = [Pace(operation="step", threads=1, sizes=sizes, seconds=seconds)] if ratios else []
        cluster = machine(paces=(*measured(1, 1e-6), *steps))
        return build_op_times(cluster, describe_host(cluster, 4), 1e9, 1e9).seconds("move", 1.0) / 1e-6

    assert slowed() == pytest.approx(1.0)
    assert slowed(1.2, 1.2) == pytest.approx(1.2)
    assert slowed(1.1, 1.21) == pytest.approx(1.1**1.5)
    assert slowed(0.7) == pytest.approx(1.0)
    assert slowed(9.0) == pytest.approx(MAX_SLOWDOWN)


def test_operations_of_a_step_are_summed() -> None:
    """With the same time for each operation, the sum is their number."""
    kinds = {pace.operation for pace in measured(1, 1.0)}
    same = OpTimeTable(dict.fromkeys(kinds, ((1.0, 1.0), (1000000000000.0, 1.0))))
    block = BlockFacts(
        "block",
        30,
        products=(Product(4, 4, 4), Product(4, 4, 4, first=True)),
        tensors=3,
        operations=(Operation("move", 8.0, True, 2), Operation("view", 1.0, False, 1)),
    )
    facts = dataclasses.replace(FACTS, first=block, runs=((block, 2),), last=block)
    products, others, updates = 2 + 1.5, 3 + 2, 3  # one product has no gradients of inputs
    expected = 4 * (products + others + updates)
    assert step_operations_s(same, facts, 2) == pytest.approx(expected)


def test_interpolation_between_thread_counts() -> None:
    cluster = machine(paces=(*measured(1, 4e-6), *measured(4, 1e-6)))
    of = {
        ranks: build_op_times(cluster, describe_host(cluster, ranks), 1e9, 1e9).seconds("move", 1.0)
        for ranks in (1, 2, 4, 8)
    }
    assert of[1] == pytest.approx(1e-6)
    assert of[4] == pytest.approx(4e-6)
    assert of[1] < of[2] < of[4]
    assert of[8] == pytest.approx(8e-6 * CPU.turns)  # two ranks share a core


def test_measured_op_times_are_used() -> None:
    slow, quick = (step_s(machine(paces=measured(1, seconds)), "ddp", 4) for seconds in (2e-5, 1e-5))
    assert quick < slow < 2.01 * quick


def test_unmeasured_op_times_are_reported_as_guess() -> None:
    found = device_rates(machine(), ranks=2)
    assert found.op_times is not None
    assert not found.op_times.measured
    assert any("guessed from its cores" in guess for guess in found.guesses)
    guess, known = (
        predict(FACTS, parse("single"), machine(paces=paces), 16, FLOAT32, 1).time
        for paces in ((), measured(1, 1e-5))
    )
    assert 1e-5 < guess.step_s < 1.0
    assert guess.error > 0.3 > known.error


def test_engine_overhead_replaces_collective_latency() -> None:
    engines = (Engine(name="ddp", ranks=2, step_s=Fact(value=1e-3), unit_s=Fact(value=1e-4)),)
    with_engine = predict(FACTS, parse("ddp"), machine(engines=engines), 16, FLOAT32, 2)
    parts = {part.name: part.value for part in with_engine.time.parts}
    tensors = sum(block.tensors * count for block, count in FACTS.parts())
    assert parts["engines"] == pytest.approx(1e-3 + 1e-4 * tensors)
    alone = predict(FACTS, parse("single"), machine(engines=engines), 16, FLOAT32, 1)
    assert "engines" not in {part.name for part in alone.time.parts}


def data_parallel_s(cluster: Cluster, plan: str, ranks: int) -> float:
    parts = predict(FACTS, parse(plan), cluster, 16, FLOAT32, ranks).time.parts
    return sum(part.value for part in parts if part.name == "data parallel")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_one_machine_average_through_memory(ranks: int) -> None:
    """Each rank reads its gradients, writes the mean and reads each further rank, at its share of the
    bandwidth of the memory."""
    found = data_parallel_s(machine(), "ddp", ranks)
    rate = device_rates(machine(), ranks=ranks).memory_Bps
    assert found == pytest.approx(ranks * 4 * FACTS.params / rate)
    assert found == data_parallel_s(machine(), "zero1", ranks)


def test_other_ranks_average_through_links() -> None:
    fast, slow = machine(), machine()
    slow = slow.model_copy(
        update={"links": (slow.links[0].model_copy(update={"beta_Bps": Fact(value=1e6, source="measured")}),)}
    )
    for plan, ranks in (("zero2", 2), ("ddp", 16), ("dp=2,tp=2", 4)):
        assert data_parallel_s(slow, plan, ranks) > 2 * data_parallel_s(fast, plan, ranks), plan
    assert data_parallel_s(slow, "ddp", 2) == data_parallel_s(fast, "ddp", 2)


def test_pipeline_on_shared_cores_has_no_bubble() -> None:
    crowded = machine(paces=measured(1, 1e-5)).model_copy(update={"cores_per_node": 1})
    parts = {
        part.name: part.value for part in predict(FACTS, parse("pp=2"), crowded, 16, FLOAT32, 2).time.parts
    }
    roomy = {
        part.name: part.value
        for part in predict(FACTS, parse("pp=2"), machine(paces=measured(1, 1e-5)), 16, FLOAT32, 2).time.parts
    }
    assert roomy["pipeline bubble"] > 0
    assert "pipeline bubble" not in parts


def simulate_1f1b(stages_s: list[float], microbatches: int, cores: int) -> float:
    """Return the seconds of a step if ranks that are not waiting share the cores equally."""
    ranks, now = len(stages_s), 0.0
    queues: list[list[tuple[str, int]]] = []
    for rank in range(ranks):
        started = min(microbatches, ranks - rank)
        queue = [("forward", index) for index in range(started)]
        for index in range(microbatches):
            queue.append(("backward", index))
            if started + index < microbatches:
                queue.append(("forward", started + index))
        queues.append(queue)
    left: dict[int, float] = {}
    done: set[tuple[str, int, int]] = set()
    while any(queues):
        for rank, queue in enumerate(queues):
            if queue and rank not in left:
                name, index = queue[0]
                before = rank - 1 if name == "forward" else rank + 1
                if before in (-1, ranks) or (name, before, index) in done:
                    left[rank] = stages_s[rank] * (1 / 3 if name == "forward" else 2 / 3)
        speed = min(1.0, cores / len(left))
        took = min(left.values())
        now += took / speed
        left = {rank: seconds - took for rank, seconds in left.items()}
        for rank in [rank for rank, seconds in left.items() if seconds < 1e-12]:
            name, index = queues[rank].pop(0)
            done.add((name, rank, index))
            del left[rank]
    return now


@pytest.mark.parametrize("microbatches", [4, 8, 16])
@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("stages_s", [[1.0] * 4, [0.2, 1, 0.4, 0.4], [0.1, 0.1, 0.1, 1], [0.3, 1, 0.3, 1]])
def test_waiting_ranks_leave_their_core(stages_s: list[float], cores: int, microbatches: int) -> None:
    crowd = 4 / cores
    busiest_s, mean_s = crowd * max(stages_s), crowd * sum(stages_s) / 4
    bubble_s = crowd * (sum(stages_s) - max(stages_s))
    busy_share, bubble = share_cores(microbatches, busiest_s, mean_s, bubble_s, crowd)
    found = busy_share * microbatches * busiest_s + bubble
    assert found == pytest.approx(simulate_1f1b(stages_s, microbatches, cores), rel=0.12)
    if min(stages_s) < max(stages_s):  # as if a rank with more work than the others always shared its core
        assert microbatches * busiest_s > 1.3 * found


def test_bench_rows_become_facts() -> None:
    rows = [
        {"operation": "move", "threads": 1, "size": size, "min_s": size * 1e-9, "median_s": 1.0}
        for size in (100.0, 10.0)
    ]
    for units, tensors in ((2, 32), (6, 96), (6, 12)):
        rows.append(
            {
                "engine": "zero3",
                "ranks": 2,
                "units": units,
                "tensors": tensors,
                "median_s": 1e-3 + units * 1e-4 + tensors * 1e-5,
            }
        )
    found = update_cluster(machine(), [Result(kind="host", rows=tuple(rows))])
    [pace], [engine] = found.paces, found.engines
    assert (pace.sizes, pace.seconds, pace.source) == ((10.0, 100.0), (1e-8, 1e-7), "measured")
    assert (engine.name, engine.ranks) == ("zero3", 2)
    assert [fact.value for fact in (engine.step_s, engine.unit_s, engine.tensor_s)] == pytest.approx(
        [1e-3, 1e-4, 1e-5], rel=1e-3
    )


def test_gpus_have_no_op_times() -> None:
    assert device_rates(find("h100:8")).op_times is None
