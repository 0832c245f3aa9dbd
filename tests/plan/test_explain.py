"""Text and pictures of plans: the Pareto front, colours, and why a plan does not fit."""

import pytest

from clusters import make_cluster
from paceline.plan.cost_model import memory, step_time
from paceline.plan.model.library import load_model
from paceline.plan.report.bars import draw, find_front
from paceline.plan.report.explain import explain
from paceline.plan.report.plan import list_notes
from paceline.plan.search.best_plans import find_best_plans
from paceline.plotting.colours import COLOURS


@pytest.fixture(scope="module")
def found():
    return find_best_plans(load_model("gpt3-1.3b"), make_cluster(8), 64)


def test_no_plan_dominates_the_front(found):
    best = find_front(found.pool)
    assert best[0] == found.pool[0]
    assert len(best) > 3
    for plan, cost in best:
        assert not any(
            its.step_s < cost.step_s and its.peak_bytes < cost.peak_bytes for _, its in found.pool
        ), plan
    others = [cost for plan, cost in found.pool if plan not in dict(best)]
    assert all(
        any(its.step_s <= cost.step_s and its.peak_bytes <= cost.peak_bytes for _, its in best)
        for cost in others
    )


def test_every_part_has_a_distinct_colour():
    assert set(step_time.PARTS) | set(memory.PART_NAMES) | {"input", "save"} == set(COLOURS)
    for parts in (step_time.PARTS, memory.PART_NAMES):
        assert len({COLOURS[part] for part in parts}) == len(tuple(parts))


def test_a_plan_that_does_not_fit_is_explained():
    best = find_best_plans(load_model("gpt3-13b"), make_cluster(8), 8, "ddp", others=True)
    text = [line for line in explain(best) if isinstance(line, str)]
    assert "it does not fit" in text[0]
    assert best.pool
    assert "; the closest, " in list_notes(best)[0]


def test_pictures_are_reproducible(tmp_path):
    pytest.importorskip("matplotlib")
    best = find_best_plans(load_model("resnet50"), make_cluster(4), 64, "zero3,microbatches=2", others=True)
    for name in ("one.svg", "two.svg"):
        draw(best, 3, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
