"""A GPT or a Llama-like model on documents of text: --set file=PATH, --set tokenizer=tokenizer.json."""

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
from paceline.errors import DataError, TaskError
from paceline.tasks.decoder import Decoder
from paceline.tasks.text import read

BYTES, END = 256, 256  # tokens of documents without a tokenizer: bytes, and the end of a document
EVERY = 10  # one of so many documents is for validation


@lru_cache
def read_documents(file: str | None, tokenizer: str | None) -> list[Tensor]:
    """Return the documents of a file as token numbers: its lines, or the key "text" of JSON lines.

    Raises DataError and TaskError.
    """
    content = bytes(read(file).numpy())
    try:
        texts = content.decode().splitlines()
        if file is not None and file.endswith(".jsonl"):
            texts = [json.loads(text)["text"] for text in texts if text.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} has a document that cannot be read ({error!r}); expected UTF-8 text, or JSON lines with"
            ' the key "text"'
        ) from error
    texts = [text for text in texts if text.strip()]
    if tokenizer is None:
        return [torch.tensor([END, *text.encode()]) for text in texts]
    encodings = load_tokenizer(tokenizer).encode_batch(texts)
    return [torch.from_numpy(np.array(encoding.ids, dtype=np.int64)) for encoding in encodings]


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


class Lm(Task):
    """Next-token prediction on packed documents, by a model like GPT-2 or Llama."""

    file: str | None = None  # text, whose lines are documents, or JSON lines with the key "text"
    tokenizer: str | None = None  # a tokenizer.json; None: bytes
    kind: Literal["gpt", "llama"] = "llama"
    width: int = 128  # features of each token
    depth: int = 4  # number of blocks
    heads: int = 4  # attention heads of each block
    context: int = 256  # positions of a sample
    vocabulary: int | None = None  # number of tokens of the model; None: as many as the tokenizer has

    def model(self) -> nn.Module:
        tokens = BYTES + 1 if self.tokenizer is None else load_tokenizer(self.tokenizer).get_vocab_size()
        vocabulary = self.vocabulary or tokens
        if vocabulary < tokens:
            raise TaskError(
                f"the tokenizer has {tokens} tokens, more than vocabulary={vocabulary}; use at least {tokens}"
            )
        if self.width % (2 * self.heads):
            raise TaskError(f"width={self.width} must be a multiple of 2 × heads = {2 * self.heads}")
        return Decoder(self.kind, vocabulary, self.width, self.depth, self.heads, self.context)

    def layout(self) -> Layout:
        return Layout(blocks=("blocks",))

    def dataset(self, split: str) -> PackedDocuments:
        documents = read_documents(self.file, self.tokenizer)
        chosen = [
            document
            for number, document in enumerate(documents)
            if (number % EVERY == 0) == (split == "validation")
        ]
        return PackedDocuments(chosen, self.context)

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return batch["tokens"], batch["documents"], batch["positions"]

    def loss(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.transpose(1, 2), batch["targets"], reduction="none")

    def weights(self, batch: Any) -> Tensor:
        return (batch["documents"] >= 0).float()

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": output.argmax(-1) == batch["targets"]}
