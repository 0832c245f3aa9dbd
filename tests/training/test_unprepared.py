"""Unusual models train as with one process, or are refused with a reason, never with an error of torch."""

import dataclasses
import warnings
from functools import cache

import pytest

from harness import TrainingResult, differences, ranks, train_on_this_rank
from paceline import Spec
from paceline.errors import PlanError
from paceline.spec import Optimizer
from unprepared import MODELS, SAMPLE_BY_SAMPLE, Unprepared

pytestmark = pytest.mark.processes

SPEC = Spec(
    steps=3, batch=8, seed=3, precision="fp64", optimizer=Optimizer(lr=1e-2, weight_decay=0.1, clip=0.5)
)
TP_NEEDS = "the model cannot run on tensors without values, which determines what tp=2 may split"
PP_NEEDS = "the model cannot run on tensors without values, which determines where a pipeline may cut it"
COMPUTED = (
    "computes the weight of 0 from others (weight_norm, spectral_norm or another parametrization); "
    "use a plan without tp, such as zero3"
)
REFUSED = {
    "tp=2": {
        **dict.fromkeys(("item", "chosen", "packed", "cumulative batch norm"), TP_NEEDS),
        **dict.fromkeys(("first weight norm", "first spectral norm"), COMPUTED),
        **dict.fromkeys(("scaled", "idle"), "tp=2 does not divide the 5 features of"),
        "no linear layer": "tp=2, but Sequential has no linear layer or embedding; use a plan "
        "without tp, such as zero3",
    },
    "pp=2,microbatches=2": dict.fromkeys(("item", "chosen", "cumulative batch norm"), PP_NEEDS),
    "pp=2,microbatches=2,pp_schedule=zbv": {},
}


def train_all(plan: str, kinds: list[str]) -> dict[str, TrainingResult | str]:
    """Return the training of each model, or why it was refused."""
    warnings.filterwarnings("ignore", ".*weight_norm. is deprecated", FutureWarning)
    results: dict[str, TrainingResult | str] = {}
    for kind in kinds:
        try:
            results[kind] = train_on_this_rank(Unprepared(kind=kind), SPEC, plan)
        except PlanError as error:  # the same on all ranks, before the first message
            results[kind] = str(error)
    return results


@cache
def train_one_process(plan: str, kinds: tuple[str, ...] = tuple(MODELS)) -> dict[str, TrainingResult]:
    return ranks(1)(train_all, plan, list(kinds))[0]


@pytest.mark.parametrize(
    "plan",
    [
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ("ddp", "zero2", "zero3", "zero3,microbatches=2", "pp=2,microbatches=2")
        ),
        "tp=2",
    ],
)
def test_models_train_as_with_one_process_or_are_refused(plan: str) -> None:
    expected = train_one_process("single,microbatches=2" if "microbatches" in plan else "single")
    first, second = ranks(2)(train_all, plan, list(MODELS))
    wrong: dict[str, str] = {}
    for kind in MODELS:
        on_first, on_second, refused = first[kind], second[kind], REFUSED.get(plan, {}).get(kind)
        if refused or isinstance(on_first, str) or isinstance(on_second, str):
            assert on_first == on_second
            if not (refused and isinstance(on_first, str) and refused in on_first):
                wrong[kind] = str(on_first)
            continue
        merged = dataclasses.replace(on_first, weights=on_second.weights | on_first.weights)
        if result := differences(merged, expected[kind], 1e-10):
            wrong[kind] = str(result)
    assert not wrong


@pytest.mark.parametrize("plan", ["ddp,microbatches=4", "zero2,microbatches=4", "zero3,microbatches=4"])
def test_ranks_may_skip_different_layers(plan: str) -> None:
    """Each micro-batch has one sample, so that one process skips the same layers for it."""
    kinds = tuple(SAMPLE_BY_SAMPLE)
    expected = train_one_process("single,microbatches=8", kinds)
    first, second = ranks(2)(train_all, plan, list(kinds))
    assert not [
        result
        for kind in kinds
        for results in (first, second)
        if (result := differences(results[kind], expected[kind], 1e-10))
    ]
