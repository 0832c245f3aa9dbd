"""Stream: samples that can only be read one after another."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paceline.errors import DataError

END = object()


class Stream:
    """The samples of an iterator, such as a `torch.utils.data.IterableDataset` or a generator function.

        class Logs(paceline.Task):
            def dataset(self, split):
                return Stream(read_lines, length=1_000_000, decode=json.loads)  # def read_lines(): yield …

    Sample i is the i-th that the iterator yields, so it must yield the same samples each time it starts. Then
    each sample is read once by one rank, in the order of the iterator, for any number of ranks, workers and
    micro-batches, and after a resume. The price is that every process that reads goes through the whole
    iterator, and keeps its own samples: only `decode` is divided among them. A resume goes through the
    samples before it; `skipped` and `skipped_s` count what that took.

    It requires data.shuffle=none: shuffle in the iterator, with a generator that is seeded when it starts.

    source: an iterable, or a function that returns one.
    length: the number of samples of an epoch, after which the iterator starts again. It may yield more.
    decode: makes what `[i]` returns of a sample. It is called only for the samples that this process needs.

    Raises DataError if the iterator ends before `length`.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[[], Iterable[Any]],
        length: int,
        decode: Callable[[Any], Any] | None = None,
    ):
        if length < 1:
            raise DataError(f"the length of a stream must be at least 1 sample, got {length}")
        self.source, self.length, self.decode = source, length, decode
        self.skipped, self.skipped_s = 0, 0.0
        self._iterator: Iterator[Any] | None = None
        self._next = 0  # number of the sample that the iterator yields next

    def __getstate__(self) -> dict[str, Any]:  # for spawned processes: iterators cannot be sent
        return {"source": self.source, "length": self.length, "decode": self.decode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Stream.__init__(self, **state)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.length:
            raise IndexError(index)
        if self._iterator is None or index < self._next:
            self._iterator = iter(self.source() if callable(self.source) else self.source)
            self._next = 0
        if index > self._next:
            self._skip(index - self._next)
        sample = self._advance()
        return sample if self.decode is None else self.decode(sample)

    def _skip(self, count: int) -> None:
        begin = time.perf_counter()
        for _ in range(count):
            self._advance()
        self.skipped += count
        self.skipped_s += time.perf_counter() - begin

    def _advance(self) -> Any:
        assert self._iterator is not None
        sample = next(self._iterator, END)
        if sample is END:
            self._iterator = None
            raise DataError(
                f"the stream ended after {self._next:,} of {self.length:,} samples; specify"
                f" length={self._next}"
            )
        self._next += 1
        return sample
