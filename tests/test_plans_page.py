"""The page of plans shows the pictures that its script draws, and its commands name valid plans."""

import re
import shlex
from pathlib import Path

import pytest

from command import paceline
from paceline.errors import PlanError
from paceline.plan.plan import NAMED_PLANS, RECOMPUTE, micro_batch_size, parse
from paceline.plan.schedules import RUNNABLE_SCHEDULES
from paceline.spec import Spec
from paceline.task import load_task
from paceline.training.model_facts.model_analysis import validate_plan

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "plans.md").read_text()
COMMANDS = re.findall(r"^(paceline .+)$", PAGE, re.M)


def validate_command(command: str) -> None:
    """Raise PlanError if the plan of a command is invalid for its ranks, batch or model."""
    words = shlex.split(command)
    options = {word: words[index + 1] for index, word in enumerate(words) if word.startswith("--")}
    plan = parse(options["--plan"]).resolve(int(options["--ranks"]))
    spec = Spec(task=words[2], batch=int(options.get("--batch", Spec.model_fields["batch"].default)))
    micro_batch_size(spec.batch, plan)
    validate_plan(spec, plan, load_task(spec.task, spec.set))


def check_pictures(folder: Path):
    return paceline("python", "draw_plans.py", "--check", at=folder)


@pytest.fixture(scope="module")
def checked():
    return check_pictures(DOCS)


def test_pictures_equal_the_output_of_the_script(checked):
    assert checked.status == 0, checked.all


def test_bubbles_equal_the_formula_and_the_page(checked):
    """gpipe, 1f1b: (p-1)/(m+p-1) of the time.

    Of the ideal time, interleaved: (p-1)/(v m); with separate gradients of weights: (p-1)/(3 v m).
    """
    bubbles = dict(re.findall(r"^(\S+) +bubble (\S+)% of the time", checked.out, re.M))
    assert set(bubbles) == set(RUNNABLE_SCHEDULES)
    assert bubbles["gpipe"] == bubbles["1f1b"] == f"{100 * 3 / 11:.1f}"
    for schedules, ideal in ((("interleaved",), 3 / (2 * 8)), (("zero-bubble", "zbv"), 3 / (3 * 2 * 8))):
        assert all(bubbles[schedule] == f"{100 * ideal / (1 + ideal):.1f}" for schedule in schedules)
    for schedule, bubble, kept in re.findall(r"^(\S+) +bubble (\S+)% .*by rank: (.+)$", checked.out, re.M):
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{schedule}`"))
        assert f"| {bubble} %" in row
        assert f"| {kept} |" in row


def test_changed_picture_is_detected(tmp_path):
    for name in ("draw_plans.py", "schedules.py"):
        (tmp_path / name).write_text((DOCS / name).read_text())
    (tmp_path / "plans").mkdir()
    for picture in (DOCS / "plans").glob("*.svg"):
        (tmp_path / "plans" / picture.name).write_text(
            picture.read_text().replace("backward, input", "backwards")
        )
    done = check_pictures(tmp_path)
    assert done.status == 1
    assert "schedule-zbv.svg" in done.err
    assert "ddp.svg" not in done.err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_a_valid_plan(command):
    validate_command(command)


@pytest.mark.parametrize(
    "plan",
    [
        "pp=4,pp_schedule=interleaved,microbatches=6",
        "tp=3",
        "pp=4,pp_schedule=interleaved,stages=3,microbatches=8",
    ],
)
def test_invalid_plan_is_detected(plan):
    with pytest.raises(PlanError):
        validate_command(f"paceline train text --plan {plan} --ranks 4")


def test_page_has_each_plan_and_each_picture():
    text = "\n".join(COMMANDS)
    words = [
        *NAMED_PLANS,
        *(f"pp_schedule={name}" for name in RUNNABLE_SCHEDULES),
        *(f"recompute={name}" for name in RECOMPUTE if name != "none"),
    ]
    assert [word for word in words if word not in text] == []
    shown = set(re.findall(r"\]\(plans/(\S+)\)", PAGE))
    assert shown == {picture.name for picture in (DOCS / "plans").glob("*.svg")}


def test_links_within_the_page_exist():
    anchors = {
        re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-")
        for head in re.findall(r"^## (.+)$", PAGE, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors
