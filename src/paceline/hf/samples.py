"""Samples of language models, held in memory: documents of text files and JSON lines, as token numbers."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import DataError, TaskError
from paceline.hf.folder import load_tokenizer
from paceline.spec import abbreviate

JSON_LINES = (".jsonl", ".json")
IGNORED = -100  # label of a token that has no loss, as in transformers


class TokenWindows:
    """Windows of `length` tokens that do not overlap. The label of each token is the next token.

    tokens: the tokens of a split, shape (n,). The window is shorter than `length` + 1 tokens nowhere, so that
    the rest at the end of the split is left out.
    """

    def __init__(self, tokens: Tensor, length: int):
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.length)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length + 1].long()
        return {"input_ids": window[:-1], "labels": window[1:]}


class BatchedTokenWindows(TokenWindows):
    """The same windows, of which a whole batch is read at once. A batch is what default_collate returns."""

    replaces_collate = True  # of a task, which pads samples of other objectives

    def __init__(self, tokens: Tensor, length: int):
        super().__init__(tokens, length)
        self._windows = tokens.unfold(0, length + 1, length) if len(tokens) > length else tokens[:0]

    def batch_of(self, indices: Sequence[int]) -> dict[str, Tensor]:
        windows = self._windows[torch.as_tensor(indices)].long()
        return {"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


class MaskedWindows:
    """Windows of `length` tokens that do not overlap, in which some tokens are hidden and predicted.

    Of the predicted tokens, 80 % become the token for masks, 10 % a random token, and 10 % stay (Devlin et
    al., BERT, 2018). Each sample draws its own tokens anew in each epoch. Special tokens are not predicted.
    tokens: shape (n,). share: of the tokens that are predicted. Raises TaskError for a tokenizer without a
    token for masks.
    """

    def __init__(self, tokens: Tensor, length: int, share: float, tokenizer: Any):
        if tokenizer.mask_token_id is None:
            raise TaskError(
                "the tokenizer has no token for masks, which masked-lm requires; set mask_token in "
                "tokenizer_config.json"
            )
        self.tokens, self.length, self.share = tokens, length, share
        self.mask, self.vocabulary = tokenizer.mask_token_id, len(tokenizer)
        self.special = torch.tensor(sorted(tokenizer.all_special_ids))

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length].long()
        is_predicted = (torch.rand(self.length) < self.share) & ~torch.isin(window, self.special)
        fate = torch.rand(self.length)
        random = torch.randint(self.vocabulary, (self.length,))
        hidden = torch.where(fate < 0.8, self.mask, torch.where(fate < 0.9, random, window))
        return {
            "input_ids": torch.where(is_predicted, hidden, window),
            "labels": torch.where(is_predicted, window, IGNORED),
        }


class TextPairs:
    """Pairs of a text and the text to write, of JSON lines. Longer texts are cut to `length` tokens.

    keys: of both texts. start: the token with which a decoder starts. Raises DataError.
    """

    def __init__(self, folder: Path, file: Path, keys: tuple[str, str], length: int, start: int):
        sources, targets = zip(*_read_objects(file, keys, True), strict=True)
        self.sources, self.targets = (_encode(folder, texts, length) for texts in (sources, targets))
        self.start = torch.tensor([start])

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source, target = self.sources[index].long(), self.targets[index].long()
        return {
            "input_ids": source,
            "attention_mask": torch.ones_like(source),
            "decoder_input_ids": torch.cat([self.start, target[:-1]]),
            "labels": target,
        }


class LabelledTexts:
    """Texts and their classes, of JSON lines. Longer texts are cut to `length` tokens.

    keys: of the text and of the class, which is a name of `names` or its number. Raises DataError.
    """

    def __init__(self, folder: Path, file: Path, keys: tuple[str, str], length: int, names: tuple[str, ...]):
        texts, labels = zip(*_read_objects(file, keys, False), strict=True)
        self.texts = _encode(folder, texts, length)
        self.labels = torch.tensor([_number(label, names, file) for label in labels])

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = self.texts[index].long()
        return {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": self.labels[index]}


class Texts:
    """Texts without classes. Longer texts are cut to `length` tokens."""

    def __init__(self, folder: Path, texts: Sequence[str], length: int):
        self.texts = _encode(folder, texts, length)

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text = self.texts[index].long()
        return {"input_ids": text, "attention_mask": torch.ones_like(text)}


def _number(label: Any, names: tuple[str, ...], file: Path) -> int:
    if isinstance(label, str) and label in names:
        return names.index(label)
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names):
        return label
    raise DataError(
        f"{file} has the class {abbreviate(label)}, but the model has {', '.join(names[:5])}"
        f"{', …' if len(names) > 5 else ''} (or 0 to {len(names) - 1}); name the classes with "
        '--set labels=["A","B"]'
    )


def find_padding(folder: Path) -> int:
    """Return the token that fills shorter samples. Raises TaskError."""
    number = load_tokenizer(folder).pad_token_id
    if number is None:
        raise TaskError(
            f"the tokenizer of {folder} has no token for padding; set pad_token in tokenizer_config.json"
        )
    return int(number)


def _encode(folder: Path, texts: Sequence[Any], length: int) -> list[Tensor]:
    """Return the tokens of each text, with the special tokens of the tokenizer, as int32."""
    allow_forks()
    tokenizer = load_tokenizer(folder)
    numbers = tokenizer(list(texts), truncation=True, max_length=length, verbose=False)["input_ids"]
    return [torch.tensor(row, dtype=torch.int32) for row in numbers]


def allow_forks() -> None:
    """Keep tokenizers from a warning about its threads in ranks and workers, which are forked."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def read_documents(file: Path, key: str) -> Iterator[str]:
    """Yield the texts of a file: `key` of each object of JSON lines, or else the whole file.

    Raises DataError.
    """
    if file.suffix not in JSON_LINES:
        yield read_file(file)
        return
    for number, line in _read_lines(file):
        yield _read_value(line, key, f"{file}, line {number}")


def read_lines(file: Path, key: str) -> Iterator[str]:
    """Yield the texts of a file: `key` of each object of JSON lines, or else each line that is not blank."""
    for number, line in _read_lines(file):
        yield _read_value(line, key, f"{file}, line {number}") if file.suffix in JSON_LINES else line


def read_file(file: Path, fix: str = "specify --set data=FILE") -> str:
    """Return the text of a file. Raises DataError, whose last words are `fix`."""
    try:
        return file.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}; {fix}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {file}: it is not UTF-8 text ({error.reason}); {fix}") from error


def _read_lines(file: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(read_file(file).split("\n"), 1):
        if line.strip():
            yield number, line


def _read_objects(file: Path, keys: tuple[str, str], are_texts: bool) -> list[tuple[Any, Any]]:
    """Return a text and another value of each line, which is also a text if `are_texts`. Raises DataError."""
    if file.suffix not in JSON_LINES:
        raise DataError(
            f"the data {file} must be JSON lines with the keys {keys[0]!r} and {keys[1]!r}; name it .jsonl"
        )
    rows = []
    for number, line in _read_lines(file):
        place = f"{file}, line {number}"
        rows.append((_read_value(line, keys[0], place), _read_value(line, keys[1], place, are_texts)))
    if not rows:
        raise DataError(f"{file} has no samples; each line must be a JSON object")
    return rows


def _read_value(line: str, key: str, place: str, is_text: bool = True) -> Any:
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"{place}: each line must be a JSON object ({what})") from error
    value = tree.get(key) if isinstance(tree, dict) else None
    if value is None or (is_text and not isinstance(value, str)):
        found = ", ".join(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
        raise DataError(
            f"{place}: no {'text' if is_text else 'value'} in {key!r}; it has {found or 'nothing'}; name the "
            f"key with --set {'text' if is_text else 'label'}=KEY"
        )
    return value


@lru_cache(maxsize=4)
def read_tokens(folder: Path, file: Path, key: str) -> Tensor:
    """Return the tokens of all documents of a file in a row, shape (n,), int32.

    Each document is encoded with the special tokens of the tokenizer, and ends with its end-of-text token.
    Raises DataError and TaskError.
    """
    allow_forks()
    tokenizer = load_tokenizer(folder)
    end = tokenizer.eos_token_id
    parts = []
    for document in read_documents(file, key):
        numbers = tokenizer(document, verbose=False)["input_ids"]
        if end is not None and numbers[-1:] != [end]:
            numbers.append(end)
        parts.append(torch.tensor(numbers, dtype=torch.int32))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
