"""The files of a folder of tokens."""

from typing import Any

FORMAT = "paceline-tokens-1"
META = "tokens.json"  # dtype, number of tokens, documents and vocabulary
TOKENS = "tokens.bin"  # of all documents, one after another
DOCUMENTS = "documents.bin"  # the position after each document, uint64
TOKENIZER = "tokenizer.json"  # a copy of the tokenizer that was used
DTYPES = {"uint8": "<u1", "uint16": "<u2", "uint32": "<u4"}


def count_tokens(tokenizer: Any) -> int:
    """Return how many tokens a model needs for a tokenizer of Hugging Face: one more than its largest number.

    Added tokens may leave numbers out.
    """
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
