"""verify on models of transformers: the same or refused in words, never a false alarm, and a small defect is found in each of them."""

import importlib.util
from collections.abc import Iterator

import pytest

import faults
from library import MODELS
from paceline import Spec
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import parse
from paceline.spec import Optimizer
from paceline.verify.report import sentence
from paceline.verify.run import Verification

pytestmark = pytest.mark.processes

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
PLANS = ("ddp", "zero1", "zero3", "pp=2", "pp=2,microbatches=2", "tp=2")
NO_VALUES, NO_LAYER = (
    "cannot be run on tensors without values",
    "has no linear layer or embedding whose size 2 divides",
)
EXPERTS = {"pp=2": NO_VALUES, "pp=2,microbatches=2": NO_VALUES, "tp=2": NO_VALUES}
REFUSED = {
    "mixtral": EXPERTS,
    "qwen3-moe": EXPERTS,
    "resnet": {"tp=2": NO_LAYER},
    "mobilenet": {"tp=2": NO_LAYER},
}


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def verification(two: Ranks, kind: str, **optimizer: float) -> Verification:
    spec = Spec(
        task="library:Library", batch=8, steps=3, seed=3, set={"kind": kind}, optimizer=Optimizer(**optimizer)
    )
    return Verification(spec, two, timeout_s=240)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", MODELS)
def test_no_false_alarm_and_a_small_defect_is_found(two: Ranks, kind: str) -> None:
    with verification(two, kind) as of_model:
        for plan in PLANS:
            verdict, why = of_model.outcome(parse(plan)), REFUSED.get(kind, {}).get(plan)
            assert (verdict.same, why) == (True, None) or (
                why is not None and why in (verdict.cannot_be or "")
            ), (plan, sentence(verdict))
        small = of_model.reference().computes_in == "float64" and of_model.no_float64 is None
        for plan in ("ddp", "zero3"):
            verdict = of_model.outcome(
                parse(plan), faults.gradient_off_by_a_millionth if small else faults.gradient_a_little_off
            )
            assert verdict.first is not None, (plan, sentence(verdict))
            assert verdict.first.what == "gradient"
            assert verdict.first.step == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gradients_that_are_rounding_alone_are_no_difference(two: Ranks) -> None:
    """A bias of keys changes no attention: its gradient is 0 but for rounding, of which this optimizer makes whole steps."""
    with verification(two, "bart", eps=1e-30, lr=1e-3) as of_model:
        for plan in ("ddp", "zero1", "zero3", "pp=2", "tp=2"):
            verdict = of_model.outcome(parse(plan))
            assert verdict.same, (plan, sentence(verdict))
        assert of_model.reference().grown, "nothing was amplified"
        verdict = of_model.outcome(parse("ddp"), faults.gradient_off_by_a_millionth)
        assert verdict.first is not None
        assert (verdict.first.what, verdict.first.step) == ("gradient", 1)
