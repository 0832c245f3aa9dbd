"""Parsing, printing and resolving plans, and the errors of impossible plans."""

import itertools

import pytest

from paceline.errors import PlanError
from paceline.plan.plan import KEYS, NAMED_PLANS, Plan, micro_batch_size, parse

ALL = [
    Plan(zero=zero, dp=dp, replicate=replicate, microbatches=microbatches)
    for zero, dp, replicate, microbatches in itertools.product(
        (0, 1, 2, 3), (None, 1, 2, 4, 8), (1, 2, 4), (1, 2, 3)
    )
    if replicate == 1 or zero >= 2
]


@pytest.mark.parametrize("plan", ALL, ids=str)
def test_parse_and_str_are_inverse(plan):
    assert parse(str(plan)) == plan


def test_str_is_unique():
    assert len({str(plan) for plan in ALL}) == len(ALL)


@pytest.mark.parametrize("word", NAMED_PLANS)
def test_named_plan_round_trips(word):
    assert str(parse(word)) == word


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("ddp", Plan()),
        ("single", Plan(dp=1)),
        ("zero1", Plan(zero=1)),
        ("zero3,microbatches=4", Plan(zero=3, microbatches=4)),
        ("hsdp", Plan(zero=3, replicate=2)),
        ("hsdp,replicate=4", Plan(zero=3, replicate=4)),
        ("dp=4,zero=2,microbatches=8", Plan(zero=2, dp=4, microbatches=8)),
        ("zero=3,replicate=2,microbatches=4", Plan(zero=3, replicate=2, microbatches=4)),
        ("microbatches=2", Plan(microbatches=2)),
        (" zero2 , microbatches=2 ", Plan(zero=2, microbatches=2)),
        ("zero2,replicate=2", Plan(zero=2, replicate=2)),
    ],
)
def test_parse_names_and_keys(text, plan):
    assert parse(text) == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zerro3", "plan 'zerro3': there is no plan 'zerro3'; did you mean zero3?"),
        ("fsdp", "plan 'fsdp': there is no plan 'fsdp'; did you mean hsdp?"),
        (
            "xyz",
            "plan 'xyz': there is no plan 'xyz'; available: ddp, zero1, zero2, zero3, hsdp, single, "
            "local-sgd, "
            + "post-local-sgd, parameter-server, "
            + ", ".join(f"{key}=" for key in KEYS[:-5])
            + " and 5 more",
        ),
        (
            "ddp,microbatch=2",
            "plan 'ddp,microbatch=2': there is no key 'microbatch'; did you mean microbatches?",
        ),
        (
            "ddp,microbatches=two",
            "plan 'ddp,microbatches=two': microbatches must be a whole number, got 'two'",
        ),
        ("ddp,microbatches=-2", "plan 'ddp,microbatches=-2': microbatches must be a whole number, got '-2'"),
        ("ddp,microbatches=", "plan 'ddp,microbatches=': microbatches must be a whole number, got ''"),
        ("ddp,microbatches=0", "microbatches must be at least 1, got microbatches=0"),
        ("zero=4", "zero must be 0, 1, 2 or 3, got zero=4"),
        (
            "ddp,microbatches=2,microbatches=4",
            "plan 'ddp,microbatches=2,microbatches=4' has microbatches twice",
        ),
        (
            "microbatches=2,ddp",
            "plan 'microbatches=2,ddp': ddp must come first, and a plan has only one name; leave ddp out",
        ),
        (
            "zero1,zero2",
            "plan 'zero1,zero2': zero2 must come first, and a plan has only one name; leave zero2 out",
        ),
        ("zero1,zero=3", "plan 'zero1,zero=3': zero1 means zero=1, got zero=3; leave one of them out"),
        (
            "ddp,replicate=2",
            "replicate=2 requires shards to replicate: use zero=2, zero=3 or hsdp, got zero=0",
        ),
        (
            "zero=1,replicate=2",
            "replicate=2 requires shards to replicate: use zero=2, zero=3 or hsdp, got zero=1",
        ),
        ("replicate=0,zero=3", "replicate must be at least 1, got replicate=0"),
    ],
)
def test_parse_errors(text, message):
    with pytest.raises(PlanError) as caught:
        parse(text)
    assert str(caught.value) == message


@pytest.mark.parametrize("text", ["", ",", "ddp,", "=", "=3"])
def test_parse_rejects_fragments(text):
    with pytest.raises(PlanError, match="there is no"):
        parse(text)


@pytest.mark.parametrize("text", ["zero=3,replicate=2", "replicate=2,zero=3"])
def test_order_of_keys_does_not_matter(text):
    assert parse(text) == Plan(zero=3, replicate=2)


def test_resolve_sets_data_degree():
    assert parse("zero3").resolve(4) == Plan(zero=3, dp=4, microbatches=1)
    assert parse("single").resolve(1) == Plan(dp=1, microbatches=1)
    assert parse("hsdp").resolve(4) == Plan(zero=3, dp=4, replicate=2, microbatches=1)
    assert parse("dp=2,zero=2").resolve(2) == Plan(zero=2, dp=2, microbatches=1)


@pytest.mark.parametrize(
    ("microbatches", "schedule"), [(1, "gpipe"), (3, "gpipe"), (4, "1f1b"), (None, "1f1b")]
)
def test_resolve_chooses_schedule_for_micro_batches(microbatches, schedule):
    assert Plan(pp=4, microbatches=microbatches).resolve(4).pp_schedule == schedule


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        (
            "single",
            2,
            "plan single is for 1 rank, got 2: use --ranks 1 or another plan: ddp, zero1, zero2, zero3",
        ),
        ("dp=4,zero=2", 3, "plan zero2,dp=4 is for 4 ranks, got 3: use --ranks 4 or dp=3"),
        ("hsdp", 3, "plan hsdp keeps 2 copies, which does not divide 3 ranks: use replicate=3, or zero3"),
        ("hsdp", 1, "plan hsdp keeps 2 copies, which does not divide 1 rank: use single"),
        (
            "hsdp,replicate=3",
            4,
            "plan hsdp,replicate=3 keeps 3 copies, which does not divide 4 ranks: use replicate=2 or "
            "4, or zero3",
        ),
    ],
)
def test_resolve_errors(text, ranks, message):
    with pytest.raises(PlanError) as caught:
        parse(text).resolve(ranks)
    assert str(caught.value) == message


def test_micro_batch_size():
    assert micro_batch_size(24, parse("zero3,microbatches=3").resolve(4)) == 2


@pytest.mark.parametrize(
    ("batch", "text", "ranks", "message"),
    [
        (10, "ddp", 4, "batch 10 is not divisible by ranks × microbatches = 4 × 1 = 4: use --batch 12 or 8"),
        (10, "ddp,microbatches=4", 1, "batch 10 is not divisible by microbatches=4: use --batch 12 or 8"),
        (
            2,
            "ddp,microbatches=2",
            2,
            "batch 2 is not divisible by ranks × microbatches = 2 × 2 = 4: use --batch 4",
        ),
    ],
)
def test_indivisible_batch(batch, text, ranks, message):
    with pytest.raises(PlanError) as caught:
        micro_batch_size(batch, parse(text).resolve(ranks))
    assert str(caught.value) == message


def test_keys_are_the_fields():
    assert {*KEYS} == {*vars(Plan())}


@pytest.mark.parametrize("field", [*KEYS])
def test_plan_is_frozen(field):
    with pytest.raises(AttributeError):
        setattr(Plan(), field, 1)
