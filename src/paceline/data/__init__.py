"""Samples: their sources, their order, loading them in workers, and fake batches without values.

Order and random streams are functions of (seed, position). Files here know nothing of a plan except the
rank's share of a batch. Sources for tasks:

    Folder          images in a folder for each class, or such a folder packed by `paceline pack`
    Mixture         several datasets in fixed shares
    Shards          samples in tar files, as WebDataset names them
    Stream          samples of an iterator, one after another
    TokenDocuments  the documents of a folder of tokens
    Tokens          windows of memory-mapped tokens
    decode_image    the pixels of an image file
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.data.folder import Folder as Folder
    from paceline.data.images import decode_image as decode_image
    from paceline.data.mixture import Mixture as Mixture
    from paceline.data.shards.shards import Shards as Shards
    from paceline.data.stream import Stream as Stream
    from paceline.data.tokens import TokenDocuments as TokenDocuments
    from paceline.data.tokens import Tokens as Tokens

# Imported on first use, because some of them need torch.
_PLACES = {
    "Folder": "folder",
    "Mixture": "mixture",
    "Shards": "shards.shards",
    "Stream": "stream",
    "TokenDocuments": "tokens",
    "Tokens": "tokens",
    "decode_image": "images",
}
__all__ = ["Folder", "Mixture", "Shards", "Stream", "TokenDocuments", "Tokens", "decode_image"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'paceline.data' has no attribute {name!r}")
    return getattr(import_module(f"paceline.data.{_PLACES[name]}"), name)
