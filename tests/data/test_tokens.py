"""paceline pack --tokenizer, Tokens and TokenDocuments: compared with the tokenizer itself."""

import json
import os
import pickle
import shutil

import numpy as np
import psutil
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from command import paceline, succeed
from paceline.data import TokenDocuments, Tokens
from paceline.data import pack_tokens as packing
from paceline.data.pack_tokens import pack_tokens
from paceline.errors import DataError
from paceline.spec import Spec
from paceline.tasks.lm import Lm, read_documents
from paceline.training.training_data import open_data

TEXTS = [f"Document {number}: " + "the cat sat on the mat, ünï. " * (number % 7) for number in range(40)]
TEXTS[3] = ""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<pad>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tok.json"
    tokenizer.save(str(path))
    return path


def write_corpus(folder, texts=TEXTS, key="text"):
    folder.mkdir()
    for name, part in (("a.jsonl", texts[:25]), ("b.jsonl", texts[25:39])):
        lines = [json.dumps({key: text, "id": number}) for number, text in enumerate(part)]
        (folder / name).write_text("\n".join(lines) + ("\n\n" if name == "a.jsonl" else ""))
    (folder / "c.txt").write_text(texts[39])
    (folder / "notes.md").write_text("no part of the corpus")
    return folder


def expected_ids(tokenizer, end=("<|endoftext|>",)):
    loaded = Tokenizer.from_file(str(tokenizer))
    ends = [loaded.token_to_id(token) for token in end]
    return [loaded.encode(text).ids + ends for text in TEXTS]


@pytest.mark.parametrize("piece_bytes", [2**26, 500, 60])
def test_documents_are_those_of_the_tokenizer(piece_bytes, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "PIECE_BYTES", piece_bytes)
    write_corpus(tmp_path / "corpus")
    result = pack_tokens([tmp_path / "corpus"], tmp_path / "out", tokenizer)
    expected = expected_ids(tokenizer)
    documents = TokenDocuments(tmp_path / "out")
    assert [documents[index].tolist() for index in range(len(documents))] == expected
    assert documents.lengths.tolist() == [len(ids) for ids in expected]
    assert (result.documents, result.tokens) == (40, sum(map(len, expected)))
    assert (result.dtype, documents.vocabulary) == ("uint16", 300)
    assert (result.end_token, documents[0].dtype) == ("<|endoftext|>", torch.int64)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "documents.bin",
        "tokenizer.json",
        "tokens.bin",
        "tokens.json",
    ]


@pytest.mark.parametrize("end", ["<pad>", ""])
def test_end_token(end, tokenizer, tmp_path):
    write_corpus(tmp_path / "corpus")
    pack_tokens([tmp_path / "corpus"], tmp_path / "out", tokenizer, end_token=end)
    documents = TokenDocuments(tmp_path / "out")
    expected = expected_ids(tokenizer, (end,) if end else ())
    assert [documents[index].tolist() for index in range(len(documents))] == expected


def test_windows(tokenizer, tmp_path):
    write_corpus(tmp_path / "corpus")
    pack_tokens([tmp_path / "corpus"], tmp_path / "out", tokenizer)
    whole = [number for ids in expected_ids(tokenizer) for number in ids]
    tokens = Tokens(tmp_path / "out", context=16)
    assert len(tokens) == (len(whole) - 1) // 16
    for index in (0, 1, len(tokens) - 1):
        inputs, targets = tokens[index]
        assert inputs.tolist() == whole[index * 16 : (index + 1) * 16]
        assert targets.tolist() == whole[index * 16 + 1 : (index + 1) * 16 + 1]
    with pytest.raises(IndexError):
        tokens[len(tokens)]
    border = round(0.8 * len(whole))
    train, rest = (Tokens(tmp_path / "out", 16, part) for part in ((0, 0.8), (0.8, 1)))
    assert train[len(train) - 1][1][-1] == whole[len(train) * 16]
    assert len(train) * 16 < border
    assert rest[0][0].tolist() == whole[border : border + 16]
    again = pickle.loads(pickle.dumps(rest))
    assert again[1][0].equal(rest[1][0])
    assert len(pickle.dumps(rest)) < 1000  # not the tokens


def test_stopped_command_continues(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "PIECE_BYTES", 500)
    write_corpus(tmp_path / "corpus")
    pack_tokens([tmp_path / "corpus"], tmp_path / "whole", tokenizer)
    write, count = packing._write_piece, []

    def stop(*words):
        count.append(1)
        if len(count) == 4:
            raise KeyboardInterrupt
        write(*words)

    monkeypatch.setattr(packing, "_write_piece", stop)
    with pytest.raises(KeyboardInterrupt):
        pack_tokens([tmp_path / "corpus"], tmp_path / "out", tokenizer)
    with pytest.raises(DataError, match="cannot read"):
        TokenDocuments(tmp_path / "out")
    result = pack_tokens([tmp_path / "corpus"], tmp_path / "out", tokenizer)
    assert result.reused == 3
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(("dtype", "kind"), [("uint8", "<u1"), ("uint16", "<u2"), ("uint32", "<u4")])
def test_files_of_integers(dtype, kind, tmp_path):
    values = np.random.default_rng(0).integers(0, 250, 101)
    (tmp_path / "x.bin").write_bytes(values.astype(kind).tobytes())
    tokens = Tokens(tmp_path / "x.bin", 10, dtype=dtype)
    assert len(tokens) == 10
    assert tokens[9][1].tolist() == values[91:101].tolist()


def test_long_file_takes_no_memory(tmp_path):
    path = tmp_path / "sparse.bin"
    path.touch()
    os.truncate(path, 10 * 10**9)
    with open(path, "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\x07\x01")
    before = psutil.Process().memory_info().rss
    tokens = Tokens(path, 512, dtype="uint16")
    assert len(tokens) == (5 * 10**9 - 1) // 512
    last = tokens[len(tokens) - 1][1]
    assert last.sum() == 0
    assert tokens.file.read(5 * 10**9 - 1, 5 * 10**9).tolist() == [0x107]
    assert psutil.Process().memory_info().rss - before < 30_000_000
    task = Lm(file=str(path), dtype="uint16", context=512, vocabulary=2**16, width=16, depth=1)
    data = open_data(Spec(steps=1, batch=2), task)
    assert (data.training.count, data.validation.count) == (9_277_343, 488_281)
    batch = data.validation[([0], [488_280])]
    assert batch["tokens"].sum() == 0
    assert batch["positions"].tolist() == [list(range(512))]
    assert psutil.Process().memory_info().rss - before < 30_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: not JSON"),
        (b'{"text": "a"}\n\n{"body": "b"}\n', r"line 3: no field 'text', got body; specify --field"),
        (b"[1]\n", r"line 1: no field 'text', got list; specify --field"),
        (b'{"text": 3}\n', r"line 1: the field 'text' is not a text"),
        (b"", r"no text; specify files \.jsonl"),
    ],
    ids=["not JSON", "no field", "no object", "no text", "empty"],
)
def test_bad_lines(content, message, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        pack_tokens([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()  # nothing half-written


def test_lines_of_other_programs(tokenizer, tmp_path):
    """Blank lines, CRLF, other keys, and separators of Unicode inside of a text."""
    texts = ["one", "two\u2028more\x85and\x0bmore", "drei ü"]
    lines = [json.dumps({"id": 1, "text": text, "x": None}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_bytes("\r\n\r\n  \r\n".join(lines).encode())
    pack_tokens([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer, end_token="")
    documents = TokenDocuments(tmp_path / "out")
    library = Tokenizer.from_file(str(tokenizer))
    expected = [library.encode(text).ids for text in texts]
    assert [documents[at].tolist() for at in range(3)] == expected
    read = read_documents(str(tmp_path / "a.jsonl"), str(tokenizer))
    assert [tensor.tolist() for tensor in read] == expected
    for content, message in (
        (b'\n{"text": 3}\n', r'line 2: expected an object with the key "text"; for another key'),
        (b'["a"]', r"line 1: expected an object"),
        (b"{]", r"line 1: not JSON"),
        (b"\xff", "is not UTF-8"),
    ):
        (tmp_path / f"bad{len(content)}.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_documents(str(tmp_path / f"bad{len(content)}.jsonl"), None)


def test_too_few_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one line\n")
    with pytest.raises(DataError, match=r"a.txt has 1 document, too few: one of 10 is for validation"):
        Lm(file=str(tmp_path / "a.txt")).dataset("train")


def test_numbers_of_tokens_with_gaps(tmp_path):
    """The model has a row for the largest number, even if others in between do not exist."""
    library = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 2, "b": 70}, "[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<|new|>"])
    library.save(str(tmp_path / "tok.json"))
    (tmp_path / "a.txt").write_text("a <|new|> b\n" * 40)
    pack_tokens([tmp_path / "a.txt"], tmp_path / "out", tmp_path / "tok.json", end_token="")
    assert 70 in TokenDocuments(tmp_path / "out")[0]
    for file, tokens in (("a.txt", str(tmp_path / "tok.json")), ("out", None)):
        model = Lm(file=str(tmp_path / file), tokenizer=tokens, width=16, depth=1, heads=2).model()
        assert 71 in {parameter.shape[0] for parameter in model.parameters()}


def test_tokens_that_the_model_does_not_have(tmp_path):
    np.arange(600, dtype="<u2").tofile(tmp_path / "x.bin")
    task = Lm(file=str(tmp_path / "x.bin"), dtype="uint16", vocabulary=80, context=16)
    windows = task.dataset("train")
    assert windows[3]["targets"].max() == 64
    with pytest.raises(DataError, match=r"x.bin has the token 80, but vocabulary=80; use at least --set vo"):
        windows[4]


def test_bad_folders(tokenizer, tmp_path):
    write_corpus(tmp_path / "corpus")
    pack_tokens([tmp_path / "corpus"], tmp_path / "out", tokenizer)
    with pytest.raises(DataError, match="has packed tokens already"):
        pack_tokens([tmp_path / "corpus"], tmp_path / "out", tokenizer)
    with pytest.raises(DataError, match=r"needs context \+ 1 = 100001; use a smaller context"):
        Tokens(tmp_path / "out", 100_000)
    with pytest.raises(DataError, match=r"part must be shares such as \(0, 0\.95\), got \(1, 0\)"):
        Tokens(tmp_path / "out", 10, (1, 0))
    with pytest.raises(DataError, match="leave out dtype='uint8'"):
        Tokens(tmp_path / "out", 10, dtype="uint8")
    with pytest.raises(DataError, match="must be uint8, uint16, uint32, got None; specify dtype="):
        Tokens(tmp_path / "out/tokens.bin", 10)
    shutil.copytree(tmp_path / "out", tmp_path / "cut")
    os.truncate(tmp_path / "cut/tokens.bin", 100)
    with pytest.raises(DataError, match=r"tokens\.bin has 50 tokens, but [\d,]+ in .*; copy or pack"):
        TokenDocuments(tmp_path / "cut")
    os.truncate(tmp_path / "cut/tokens.bin", 99)
    with pytest.raises(DataError, match="has 99 bytes, no multiple of 2"):
        TokenDocuments(tmp_path / "cut")
    (tmp_path / "cut/tokens.json").write_text("[]")
    with pytest.raises(DataError, match="does not describe tokens, or is damaged"):
        TokenDocuments(tmp_path / "cut")


@pytest.mark.processes
def test_command(tokenizer, tmp_path):
    write_corpus(tmp_path / "corpus", key="body")
    shutil.copy(tokenizer, tmp_path / "tok.json")
    words = ("pack", "corpus/a.jsonl", "corpus/b.jsonl", "out", "--tokenizer", "tok.json", "--field", "body")
    result = succeed(*words, at=tmp_path)
    assert "(uint16) of 39 documents" in result.out
    assert "each document ends with <|endoftext|>" in result.out
    assert len(TokenDocuments(tmp_path / "out")) == 39


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tokenizer none.json", "cannot read the tokenizer none.json: No such file or directory"),
        ("--tokenizer a.txt", "a.txt is not a tokenizer.json of Hugging Face"),
        ("--tokenizer tok.json --end-token none", "tok.json has no token 'none'; use --end-token ''"),
        ("--tokenizer tok.json --workers 2", "--workers has no meaning with --tokenizer; leave it out"),
        ("--field x", "--field requires --tokenizer"),
    ],
)
def test_bad_input_gives_one_sentence(words, message, tokenizer, tmp_path):
    shutil.copy(tokenizer, tmp_path / "tok.json")
    (tmp_path / "a.txt").write_text("text")
    result = paceline("pack", "a.txt", "out", *words.split(), at=tmp_path)
    assert (result.status, result.out) == (2, ""), result.all
    assert result.err.startswith(f"paceline: {message}")
    assert result.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
