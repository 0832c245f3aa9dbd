"""Packed documents: nothing lost, full samples, attention and positions of each document alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from command import paceline, succeed
from harness import differences_from_single, ranks
from paceline import Spec, TaskError
from paceline.data.packing import PackedDocuments, isolate_documents, pack_best_fit
from paceline.errors import DataError
from paceline.spec import Optimizer
from paceline.tasks import decoder
from paceline.tasks.lm import Lm
from paceline.verify.run import Verification


def draw_documents(lengths: Any, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 250, (int(length),), generator=draw) for length in lengths]


def find_pieces(packed: PackedDocuments) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return tokens and targets of each piece of all samples, after a check of its positions."""
    pieces = []
    for sample in (packed[index] for index in range(len(packed))):
        numbers = sample["documents"].tolist()
        filled = [number for number in numbers if number >= 0]
        assert numbers == filled + [-1] * (len(numbers) - len(filled))
        assert filled == sorted(filled)
        for number in range(max(filled) + 1):
            chosen = sample["documents"] == number
            assert sample["positions"][chosen].tolist() == list(range(int(chosen.sum())))
            tokens, targets = (tuple(sample[key][chosen].tolist()) for key in ("tokens", "targets"))
            pieces.append((tokens, targets))
    return pieces


@pytest.mark.parametrize("window", [7, 65_536])
def test_each_target_is_in_one_sample(window: int) -> None:
    documents = draw_documents([5, 0, 1, 2, 40, 17, 33, 16, 18, 9, 3, 100])
    expected = [
        (tuple(document[begin : begin + 16].tolist()), tuple(document[begin + 1 : begin + 17].tolist()))
        for document in documents
        for begin in range(0, len(document) - 1, 16)
    ]
    expected = [(tokens[: len(targets)], targets) for tokens, targets in expected]
    assert sorted(find_pieces(PackedDocuments(documents, 16, window=window))) == sorted(expected)


def test_samples_are_a_pure_function_of_the_lengths() -> None:
    lengths = np.random.default_rng(0).integers(2, 60, 300)
    documents = draw_documents(lengths)
    first, second = PackedDocuments(documents, 64), PackedDocuments(documents, 64, lengths)
    assert len(first) == len(second)
    for index in range(len(first)):
        for key, tensor in first[index].items():
            assert torch.equal(tensor, second[index][key])


def pack_by_search(sizes: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing by its definition."""
    packs: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rooms = [capacity - sum(sizes[other] for other in pack) for pack in packs]
        fitting = [room for room in rooms if room >= sizes[index]]
        if fitting:
            packs[rooms.index(min(fitting))].append(index)
        else:
            packs.append([index])
    return packs


@pytest.mark.parametrize("seed", range(5))
def test_packs_are_those_of_best_fit_decreasing(seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 51, 80)
    found, expected = pack_best_fit(sizes, 50), pack_by_search(sizes.tolist(), 50)
    # Packs with the same room are interchangeable.
    loads = [sorted(sum(sizes[index] for index in pack) for pack in packs) for packs in (found, expected)]
    assert loads[0] == loads[1]
    assert sorted(index for pack in found for index in pack) == list(range(80))


def test_lines_of_text_fill_the_samples() -> None:
    """Lines of a source file have lengths like those of verses."""
    lines = [line for line in Path(__file__).read_text().splitlines() if line.strip()] * 20
    packed = PackedDocuments([torch.arange(len(line)) for line in lines], 256)
    assert packed.filled > 0.99


@pytest.mark.parametrize("length", [512, 2048])
def test_a_skewed_distribution_fills_the_samples(length: int) -> None:
    lengths = np.random.default_rng(1).lognormal(5, 1.2, 20_000).astype(int) + 2
    packed = PackedDocuments([range(1)] * len(lengths), length, lengths)
    assert packed.filled > 0.99


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1], []], 8), "none of the 2 documents has two tokens"),
        (([[1, 2]], 0), "length and window must be at least 1, got length=0"),
        (([[1, 2]], 8, [2, 3]), "2 lengths for 1 documents"),
    ],
)
def test_bad_arguments_are_one_sentence(arguments: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PackedDocuments(*arguments)


def test_wrong_lengths_are_found() -> None:
    with pytest.raises(DataError, match="document 0 has 2 tokens, not as many as its length says"):
        PackedDocuments([[1, 2]], 8, [7])[0]


def make_model(kind: str) -> decoder.Decoder:
    torch.manual_seed(3)
    return decoder.Decoder(kind, 256, 24, 2, 2, 16).double()


def batch_of(packed: PackedDocuments) -> tuple[Tensor, Tensor, Tensor]:
    batch = default_collate([packed[index] for index in range(len(packed))])
    return batch["tokens"], batch["documents"], batch["positions"]


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_other_documents_change_no_bit(kind: str, dtype: torch.dtype) -> None:
    tokens, documents, positions = batch_of(PackedDocuments(draw_documents([6, 5, 7, 9, 4, 8]), 16))
    model = make_model(kind).to(dtype)
    expected = model(tokens, documents, positions)
    found = model(torch.where(documents == 0, 255 - tokens, tokens), documents, positions)
    differs = (expected != found).any(-1)
    assert not differs[documents != 0].any()
    assert differs[documents == 0].all()


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_document_has_the_output_that_it_has_alone(kind: str) -> None:
    packed = PackedDocuments(draw_documents([6, 5, 7, 9, 4, 8]), 16)
    tokens, documents, positions = batch_of(packed)
    model = make_model(kind)
    output = model(tokens, documents, positions)
    for row in range(len(packed)):
        for number in range(int(documents[row].max()) + 1):
            chosen = documents[row] == number
            alone, size = tokens[row, chosen][None], int(chosen.sum())
            expected = model(alone, torch.zeros(1, size, dtype=torch.int64), torch.arange(size)[None])[0]
            torch.testing.assert_close(output[row, chosen], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_models_of_transformers_are_isolated(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = {
        "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
    }[kind]
    if kind == "llama":
        settings |= {"num_attention_heads": 2, "vocab_size": 256, "max_position_embeddings": 16}
    config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens, documents, positions = batch_of(PackedDocuments(draw_documents([6, 5, 7, 9, 4, 8]), 16))

    def run(tokens: Tensor, documents: Tensor) -> Tensor:
        mask = isolate_documents(documents)
        with torch.no_grad():
            return model(  # type: ignore[no-any-return]
                input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False
            ).logits

    changed = torch.where(documents == 0, 255 - tokens, tokens)
    differs = (run(tokens, documents) != run(changed, documents)).any(-1)
    assert not differs[documents != 0].any()
    assert differs[documents == 0].all()
    whole = torch.zeros_like(documents)
    assert (run(tokens, whole) != run(changed, whole)).any(-1)[documents == 1].all()


def test_mask_by_definition() -> None:
    documents = torch.tensor([[0, 0, 1, -1, -1]])
    expected = torch.tensor(
        [[documents[0, q] == documents[0, k] and k <= q for k in range(5)] for q in range(5)]
    )
    assert torch.equal(isolate_documents(documents)[0, 0], expected)
    assert torch.equal(isolate_documents(documents, causal=False)[0, 0], expected | expected.T)


def write_lines(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "of", "a"]
    lines = [" ".join(draw.choice(words, draw.integers(1, 6))) for _ in range(200)]
    (folder / "lines.txt").write_text("\n".join(lines))
    return folder / "lines.txt"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = write_lines(tmp_path_factory.mktemp("lines"))
    return {"file": str(file), "width": 12, "depth": 2, "heads": 2, "context": 32}


SPEC = Spec(steps=3, batch=4, seed=3, precision="fp64", optimizer=Optimizer(name="sgd", lr=0.1, momentum=0))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("size", "plan"), [(2, "ddp,microbatches=2"), (2, "tp=2"), (2, "cp=2"), (2, "pp=2,microbatches=2")]
)
def test_plans_train_like_one_process(size: int, plan: str, small: Any) -> None:
    assert not differences_from_single(size, plan, Lm(**small), SPEC)


def test_the_loss_is_a_mean_over_tokens(small: Any) -> None:
    """The mean of a global batch, by a loop over single documents without packing."""
    task = Lm(**small, kind="gpt")
    packed = task.dataset("train")
    batch = default_collate([packed[index] for index in range(4)])
    torch.manual_seed(0)
    model = task.model().double()
    losses, weights = task.loss(model(*task.inputs(batch)), batch), task.weights(batch)
    total, count = 0.0, 0
    for row in range(4):
        for number in range(int(batch["documents"][row].max()) + 1):
            chosen = batch["documents"][row] == number
            size = int(chosen.sum())
            output = model(
                batch["tokens"][row, chosen][None], torch.zeros(1, size).long(), torch.arange(size)[None]
            )
            targets = batch["targets"][row, chosen]
            total += F.cross_entropy(output[0], targets, reduction="sum").item()
            count += size
    assert float((losses * weights).sum().detach() / weights.sum()) == pytest.approx(total / count, rel=1e-10)
    assert 0 < int((weights == 0).sum()) < 20  # some padding, but little


class Leaking(Lm):
    """A model whose attention crosses the borders of documents."""

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return batch["tokens"], torch.zeros_like(batch["documents"]), batch["positions"]


@pytest.mark.processes
def test_verify_checks_the_isolation(small: Any) -> None:
    def start(task: str) -> Verification:
        return Verification(Spec(task=task, set=small, steps=1, batch=4), ranks(1)._pool)

    with start("lm") as good:
        good.reference()
        assert any("documents are isolated" in note for note in good.notes)
    with (
        start("test_packing:Leaking") as bad,
        pytest.raises(TaskError, match="output of document 1 in"),
    ):
        bad.reference()


@pytest.mark.processes
def test_commands(small: Any, tmp_path: Path) -> None:
    """Train with a tokenizer from a local file; a model with too few tokens is one sentence."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "alpha": 1, "of": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tok.json"))
    settings = [f"--set={name}={value}" for name, value in (small | {"tokenizer": "tok.json"}).items()]
    succeed("train", "lm", *settings, "--steps", "2", "--batch", "4", "--no-report", at=tmp_path)
    for more, message in (
        ("vocabulary=2", "the tokenizer has 3 tokens, more than vocabulary=2; use at least 3"),
        ("tokenizer=none.json", "no such file: none.json; specify a tokenizer.json"),
        ("width=10", "width=10 must be a multiple of 2 × heads = 4"),
    ):
        rest = [word for word in settings if not word.startswith(f"--set={more.partition('=')[0]}=")]
        result = paceline("train", "lm", *rest, f"--set={more}", "--steps", "2", at=tmp_path)
        assert (result.status, message in " ".join(result.all.split())) == (2, True), result.all
