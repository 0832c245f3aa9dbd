"""A GPT or a Llama-like model on documents of text: --set file=PATH, --set tokenizer=tokenizer.json.

A folder that `paceline pack --tokenizer` wrote, or a file of integers, is mapped into memory instead.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Layout, Task
from paceline.data.packing import PackedDocuments
from paceline.data.token_files import count_tokens
from paceline.data.tokens import TokenFile, Tokens
from paceline.errors import DataError, TaskError
from paceline.tasks.decoder import Decoder
from paceline.tasks.text import read

BYTES, END = 256, 256  # tokens of documents without a tokenizer: bytes, and the end of a document
TRAINING_SHARE = 0.95  # of a file of tokens; the rest is for validation
EVERY = 10  # one of so many documents is for validation


@lru_cache
def read_documents(file: str | None, tokenizer: str | None) -> list[Tensor]:
    """Return the documents of a file as token numbers: its lines, or the key "text" of JSON lines.

    Raises DataError and TaskError.
    """
    content = bytes(read(file).numpy())
    try:
        texts = content.decode().split("\n")  # not splitlines: a text in JSON may contain other separators
    except ValueError as error:
        raise DataError(f"{file} is not UTF-8: {error}; convert it") from error
    if file is not None and file.endswith(".jsonl"):
        texts = [_read_text(file, number, line) for number, line in enumerate(texts, 1) if line.strip()]
    texts = [text.rstrip("\r") for text in texts if text.strip()]
    if tokenizer is None:
        return [torch.tensor([END, *text.encode()]) for text in texts]
    encodings = load_tokenizer(tokenizer).encode_batch(texts)
    return [torch.from_numpy(np.array(encoding.ids, dtype=np.int64)) for encoding in encodings]


def _read_text(file: str, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except ValueError as error:
        raise DataError(f"{file}, line {number}: not JSON: {error}") from error
    except (KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise DataError(
            f'{file}, line {number}: expected an object with the key "text"; for another key, use paceline'
            " pack --field"
        )
    return text


@lru_cache
def load_tokenizer(path: str) -> Any:
    """Return the tokenizer of a file tokenizer.json. Raises TaskError and DataError."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise TaskError("tokenizer requires the package tokenizers: pip install 'paceline[hf]'") from error
    if not Path(path).is_file():
        raise DataError(f"no such file: {path}; specify a tokenizer.json: --set tokenizer=PATH")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{path} is not a tokenizer of the library tokenizers: {error}") from error


class DocumentWindows(Tokens):
    """Windows of tokens in the form of packed documents: each window is one document.

    limit: number of tokens of the model, if the file does not say how many it has.
    """

    limit: int | None = None

    def __getitem__(self, index: int) -> Any:
        return self._describe(*super().__getitem__(index))

    def decode_raw(self, index: int, content: bytes) -> Any:
        """Return the sample with these tokens."""
        return self._describe(*super().decode_raw(index, content))

    def _describe(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if self.limit is not None and (largest := max(int(tokens.max()), int(targets.max()))) >= self.limit:
            raise DataError(
                f"{self.file.path} has the token {largest}, but vocabulary={self.limit}; use at least"
                f" --set vocabulary={largest + 1}"
            )
        documents, positions = torch.zeros(len(tokens), dtype=torch.int64), torch.arange(len(tokens))
        return {"tokens": tokens, "targets": targets, "documents": documents, "positions": positions}


class Lm(Task):
    """Next-token prediction on packed documents or tokens, by a model like GPT-2 or Llama."""

    # text, whose lines are documents, or JSON lines with the key "text"; or a folder of `paceline pack
    # --tokenizer`, or a file of integers, whose last 5 % are for validation
    file: str | None = None
    tokenizer: str | None = None  # a tokenizer.json for text; None: bytes
    dtype: Literal["uint8", "uint16", "uint32"] | None = None  # of a file of integers
    kind: Literal["gpt", "llama"] = "llama"
    width: int = 128  # features of each token
    depth: int = 4  # number of blocks
    heads: int = 4  # attention heads of each block
    context: int = 256  # positions of a sample
    vocabulary: int | None = None  # number of tokens of the model; None: as many as the tokenizer has
    chunked_loss: bool = False  # compute the loss in chunks, so that a training never holds all logits

    def model(self) -> nn.Module:
        tokens = self._count_tokens()
        vocabulary = self.vocabulary or tokens
        if vocabulary is None:
            raise TaskError(f"{self.file} does not say how many tokens there are; use --set vocabulary=N")
        if tokens is not None and vocabulary < tokens:
            raise TaskError(
                f"the tokenizer has {tokens} tokens, more than vocabulary={vocabulary}; use at least {tokens}"
            )
        if self.width % (2 * self.heads):
            raise TaskError(f"width={self.width} must be a multiple of 2 × heads = {2 * self.heads}")
        return Decoder(
            self.kind,
            vocabulary,
            self.width,
            self.depth,
            self.heads,
            self.context,
            is_chunked=self.chunked_loss,
        )

    def _count_tokens(self) -> int | None:
        if self._has_tokens():
            return TokenFile(str(self.file), self.dtype).vocabulary
        return BYTES + 1 if self.tokenizer is None else count_tokens(load_tokenizer(self.tokenizer))

    def _has_tokens(self) -> bool:
        return self.file is not None and (self.dtype is not None or Path(self.file).is_dir())

    def layout(self) -> Layout:
        return Layout(blocks=("blocks",))

    def dataset(self, split: str) -> PackedDocuments | Tokens:
        if self._has_tokens():
            if self.tokenizer is not None:
                raise TaskError(f"{self.file} has tokens already; leave out tokenizer={self.tokenizer!r}")
            part = (TRAINING_SHARE, 1.0) if split == "validation" else (0.0, TRAINING_SHARE)
            windows = DocumentWindows(str(self.file), self.context, part, self.dtype)
            windows.limit = self.vocabulary if windows.vocabulary is None else None
            return windows
        documents = read_documents(self.file, self.tokenizer)
        chosen = [
            document
            for number, document in enumerate(documents)
            if (number % EVERY == 0) == (split == "validation")
        ]
        if not chosen:
            raise DataError(
                f"{self.file} has {len(documents)} document{'s' * (len(documents) != 1)}, too few: one of"
                f" {EVERY} is for validation; each line is one"
            )
        return PackedDocuments(chosen, self.context)

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        inputs = batch["tokens"], batch["documents"], batch["positions"]
        return (*inputs, batch["targets"]) if self.chunked_loss else inputs

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        if output.shape == batch["targets"].shape:  # losses, by CrossEntropyHead
            return output
        return F.cross_entropy(output.transpose(1, 2), batch["targets"], reduction="none")

    def weights(self, batch: Any) -> Tensor:
        return (batch["documents"] >= 0).float()

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch["targets"]}
