"""Scaling: the fastest plan for each number of ranks, and how many ranks are worth using."""

import json
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from clusters import make_cluster
from command import paceline, succeed
from paceline.cluster.published import find
from paceline.errors import PlanError, SpecError
from paceline.plan.model.library import load_model
from paceline.plan.report.scale import format_amount, format_duration, list_findings
from paceline.plan.search.rank_counts import parse_counts
from paceline.plan.search.scaling import find_last_efficient, predict_scaling
from paceline.plan.search.search import search_plans

GPT = ("scale", "--model", "gpt3-1.3b", "--cluster", "a100-80g:8", "--batch", "64")
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("8", (8,)),
        ("8, 2,1", (1, 2, 8)),
        ("1,2,4,…,32", (1, 2, 4, 8, 16, 32)),
        ("1,2,4,...,32", (1, 2, 4, 8, 16, 32)),
        ("8:64", (8, 16, 32, 64)),
        ("3,…,12", (3, 6, 12)),
        ("8,16,24,…,40", (8, 16, 24, 32, 40)),
        ("8,16,…,64", (8, 16, 32, 64)),
        ("8,16,…,24", (8, 16, 24)),
        ("1,3,9,…,81", (1, 3, 9, 27, 81)),
    ],
)
def test_parse_rank_counts(text, counts):
    assert parse_counts(text) == counts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,2,4,…,100", "does not reach 100; end it with 64 or 128"),
        ("64:8", "end it with 64"),
        ("1,2,x", "'x' is not a whole number"),
        ("0:8", "each number must be at least 1"),
        ("-4", "not a whole number"),
        ("…,8", "must stand between"),
        ("1,2,…", "must stand between"),
        ("1,…,4,…,8", "must stand between"),
        ("1,2,5,…,17", "has no common factor or step"),
        ("1,2,3,…,4096", "more than 100 numbers"),
    ],
)
def test_bad_rank_counts(text, says):
    with pytest.raises(SpecError, match=says):
        parse_counts(text)


def test_each_point_is_the_fastest_plan():
    facts, on = load_model("gpt3-1.3b"), make_cluster(64)
    found = predict_scaling(facts, on, (4, 8, 32), 64)
    assert [point.ranks for point in found.strong.points] == [4, 8, 32]
    for point, nodes in zip(found.strong.points, (1, 1, 4), strict=True):
        best = search_plans(facts, on.model_copy(update={"nodes": nodes}), 64, ranks=point.ranks).fitting[0]
        assert (point.plan, point.cost) == best
        assert (point.nodes, point.batch) == (nodes, 64)
    assert found.each == 16
    assert [point.batch for point in found.weak.points] == [64, 128, 512]


def test_efficiency_is_relative_to_fewest_ranks():
    found = predict_scaling(load_model("resnet50"), make_cluster(8), (1, 2, 8, 16), 512, tokens=1e6, price=3)
    for curve in (found.strong, found.weak):
        of_rank = [point.cost.time.samples / point.cost.step_s / point.ranks for point in curve.points]
        assert [point.efficiency for point in curve.points] == pytest.approx(
            [rate / of_rank[0] for rate in of_rank]
        )
        for point in curve.points:
            hours = 1e6 / point.batch * point.cost.step_s / 3600
            assert (point.bill.seconds, point.bill.device_hours) == pytest.approx(
                (hours * 3600, hours * point.ranks)
            )
            assert point.bill.price == pytest.approx(3 * point.bill.device_hours)
    assert found.strong.points[-1].efficiency < found.weak.points[-1].efficiency


def test_efficiency_is_lost_to_slow_network():
    facts = load_model("resnet50")
    fast, slow = (
        predict_scaling(facts, make_cluster(64, across_GBps=GBps), (8, 64, 512), 2048).strong.points
        for GBps in (200, 0.2)
    )
    assert fast[1].efficiency > 0.8
    assert slow[1].efficiency < 0.3
    assert slow[2].lost.name == "data parallel"
    assert slow[2].lost.value > 0.5


def test_find_last_efficient():
    curve = predict_scaling(
        load_model("resnet50"), make_cluster(64, across_GBps=5), (1, 8, 64, 512), 1024
    ).strong
    shares = [point.efficiency for point in curve.points]
    assert shares == sorted(shares, reverse=True)
    between = (shares[1] + shares[2]) / 2
    assert find_last_efficient(curve, between).ranks == 8
    assert find_last_efficient(curve, min(shares)).ranks == 512
    assert find_last_efficient(curve, 0.999999999).ranks == 1


MANY = 8 * 10_007  # a prime number of nodes: more than samples and tokens


def test_infeasible_counts_give_reason():
    found = predict_scaling(load_model("llama3-8b"), make_cluster(8), (1, 12, 16, MANY), 48)
    assert {count.ranks: count.want for count in found.strong.refused} == {
        1: "memory",
        12: "nodes",
        MANY: "samples",
    }
    by_ranks = {count.ranks: count.reason for count in found.strong.refused}
    assert "most of it optimizer" in by_ranks[1]
    assert "use 8 or 16" in by_ranks[12]
    assert "a batch of 48 cannot be split over 80,056 ranks" in by_ranks[MANY]
    assert found.each == Fraction(48, 16)
    assert any(
        "has 1 node; the others of 10,007 are assumed to be identical" in sentence
        for sentence in found.assumed
    )


def test_fractional_samples_per_rank():
    found = predict_scaling(load_model("gpt2"), make_cluster(8), (2, 3, 4), 2)
    assert found.weak.refused == ()
    found = predict_scaling(load_model("gpt2"), make_cluster(8), (4, 6), 2)
    assert [count.want for count in found.weak.refused] == []
    assert [point.batch for point in found.weak.points] == [2, 3]
    found = predict_scaling(load_model("gpt2"), make_cluster(8), (4, 5), 2)
    assert [count.reason for count in found.weak.refused] == [
        "a batch of 2.5 is not a whole number of samples"
    ]


def test_error_names_the_ranks_that_fit():
    with pytest.raises(
        PlanError,
        match=r"no plan fits 72.0 GiB per device; the leanest, .* needs .*: use 32 ranks on 4 nodes of this "
        r"kind",
    ):
        predict_scaling(load_model("llama3-70b"), make_cluster(8), (1, 2, 4), 64)


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.000"), (1e-5, "<0.001"), (0.25, "0.250"), (12.5, "12.5"), (6.19e6, "6.19 M")]
)
def test_format_counts(value, text):
    assert format_amount(value) == text


def test_format_durations():
    assert [format_duration(seconds) for seconds in (40, 7200, 2 * 86400, 800 * 86400)] == [
        "40.0 s",
        "2.0 h",
        "2.0 days",
        "2.2 years",
    ]


def test_axes_have_labels_within_a_decade(tmp_path: Path) -> None:
    """The rates contain no power of ten, at which logarithmic axes have labels, and the durations one."""
    picture = tmp_path / "scale.svg"
    succeed(*GPT, "--ranks", "8,16", "--tokens", "1e9", "--plot", str(picture), at=tmp_path)
    texts = " ".join(re.findall("<!-- (.*) -->", picture.read_text()))
    assert "ranks 150 k 175 k 200 k" in texts
    assert "recommended: 16 50 100 minutes of the training" in texts


def test_command_does_not_import_torch(tmp_path: Path) -> None:
    words = (
        *GPT,
        "--ranks",
        "1,2,4,...,64",
        "--tokens",
        "1e9",
        "--price",
        "2",
        "--json",
        "scale.json",
        "--plot",
        "scale.svg",
    )
    found = succeed(*words, at=tmp_path, program=(sys.executable, "-c", WITHOUT_TORCH))
    figures = json.loads((tmp_path / "scale.json").read_text())
    assert [point["ranks"] for point in figures["strong"]["points"]] == [1, 2, 4, 8, 16, 32, 64]
    assert [point["batch"] for point in figures["weak"]["points"]] == [
        64 * ranks for ranks in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert f"recommended: {figures['ask_for']} rank" in found.out
    plan = figures["strong"]["points"][3]["plan"]
    for words in (
        "strong scaling",
        "weak scaling",
        "efficiency",
        "are assumed to be identical",
        "are assumed",
        plan,
    ):
        assert words in found.out, words
    of_tables = [
        line for line in found.out.partition("fastest plans")[0].splitlines() if line.strip()[:1].isdecimal()
    ]
    assert len(of_tables) == 14
    assert max(map(len, of_tables)) <= 80
    assert (tmp_path / "scale.svg").read_text().startswith("<?xml")


def test_task_determines_length_of_training(tmp_path: Path) -> None:
    words = (
        "scale",
        "digits",
        "--ranks",
        "1,2",
        "--batch",
        "32",
        "--peak",
        "0.1",
        "--epochs",
        "2",
        "--json",
        "scale.json",
    )
    succeed(*words, at=tmp_path)
    points = json.loads((tmp_path / "scale.json").read_text())["strong"]["points"]
    assert [point["bill"]["seconds"] / point["step_s"] for point in points] == pytest.approx(
        [90, 90]
    )  # 1,437 samples


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (GPT, "scale requires numbers of ranks; add --ranks"),
        ((*GPT, "--ranks", "1,2,4,…,100"), "end it with 64 or 128"),
        ((*GPT, "--ranks", "8", "--efficiency", "80"), "--efficiency must be above 0 and at most 1, got 80"),
        (
            (*GPT, "--ranks", "8", "--steps", "10"),
            "--epochs and --steps require a task, got --model; use --tokens",
        ),
        ((*GPT, "--ranks", "8", "--plot", "scale.pdf"), "must end in .svg or .png"),
        (
            ("scale", "--model", "gpt3", "--cluster", "a100-80g:8", "--batch", "8", "--ranks", "1:8"),
            "no plan fits",
        ),
        (
            ("scale", "--model", "resnet50", "--cluster", "a100-80g:8", "--batch", "3", "--ranks", "8"),
            "cannot be split over 8 ranks",
        ),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    found = paceline(*words, at=tmp_path)
    assert found.status == 2, found.all
    assert sentence in found.err
    assert found.err.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "device", "counts", "batch", "is_memory"),
    [
        ("llama3-70b", "h100:8x16@50", (32, 64), 256, True),
        ("bert-base", "h100:8x2@50", (4, 5), 15, False),  # 4 ranks cannot split 15 samples
    ],
)
def test_more_than_linear_scaling_has_its_cause(
    model: str, device: str, counts: tuple[int, int], batch: int, is_memory: bool
) -> None:
    scaling = predict_scaling(load_model(model), find(device), counts, batch)
    assert scaling.strong.points[-1].efficiency > 1.01
    [sentence] = [line for line in list_findings(scaling, 0.8) if line.startswith("above 100%")]
    assert ("need more memory" in sentence) is is_memory
    assert ("is the largest gain" in sentence) is not is_memory
