"""Initial weights have the distribution of the model's constructor, and depend only on seed and name."""

import copy
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import init
from torch.utils._pytree import tree_leaves, tree_map

import models
from harness import train_on_ranks
from paceline import Spec
from paceline.distributed.dtensor import storage_id
from paceline.errors import TaskError
from paceline.training.init.deferred_init import Weights, fill_, record
from paceline.training.init.named_tensors import find_aliases, named_tensors
from paceline.training.init.operation_tape import flatten_storage, view_as
from paceline.training.init.pretrained import PretrainedWeights


def build_model(build: Callable[[], nn.Module], seed: int = 0, pretrained: Path | None = None) -> nn.Module:
    model, weights, _ = record(build, seed)
    opened = PretrainedWeights(pretrained, model) if pretrained is not None else None
    fill_(model, weights, torch.device("cpu"), opened)
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named_tensors(model).items()}


class Built(nn.Module):
    """A module whose tensors a function creates."""

    def __init__(self, give: Callable[[nn.Module], None]):
        super().__init__()
        give(self)


def holding(**parameters: Callable[[], Tensor]) -> Callable[[], nn.Module]:
    def give(module: nn.Module) -> None:
        for name, make in parameters.items():
            module.register_parameter(name, nn.Parameter(make()))

    return lambda: Built(give)


def initialized(how: Callable[[Tensor], object], *shape: int) -> Callable[[], nn.Module]:
    def make() -> Tensor:
        tensor = torch.empty(shape)
        how(tensor)
        return tensor

    return holding(w=make)


def padded() -> nn.Module:
    return nn.Embedding(31, 16, padding_idx=3)


def scaled_tensors() -> nn.Module:
    return holding(
        scale=lambda: 1e-5 * torch.ones(9),
        sum=lambda: torch.zeros(40) + 0.1 * torch.randn(40),
        cat=lambda: torch.cat([torch.randn(9), torch.zeros(3)]),
    )()


def channels_last() -> nn.Module:
    return nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)


def slices() -> nn.Module:
    def give(module: nn.Module) -> None:
        module.w = nn.Parameter(torch.randn(30, 9).mul_(0.02))
        with torch.no_grad():
            module.w[:10].zero_()
            module.w[:, 3] = 1.0
        module.transposed = nn.Parameter(torch.randn(8, 6).t())
        module.part = nn.Parameter(torch.randn(60)[20:50])

    return Built(give)


def real_trunc_normal() -> nn.Module:
    return holding(w=lambda: init.trunc_normal_(torch.Tensor(40, 30), std=0.02))()


RANDOM: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(17, 13),
    "conv": lambda: nn.Conv2d(3, 8, 3, groups=1),
    "conv-transpose": lambda: nn.ConvTranspose1d(4, 6, 5),
    "channels-last": channels_last,
    "batch-norm": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)),
    "layer-norm": lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8)),
    "embedding": padded,
    "embedding-bag": lambda: nn.EmbeddingBag(12, 10),
    "attention": lambda: nn.MultiheadAttention(12, 3, add_bias_kv=True),
    "transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 11, batch_first=True), 3, enable_nested_tensor=False
    ),
    "lstm": lambda: nn.LSTM(5, 7, 2, bidirectional=True),
    "gru": lambda: nn.GRU(5, 7),
    "bilinear": lambda: nn.Bilinear(4, 5, 6),
    "double": lambda: nn.Linear(9, 9).double(),
    "bfloat16": lambda: nn.Linear(9, 9, dtype=torch.bfloat16),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(7, 9)),
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(7, 9)),
    "uniform_": initialized(lambda t: init.uniform_(t, -3, 1), 50, 20),
    "normal_": initialized(lambda t: init.normal_(t, 2, 0.1), 50, 20),
    "trunc_normal_": initialized(lambda t: init.trunc_normal_(t, 0.5, 1, 0, 2), 50, 20),
    "xavier_uniform_": initialized(lambda t: init.xavier_uniform_(t, 2.0), 50, 20),
    "xavier_normal_": initialized(init.xavier_normal_, 50, 20),
    "kaiming_uniform_": initialized(lambda t: init.kaiming_uniform_(t, a=math.sqrt(5)), 50, 20),
    "kaiming_normal_": initialized(lambda t: init.kaiming_normal_(t, nonlinearity="relu"), 50, 20),
    "orthogonal_": initialized(init.orthogonal_, 30, 20),
    "sparse_": initialized(lambda t: init.sparse_(t, 0.3), 50, 20),
    "exponential_": initialized(lambda t: t.exponential_(2.0), 50, 20),
    "normal": holding(w=lambda: torch.normal(1.0, 2.0, (50, 20))),
    "randint": holding(w=lambda: torch.randint(0, 9, (300,)).float()),
    "randperm": holding(w=lambda: torch.randperm(300).float()),
    "bernoulli": holding(w=lambda: torch.bernoulli(torch.full((500,), 0.3))),
    "rand_like": holding(w=lambda: torch.rand_like(torch.ones(50, 20))),
    "arithmetic": scaled_tensors,
    "slices": slices,
    "real-trunc-normal": real_trunc_normal,
    "gpt": models.Gpt,
}


def positions() -> nn.Module:
    def give(module: nn.Module) -> None:
        table = torch.zeros(50, 8)
        place = torch.arange(50).float().unsqueeze(1)
        rate = torch.exp(torch.arange(0, 8, 2).float() * (-math.log(10000.0) / 8))
        table[:, 0::2] = torch.sin(place * rate)
        table[:, 1::2] = torch.cos(place * rate)
        module.register_buffer("table", table)
        module.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)), persistent=False)
        module.register_buffer("rotation", torch.polar(torch.ones(3), torch.arange(3.0)))

    return Built(give)


def shared_buffer() -> nn.Module:
    mask = torch.full((4, 4), float("-inf")).triu(1)
    return nn.ModuleList([Built(lambda module: module.register_buffer("mask", mask)) for _ in range(3)])


def loaded() -> nn.Module:
    model = nn.Linear(2, 3)
    model.load_state_dict({"weight": torch.arange(6.0).view(3, 2), "bias": torch.zeros(3)})
    return model


def given_data() -> nn.Module:
    model = nn.Linear(2, 3)
    model.weight.data = torch.ones(3, 2) * 3
    model.bias = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]))
    return model


def read_devices(module: nn.Module) -> None:
    """Read devices as a library does that skips its initialization on the meta device."""
    probe = torch.tensor([])
    plain = [
        probe.device,
        torch.empty(2).device,
        torch.get_default_device(),
        nn.Linear(2, 2).weight.device,
    ] == [torch.device("cpu")] * 4
    real = plain and not torch.empty(1).is_meta and torch.zeros(1).is_cpu and str(probe.device) == "cpu"
    module.w = nn.Parameter(torch.full((3,), 7.0 if real else -1.0))


def create_by_device(module: nn.Module) -> None:
    """Create tensors on the devices of other tensors."""
    base = torch.linspace(0, 1, 6)
    created = [
        torch.zeros(6, device=base.device),
        torch.arange(6.0, device="cpu"),
        torch.ones_like(base, device=base.device),
        base.cpu(),
    ]
    moved = base.to("cpu").add_(1)  # the same tensor
    module.register_buffer("sum", sum(created) + moved.to(torch.device("cpu"), torch.float64))
    module.register_buffer("base", base)
    module.register_buffer("new", base.new_full((3,), 2.0, device=base.device))
    module.register_buffer("written", torch.zeros(6).copy_(torch.arange(6.0, device="cpu")))


def data_and_slots(module: nn.Module) -> None:
    module.w = nn.Parameter(torch.empty(4, 3))
    module.w.data = torch.arange(12.0).view(4, 3)
    module.w.data[1] = 0
    module.w.data.mul_(2)
    module.v = nn.Parameter(torch.empty(2, 2))
    for row in range(2):
        with torch.no_grad():
            module.v[row].fill_(row)


def seeded() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(6, 5)


def seeded_inside() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(6, 5)


def own_generator() -> nn.Module:
    return holding(
        w=lambda: torch.empty(9).normal_(generator=torch.Generator().manual_seed(1)),
        v=lambda: torch.randn(9, generator=torch.Generator().manual_seed(2)),
    )()


def own_trunc_normal() -> nn.Module:
    return holding(w=lambda: init.trunc_normal_(torch.empty(9), generator=torch.Generator().manual_seed(1)))()


def reads_values() -> nn.Module:
    """A constructor that reads values, and continues if it cannot."""
    scale = torch.full((), 3.0)
    try:
        factor = scale.item()
    except RuntimeError:
        factor = 1.0
    return holding(w=lambda: torch.ones(3) * factor)()


def asserts() -> nn.Module:
    table = torch.linspace(0, 1, 4)
    if "size" in repr(table):
        raise AssertionError("it shows no values")
    return holding(w=lambda: table)()


def given(model: nn.Linear) -> nn.Module:
    init.constant_(model.weight, 2.0)
    init.zeros_(model.bias)
    return model


DETERMINISTIC: dict[str, Callable[[], nn.Module]] = {
    "batch-norm": lambda: nn.BatchNorm2d(5),
    "ones": initialized(init.ones_, 7),
    "constant_": initialized(lambda t: init.constant_(t, 0.3), 7),
    "eye_": initialized(init.eye_, 5, 7),
    "dirac_": initialized(init.dirac_, 4, 4, 3),
    "tensor": holding(w=lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
    "tensor-by-name": holding(w=lambda: torch.tensor(data=[1.0, 2.0])),
    "as_tensor": holding(w=lambda: torch.as_tensor(np.arange(5.0))),
    "from_numpy": holding(w=lambda: torch.from_numpy(np.eye(4, dtype=np.float32))),
    "new_tensor": holding(w=lambda: torch.ones(2).new_tensor([3.0, 4.0])),
    "legacy": holding(w=lambda: torch.Tensor([1.0, 2.0])),
    "linspace": holding(w=lambda: torch.linspace(0, 1, 7)),
    "arithmetic": holding(w=lambda: 1e-5 * torch.ones(4), v=lambda: torch.arange(6.0).view(2, 3).t() ** 2),
    "stack": holding(w=lambda: torch.stack([torch.tensor(1.0), torch.tensor(2.0)])),
    "scalar": holding(w=lambda: torch.tensor(2.5)),
    "bias-after": lambda: Built(
        lambda module: setattr(
            module, "b", nn.Parameter(torch.zeros(5).index_fill_(0, torch.tensor([1, 3]), -2.0))
        )
    ),
    "positions": positions,
    "shared-buffer": shared_buffer,
    "from_pretrained": lambda: nn.Embedding.from_pretrained(torch.arange(6.0).view(3, 2)),
    "load_state_dict": loaded,
    "data": given_data,
    "seen": lambda: Built(read_devices),
    "by-device": lambda: Built(create_by_device),
    "data-and-slots": lambda: Built(data_and_slots),
    "seeded": seeded,
    "seeded-inside": seeded_inside,
    "own-generator": own_generator,
    "own-trunc-normal": own_trunc_normal,
    "looked-at": reads_values,
    "asserts": asserts,
    "skip_init": lambda: given(nn.utils.skip_init(nn.Linear, 3, 2)),
    "meta-then-real": lambda: given(nn.Linear(3, 2, device="meta").to_empty(device="cpu")),
    "no-number": holding(w=lambda: torch.tensor([1.0, math.nan, math.inf])),
    "half-by-half": holding(w=lambda: torch.cat([torch.empty(3).zero_(), torch.empty(3).fill_(2)])),
    "legacy-empty": holding(w=lambda: torch.Tensor(3, 2).fill_(4), n=lambda: torch.FloatTensor(2).zero_()),
}


def test_parameters_that_ignore_the_default_device_need_no_memory() -> None:
    """Ranks of a pipeline would else hold the parameters of all stages."""

    def give(module: nn.Module) -> None:
        module.old, module.new = nn.Parameter(torch.FloatTensor(4, 2)), nn.Parameter(torch.empty(2))
        module.tied = module.old
        module.frozen = nn.Parameter(torch.FloatTensor(3), requires_grad=False)
        for parameter in module.parameters():
            nn.init.constant_(parameter, 3)

    model, weights, is_recorded = record(lambda: Built(give), 0)
    assert is_recorded
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.tied is model.old
    assert not model.frozen.requires_grad
    assert (weights.draw("old") == 3).all()


def statistics(tensor: Tensor) -> Tensor:
    """Return mean, standard deviation, minimum, maximum and share of zeros."""
    flat = tensor.double().flatten()
    share = (flat == 0).double().mean()
    return torch.stack([flat.mean(), flat.std(correction=0), flat.min(), flat.max(), share])


# test_replayed_tape_matches_the_constructor runs these too.
LONG = ("spectral-norm", "transformer", "sparse_", "lstm")


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(build, id=name, marks=[pytest.mark.slow] if name in LONG else [])
        for name, build in RANDOM.items()
    ],
)
def test_weights_are_distributed_as_by_the_constructor(build: Callable[[], nn.Module]) -> None:
    drawn, repeated, other = (
        tensors(build_model(build)),
        tensors(build_model(build)),
        tensors(build_model(build, seed=1)),
    )
    torch.manual_seed(0)
    eager = tensors(build())
    assert drawn.keys() == eager.keys()
    for name, expected in eager.items():
        found = drawn[name]
        assert (found.shape, found.dtype, found.stride()) == (
            expected.shape,
            expected.dtype,
            expected.stride(),
        )
        assert torch.equal(found, repeated[name])
    assert any(not torch.equal(drawn[name], other[name]) for name in drawn)
    own_samples = [
        {name: statistics(tensor) for name, tensor in tensors(build_model(build, seed)).items()}
        for seed in range(40)
    ]
    torch.manual_seed(0)
    expected_samples = [
        {name: statistics(tensor) for name, tensor in tensors(build()).items()} for _ in range(40)
    ]
    for name in drawn:
        found, expected = (
            torch.stack([sample[name] for sample in samples]) for samples in (own_samples, expected_samples)
        )
        error = torch.sqrt((found.var(0) + expected.var(0)) / 40) + 1e-7
        assert ((found.mean(0) - expected.mean(0)).abs() < 6 * error).all(), name


@pytest.mark.parametrize("build", DETERMINISTIC.values(), ids=DETERMINISTIC)
def test_deterministic_weights_are_equal(build: Callable[[], nn.Module]) -> None:
    found, expected = build_model(build), build()
    assert tensors(found).keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        assert (tensors(found)[name].dtype, tensors(found)[name].stride()) == (tensor.dtype, tensor.stride())
        assert torch.equal(tensors(found)[name].nan_to_num(9), tensor.nan_to_num(9))
    assert [(p.requires_grad) for p in found.parameters()] == [p.requires_grad for p in expected.parameters()]
    assert found.state_dict().keys() == expected.state_dict().keys()


def replay_tape(weights: Weights, seed: int) -> dict[str, Tensor]:
    """Replay the whole tape in order, with one seed."""
    contents: dict[int, Tensor] = {}

    def real(item: Any) -> Any:
        if isinstance(item, torch.device):
            return torch.device("cpu")
        return (
            view_as(contents[storage_id(item)], item) if isinstance(item, Tensor) and item.is_meta else item
        )

    torch.manual_seed(seed)
    with torch.no_grad():
        for operation in weights.tape.operations:
            result = operation.run(*tree_map(real, operation.args), **tree_map(real, operation.kwargs))
            for stand_in, value in zip(operation.results, tree_leaves(result), strict=True):
                if storage_id(stand_in) not in operation.reads:
                    contents[storage_id(stand_in)] = flatten_storage(value, stand_in)
    return {name: view_as(contents[storage_id(origin)], origin) for name, origin in weights.origins.items()}


RECORDED = [name for name in RANDOM if name not in ("normal", "real-trunc-normal")]


@pytest.mark.parametrize("build", [RANDOM[name] for name in RECORDED], ids=RECORDED)
def test_replayed_tape_matches_the_constructor(build: Callable[[], nn.Module]) -> None:
    _, weights, recorded = record(build, 0)
    assert recorded
    found = replay_tape(weights, 5)
    torch.manual_seed(5)
    for name, expected in tensors(build()).items():
        assert torch.equal(found[name], expected), name


def test_weight_depends_only_on_seed_and_name() -> None:
    single = tensors(build_model(lambda: nn.ModuleDict({"here": nn.Linear(5, 7)})))
    several = tensors(
        build_model(
            lambda: nn.ModuleDict(
                {"before": nn.LSTM(3, 3), "here": nn.Linear(5, 7), "after": nn.Linear(5, 7)}
            )
        )
    )
    assert torch.equal(single["here.weight"], several["here.weight"])
    assert torch.equal(single["here.bias"], several["here.bias"])
    assert not torch.equal(several["here.weight"], several["after.weight"])


@pytest.mark.parametrize("recorded", [True, False])
def test_earlier_random_numbers_do_not_matter(recorded: bool) -> None:
    def build() -> nn.Module:
        if not recorded:
            torch.rand(3).sum().item()
        own = torch.rand(5, device="cpu") + random.random() + np.random.rand()
        return nn.ModuleList(
            [nn.Linear(5, 7), nn.Linear(7, 3, device="cpu"), Built(lambda m: m.register_buffer("own", own))]
        )

    first = tensors(build_model(build, 3))
    assert record(build, 3)[2] == recorded
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    second = tensors(build_model(build, 3))
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = tensors(build_model(build, 4))
    assert not any(torch.equal(first[name], other[name]) for name in first)
    # Drawing does not change the state of the generators.
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


class FromNumpy(models.Points):
    """Draws from numpy's and Python's generators, which differ between processes unless they are seeded."""

    def model(self) -> nn.Module:
        model = super().model()
        model[0].weight = nn.Parameter(
            torch.tensor(np.random.randn(7, 5) * random.random(), dtype=torch.float32)
        )
        return model


@pytest.mark.parametrize("plan", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_ranks_agree_on_numpy_draws(plan: str) -> None:
    spec = Spec(steps=1, batch=8, precision="fp64")
    found, expected = (
        train_on_ranks(2, FromNumpy(), spec, plan),
        train_on_ranks(1, FromNumpy(), spec, "single"),
    )
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


def reads_values_first() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(rate)) for rate in rates])


def calls_numpy() -> nn.Module:
    return holding(w=lambda: torch.from_numpy(np.linalg.qr(torch.randn(5, 5).numpy())[0]))()


def keeps_a_plain_tensor() -> nn.Module:
    def give(module: nn.Module) -> None:
        module.linear = nn.Linear(3, 3)
        module.scales = [torch.linspace(0, 1, 3)]

    return Built(give)


def branches() -> nn.Module:
    drawn = torch.randn(5)
    return holding(w=lambda: drawn if drawn.sum() > 0 else -drawn)()


@pytest.mark.parametrize("build", [reads_values_first, calls_numpy, keeps_a_plain_tensor, branches])
def test_unrecordable_models_are_built_whole(build: Callable[[], nn.Module]) -> None:
    model, weights, recorded = record(build, 7)
    assert not recorded
    assert all(tensor.is_meta for tensor in tensors(model).values())
    fill_(model, weights, torch.device("cpu"))
    assert not any(tensor.is_meta for tensor in getattr(model, "scales", []))
    repeated, other = build_model(build, 7), build_model(build, 8)
    for name, tensor in tensors(model).items():
        assert torch.equal(tensor, tensors(repeated)[name])
        assert not torch.equal(tensor, tensors(other)[name])


def test_tied_weights_stay_tied() -> None:
    model = build_model(models.Gpt)
    assert model.output.weight is model.tokens.weight
    assert find_aliases(model) == {"output.weight": "tokens.weight"}
    shared = build_model(shared_buffer)
    assert shared[0].mask is shared[2].mask
    assert find_aliases(shared) == {"1.mask": "0.mask", "2.mask": "0.mask"}


def test_copies_equal_their_source() -> None:
    def build() -> nn.Module:
        source = nn.Linear(5, 5)
        other = nn.Linear(5, 5)
        with torch.no_grad():
            other.weight.copy_(source.weight)
        return nn.ModuleList([source, copy.deepcopy(source), other])

    model = build_model(build)
    assert torch.equal(model[0].weight, model[1].weight)
    assert torch.equal(model[0].bias, model[1].bias)
    assert torch.equal(model[0].weight, model[2].weight)
    assert not torch.equal(model[0].bias, model[2].bias)
    assert model[0].weight is not model[1].weight


def test_lazy_module_is_refused() -> None:
    with pytest.raises(TaskError, match=r"0\.weight has no shape yet"):
        record(lambda: nn.Sequential(nn.LazyLinear(3)), 0)


def test_errors_of_the_constructor_are_raised() -> None:
    with pytest.raises(ValueError, match="my own"):
        record(lambda: (_ for _ in ()).throw(ValueError("my own")), 0)
    with pytest.raises(TaskError, match=r"model\(\) must return a torch.nn.Module, got str"):
        record(lambda: "model", 0)  # type: ignore[arg-type, return-value]


def read_values_and_build(build: Callable[[], nn.Module]) -> nn.Module:
    torch.zeros(1).item()
    return build()


def partly_written() -> nn.Module:
    def give(module: nn.Module) -> None:
        module.linear = nn.Linear(4, 4)
        module.w = nn.Parameter(torch.empty(10, 3))
        with torch.no_grad():
            module.w[:7].normal_()

    return Built(give)


def computed() -> nn.Module:
    return Built(lambda module: module.register_buffer("table", torch.exp(torch.empty(5)) + 1))


UNINITIALIZED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "parameter": (holding(w=lambda: torch.empty(4, 3)), "w", "12 of its 12"),
    "like": (holding(w=lambda: torch.empty_like(torch.ones(4))), "w", "4 of its 4"),
    "strided": (holding(w=lambda: torch.empty_strided((2, 3), (1, 2))), "w", "6 of its 6"),
    "partly": (partly_written, "w", "9 of its 30"),
    "computed": (computed, "table", "5 of its 5"),
    "integers": (
        lambda: Built(lambda m: m.register_buffer("n", torch.empty(3, dtype=torch.int64))),
        "n",
        "3 of its 3",
    ),
    "booleans": (
        lambda: Built(lambda m: m.register_buffer("n", torch.empty(3, dtype=torch.bool))),
        "n",
        "3 of its 3",
    ),
    "complex": (holding(w=lambda: torch.empty(3, dtype=torch.complex64)), "w", "3 of its 3"),
    "bfloat16": (holding(w=lambda: torch.empty(3, dtype=torch.bfloat16)), "w", "3 of its 3"),
    "legacy": (holding(w=lambda: torch.Tensor(3, 2)), "w", "6 of its 6"),
    "legacy-integers": (
        lambda: Built(lambda m: m.register_buffer("n", torch.IntTensor(3))),
        "n",
        "3 of its 3",
    ),
    "skipped": (lambda: nn.utils.skip_init(nn.Linear, 3, 2, bias=False), "weight", "6 of its 6"),
}


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(("build", "name", "count"), UNINITIALIZED.values(), ids=UNINITIALIZED)
def test_uninitialized_tensor_is_named(
    build: Callable[[], nn.Module], name: str, count: str, recorded: bool
) -> None:
    with pytest.raises(
        TaskError, match=rf"the model's {name} is not initialized: model\(\) never writes {count} values"
    ):
        build_model(build if recorded else lambda: read_values_and_build(build))


def test_tensor_on_meta_is_named() -> None:
    with pytest.raises(
        TaskError, match=r"the model's weight is not initialized: model\(\) never writes 6 of its 6 values"
    ):
        build_model(lambda: nn.Linear(3, 2, device="meta"))


def test_pretrained_weights_initialize_a_tensor(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, 3)}, tmp_path / "weights.safetensors")
    assert (
        tensors(build_model(UNINITIALIZED["parameter"][0], pretrained=tmp_path / "weights.safetensors"))["w"]
        == 1
    ).all()


class Unwritten(models.Points):
    def model(self) -> nn.Module:
        model = super().model()
        model[0].weight = nn.Parameter(torch.empty(7, 5))
        return model


@pytest.mark.parametrize("plan", ["ddp", "zero3", "pp=2"])
def test_training_names_an_uninitialized_tensor(plan: str) -> None:
    with pytest.raises(AssertionError, match=r"TaskError: the model's 0\.weight is not initialized"):
        train_on_ranks(2, Unwritten(), Spec(steps=1, batch=8), plan)


class Pretrained(models.Text):
    file: str = ""

    def pretrained(self) -> str:
        return self.file


def test_pretrained_weights_are_used(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"output.weight": torch.full((11, 6), 0.25), "blocks.1.norm.bias": torch.ones(6)}, file)
    model, fresh = tensors(build_model(models.Gpt, pretrained=file)), tensors(build_model(models.Gpt))
    assert (model["tokens.weight"] == 0.25).all()  # by its other name
    assert (model["blocks.1.norm.bias"] == 1).all()
    assert all(
        torch.equal(model[name], fresh[name])
        for name in fresh
        if name not in ("tokens.weight", "blocks.1.norm.bias")
    )
    spec = Spec(steps=1, batch=8, precision="fp64")
    expected = train_on_ranks(1, Pretrained(file=str(file)), spec, "single").losses
    assert expected != train_on_ranks(1, models.Text(), spec, "single").losses
    for plan in ("ddp", "zero3"):
        assert train_on_ranks(2, Pretrained(file=str(file)), spec, plan).losses == pytest.approx(
            expected, rel=1e-12
        )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"tokens.weight": torch.zeros(11, 5)},
            r"tokens.weight has shape \(11, 5\), the model's has \(11, 6\)",
        ),
        (
            {"token.weight": torch.zeros(11, 6)},
            r"weights token.weight, which the model lacks; did you mean tokens.weight\?",
        ),
    ],
)
def test_pretrained_weights_that_do_not_fit_are_refused(
    tmp_path: Path, weights: dict[str, Tensor], message: str
) -> None:
    save_file(weights, tmp_path / "weights.safetensors")
    with pytest.raises(TaskError, match=message):
        build_model(models.Gpt, pretrained=tmp_path / "weights.safetensors")


def test_pretrained_weights_of_several_files(tmp_path: Path) -> None:
    expected = tensors(build_model(models.Gpt, seed=5))
    names = sorted(expected)
    parts = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: expected[name].contiguous() for name in part}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = tensors(build_model(models.Gpt, pretrained=path))
        assert all(torch.equal(found[name], expected[name]) for name in names)


def test_pretrained_weights_of_a_folder_with_one_file(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    assert (tensors(build_model(lambda: nn.Linear(3, 2), pretrained=tmp_path))["weight"] == 1).all()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "has neither model.safetensors.index.json nor model.safetensors"),
        ("{", "cannot read the index of pretrained weights"),
        ("[]", "it needs a weight_map"),
        ('{"weight_map": {"weight": "../one.safetensors"}}', "the files must be in the folder of the index"),
        ('{"weight_map": {"weight": 3}}', "the files must be in the folder of the index"),
        ('{"weight_map": {"weight": ["x"]}}', "cannot read the index"),
        ('{"weight_map": {"weight": "none.safetensors"}}', "lacks none.safetensors of the 1 files"),
        ('{"weight_map": {"bias": "one.safetensors"}}', "lacks bias, which the index"),
    ],
)
def test_unreadable_index_is_refused(tmp_path: Path, index: str | None, message: str) -> None:
    save_file({"weight": torch.ones(2, 3)}, tmp_path / "one.safetensors")
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(TaskError, match=message):
        build_model(lambda: nn.Linear(3, 2), pretrained=tmp_path)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="cannot read the pretrained weights"):
        build_model(models.Gpt, pretrained=tmp_path / "none.safetensors")
    (tmp_path / "text.safetensors").write_text("these are no weights")
    with pytest.raises(TaskError, match="cannot read the pretrained weights"):
        build_model(models.Gpt, pretrained=tmp_path / "text.safetensors")
