"""paceline plan on the real command line."""

import json
import re
import sys
from pathlib import Path

import pytest

from command import paceline, succeed

pytestmark = pytest.mark.processes

LLAMA = ("plan", "--model", "llama3-8b", "--cluster", "h100:8x2@50", "--batch", "64", "--seq", "4096")
GPT = ("plan", "--model", "gpt3-1.3b", "--cluster", "a100-80g:8", "--batch", "64")
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from paceline.cli import main; main()"


def test_model_does_not_import_torch(tmp_path: Path) -> None:
    words = ("--explain", "--json", "plans.json", "--plot", "plans.svg")
    found = succeed(*LLAMA, *words, at=tmp_path, program=(sys.executable, "-c", WITHOUT_TORCH))
    figures = json.loads((tmp_path / "plans.json").read_text())
    steps = [plan["step_s"] for plan in figures["plans"]]
    assert steps == sorted(steps)
    assert all(plan["fits"] for plan in figures["plans"])
    assert sum(figures["plans"][0]["time_s"].values()) == pytest.approx(steps[0])
    assert figures["rejected"] > 0
    for words in (
        figures["plans"][0]["plan"],
        "tokens/s",
        "MFU",
        "do not, mostly because of",
        "optimizer",
        "difference of the next plan",
    ):
        assert words in found.out
    assert (
        f"why {figures['plans'][0]['plan']}: the fastest of {figures['fitting']:,} plans that fit"
        in found.out
    )
    assert "<svg" in (tmp_path / "plans.svg").read_text()


def test_adapters_and_other_systems(tmp_path: Path) -> None:
    def step_s(*words: str) -> float:
        succeed(*LLAMA, "--plan", "tp=2,zero=1", *words, "--json", "plans.json", at=tmp_path)
        [plan] = json.loads((tmp_path / "plans.json").read_text())["plans"]
        return float(plan["step_s"])

    whole, nemo = step_s(), step_s("--system", "nemo")
    assert step_s("--lora", "rank=16") < 0.85 * whole
    assert nemo < whole
    assert step_s("--system", "nemo", "--precision", "fp8") < nemo
    for words, sentence in (
        (("--lora", "rank=0"), "--lora must be rank=NUMBER with a number of at least 1, got 'rank=0'"),
        (("--system", "nemoo"), "--system nemoo is not known; did you mean nemo?"),
        (("--system", "nemo", "--precision", "fp32"), "--precision fp32 cannot be predicted with --system"),
        (("--precision", "fp8"), "a step in fp8 cannot be predicted"),
        (("--precision", "int7"), "a step in int7 cannot be predicted; use --precision fp32, bf16, fp16"),
        (("--precision", "BF16"), "a step in BF16 cannot be predicted (did you mean bf16?)"),
        (("--system", "nemo", "--precision", "mxfp6"), "with --system (did you mean mxfp8?); use"),
        (("--system", "nemo", "--precision", "fp4"), "in fp4 is unknown; use --precision bf16, fp16"),
    ):
        done = paceline(*LLAMA, *words, at=tmp_path)
        assert done.status == 2
        assert sentence in done.err


def test_estimate_on_the_back_of_an_envelope(tmp_path: Path) -> None:
    """GPT-3 on one V100 at 28 TFLOP/s: 355 years, and 355·365·24 h at 0.9792 an hour."""
    words = ("plan", "--model", "gpt3", "--achieved", "28", "--tokens", "300e9")
    found = succeed(*words, "--instance", "NC6s_v3:3y", at=tmp_path).out
    assert "355 years of one device" in found
    assert "355 × 365 × 24 h × 0.9792 USD = 3,045,116 USD" in found
    words = ("plan", "--model", "gpt3", "--achieved", "100", "--tokens", "15e9", "--instance", "NC6s_v3:3y")
    assert (
        "4.98 × 365 × 24 h × 0.9792 USD = 42,717 USD" in succeed(*words, at=tmp_path).out
    )  # not that of 4 years
    done = paceline("plan", "--model", "gpt3", "--achieved", "126", *words[5:], at=tmp_path)
    assert done.status == 2
    assert "--achieved 126 is more than the peak of NVIDIA V100 PCIe 16 GB, " in done.err


def test_an_instance_determines_price_and_devices(tmp_path: Path) -> None:
    words = ("plan", "--model", "gpt2", "--batch", "64", "--tokens", "1e9", "--json", "plans.json")
    succeed(*words, "--instance", "nc24s_v3:spot", at=tmp_path)
    best = json.loads((tmp_path / "plans.json").read_text())["plans"][0]
    assert best["bill"]["price"] == pytest.approx(best["bill"]["device_hours"] * 1.224 / 4)
    for instance, sentence in (
        ("NC24", "there is no price of the instance NC24; did you mean NC24s_v3?"),
        ("NC6s_v3:5y", "NC6s_v3 has no terms '5y'; choose one of on demand, 1y, 3y, spot"),
    ):
        done = paceline(*words, "--instance", instance, at=tmp_path)
        assert (done.status, sentence in done.err) == (2, True)


def test_every_price_has_its_currency(tmp_path: Path) -> None:
    words = ("--model", "gpt2", "--batch", "64", "--tokens", "1e10", "--price", "2")
    euros = succeed(
        "plan", *words, "--cluster", "h100:8", "--currency", "EUR", "--json", "a.json", at=tmp_path
    )
    assert re.search(r"kWh +EUR\b", euros.out)
    assert "USD" not in euros.out
    assert json.loads((tmp_path / "a.json").read_text())["plans"][0]["bill"]["currency"] == "EUR"
    several = succeed("plan", *words, "--cluster", "h100:8", "--cluster", "a100-80g:8", at=tmp_path)
    assert re.search(r"kWh +USD\b", several.out)
    scaled = succeed("scale", *words, "--cluster", "h100:8", "--ranks", "1,2", at=tmp_path)
    assert len(re.findall(r"kWh +USD\b", scaled.out)) == 2
    assert re.search(r"at a price of [\d.]+ USD", scaled.out)
    for option, says in (
        (
            ("--currency", "EUR", "--instance", "NC6s_v3"),
            "NC6s_v3 is priced in USD, not in EUR; leave --currency out",
        ),
        (("--currency", "1 €"), "--currency must be a name such as EUR, got '1 €'"),
    ):
        done = paceline("plan", *words[:6], *option, at=tmp_path)
        assert done.status == 2
        assert says in done.err


def test_price_of_requested_plan(tmp_path: Path) -> None:
    succeed(
        *GPT,
        "--plan",
        "tp=2,microbatches=4",
        "--tokens",
        "1e9",
        "--price",
        "2",
        "--json",
        "plans.json",
        at=tmp_path,
    )
    [plan] = json.loads((tmp_path / "plans.json").read_text())["plans"]
    assert plan["bill"]["price"] == pytest.approx(2 * plan["bill"]["device_hours"])
    assert plan["bill"]["seconds"] == pytest.approx(1e9 / plan["tokens_per_s"])


def test_batch_from_file_and_bubble_warning(tmp_path: Path) -> None:
    (tmp_path / "gpt.toml").write_text('like = "gpt3-175b"\nbatch = 1536\n')
    words = (
        "plan",
        "--model",
        "gpt.toml",
        "--cluster",
        "a100-80g:8x48",
        "--tokens",
        "300e9",
        "--price",
        "1.95",
    )
    found = succeed(*words, "--plan", "tp=8,pp=12,microbatches=1", at=tmp_path).out
    assert "batch 1,536 × 2,048 tokens" in found
    assert "data: 300 G tokens are 558.8 GiB as numbers of 2 bytes" in " ".join(found.split())
    assert (
        "of the step: tp=8,pp=12,microbatches=1 has 1 micro-batch of 384 samples; with "
        "microbatches=384, each has one sample" in found
    )
    assert (
        "the pipeline bubble is"
        not in succeed(*words, "--plan", "tp=8,pp=12,microbatches=384", at=tmp_path).out
    )


def test_plan_is_compared_with_alternatives(tmp_path: Path) -> None:
    """recompute=full is necessary here, unless the model is divided further."""
    found = succeed(*GPT, "--plan", "zero3,microbatches=8,recompute=full", "--explain", at=tmp_path)
    assert "plans that fit are faster" in found.out
    rows = {
        line.split()[0]: line
        for line in found.out.splitlines()
        if line.startswith(("recompute=", "zero=", "tp="))
    }
    assert "-" in rows["recompute=none"].split()[1]
    assert "again" in rows["recompute=none"]
    assert "tensor parallel" in rows["tp=2"]
    assert {"zero=0", "zero=1", "zero=2"} >= {name for name in rows if name.startswith("zero")}
    assert "0.5 bytes per parameter: 4, over 8 ranks" in found.out
    assert "8 ranks of a node" in found.out


def test_task_on_this_machine(tmp_path: Path) -> None:
    words = ("plan", "text", "--ranks", "2", "--batch", "8", "--set", "depth=2", "--set", "width=32")
    found = succeed(*words, "--peak", "0.1", "--json", "text.json", at=tmp_path)
    figures = json.loads((tmp_path / "text.json").read_text())
    assert (figures["source"], figures["tokens_per_sample"], figures["ranks"]) == ("counted", 128, 2)
    assert "are assumed" in found.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("plan", "--model", "lama3-8b", "--batch", "8"), "did you mean llama3-8b?"),
        (("plan", "--model", "gpt2", "--batch", "8", "--cluster", "hh200:8"), "did you mean h200?"),
        (("plan", "--model", "gpt2", "--cluster", "h100:8"), "add --batch"),
        (("plan",), "name a task, or a model with --model"),
        ((*GPT, "--plan", "tp=3"), "tp=3"),
        ((*GPT, "--plan", "pp=8,microbatches=2,pp_schedule=1f1b"), "microbatches=8"),
        ((*GPT, "--plan", "pp=4,tp=4"), "8"),
        ((*GPT, "--ranks", "16"), "has 8 devices"),
        (("plan", "--model", "gpt3", "--cluster", "a100-80g:8", "--batch", "8"), "no plan fits"),
        ((*GPT, "--price", "-1"), "--price must be above 0"),
        ((*GPT, "--ranks", "0"), "--ranks must be at least 1, got 0"),
        ((*GPT, "--plan", "dp=3"), "use --ranks 3 or dp=8"),
        ((*GPT, "--plan", "tp=5"), "use tp=1 or 2 or 4 or 8"),
        ((*GPT[:-1], "4", "--plan", "ddp"), "use --batch 8"),
        (
            ("plan", "--model", "resnet50", "--batch", "4", "--cluster", "h100:8"),
            "no plan splits a batch of 4 over 8 ranks",
        ),
        (
            ("plan", "--model", "resnet50", "--batch", "8", "--cluster", "h100:8", "--plan", "tp=2"),
            "leave tp out",
        ),
        ((*GPT, "--measure-compute"), "--measure-compute requires a task to run"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, words: tuple[str, ...], sentence: str) -> None:
    found = paceline(*words, at=tmp_path)
    assert found.status == 2, found.all
    assert sentence in found.err
    assert found.err.count("\n") == 1


CHOICE = """
import torch
from paceline import Task

class Choosy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y * 2 if y.sum().item() > 0 else y

class Choice(Task):
    def model(self):
        return torch.nn.Sequential(Choosy(), torch.nn.Linear(4, 2))

    def dataset(self, split):
        return torch.ones(32, 4)

    def loss(self, output, batch):
        return output.square().mean(-1)
"""


def test_measure_runs_model_that_cannot_be_described(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(CHOICE)
    words = ("plan", "my.py:Choice", "--ranks", "2", "--batch", "8", "--json", "found.json")
    refused = paceline(*words, at=tmp_path)
    assert refused.status == 2
    assert "Choice cannot be described: 0 fails without values" in refused.err
    assert "--measure-compute" in refused.err
    succeed(*words, "--measure-compute", at=tmp_path)
    figures = json.loads((tmp_path / "found.json").read_text())
    assert (figures["source"], figures["parameters"]) == ("measured", 30)
    assert 0 < figures["plans"][0]["step_s"] < 10


def test_unknown_peak_is_required(tmp_path: Path) -> None:
    device = {"name": "new", "kind": "cuda", "memory_bytes": 8e10}
    (tmp_path / "cluster.json").write_text(
        json.dumps({"format": "paceline.cluster", "version": 1, "device": device})
    )
    words = ("plan", "--model", "gpt2", "--batch", "8")
    assert "--peak" in paceline(*words, at=tmp_path).err
    assert "extrapolated" in succeed(*words, "--peak", "300", at=tmp_path).out
