"""Batches of all kinds: tuples, named tuples, lists, dicts, mappings and dataclasses, also nested."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import models
from harness import TrainingResult, differences, take_sgd_step_, train_on_ranks
from paceline import Spec
from paceline.batch import cast_floats, count_samples, find_leaves, find_tensors, map_tensors, move
from paceline.data.order import shuffle
from paceline.spec import Optimizer
from paceline.training.init.deferred_init import fill_, record

SPEC = Spec(steps=3, batch=8, seed=5, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.0))


class Pair(NamedTuple):
    tokens: Tensor
    rest: Any


@dataclass(frozen=True)
class Record:
    tokens: Tensor
    rest: dict[str, Any]
    length: int = field(init=False, default=8)

    def __post_init__(self) -> None:
        assert self.tokens.dtype == torch.int64  # not so for copies that map_tensors makes


KINDS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    # how to build a batch of tokens, masks and names, and how to read its tokens and masks
    "named tuple": (lambda x, m, names: Pair(x, (m, names)), lambda batch: (batch.tokens, batch.rest[0])),
    "dict": (
        lambda x, m, names: {"names": names, "inner": [{"tokens": x}, (m, 3)]},
        lambda batch: (batch["inner"][0]["tokens"], batch["inner"][1][0]),
    ),
    "mapping": (
        lambda x, m, names: UserDict(tokens=x, mask=UserDict(mask=m)),
        lambda batch: (batch["tokens"], batch["mask"]["mask"]),
    ),
    "dataclass": (
        lambda x, m, names: Record(x, {"pair": Pair(m, names)}),
        lambda batch: (batch.tokens, batch.rest["pair"].tokens),
    ),
}


class Reader(models.Gpt):
    """A model that takes a whole batch as its argument."""

    def __init__(self, kind: str):
        super().__init__()
        self.read = KINDS[kind][1]

    def forward(self, batch: Any) -> Tensor:
        return super().forward(self.read(batch)[0][:, :-1])


class Kinds(models.Text):
    kind: str = "dict"

    def model(self) -> nn.Module:
        return Reader(self.kind)

    def dataset(self, split: str) -> Any:
        rows = super().dataset(split)
        if rows is None:
            return None
        return list(zip(rows.columns["tokens"], 0.3 * rows.columns["mask"], strict=True))

    def collate(self, samples: list[tuple[Tensor, Tensor]]) -> Any:
        tokens, masks = (torch.stack(column) for column in zip(*samples, strict=True))
        return KINDS[self.kind][0](tokens, masks, [f"sample {len(tokens)}" for _ in tokens])

    def inputs(self, batch: Any) -> Any:
        return (batch,)

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        tokens, _ = KINDS[self.kind][1](batch)
        return F.cross_entropy(output.transpose(1, 2), tokens[:, 1:], reduction="none")

    def weights(self, batch: Any) -> Tensor:
        mask = KINDS[self.kind][1](batch)[1]
        assert mask.dtype == torch.float64
        return mask


@cache
def train_plainly() -> TrainingResult:
    """Return what a plain loop on tensors computes."""
    rows = models.Text().dataset("train")
    assert rows is not None
    tokens, masks = rows.columns["tokens"], (0.3 * rows.columns["mask"]).double()
    model, weights, _ = record(models.Gpt, SPEC.seed)
    fill_(model, weights, torch.device("cpu"))
    model.double()
    losses, norms = [], []
    order = shuffle(np.arange(24), len(tokens), SPEC.seed).reshape(3, 8)
    for indices in order.tolist():
        x, mask = tokens[indices], masks[indices]
        values = F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none")
        loss = (values * mask).sum() / mask.sum()
        norms.append(take_sgd_step_(model, loss, 0.1))
        losses.append(loss.item())
    final = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return TrainingResult(losses, norms, [0.1] * 3, [], final, ())


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "ranks", "plan"),
    [
        *((kind, 2, "ddp,microbatches=2") for kind in KINDS),
        ("dict", 4, "zero2"),
        ("mapping", 2, "zero3"),
        ("named tuple", 2, "cp=2"),
        ("dataclass", 2, "pp=2,microbatches=2"),
        ("dataclass", 2, "cp=2"),
        ("mapping", 2, "pp=2,microbatches=2"),
    ],
)
def test_batches_of_all_kinds_equal_a_plain_loop(kind: str, ranks: int, plan: str) -> None:
    found, expected = train_on_ranks(ranks, Kinds(kind=kind), SPEC, plan), train_plainly()
    weights = {name: found.weights.get(name, found.weights["tokens.weight"]) for name in expected.weights}
    found.weights.update(weights)  # a tied weight has one name
    assert not differences(found, expected, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_all_kinds_are_found_and_changed(kind: str) -> None:
    build, read = KINDS[kind]
    tokens, masks, names = torch.ones(2, 9, dtype=torch.int64), torch.ones(2, 8), ["a", "b"]
    batch = build(tokens, masks, names)
    assert find_tensors(batch) == [tokens, masks]
    assert count_samples(batch) == 2
    changed = cast_floats(batch, torch.float64)
    assert type(changed) is type(batch)
    assert read(changed)[0] is tokens
    assert read(changed)[1].dtype == torch.float64
    assert read(batch)[1] is masks  # the batch itself is unchanged
    assert [leaf for leaf in find_leaves(changed) if isinstance(leaf, str)] in (names, [])
    assert {tensor.device.type for tensor in find_tensors(move(batch, "meta"))} == {"meta"}
    assert read(map_tensors(lambda tensor: tensor.double(), batch))[0].dtype == torch.float64


def test_packed_sequences_keep_their_batch_sizes() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    changed = move({"x": packed, "y": torch.ones(2)}, "meta")["x"]
    assert changed.data.is_meta
    assert changed.unsorted_indices.is_meta
    assert changed.batch_sizes.tolist() == [2, 2, 1]
    assert count_samples({"x": packed}) == 2


def test_other_objects_stay_as_they_are() -> None:
    shape = torch.ones(2, 3).shape
    batch = [shape, "text", None, np.ones(2), 4.0, torch.ones(2).max(0)]
    changed = map_tensors(lambda tensor: tensor + 1, batch)
    assert changed[0] == shape
    assert changed[1:3] == ["text", None]
    assert changed[3] is batch[3]
    assert changed[5].values == 2
    assert count_samples([]) == 1
