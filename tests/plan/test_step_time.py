"""Predicted step time, compared with published bubbles, collectives and times of large trainings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clusters import make_cluster
from paceline.cluster.facts import Fact, Link, Overlap, Rate
from paceline.cluster.published import find
from paceline.errors import PlanError
from paceline.plan.cost_model.block_communication import rank_group
from paceline.plan.cost_model.calibration import Calibration
from paceline.plan.cost_model.compute_time import product_s
from paceline.plan.cost_model.constants import CONSTANTS
from paceline.plan.cost_model.cost import (
    FACILITY_OVERHEAD,
    USED_POWER,
    TimeCost,
    compute_bill,
    list_slower_parts,
    training_days,
)
from paceline.plan.cost_model.framework_profiles import HAI_LLM, MEGATRON, NEMO, PACELINE, Recipe
from paceline.plan.cost_model.optimizer_state import recipe_of_request
from paceline.plan.cost_model.predict import add_input_and_save, predict
from paceline.plan.cost_model.rates import device_rates
from paceline.plan.cost_model.step_time import predict_time
from paceline.plan.cost_model.work_split import WorkSplit, split_work
from paceline.plan.model.library import load_model, load_transformer
from paceline.plan.plan import parse
from paceline.plan.schedules import StageTimes, bubble_share
from paceline.spec import Spec

RATES = (("gloo", 1e9), ("nccl", 2e11))
# arXiv 2401.10241, tables 5 and 9: schedule, ranks, micro-batches, stages per rank, times in ms of forward,
# inputs, weights and send, idle share
BUBBLES = [
    ("1f1b", 8, 24, 1, (18.522, 18.086, 9.337, 0.601), 0.2431),
    ("interleaved", 8, 24, 3, (18.522, 18.086, 9.337, 0.601), 0.1055),
    ("zb-h1", 8, 24, 1, (18.522, 18.086, 9.337, 0.601), 0.1585),
    ("zb-h2", 8, 24, 1, (18.522, 18.086, 9.337, 0.601), 0.1083),
    ("zb-2p", 8, 24, 1, (18.522, 18.086, 9.337, 0.601), 0.0433),
    ("1f1b", 16, 48, 1, (11.347, 11.248, 8.132, 0.377), 0.2552),
    ("interleaved", 16, 48, 3, (11.347, 11.248, 8.132, 0.377), 0.1104),
    ("zb-h1", 16, 48, 1, (11.347, 11.248, 8.132, 0.377), 0.1397),
    ("zb-h2", 16, 48, 1, (11.347, 11.248, 8.132, 0.377), 0.0672),
]


@pytest.mark.parametrize(("schedule", "p", "m", "v", "ms", "idle"), BUBBLES)
def test_bubbles_of_the_zero_bubble_paper(schedule, p, m, v, ms, idle):
    assert bubble_share(schedule, p, m, v, StageTimes(*ms[:3]), ms[3]) == pytest.approx(
        idle, abs=0.0005 if schedule != "zb-2p" else 0.006
    )


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2), ("zbv", 2)]
)
def test_textbook_bubbles(schedule, stages):
    p, m = 4, 16
    third = {"zero-bubble": 3, "zbv": 3}.get(schedule, 1)
    idle = (p - 1) / (m * stages * third)
    assert bubble_share(schedule, p, m, stages, StageTimes(1, 1, 1), 0.0) == pytest.approx(idle / (1 + idle))


def test_all_reduce_takes_twice_as_long_as_all_gather():
    on = device_rates(make_cluster(64), ranks=64)
    size = 1e12
    reduce, gather, scatter = (
        on.collective_s(kind, size, 64, 8) for kind in ("all-reduce", "all-gather", "reduce-scatter")
    )
    assert reduce == pytest.approx(gather + scatter, rel=1e-3)
    constants = on.constants
    assert gather == pytest.approx(
        63 / 64 * size / min(300e9 * constants.node, 8 * 25e9 * constants.across), rel=1e-3
    )
    assert on.collective_s("all-reduce", size, 1, 1) == 0.0


def test_ranks_of_node_share_network_devices():
    on = device_rates(make_cluster(64), ranks=64)
    assert on.collective_s("all-gather", 1e11, 8, 1) > 5 * on.collective_s("all-gather", 1e11, 8, 8)
    assert on.collective_s("all-gather", 1e11, 64, 8) < on.collective_s("all-gather", 1e11, 8, 1)


@pytest.mark.parametrize(
    ("words", "devices", "of_a_node"),
    [("tp=4,pp=2", 32, 8), ("tp=2,cp=2", 32, 4), ("ddp", 16, 8), ("pp=4", 16, 8)],
)
def test_groups_match_plan(words, devices, of_a_node):
    """The number of ranks of an axis in one node agrees with ResolvedPlan.place."""
    plan = parse(words).resolve(devices)
    strides = {"tp": 1, "cp": plan.tp, "dp": plan.tp * plan.cp, "pp": plan.tp * plan.cp * plan.dp}
    for axis, stride in strides.items():
        others = [name for name in strides if name != axis]
        first = plan.place(0)
        members = [
            r for r in range(devices) if all(getattr(plan.place(r), o) == getattr(first, o) for o in others)
        ]
        together = sum(member < of_a_node for member in members)
        assert rank_group(len(members), stride, of_a_node) == (getattr(plan, axis), together)


def test_constants_match_last_fit():
    """benchmarks/published.py --fit writes them."""
    fitted = json.loads((Path(__file__).parents[2] / "benchmarks" / "published_constants.json").read_text())[
        ""
    ]
    ampere, hopper = (CONSTANTS.architectures[name] for name in ("A100", "H100"))
    assert (ampere.product, hopper.product, CONSTANTS.across, CONSTANTS.hidden, ampere.memory) == (
        *(
            fitted["A100 product"],
            fitted["H100 product"],
            fitted["across"],
            fitted["hidden"],
            fitted["memory"],
        ),
    )
    assert ampere.forward == pytest.approx(0.55 * fitted["attention"], rel=0.01)


def test_unknown_network_raises():
    lonely = make_cluster(16).model_copy(update={"links": make_cluster(16).links[:1]})
    with pytest.raises(PlanError, match=r"between nodes is unknown.*@GB/s"):
        predict(load_model("gpt2"), parse("ddp"), lonely, 64)


def test_unknown_peak_raises():
    device = make_cluster(1).device.model_copy(update={"peaks_flops": {}, "name": "abacus"})
    with pytest.raises(PlanError, match="the peak of abacus is unknown; give it with --peak"):
        predict(
            load_model("gpt2"), parse("single"), make_cluster(1, 1).model_copy(update={"device": device}), 8
        )


def test_unknown_device_family_is_reported_as_guess():
    device = make_cluster(1).device.model_copy(update={"name": "abacus"})
    found = predict(
        load_model("gpt2"), parse("single"), make_cluster(1, 1).model_copy(update={"device": device}), 8
    )
    assert found.time.extrapolated
    assert found.time.guesses == ("the share of its peak that abacus reaches is a guess",)
    assert not predict(load_model("gpt2"), parse("single"), make_cluster(1, 1), 8).time.extrapolated


def test_models_and_systems_without_fitted_trainings_have_wider_bars() -> None:
    def predict_time_of(model: str, recipe: Recipe) -> TimeCost:
        return predict(load_model(model), parse("zero1,tp=8"), find("h100:8x8@50"), 64, recipe).time

    hybrid = predict_time_of("nemotron-h-8b", NEMO)
    assert hybrid.guesses == ("the kernels of the state-space layers of nemotron-h-8b are not fitted",)
    assert hybrid.error > 1.5 * hybrid.error_of_plan
    new = predict_time_of("llama3-8b", HAI_LLM)
    assert new.guesses == ("no training by hai-llm is fitted",)
    known = predict_time_of("llama3-8b", NEMO)
    assert known.error == known.error_of_plan < new.error < hybrid.error
    adapters = predict(load_model("nemotron-h-8b", lora_rank=16), parse("tp=8"), find("h100:8"), 8).time
    assert adapters.extrapolated


def test_extrapolated_predictions_have_wider_bars():
    """The error is common to all plans of the devices, so plans are compared without it."""

    def errors(name: str) -> tuple[float, float]:
        device = make_cluster(1).device.model_copy(update={"name": name})
        cluster = make_cluster(1, 1).model_copy(update={"device": device})
        time = predict(load_model("gpt2"), parse("single"), cluster, 8).time
        return time.error, time.error_of_plan

    fitted, of_plan = errors("NVIDIA A100 SXM4 80 GB")
    assert fitted == of_plan
    assert errors("AMD MI300X")[0] > 1.3 * fitted
    assert errors("abacus")[0] > errors("AMD MI300X")[0]
    assert errors("abacus")[1] < 1.5 * of_plan


def test_small_products_are_slower():
    on = device_rates(make_cluster(8), ranks=8)
    rates = [2 * n**3 / product_s(on, "bf16", n, n, n) for n in (256, 1024, 4096, 16384)]
    assert rates == sorted(rates)
    assert rates[0] < 0.2 * rates[-1] < rates[-1] < 312e12
    assert product_s(on, "bf16", 4096, 16, 4096) > 2 * 4096 * 4096 / 2039e9  # limited by memory


def test_measured_rates_take_precedence():
    """paceline bench writes the rates of products, the links of a back end, and overlap into cluster.json."""

    def measured(value):
        return Fact(value=value, source="measured")

    on = make_cluster(8).updated(
        links=[
            Link(
                axis="node",
                backend=name,
                collective="all-reduce",
                alpha_s=measured(1e-5),
                beta_Bps=measured(rate),
            )
            for name, rate in RATES
        ],
        rates=[
            Rate(operation="matmul", dtype="bf16", shape=(n, n, n), flops=measured(f))
            for n, f in ((256, 1e13), (4096, 1e14))
        ],
        overlaps=[Overlap(operation="all-reduce", hidden=measured(0.25))],
    )
    found = device_rates(on, ranks=8)
    assert found.hidden == 0.25
    assert found.collective_s("all-reduce", 8e9, 8, 8) == pytest.approx(1e-5 + 14 / 8 * 8e9 / 2e11)
    assert product_s(found, "bf16", 4096, 4096, 4096) == pytest.approx(2 * 4096**3 / 1e14, rel=1e-2)
    assert found.measured_flops("bf16", 1024.0**3) == pytest.approx((1e13 * 1e14) ** 0.5)
    assert found.measured_flops("bf16", 1.0) == 1e13
    assert found.measured_flops("fp32", 1.0) is None


@pytest.mark.parametrize(
    ("name", "samples", "least", "most"),
    [("resnet50", 256, 1200, 2600), ("vit-b16", 128, 800, 1600), ("bert-large", 32, 80, 160)],
)
def test_other_models_are_in_published_range(name, samples, least, most):
    """Samples/s of one A100 in mixed precision, from eager PyTorch to NVIDIA's DeepLearningExamples."""
    found = predict(load_model(name), parse("ddp"), make_cluster(8), 8 * samples).time
    assert least < found.samples / found.step_s / 8 < most


def test_ranks_share_cores_of_node():
    device = make_cluster(1).device.model_copy(update={"kind": "cpu", "name": "cpu"})
    alone, shared = (
        device_rates(make_cluster(1, 1).model_copy(update={"device": device}), ranks=ranks)
        for ranks in (1, 2)
    )
    assert shared.product_flops("bf16") == alone.product_flops("bf16") / 2
    assert shared.memory_bytes == alone.memory_bytes / 2


# arXiv 2104.04473, table 2, with tp = 8 and micro-batch 1: parameters, (layers, hidden, heads), pp, batch,
# GPUs, days for 300·10⁹ tokens
LARGE = [
    (174.6e9, (96, 12288, 96), 12, 1536, 384, 84),
    (174.6e9, (96, 12288, 96), 12, 1536, 768, 43),
    (174.6e9, (96, 12288, 96), 12, 1536, 1536, 23),
    (529.6e9, (105, 20480, 128), 35, 2240, 560, 156),
    (529.6e9, (105, 20480, 128), 35, 2240, 1120, 80),
    (529.6e9, (105, 20480, 128), 35, 2240, 2240, 42),
]


@pytest.mark.parametrize(("params", "shape", "pp", "batch", "gpus", "days"), LARGE)
def test_days_of_large_trainings(params, shape, pp, batch, gpus, days):
    layers, hidden, heads = shape
    facts = load_transformer("gpt3-175b", layers=layers, hidden=hidden, heads=heads, vocab=51200).facts()
    assert facts.params == pytest.approx(params, rel=1e-3)
    dp = gpus // (8 * pp)
    cut = WorkSplit(dp=dp, tp=8, pp=pp, micro_batch=1, microbatches=batch // dp, recompute="full")
    on = device_rates(make_cluster(gpus), ranks=gpus)
    found = predict_time(facts, cut, MEGATRON, on)
    assert compute_bill(found.step_s, 300e9 / found.tokens, gpus).days == pytest.approx(days, rel=0.06)
    assert training_days(300e9, facts.params, gpus, found.hardware_flops_per_s) == pytest.approx(
        days, rel=0.1
    )


# arXiv 2104.04473, table 2, first ZeRO-3, then PTD-P: 10⁹ parameters, GPUs, TFLOP/s per GPU, days for
# 300·10⁹ tokens
TABLE = [
    *((174.6, 384, 144, 90), (174.6, 768, 88, 74), (174.6, 1536, 44, 74)),
    *((529.6, 640, 138, 169), (529.6, 1120, 98, 137), (529.6, 2240, 48, 140)),
    *((174.6, 384, 153, 84), (174.6, 768, 149, 43), (174.6, 1536, 141, 23)),
    *((529.6, 560, 171, 156), (529.6, 1120, 167, 80), (529.6, 2240, 159, 42)),
]


@pytest.mark.parametrize(("billions", "gpus", "TFLOPs", "days"), TABLE)
def test_rule_of_thumb_of_training_days(billions, gpus, TFLOPs, days):
    """8·T·P/(n·X) omits attention scores and vocabulary, and is 1 to 3 % too low."""
    found = training_days(300e9, billions * 1e9, gpus, TFLOPs * 1e12)
    assert 0.965 * days < found < days + 0.5


def test_gpt3_on_one_v100_takes_355_years():
    """Years of 365 days: 3,109,800 hours."""
    year_s = 365 * 24 * 3600
    found = compute_bill(1.0, 355 * year_s, 1, power_W=300, price_per_hour=0.9792)
    assert found.price == pytest.approx(3_045_116, abs=1)
    assert found.device_hours == 355 * 365 * 24
    assert found.kWh == pytest.approx(355 * 365 * 24 * 0.3 * USED_POWER * FACILITY_OVERHEAD)
    assert compute_bill(1.0, 10, 2).kWh is None
    assert compute_bill(1.0, 10, 2).price is None


# Price of a machine per hour, with 1, 2, 4 and (at a tenth more, with RDMA) 4 V100: on demand, reserved for
# one year, for three years, spot.
NCSV3 = {
    (1, 1.0): (3.06, 1.9492, 0.9792, 0.306),
    (2, 1.0): (6.12, 3.8984, 1.9585, 0.612),
    (4, 1.0): (12.24, 7.7970, 3.9169, 1.224),
    (4, 1.1): (13.464, 8.5766, None, 1.3464),
}


@pytest.mark.parametrize(("devices", "more"), NCSV3)
def test_price_depends_on_device_hours(devices, more):
    """RDMA for three years (5.1002) is left out: it costs 1.302 times as much, not 1.1."""
    hours = 355 * 365 * 24
    for price, single in zip(NCSV3[devices, more], NCSV3[1, 1.0], strict=True):
        if price is not None:
            found = compute_bill(3600.0, hours / devices, devices, price_per_hour=price / devices)
            assert found.price == pytest.approx(hours * single * more, rel=2e-4)
            assert found.seconds == pytest.approx(hours * 3600 / devices)


def test_parts_add_up_to_step_and_mfu():
    found = predict(load_model("llama3-8b"), parse("zero3,recompute=full"), make_cluster(64), 64).time
    assert found.step_s == pytest.approx(sum(part.value for part in found.parts))
    assert found.hardware_flops == pytest.approx(
        found.flops * 4 / 3, rel=0.05
    )  # head and embedding are not recomputed
    assert found.mfu == pytest.approx(found.flops / found.step_s / 312e12)
    assert found.tokens_per_s == pytest.approx(64 * 8192 / found.step_s)
    assert 0.02 < found.error < 0.3


def test_list_slower_parts():
    ours, best = (
        predict(load_model("llama3-8b"), parse(words), make_cluster(64), 64)
        for words in ("tp=8,zero=3", "zero3")
    )
    more = {part.name: part.value for part in list_slower_parts(ours, best)}
    assert more["tensor parallel"] > 0 > more["gathered weights"]
    assert sum(part.value for part in list_slower_parts(ours, best)) == pytest.approx(
        ours.step_s - best.step_s
    )
    with pytest.raises(PlanError, match="not divisible"):
        predict(load_model("llama3-8b"), parse("zero3"), make_cluster(64), 65)


def test_overlap_is_limited_by_computing():
    facts, on = load_model("llama3-8b"), device_rates(make_cluster(64), ranks=64)
    cut = split_work(parse("ddp"), 64, 64)
    hidden = predict_time(facts, cut, PACELINE, on)
    shown = predict_time(facts, cut, replace(PACELINE, overlaps_data=False), on)
    by_name = {part.name: part.value for part in shown.parts}
    assert 0 < shown.step_s - hidden.step_s < by_name["data parallel"] * 1.1


def test_input_and_checkpoints_are_added():
    found = predict(load_model("gpt2"), parse("ddp"), make_cluster(8), 64).time
    more = add_input_and_save(found, input_s=2 * found.step_s, save_s=10, steps_between_saves=1000)
    assert more.step_s == pytest.approx(2 * found.step_s + 0.01)
    assert add_input_and_save(found, input_s=found.step_s / 2).step_s == found.step_s


def test_local_sgd_is_not_predicted():
    with pytest.raises(PlanError, match="cannot be predicted"):
        predict(load_model("gpt2"), parse("local-sgd"), make_cluster(8), 64)


def test_tensor_cores_round_float32() -> None:
    """tf32 changes the rate of products on a device that has it, and nothing else."""
    model = load_model("gpt2")
    spec = Spec(task="text")
    recipes = [
        recipe_of_request(each, model, False) for each in (spec, spec.model_copy(update={"tf32": True}))
    ]
    for device, is_faster in (("h100", True), ("v100-16g", False)):
        whole, rounded = (predict(model, parse("ddp"), find(f"{device}:8"), 64, each) for each in recipes)
        assert (rounded.step_s < 0.8 * whole.step_s) is is_faster
        assert rounded.memory == whole.memory


def test_what_no_profiled_run_had_is_named() -> None:
    profiled = Calibration({}, frozenset({"products", "engines"}), 2)
    assert profiled.beyond(("products", "engines"), 2) == ()
    assert profiled.beyond(("products", "computed again"), 4) == (
        'no profiled run here had the part "computed again" of a step',
        "4 ranks are more than the 2 of any run here",
    )
