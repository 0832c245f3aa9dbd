"""Tables never break the name of a plan, on a terminal of any width, so that it can be pasted."""

import re

import pytest
from rich.console import Console

from paceline.cli.options.plan_options import print_parts
from paceline.cluster.published import find
from paceline.plan.model.library import load_model
from paceline.plan.plan import parse
from paceline.plan.report.plan import build_tables
from paceline.plan.search.best_plans import find_best_plans
from paceline.verify.report import Overview
from paceline.verify.run import Verdict

WIDTHS = (10, 25, 40, 60, 80, 200)
LONG = "zero1,tp=2,pp=4,microbatches=16,pp_schedule=interleaved,stages=2,recompute=full"


@pytest.fixture(scope="module")
def found():
    return find_best_plans(load_model("llama3-8b"), find("h100:8x4@50"), 64, tokens=1e9)


@pytest.mark.parametrize("width", WIDTHS)
def test_prediction_tables_keep_plan_names_whole(width, found, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    plans = [str(plan) for plan, _ in found.plans[:20]]
    assert max(map(len, plans)) > 25, "some are longer than some of the terminals"
    print_parts(*build_tables(found, 20, with_explanation=True))
    lines = capsys.readouterr().out.splitlines()
    of_step, of_training = (
        next(at for at, line in enumerate(lines) if line.startswith(head))
        for head in ("plan", "whole training")
    )
    for begin in (of_step, of_training):
        words = [line.split(" ")[0] for line in lines[begin + 1 :]]
        assert [word for word in words if word in plans][:20] == plans, (
            "in their order, each from the left edge on"
        )
    for plan, cost in found.plans[:20]:
        at = next(at for at, line in enumerate(lines) if line.split(" ")[0] == str(plan))
        figures = lines[at].split()[1:] or lines[at + 1].split()
        assert f"{cost.time.error:.0%}" in figures, "the error must be next to the plan or below it"
        assert figures[-1] in ("yes", "barely")
    if width == 200:
        assert re.match(rf"{re.escape(plans[0])} +\d", lines[of_step + 1]), "where there is room, in one line"


@pytest.mark.parametrize("width", WIDTHS)
def test_verdict_tables_keep_plan_names_whole(width, capsys):
    plans = [parse(text) for text in ("ddp", LONG)]
    overview = Overview(Console(width=width, highlight=False), plans)
    overview.add(Verdict(plans[0], 2))
    overview.add(Verdict(plans[1], 2))
    overview.add(Verdict(plans[1], 2, cannot_be=f"plan {LONG}: 8 ranks are too few"))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines if line.startswith(("ddp", LONG))] == [
        "ddp",
        str(plans[1]),
        str(plans[1]),
    ]
    assert any("same" in line for line in lines) or width < 40
    assert "8 ranks are too few" in " ".join(" ".join(lines).split()) or width < 25
