"""CachedDataset: a dataset whose samples are read once, and then from a store that processes share."""

from typing import Any

from paceline.data.cache.encoding import decode, encode
from paceline.data.cache.raw import RawDataset
from paceline.data.cache.store import SampleStore
from paceline.distributed.rng import rng_states, watch_rng_state
from paceline.errors import DataError
from paceline.task import MapDataset


class CachedDataset:
    """A dataset that stores each sample when it is first read, if there is room.

    raw: the dataset as one of bytes, if the store has the bytes; None: it has the samples themselves. These
    must not depend on random numbers, which would be the same in each epoch.
    """

    def __init__(self, dataset: MapDataset, store: SampleStore, raw: RawDataset | None):
        self.dataset, self.store, self.raw = dataset, store, raw

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        content = self.store.read(index)
        if self.raw is not None:
            if content is None:
                content = self.raw.read_raw(index)
                self.store.write(index, content)
            return self.raw.decode_raw(index, content)
        if content is not None:
            return decode(content)
        sample = self._read_without_random_numbers(index)
        self.store.write(index, encode(sample))
        return sample

    def fill(self, index: int) -> None:
        """Store a sample, unless it is stored."""
        if index in self.store:
            return
        if self.raw is not None:
            self.store.write(index, self.raw.read_raw(index))
        else:
            self.store.write(index, encode(self._read_without_random_numbers(index)))

    def _read_without_random_numbers(self, index: int) -> Any:
        before = rng_states()
        with watch_rng_state() as was_state_read:
            sample = self.dataset[index]
        if was_state_read() or rng_states() != before:
            raise DataError(
                "[i] of the dataset draws random numbers, which data.cache would repeat in each epoch; draw"
                " them in Task.transform, or use data.cache=off"
            )
        return sample
