"""The check of initial weights against a plain construction finds differences, without false alarms."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import init

import models
from command import paceline
from harness import train_on_ranks
from paceline import Spec
from paceline.errors import TaskError
from paceline.training.checks import initial_weights
from paceline.training.checks.initial_weights import compare_with_plain
from paceline.training.init import construction_modes
from paceline.training.init.deferred_init import record

Build = Callable[[], nn.Module]


def compare_recorded(build: Build, recorded_as: Build, seed: int = 0) -> None:
    """Compare plain constructions by `build` with the recording of another function."""
    recorded = partial(record, recorded_as)
    model, of_model, _ = recorded(seed)
    compare_with_plain(build, recorded, model, of_model, seed)


def holding(*tensors: Callable[[], Tensor]) -> Build:
    def build() -> nn.Module:
        return nn.ParameterList([nn.Parameter(make(), requires_grad=False) for make in tensors])

    return build


def padded(index: int | None) -> Build:
    return lambda: nn.Embedding(400, 16, padding_idx=index)


def layers(std: float, bias: float = 0.0) -> Build:
    def build() -> nn.Module:
        modules = nn.ModuleList([nn.Linear(2, 64) for _ in range(6)])
        for layer in modules:
            init.normal_(layer.bias, bias, std)
        return modules

    return build


def frozen(is_frozen: bool) -> Build:
    return lambda: nn.Linear(3, 3).requires_grad_(not is_frozen)


def tied(is_tied: bool) -> Build:
    def build() -> nn.Module:
        modules = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(2)])
        if is_tied:
            modules[1].weight = modules[0].weight
        return modules

    return build


def with_numbers(value: float) -> Build:
    return holding(lambda: torch.tensor([1.0, value, torch.nan]))


WRONG: dict[str, tuple[Build, Build, str]] = {
    "std": (
        holding(lambda: 0.02 * torch.randn(100, 100)),
        holding(lambda: 0.0215 * torch.randn(100, 100)),
        "standard deviation is 0.021",
    ),
    "std-of-few": (
        holding(lambda: torch.randn(256)),
        holding(lambda: 2.5 * torch.randn(256)),
        "standard deviation is 2.4",
    ),
    "mean": (
        holding(lambda: torch.randn(100, 100)),
        holding(lambda: 0.1 + torch.randn(100, 100)),
        r"mean is (0\.10|0\.09)",
    ),
    "uniform": (
        holding(lambda: torch.rand(3000)),
        holding(lambda: 0.5 + 0.35 * torch.randn(3000)),
        "standard deviation is 0.3",
    ),
    "constant": (
        with_numbers(2.0),
        with_numbers(2.0000002),
        "1 constant values differ, the first is 2.0000002",
    ),
    "not-random": (
        holding(lambda: torch.randn(500)),
        holding(lambda: torch.ones(500)),
        "mean is 1, expected ",
    ),
    "random": (holding(lambda: torch.ones(5)), holding(lambda: torch.randn(5)), "5 constant values differ"),
    "nan": (
        holding(lambda: torch.randn(500)),
        holding(lambda: torch.randn(500) / torch.arange(500).clamp(max=1)),
        "not finite is 0.002",
    ),
    "padding": (padded(3), padded(None), "16 constant values differ"),
    "small-of-many": (layers(0.1), layers(0.2), r"standard deviation is (0\.20|0\.19)"),
    "small-of-many-mean": (layers(0.1), layers(0.1, 0.05), r"mean is 0\.0[45]"),
    "names": (lambda: nn.Linear(3, 3), lambda: nn.Linear(3, 3, bias=False), "in only one of the two"),
    "shape": (
        lambda: nn.Linear(3, 3),
        lambda: nn.Linear(3, 4),
        r"shape is torch.Size\(\[4, 3\]\), expected ",
    ),
    "frozen": (frozen(False), frozen(True), "requires_grad is False, expected True"),
    "untied": (tied(True), tied(False), "tied to another parameter in only one of the two"),
}


@pytest.mark.parametrize(("build", "recorded_as", "what"), WRONG.values(), ids=WRONG)
def test_difference_is_found(build: Build, recorded_as: Build, what: str) -> None:
    with pytest.raises(
        TaskError,
        match=f"the initial values of the model's .* are not those of a plain construction: .*{what}",
    ):
        compare_recorded(build, recorded_as)


def weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(40, 30))


# Initializations that break error estimates which assume independent, normal values.
STRANGE: dict[str, Build] = {
    "shared-scale": holding(lambda: torch.rand(1) * torch.ones(1000)),
    "row-scales": holding(lambda: torch.rand(8, 1) * torch.randn(8, 300)),
    "repeated": holding(lambda: torch.randn(5).repeat(200)),
    "walk": holding(lambda: torch.randn(2000).cumsum(0)),
    "cauchy": holding(lambda: torch.empty(2000).cauchy_()),
    "tails": holding(lambda: torch.randn(2000) ** 7),
    "coin": holding(lambda: torch.bernoulli(torch.full((1000,), 0.5))),
    "one-coin": holding(*[lambda: torch.bernoulli(torch.full((1,), 0.5))] * 4),
    "rare-coin": holding(lambda: torch.bernoulli(torch.full((1000,), 0.01))),
    "few-values": holding(lambda: torch.randint(0, 2, (300, 3)).float()),
    "order": holding(lambda: torch.randperm(300).float()),
    "sparse": holding(lambda: init.sparse_(torch.empty(50, 20), 0.3)),
    "orthogonal": holding(lambda: init.orthogonal_(torch.empty(30, 20))),
    "bfloat16": holding(lambda: torch.randn(4000).bfloat16()),
    "complex": holding(lambda: torch.randn(500, dtype=torch.complex64)),
    "infinite": holding(lambda: torch.where(torch.rand(3000) < 0.1, torch.inf, torch.randn(3000))),
    "weight-norm": weight_norm,
    "padded": padded(3),
    "gpt": models.Gpt,
    "text": lambda: nn.Sequential(*[nn.TransformerEncoderLayer(16, 2, 32) for _ in range(3)]),
}


@pytest.mark.parametrize(
    "seeds", [range(3), pytest.param(range(3, 40), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("build", STRANGE.values(), ids=STRANGE)
def test_no_false_alarm(build: Build, seeds: range) -> None:
    for seed in seeds:
        compare_recorded(build, build, seed)


def test_library_that_detects_meta_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers did while tensors reported that they are on the meta device."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    build = partial(transformers.BertModel, config)
    compare_recorded(build, build)
    monkeypatch.setattr(construction_modes, "REPORTED_ATTRIBUTES", {})
    with pytest.raises(
        TaskError,
        match=r"word_embeddings\.weight are not those .* is (1\.0|0\.9)\d*, expected 0\.0[12]\d*",
    ):
        compare_recorded(build, build)


class DetectsMeta(models.Points):
    """A model that starts differently when it is recorded.

    No real constructor does this, but the check must see it.
    """

    std: float = 1.0

    def model(self) -> nn.Module:
        model = super().model()
        std = 0.5 * self.std if "size=" in repr(torch.ones(1)) else self.std
        model.extra = nn.Parameter(std * torch.randn(3000))
        return model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paceline" / "weights"


def check_at_start(task: models.Points, seed: int = 0) -> tuple[str, ...]:
    from paceline.distributed.world import World
    from paceline.training.model_facts.model_analysis import build_meta_model

    spec = Spec(batch=8, seed=seed)
    built = build_meta_model(spec, task)
    return initial_weights.check_initial_weights_once(spec, task, built.model, built.weights, World())


def test_training_checks_a_model_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(initial_weights, "compare_with_plain", lambda *args: calls.append(0))
    assert [check_at_start(models.Points()), check_at_start(models.Points(), seed=1)] == [(), ()]
    assert len(calls) == 1
    check_at_start(DetectsMeta())
    check_at_start(DetectsMeta(std=2.0))  # another field
    assert len(calls) == 3
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in cache.iterdir()} == {0o600}
    monkeypatch.setattr(initial_weights, "version", lambda name: "another")
    check_at_start(models.Points())
    assert len(calls) == 4
    cache.chmod(0o777)  # a folder that others may write to is not trusted
    check_at_start(models.Points())
    check_at_start(models.Points())
    assert len(calls) == 6


def test_failed_checks_are_not_cached(cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(TaskError, match="the model's extra are not those of a plain construction"):
            check_at_start(DetectsMeta())
    assert not list(cache.iterdir())


def test_model_that_exceeds_memory_is_noted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initial_weights, "memory_limit", lambda: 100)
    for _ in range(2):
        (note,) = check_at_start(models.Points())
        assert "were not compared" in note
        assert "100 B are free" in note


def test_training_on_several_ranks_is_refused() -> None:
    with pytest.raises(
        AssertionError,
        match="TaskError: the initial values of the model's extra are not those of a plain construction",
    ):
        train_on_ranks(2, DetectsMeta(), Spec(steps=1, batch=8), "ddp")


TASK = """
import torch
from torch import nn
from paceline import Task

class Mine(Task):
    differs: bool = False
    def model(self):
        model = nn.Linear(60, 50)
        if self.differs and "size=" in repr(torch.ones(1)):
            nn.init.zeros_(model.weight)
        return model
    def dataset(self, split):
        return [(torch.ones(60), torch.zeros(50)) for _ in range(16)] if split == "train" else None
    def loss(self, output, batch):
        return (output - batch[1]).square().mean(1)
"""


@pytest.mark.parametrize("differs", [False, True])
def test_commands_report_it(differs: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    words = ["mine.py", "--batch", "8", "--set", f"differs={str(differs).lower()}"]
    done = [
        paceline("train", *words, "--steps", "1", "--device", "cpu", at=tmp_path),
        paceline("verify", *words, "--plan", "ddp", "--ranks", "2", "--steps", "1", at=tmp_path),
        paceline("preflight", *words, "--device", "cpu", at=tmp_path),
    ]
    for command in done:
        shown = " ".join(command.all.split())
        assert (
            "the initial values of the model's weight are not those of a plain construction" in shown
        ) == differs, shown
        assert (command.status == 0) != differs
    assert differs or "initial weights agree with those of a plain construction" in done[2].all
