"""Samples of language models, held in memory: documents of text files and JSON lines, as token numbers."""

import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.errors import DataError
from paceline.hf.folder import load_tokenizer

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


def read_documents(file: Path, key: str) -> Iterator[str]:
    """Yield the texts of a file: `key` of each object of JSON lines, or else the whole file.

    Raises DataError.
    """
    try:
        text = file.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read the data {file}: {error.strerror}; specify --set data=FILE") from error
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read the data {file}: it is not UTF-8 text ({error.reason})") from error
    if file.suffix not in JSON_LINES:
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _read_text(line, key, f"{file}, line {number}")


def _read_text(line: str, key: str, place: str) -> str:
    try:
        tree = json.loads(line)
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise DataError(f"{place}: each line must be a JSON object ({what})") from error
    text = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(text, str):
        found = ", ".join(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
        raise DataError(
            f"{place}: no text in {key!r}; it has {found or 'nothing'}; name the key with --set text=KEY"
        )
    return text


@lru_cache(maxsize=4)
def read_tokens(folder: Path, file: Path, key: str) -> Tensor:
    """Return the tokens of all documents of a file in a row, shape (n,), int32.

    Each document is encoded with the special tokens of the tokenizer, and ends with its end-of-text token.
    Raises DataError and TaskError.
    """
    # Ranks and workers are forked, and tokenizers would warn of its threads in each of them.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    tokenizer = load_tokenizer(folder)
    end = tokenizer.eos_token_id
    parts = []
    for document in read_documents(file, key):
        numbers = tokenizer(document, verbose=False)["input_ids"]
        if end is not None and numbers[-1:] != [end]:
            numbers.append(end)
        parts.append(torch.tensor(numbers, dtype=torch.int32))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)
