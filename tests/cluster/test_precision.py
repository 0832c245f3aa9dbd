"""--precision auto: what measured rates, published peaks and units of a CPU choose."""

from pathlib import Path

import pytest

from command import paceline, succeed
from paceline import Spec, train
from paceline.cluster.facts import Cluster, Fact, Rate
from paceline.cluster.precision import choose_by_peaks, choose_by_rates, choose_by_units
from paceline.cluster.published import find
from paceline.errors import SpecError
from paceline.run import RunFolder
from paceline.spec import load_own
from paceline.training import torch_settings
from paceline.training.train import train as train_rank


def measured(cluster: Cluster, source: str = "measured", **flops: float) -> Cluster:
    rates = tuple(
        Rate(operation="matmul", dtype=name, shape=(8, 8, 8), flops=Fact(value=value, source=source))
        for name, value in flops.items()
    )
    return cluster.model_copy(update={"rates": rates})


def on_cpu() -> Cluster:
    gpu = find("a100-40g:4@25")
    return gpu.model_copy(update={"device": gpu.device.model_copy(update={"kind": "cpu"})})


@pytest.mark.parametrize(
    ("flops", "expected"),
    [
        ({"fp32": 1e12, "bf16": 7e12}, "bf16"),
        ({"fp32": 1e12, "bf16": 0.15e12}, "fp32"),
        ({"fp32": 1e12, "bf16": 1.2e12}, "fp32"),
        ({"fp32": 1e12, "fp16": 9e12}, None),
        ({"bf16": 1e12}, None),
        ({}, None),
    ],
)
def test_measured_rates_of_a_cpu(flops: dict[str, float], expected: str | None) -> None:
    choice = choose_by_rates(measured(on_cpu(), **flops))
    assert (choice.precision if choice is not None else None) == expected
    if choice is not None:
        assert "bench compute measured fp32 1, bf16" in choice.why


def test_measured_rates_of_a_gpu_without_bf16() -> None:
    choice = choose_by_rates(measured(find("a100-40g:4@25"), fp32=1e13, bf16=1e12, fp16=9e13))
    assert choice is not None
    assert choice.precision == "fp16"


def test_declared_rates_are_not_measured() -> None:
    assert choose_by_rates(measured(on_cpu(), "declared", fp32=1e12, bf16=7e12)) is None


def test_published_peaks() -> None:
    cluster = find("a100-40g:4@25")
    assert choose_by_peaks(cluster).precision == "bf16"
    assert "published of" in choose_by_peaks(cluster).why
    volta = {"fp32": Fact(value=15.7e12), "fp16": Fact(value=125e12)}
    for peaks, expected in ((volta, "fp16"), ({}, "fp32")):
        device = cluster.device.model_copy(update={"peaks_flops": peaks, "vector_flops": {}})
        assert choose_by_peaks(cluster.model_copy(update={"device": device})).precision == expected


def test_units_of_a_cpu() -> None:
    assert choose_by_units({"AMX BF16", "AMX INT8"}).precision == "bf16"
    for units, why in (
        (set(), "no matrix units for bf16, and converts each value"),
        ({"AMX INT8", "AVX-512"}, "no matrix units for bf16, and converts each value"),
        ({"AVX-512 BF16"}, "has vector units for bf16 (AVX-512 BF16) but no matrix units"),
    ):
        choice = choose_by_units(units)
        assert choice.precision == "fp32"
        assert why in choice.why


def test_tf32_is_fp32_with_its_key() -> None:
    spec = Spec(precision="tf32")
    assert (spec.precision, spec.tf32) == ("fp32", True)
    with pytest.raises(ValueError, match="contradict each other"):
        Spec(precision="tf32", tf32=False)


def test_ranks_refuse_a_precision_that_was_not_chosen() -> None:
    with pytest.raises(SpecError, match="must be chosen before the ranks start"):
        next(train_rank(Spec(precision="auto")))


def test_a_precision_without_units_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_units in (True, False, None):
        monkeypatch.setattr(torch_settings, "computes_in", lambda precision, device, has=has_units: has)
        events = train(Spec(precision="bf16", steps=1, profile=False), device="cpu")
        notes = " ".join(next(events).notes)
        events.close()
        assert ("has no units for bf16" in notes) == (has_units is False)


@pytest.mark.processes
def test_a_run_stores_the_choice(tmp_path: Path) -> None:
    words = "train digits --steps 2 --ranks 1 --precision auto --device cpu --run-dir run"
    done = succeed(*words.split(), at=tmp_path)
    spec, _ = load_own(RunFolder(tmp_path / "run").spec, {}, False)
    assert spec.precision in ("fp32", "bf16")
    assert f"precision {spec.precision}: this CPU" in done.out
    for command in (("train", "digits", "--nodes", "2", "--launcher", "slurm"), ("submit", "digits")):
        refused = paceline(*command, "--precision", "auto", at=tmp_path)
        assert refused.status == 2
        assert "specify bf16, fp16 or fp32" in refused.err
