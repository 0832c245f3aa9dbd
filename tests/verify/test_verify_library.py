"""verify on models of transformers accepts or refuses them with a reason, and finds small faults."""

import importlib.util
from collections.abc import Iterator

import pytest

import faults
from library import MODELS
from paceline import Spec
from paceline.launch.rank_pool import Ranks
from paceline.plan.plan import parse
from paceline.spec import Optimizer
from paceline.verify.report import format_verdict
from paceline.verify.run import Verification

pytestmark = pytest.mark.processes

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed", allow_module_level=True)
PLANS = ("ddp", "zero1", "zero3", "pp=2", "pp=2,microbatches=2", "tp=2", "cp=2")
NO_LAYER = "has no linear layer or embedding whose size 2 divides"
NO_ATTENTION = "calls no F.scaled_dot_product_attention in its blocks"
REFUSED = {
    "resnet": {"tp=2": NO_LAYER, "cp=2": NO_ATTENTION},
    "mobilenet": {"tp=2": NO_LAYER, "cp=2": NO_ATTENTION},
    "mamba": {"cp=2": NO_ATTENTION},
    "mamba2": {"cp=2": NO_ATTENTION},
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
def test_models_are_accepted_and_a_small_fault_is_found(two: Ranks, kind: str) -> None:
    with verification(two, kind) as checked:
        for plan in PLANS:
            verdict, reason = checked.try_verify(parse(plan)), REFUSED.get(kind, {}).get(plan)
            assert (verdict.same, reason) == (True, None) or (
                reason is not None and reason in (verdict.cannot_be or "")
            ), (plan, format_verdict(verdict))
        small = checked.reference().narrowest_dtype == "float64" and checked.float64_error is None
        for plan in ("ddp", "zero3"):
            verdict = checked.try_verify(
                parse(plan), faults.gradient_times_1_000001 if small else faults.gradient_times_1_001
            )
            assert verdict.first is not None, (plan, format_verdict(verdict))
            assert verdict.first.what == "gradient"
            assert verdict.first.step == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_gradients_of_rounding_alone_are_accepted(two: Ranks) -> None:
    """A bias of keys does not change attention: its gradient is rounding, which this optimizer amplifies."""
    with verification(two, "bart", eps=1e-30, lr=1e-3) as checked:
        for plan in ("ddp", "zero1", "zero3", "pp=2", "tp=2"):
            verdict = checked.try_verify(parse(plan))
            assert verdict.same, (plan, format_verdict(verdict))
        assert checked.reference().amplified, "nothing was amplified"
        verdict = checked.try_verify(parse("ddp"), faults.gradient_times_1_000001)
        assert verdict.first is not None
        assert (verdict.first.what, verdict.first.step) == ("gradient", 1)
