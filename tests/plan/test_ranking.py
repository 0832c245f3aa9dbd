"""If error bars overlap, `plan` reports that the best plans are tied and suggests a measurement."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clusters import make_cluster
from command import succeed
from paceline.cluster.facts import CalibrationRecord, Cluster, Device, Fact, Link, Pace
from paceline.plan.cost_model.cost import RUN_NOISE, CostPart
from paceline.plan.cost_model.op_times import guess_op_times
from paceline.plan.model.library import load_model
from paceline.plan.report.plan import describe_overlap
from paceline.plan.search.best_plans import BestPlans, find_best_plans
from paceline.plan.search.ranking import IndistinctPlans, find_indistinct_plans

GPT = load_model("gpt2")
CPU = Cluster(
    device=Device(name="a CPU", kind="cpu", memory_bytes=Fact(value=64 * 2**30), memory_Bps=Fact(value=20e9)),
    cores_per_node=4,
    links=(Link(axis="node", beta_Bps=Fact(value=1e9)),),
)
MEASURED_CPU = CPU.model_copy(
    update={
        "paces": tuple(
            Pace(
                operation=name,
                threads=1,
                sizes=tuple(size for size, _ in table),
                seconds=tuple(seconds for _, seconds in table),
            )
            for name, table in guess_op_times(5e10, 5e9, 1e-6).tables.items()
        )
    }
)


def with_parts(found: BestPlans, *plans: dict[str, tuple[float, float]]) -> BestPlans:
    """Return the plans with these seconds and errors by part for the first of them."""
    costs = []
    for (plan, cost), parts in zip(found.plans, plans, strict=False):
        time = replace(cost.time, parts=tuple(CostPart(name, *value) for name, value in parts.items()))
        costs.append((plan, replace(cost, time=time)))
    return replace(found, plans=costs)


@pytest.fixture(scope="module")
def of_gpus() -> BestPlans:
    return find_best_plans(GPT, make_cluster(16), 64)


@pytest.mark.parametrize(
    ("steps", "errors", "count"),
    [
        ([1.0], [0.5], None),
        ([1.0, 1.1, 1.2, 9.0], [0.3] * 4, 3),
        ([1.0, 1.87, 2.0], [0.3] * 3, 2),  # 0.7 to 1.3, 1.31 to …: the second overlaps only with the noise
        ([1.0, 2.0, 3.0], [0.3] * 3, None),
        ([1.0, 1.04], [0.0] * 2, 2),
        ([1.0, 1.2], [0.0] * 2, None),
        ([1.0, 1.2, 1.3], [0.0, 0.0, 0.3], 2),  # only the third may be as fast as the first
    ],
)
def test_count_of_indistinct_plans(steps, errors, count, of_gpus):
    found = find_indistinct_plans(
        with_parts(of_gpus, *[{"products": part} for part in zip(steps, errors, strict=True)]), None
    )
    spreads = [(error**2 + RUN_NOISE**2) ** 0.5 for error in errors]
    intervals = [
        (step * (1 - spread), step * (1 + spread)) for step, spread in zip(steps, spreads, strict=True)
    ]
    assert sum(low < intervals[0][1] for low, _ in intervals) == (count or 1), "the figures of this test"
    assert (found.count if found else None) == count


def test_suggested_measurement_is_of_part_with_largest_error(of_gpus):
    def advice(found: BestPlans, part: str, target: str | None = None) -> IndistinctPlans:
        """Return the advice for two plans whose largest error is in `part`, which is not the largest part."""
        parts = {"other": (1.0, 0.01), part: (0.4, 0.9)}
        advised = find_indistinct_plans(with_parts(found, parts, parts), target)
        assert advised.part == part
        return advised.measure

    trained = (
        f"paceline train TASK --ranks 16 --batch 64 --plan {of_gpus.plans[0][0]} --profile, then paceline "
        "profile RUN --update"
    )
    assert advice(of_gpus, "products") == trained
    assert (
        advice(of_gpus, "data parallel")
        == "paceline bench collectives --axes across, started with srun on those nodes"
    )
    assert advice(replace(of_gpus, ranks=8), "tensor parallel") == "paceline bench"
    links = tuple(
        Link(axis=axis, beta_Bps=Fact(value=1e11, source="measured")) for axis in ("node", "across")
    )
    measured = replace(of_gpus, cluster=of_gpus.cluster.model_copy(update={"links": links}))
    assert advice(measured, "data parallel") == trained
    of_cpu = find_best_plans(GPT, CPU, 4, ranks=2)
    assert (
        advice(of_cpu, "products", "my.py:Net")
        == "paceline plan my.py:Net --measure-compute, or paceline bench --task my.py:Net"
    )
    assert advice(of_cpu, "data parallel", "my.py:Net") == "paceline bench --task my.py:Net"
    assert advice(of_cpu, "products") == "paceline bench"
    exact = {"products": (1.0, 0.01)}
    noisy = find_indistinct_plans(with_parts(of_gpus, exact, exact), "my.py:Net")
    assert (noisy.part, noisy.measure) == (
        None,
        f"paceline train my.py:Net --ranks 16 --batch 64 --plan {of_gpus.plans[0][0]} --steps 50, and "
        "the same for the other plans",
    )


def test_suggested_measurement_narrows_error_bar():
    """Take each suggested measurement until only trainings remain."""
    facts, where = GPT, CPU
    named = []
    while True:
        found = find_best_plans(facts, where, 8, ranks=2)
        close = find_indistinct_plans(found, "my.py:Net")
        error = found.plans[0][1].time.error
        if close is None or close.part is None:
            break
        named.append(close.measure.split(" --")[0])
        if "--measure-compute" in close.measure:
            facts = replace(facts, source="measured")
        elif "bench" in close.measure:
            where = MEASURED_CPU
        else:
            parts = tuple(part.name for part in found.plans[0][1].time.parts)
            ratios = {"compute": 1.0, "communication": 1.0, "optimizer": 1.0, "other": 1.0}
            runs = [
                CalibrationRecord(
                    run=str(run), plan=str(found.plans[0][0]), ranks=2, parts=parts, ratios=ratios
                )
                for run in range(3)
            ]
            where = where.model_copy(update={"calibrations": tuple(runs)})
        assert find_best_plans(facts, where, 8, ranks=2).plans[0][1].time.error < 0.9 * error, close
    assert named[0] == "paceline plan my.py:Net"
    assert "paceline train my.py:Net" in named


def test_command_prints_one_sentence(tmp_path: Path):
    words = ("plan", "--model", "gpt2", "--cluster", "a100-80g:8", "--batch", "64", "--json", "plans.json")
    found = succeed(*words, at=tmp_path).out
    figures = json.loads((tmp_path / "plans.json").read_text())
    [line] = [line for line in found.splitlines() if "cannot be ranked" in line]
    assert line.startswith(f"{figures['unranked']['count']} of {figures['fitting']:,} plans cannot be ranked")
    assert line.endswith(figures["unranked"]["measure"])
    assert figures["unranked"]["part"] in line
    alone = succeed(*words, "--plan", "ddp", at=tmp_path).out
    assert "cannot be ranked" not in alone
    assert json.loads((tmp_path / "plans.json").read_text())["unranked"] is None


def test_sentence_for_noise(of_gpus):
    exact = {"products": (1.0, 0.0)}
    found = with_parts(of_gpus, exact, exact)
    assert describe_overlap(found, find_indistinct_plans(found, None)).startswith(
        "2 of 2 plans cannot be ranked: their error bars overlap that of the first, ±5%, the usual "
        "difference between trainings of one plan; try"
    )
