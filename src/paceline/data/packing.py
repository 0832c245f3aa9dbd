"""Pack documents into samples of one length, with attention that stays within each document."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.data.order import shuffle
from paceline.errors import DataError

WINDOW = 65_536  # pieces that are packed together
PADDING = -1  # document of positions without a token
Numbers = npt.NDArray[np.int64]


class Documents(Protocol):
    """Documents by index, each the numbers of its tokens in one dimension."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class PackedDocuments:
    """Samples of `length` positions, each with one or more documents for next-token prediction.

        PackedDocuments(documents, 1024)[0]  # a dict of int64 tensors of shape (1024,)

    tokens     of the documents, one after the other; 0 for padding
    targets    the next token of the same document; 0 for padding
    documents  the number of the document in the sample: 0, 1, …; -1 for padding
    positions  in the document, from 0

    A document of n tokens takes n - 1 positions. If these are more than `length`, it is cut into pieces, each
    with attention and positions of its own; no target is lost. Documents with fewer than two tokens have no
    target and are left out.

    The packing is a pure function of the lengths, `length` and `window`. Pieces are taken in a fixed random
    order, `window` at a time, and packed by best-fit decreasing: each piece, the longest first, goes into the
    fullest sample that has room (Johnson, Near-optimal bin packing algorithms, 1973).

    documents: with `len()` and `[i]`, each a tensor, array or list of token numbers
    length: positions of a sample
    lengths: the numbers of tokens of all documents; None: all documents are read to count them
    window: pieces that are packed together. A start takes about 2 µs and 40 bytes for each piece

    Raises DataError if no document has two tokens.
    """

    packs_documents = True

    def __init__(
        self,
        documents: Documents,
        length: int,
        lengths: Sequence[int] | Numbers | None = None,
        window: int = WINDOW,
    ):
        if length < 1 or window < 1:
            raise DataError(f"length and window must be at least 1, got length={length} and window={window}")
        if lengths is None:
            lengths = [len(documents[index]) for index in range(len(documents))]
        if len(lengths) != len(documents):
            raise DataError(
                f"{len(lengths):,} lengths for {len(documents):,} documents; specify one for each document"
            )
        self._source, self._length = documents, length
        document, begin, size = _cut(np.asarray(lengths, dtype=np.int64) - 1, length)
        if not len(size):
            raise DataError(f"none of the {len(documents):,} documents has two tokens; there is no target")
        order = shuffle(np.arange(len(size)), len(size), 0)
        packs: list[Numbers] = []
        for first in range(0, len(order), window):
            chosen = order[first : first + window]
            packs += [chosen[pack] for pack in pack_best_fit(size[chosen], length)]
        pieces = np.concatenate(packs)
        self._document, self._begin, self._size = document[pieces], begin[pieces], size[pieces]
        self._ends = np.cumsum([len(pack) for pack in packs])

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        last = int(self._ends[index])
        first = int(self._ends[index - 1]) if index % len(self) else 0
        tokens, targets, positions = (torch.zeros(self._length, dtype=torch.int64) for _ in range(3))
        documents = torch.full((self._length,), PADDING)
        at = 0
        for number, piece in enumerate(range(first, last)):
            begin, size = int(self._begin[piece]), int(self._size[piece])
            document = torch.as_tensor(self._source[int(self._document[piece])])
            text = document[begin : begin + size + 1].long()
            if len(text) != size + 1:
                raise DataError(
                    f"document {int(self._document[piece])} has {len(document):,} tokens, not as many as its"
                    " length says; specify the lengths of these documents"
                )
            place = slice(at, at + size)
            tokens[place], targets[place] = text[:-1], text[1:]
            documents[place], positions[place] = number, torch.arange(size)
            at += size
        positions[at:] = torch.arange(self._length - at)
        return {"tokens": tokens, "targets": targets, "documents": documents, "positions": positions}

    @property
    def filled(self) -> float:
        """The share of positions that have a token."""
        return float(self._size.sum()) / (len(self) * self._length)


def _cut(sizes: Numbers, length: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return document, first token and size of pieces of at most `length` positions."""
    counts = np.maximum(-(-sizes // length), 0)
    document = np.repeat(np.arange(len(sizes)), counts)
    begin = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * length
    return document, begin, np.minimum(sizes[document] - begin, length)


def pack_best_fit(sizes: Numbers, capacity: int) -> list[list[int]]:
    """Return the indices of the sizes in each pack, by best-fit decreasing. Sizes are at most `capacity`."""
    packs: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # packs by their room
    rooms = 0  # bit r is set if a pack has the room r
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            pack = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, len(packs)
            packs.append([])
        packs[pack].append(index)
        if left := room - size:
            with_room.setdefault(left, []).append(pack)
            rooms |= 1 << left
    return packs


def isolate_documents(documents: Tensor, causal: bool = True) -> Tensor:
    """Return the mask of attention within documents: True where a query may read a key.

    documents: numbers of shape (batch, length), as in `PackedDocuments`. The mask has the shape (batch, 1,
    length, length), for `scaled_dot_product_attention(attn_mask=…)` and models of transformers. Padding
    attends to padding. causal: a query reads only keys up to its own position.
    """
    mask = documents[:, :, None] == documents[:, None, :]
    if causal:
        count = torch.arange(documents.shape[1], device=documents.device)
        mask = mask & (count[:, None] >= count)
    return mask[:, None]
