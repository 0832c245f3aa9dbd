"""Tests of split activations between split layers, and of their dropout masks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import models
from faults import replaced
from harness import TrainingResult, differences, ranks, train_on_ranks, train_on_this_rank
from paceline import Layout, Spec, Task
from paceline.data.fake import example_batch, is_fake
from paceline.parallel.tensor import apply as tensor
from paceline.parallel.tensor import rng, sequence_comm
from paceline.parallel.tensor.apply import Splits, find_splits
from paceline.parallel.tensor.find_sequence_parallel import NotSplittable
from paceline.plan.plan import parse
from paceline.spec import Optimizer
from paceline.training.dry_run.dry_run import compute_comm_volume
from paceline.training.init.deferred_init import record
from volumes import check_volumes, make_spec

pytestmark = pytest.mark.processes

SPEC = Spec(
    batch=8, steps=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.05, clip=0.5, weight_decay=0.1)
)


class Block(nn.Module):
    def __init__(self, drop: float = 0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.RMSNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop1, self.drop2, self.inner = (
            nn.Dropout(drop),
            nn.Dropout(drop),
            nn.Sequential(nn.Tanh(), nn.Dropout(drop)),
        )
        self.attention = Attention(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.drop1(self.o(self.attention(self.q(y), self.k(y), self.v(y))))
        return x + self.drop2(self.down(self.inner(self.up(self.norm2(x)))))


class Attention(nn.Module):
    def __init__(self, drop: float):
        super().__init__()
        self.rate = drop

    def forward(self, *qkv: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in qkv)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.rate if self.training else 0.0
        )
        return mixed.transpose(1, 2).flatten(2)


class SubtractsMean(Block):
    """Mixes positions outside of attention, and samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x.mean((0, 1), keepdim=True)


class DividesBySize(Block):
    """Runs on parts too, with different results."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (x.shape[0] * x.shape[1])


class SharesNorm(Block):
    """Uses one norm for split and whole tensors, so no sum of its gradients would be right."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.norm2(x.new_ones(16))


class LearnedPositions(Block):
    """Learned values for each position: samples can be split, positions cannot."""

    def __init__(self, drop: float = 0.0):
        super().__init__(drop)
        self.places = nn.Parameter(torch.zeros(6, 16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.places)


class Net(nn.Module):
    def __init__(self, kind: str, drop: float):
        super().__init__()
        self.token, self.place = nn.Embedding(12, 16), nn.Parameter(torch.randn(6, 16))
        self.first = nn.Dropout(drop)
        self.blocks = nn.ModuleList([globals()[kind](drop) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.token(tokens) + self.place[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Words(models.Text):
    kind: str = "Block"
    drop: float = 0.0

    def model(self) -> nn.Module:
        return Net(self.kind, self.drop)

    def dataset(self, split: str) -> models.Rows | None:
        return (
            models.Rows(tokens=models.random_integers(12, 29, 7), mask=torch.ones(29, 6))
            if split == "train"
            else None
        )

    def layout(self) -> Layout:
        return Layout(blocks=("blocks",))


def find_task_splits(task: Task, plan: str) -> Splits:
    model, _, _ = record(task.model, 0)
    resolved = parse(plan).resolve(parse(plan).tp * parse(plan).pp * parse(plan).cp)
    return find_splits(model, task, example_batch(SPEC, task, resolved), resolved)


def test_find_sequence_parallel() -> None:
    sequence = find_task_splits(Words(), "tp=2").sequence
    assert sequence is not None
    assert sequence.dim == 0
    assert list(sequence.blocks) == ["blocks.0", "blocks.1"]
    assert sequence.gathered_outputs == {
        f"blocks.{at}.{norm}" for at in (0, 1) for norm in ("norm1", "norm2")
    }
    assert sequence.scattered_sums == {f"blocks.{at}.{row}" for at in (0, 1) for row in ("o", "down")}
    assert sequence.partial == {
        f"blocks.{at}.{small}"
        for at in (0, 1)
        for small in ("norm1.weight", "norm1.bias", "norm2.weight", "o.bias", "down.bias")
    }


@pytest.mark.parametrize(
    ("kind", "plan", "dim"),
    [
        ("Block", "tp=2,microbatches=4", 0),
        ("Block", "tp=2,microbatches=8", 1),
        ("Block", "tp=4,microbatches=8", None),  # 4 divides neither one sample nor six positions
        ("LearnedPositions", "tp=2", 0),
        ("LearnedPositions", "tp=2,microbatches=8", None),
        ("SubtractsMean", "tp=2", None),
        ("DividesBySize", "tp=2", None),
        ("SharesNorm", "tp=2", None),
        ("Block", "cp=2,tp=2", None),
    ],
)
def test_split_dimension(kind: str, plan: str, dim: int | None) -> None:
    found = find_task_splits(Words(kind=kind), plan)
    assert (found.sequence.dim if found.sequence is not None else None) == dim
    reasons = [note for note in found.notes if "activations between split layers are whole" in note]
    assert bool(reasons) == (dim is None and "cp" not in plan)


def test_note_gives_reason() -> None:
    assert (
        find_task_splits(Words(kind="SubtractsMean"), "tp=2")
        .notes[-1]
        .endswith("because of aten.mean.dim in blocks.0")
    )
    assert (
        find_task_splits(Words(kind="DividesBySize"), "tp=2")
        .notes[-1]
        .endswith("because of aten.div.Tensor, which depends on their sizes")
    )
    assert (
        find_task_splits(Words(), "tp=4,microbatches=8")
        .notes[-1]
        .endswith("because of their shape (1, 6, 16)")
    )


def refuse_to_split(*args: Any) -> None:
    raise NotSplittable


FEW = [(2, "tp=2", "Block")]
MANY = [
    (2, "tp=2,microbatches=8,recompute=full", "Block"),
    (2, "tp=2", "LearnedPositions"),
    (2, "tp=2", "SubtractsMean"),
    (2, "tp=2", "SharesNorm"),
    (2, "tp=2", "DividesBySize"),
    (4, "tp=4", "Block"),
    (4, "tp=2,microbatches=4", "Block"),
    (4, "tp=2,zero=2,recompute=selective", "Block"),
    (4, "tp=2,zero=3,microbatches=4", "Block"),
    (4, "tp=2,pp=2,microbatches=4", "Block"),
    (4, "tp=2,pp=2,microbatches=8,pp_schedule=1f1b,recompute=full", "Block"),
    (4, "tp=2,pp=2,microbatches=4,pp_schedule=zbv", "Block"),
    (4, "tp=2,cp=2", "Block"),
]


@pytest.mark.parametrize(
    ("size", "plan", "kind"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY)]
)
def test_trains_as_one_process(size: int, plan: str, kind: str) -> None:
    task = Words(kind=kind)
    assert not differences(train_on_ranks(size, task, SPEC, plan), train_on_ranks(1, task, SPEC), 1e-11)


def omit_partial_sums(task: Task, plan: str) -> TrainingResult:
    with replaced(tensor, "sum_partial_gradients", lambda original: lambda *arguments: None):
        return train_on_this_rank(task, SPEC, plan)


def omit_reduce_scatter(task: Task, plan: str) -> TrainingResult:
    """Train with gradients of gathered activations that are not summed over the ranks."""
    with replaced(
        sequence_comm.SequenceCollectives,
        "reduce_scatter_parts",
        lambda original: sequence_comm.SequenceCollectives.local_part,
    ):
        return train_on_this_rank(task, SPEC, plan)


@pytest.mark.parametrize("fault", [omit_partial_sums, omit_reduce_scatter])
def test_omitted_sum_is_detected(fault: Callable[..., TrainingResult]) -> None:
    assert differences(ranks(2)(fault, Words(), "tp=2")[0], train_on_ranks(1, Words(), SPEC), 1e-4)


def check_collectives(length: int, dim: int) -> bool:
    """Return whether forward and backward are right along a dimension that the ranks may not divide."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = [3, 3]
    shape[dim] = length
    drawn = torch.randn(size, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grads = torch.randn(size, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = -(-length // size)
    own = slice(min(rank * step, length), min((rank + 1) * step, length))
    at = (own, slice(None)) if dim == 0 else (slice(None), own)
    same = []

    def check(
        change: Callable[[Tensor], Tensor],
        given: Tensor,
        expected: Tensor,
        grad: Tensor,
        expected_grad: Tensor,
    ) -> None:
        given = given.clone().requires_grad_()
        found = change(given)
        found.backward(grad)
        assert given.grad is not None
        same.append(torch.allclose(found, expected) and torch.allclose(given.grad, expected_grad))

    cut = sequence_comm.SequenceCollectives(group, dim)
    check(cut.scatter, drawn[0], drawn[0][at], grads[0][at], grads[0])
    check(cut.gather, drawn[0][at], drawn[0], grads[0], grads[0][at])
    check(cut.gather_for_split, drawn[0][at], drawn[0], grads[rank], grads.sum(0)[at])
    check(cut.reduce_scatter, drawn[rank], drawn.sum(0)[at], grads[0][at], grads[0])
    return all(same)


@pytest.mark.parametrize(("length", "dim"), [(4, 0), (4, 1), (5, 0), (5, 1), (1, 0)])
def test_collectives_forward_and_backward(length: int, dim: int) -> None:
    assert ranks(2)(check_collectives, length, dim) == [True] * 2


def measure_saved_bytes(between: bool) -> tuple[int, int]:
    """Return the bytes that autograd saves on this rank between split layers, and in total.

    Parameters are not counted.
    """
    kept: dict[int, tuple[int, bool]] = {}
    running: list[nn.Module] = []

    def keep(saved: Tensor) -> Tensor:
        if not is_fake(saved) and not saved.is_leaf and any(isinstance(module, Block) for module in running):
            is_between = isinstance(running[-1], (Block, nn.LayerNorm, nn.RMSNorm))
            kept.setdefault(
                saved.untyped_storage().data_ptr(), (saved.untyped_storage().nbytes(), is_between)
            )
        return saved

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: running.append(module)),
        nn.modules.module.register_module_forward_hook(
            lambda module, args, output: running.pop() and None, always_call=True
        ),
    ]
    once = SPEC.model_copy(update={"steps": 1})
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        if between:
            train_on_this_rank(Words(), once, "tp=2")
        else:
            with replaced(tensor, "find_sequence_parallel", lambda original: refuse_to_split):
                train_on_this_rank(Words(), once, "tp=2")
    for hook in hooks:
        hook.remove()
    return sum(size for size, is_between in kept.values() if is_between), sum(
        size for size, _ in kept.values()
    )


def test_each_rank_saves_part_of_activations() -> None:
    for (split, all_split), (full, all_full) in zip(
        ranks(2)(measure_saved_bytes, True), ranks(2)(measure_saved_bytes, False), strict=True
    ):
        assert 2 * split == full
        assert all_split == all_full - split


def test_sent_bytes_are_equal() -> None:
    """Except for whole activations at the edges, and the gradients of small parameters."""
    spec = Spec(batch=8)
    split = compute_comm_volume(spec, parse("tp=2"), 2, task=Words())
    with replaced(tensor, "find_sequence_parallel", lambda original: refuse_to_split):
        full = compute_comm_volume(spec, parse("tp=2"), 2, task=Words())
    edges, small = 2 * (4 * 8 * 6 * 16) // 2, 4 * 2 * 5 * 16
    assert (
        sum(entry.sent_bytes for entry in split.entries)
        == sum(entry.sent_bytes for entry in full.entries) + edges + small
    )


def test_comm_volume_equals_that_of_real_ranks() -> None:
    check_volumes(2, "tp=2", Words(drop=0.1), make_spec())


Drawn = dict[str, bytes]


def drawn(task: Task, plan: str) -> Drawn:
    """Return the mask of each dropout of the last forward pass on this rank, and attention's rng state."""
    found: Drawn = {}
    attention = F.scaled_dot_product_attention

    def note(name: str, output: Tensor) -> None:
        if not is_fake(output):
            found[name] = (output == 0).numpy().tobytes()

    def watched(task: Words) -> nn.Module:
        built = Net(task.kind, task.drop)
        for name, module in built.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(lambda _, args, output, name=name: note(name, output))
        return built

    def attend(*args: Any, **kwargs: Any) -> Tensor:
        if not is_fake(args[0]):
            found["attention"] = torch.default_generator.get_state().numpy().tobytes()
        return attention(*args, **kwargs)

    with (
        replaced(F, "scaled_dot_product_attention", lambda original: attend),
        replaced(Words, "model", lambda original: watched),
    ):
        train_on_this_rank(task, SPEC, plan)
    found["stream"] = torch.default_generator.get_state().numpy().tobytes()
    return found


SHARED = {"first", "stream"}


def test_dropout_masks_are_equal_for_whole_and_different_for_split_tensors() -> None:
    first, second = ranks(2)(drawn, Words(drop=0.4), "tp=2")
    assert {name for name in first if first[name] == second[name]} == SHARED
    assert {"blocks.0.drop1", "blocks.1.inner.1", "attention"} <= first.keys()


def test_dropout_masks_where_activations_are_whole() -> None:
    first, second = ranks(2)(drawn, Words(drop=0.4, kind="SubtractsMean"), "tp=2")
    residual = {f"blocks.{at}.{name}" for at in (0, 1) for name in ("drop1", "drop2")}
    assert {name for name in first if first[name] == second[name]} == SHARED | residual


def draw_with_equal_seeds(task: Task, plan: str) -> Drawn:
    with replaced(rng, "derive_seed", lambda original: lambda seed, *purpose: seed):
        return drawn(task, plan)


def test_equal_masks_are_detected() -> None:
    first, second = ranks(2)(draw_with_equal_seeds, Words(drop=0.4), "tp=2")
    assert first == second


@pytest.mark.slow
def test_data_ranks_have_different_masks() -> None:
    found = ranks(4)(drawn, Words(drop=0.4), "dp=2,tp=2")
    for tp in (0, 1):
        assert not {name for name in found[tp] if found[tp][name] == found[2 + tp][name]}


def test_recomputation_repeats_masks() -> None:
    task = Words(drop=0.4)
    expected = train_on_ranks(2, task, SPEC, "tp=2")
    assert not differences(train_on_ranks(2, task, SPEC, "tp=2,recompute=full"), expected, 1e-11)
    assert differences(expected, train_on_ranks(1, Words(), SPEC), 1e-3)
