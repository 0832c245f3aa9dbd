"""Which source of a mixture gives which sample: a function of the number of the sample, in closed form."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from paceline.data.order import Numbers
from paceline.errors import DataError

BLOCK = 1000  # samples after which the counts are within 1 of their shares


@dataclass(frozen=True)
class Shares:
    """The shares of the sources, as exact sums.

    borders  the sum of the shares up to each source, times `total`
    """

    borders: tuple[int, ...]
    total: int

    @classmethod
    def build(cls, weights: Sequence[Fraction]) -> "Shares":
        """Return the shares of these weights, which need not add up to 1."""
        scale = math.lcm(*(weight.denominator for weight in weights))
        borders = tuple(accumulate(int(weight * scale) for weight in weights))
        return cls(borders, borders[-1])

    def __getitem__(self, source: int) -> Fraction:
        before = self.borders[source - 1] if source else 0
        return Fraction(self.borders[source] - before, self.total)

    def __iter__(self) -> Iterator[Fraction]:
        return (self[source] for source in range(len(self.borders)))

    def count(self, source: int, blocks: int) -> int:
        """Return how many samples of the first blocks of a segment come from a source.

        This is the difference of the sums of the shares up to the source, times the number of samples,
        rounded. So the counts add up, and each is within 1 of its share. None decreases from block to block,
        because each share is 0 or at least 1/BLOCK.
        """
        before = self._round(self.borders[source - 1], blocks) if source else 0
        return self._round(self.borders[source], blocks) - before

    def counts(self, blocks: int) -> list[int]:
        """Return the count of each source."""
        ends = [self._round(border, blocks) for border in self.borders]
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def _round(self, border: int, blocks: int) -> int:
        return (2 * border * BLOCK * blocks + self.total) // (2 * self.total)


@dataclass(frozen=True)
class Segment:
    """A range of samples with constant shares.

    first   number of its first sample
    shares  of the sources; each is 0 or at least 1/BLOCK
    drawn   samples that each source gave before
    """

    first: int
    shares: Shares
    drawn: tuple[int, ...]


class MixtureSchedule:
    """Which source gives which sample, for any number of samples.

    lengths: number of samples of each source.
    once: the sources that end when all their samples were drawn; the others then share its weight in
    proportion to theirs. The other sources start again.
    weights: (first sample, weight of each source) for each change, beginning with sample 0.

    An epoch ends when the sources of `once` are used up; without any, when each source had all its samples.

    Raises DataError for impossible weights, and for changes of weights together with `once`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        weights: Sequence[tuple[int, Sequence[float]]],
        once: Sequence[int] = (),
    ):
        self.lengths, self.once = tuple(lengths), tuple(once)
        changes = [(first, normalize(each, len(lengths))) for first, each in weights]
        firsts = [first for first, _ in changes]
        if firsts[0] != 0 or any(a >= b for a, b in pairwise(firsts)):
            raise DataError(f"weights must change at growing numbers of samples from 0 on, got {firsts}")
        if once and len(changes) > 1:
            raise DataError(
                "weights cannot change in a mixture with sources that are read once; start a new run, or let"
                " all sources repeat"
            )
        self.segments = self._find_segments_once(changes[0][1]) if once else _chain(changes)
        first_shares = changes[0][1]
        if once:
            end = self.segments.pop()  # the beginning of the next epoch
            self.epoch_samples, self._drawn_per_epoch = end.first, end.drawn
        else:
            ends = [
                find_draw(first_shares, source, length - 1) + 1
                for source, length in enumerate(lengths)
                if first_shares[source]
            ]
            self.epoch_samples = max(ends)

    def _find_segments_once(self, shares: Shares) -> list[Segment]:
        """Return the segments of an epoch, each of which ends with a source, and the end of the epoch."""
        drawn, first, left = tuple(0 for _ in self.lengths), 0, list(self.once)
        segments = []
        while left:
            segment = Segment(first, shares, drawn)
            segments.append(segment)
            ends = {
                source: find_draw(shares, source, self.lengths[source] - drawn[source] - 1) + 1
                for source in left
            }
            source = min(ends, key=lambda each: (ends[each], each))
            drawn = tuple(a + b for a, b in zip(drawn, count_until(shares, ends[source]), strict=True))
            first += ends[source]
            left.remove(source)
            rest = [Fraction(0) if at == source else share for at, share in enumerate(shares)]
            if any(rest):
                shares = Shares.build(rest)
        return [*segments, Segment(first, shares, drawn)]

    def locate(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the source of each of these samples, and how many samples it gave before; both int64.

        numbers: counted over all epochs.
        """
        numbers = numbers.astype(np.int64)
        if self.once:
            epochs, numbers = np.divmod(numbers, self.epoch_samples)
        else:
            epochs = np.zeros_like(numbers)
        sources, draws = np.empty_like(numbers), np.empty_like(numbers)
        firsts = np.array([segment.first for segment in self.segments])
        which = np.searchsorted(firsts, numbers, side="right") - 1
        blocks, offsets = np.divmod(numbers - firsts[which], BLOCK)
        for at, block in np.unique(np.stack([which, blocks]), axis=1).T.tolist():
            segment = self.segments[at]
            here = (which == at) & (blocks == block)
            arranged, ranks = _arrange_block(segment.shares, block)
            sources[here] = arranged[offsets[here]]
            draws[here] = ranks[offsets[here]] + np.array(segment.drawn, dtype=np.int64)[sources[here]]
        if self.once:
            draws += epochs * np.array(self._drawn_per_epoch, dtype=np.int64)[sources]
        return sources, draws


def normalize(weights: Sequence[float], sources: int) -> Shares:
    """Return the exact shares of decimal weights. Raises DataError."""
    if len(weights) != sources:
        raise DataError(f"a mixture of {sources} sources requires as many weights, got {list(weights)}")
    if not all(np.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise DataError(f"weights must be at least 0, and one above it, got {list(weights)}")
    exact = [Fraction(str(float(weight))) for weight in weights]
    shares = Shares.build(exact)
    for weight, share in zip(weights, shares, strict=True):
        if 0 < share < Fraction(1, BLOCK):
            raise DataError(
                f"weight {weight} is a share of {float(share):.2g}; a share must be 0 or at least 1/{BLOCK}:"
                " concatenate small sources"
            )
    return shares


def _chain(changes: Sequence[tuple[int, Shares]]) -> list[Segment]:
    segments = [Segment(0, changes[0][1], tuple(0 for _ in changes[0][1].borders))]
    for first, shares in changes[1:]:
        last = segments[-1]
        counts = count_until(last.shares, first - last.first)
        drawn = tuple(a + b for a, b in zip(last.drawn, counts, strict=True))
        segments.append(Segment(first, shares, drawn))
    return segments


def count_until(shares: Shares, samples: int) -> tuple[int, ...]:
    """Return how many of the first samples of a segment come from each source."""
    blocks, rest = divmod(samples, BLOCK)
    counts = shares.counts(blocks)
    if not rest:
        return tuple(counts)
    inside = np.bincount(_arrange_block(shares, blocks)[0][:rest], minlength=len(counts)).tolist()
    return tuple(count + more for count, more in zip(counts, inside, strict=True))


def find_draw(shares: Shares, source: int, draw: int) -> int:
    """Return the number of the sample of a segment at which a source gives its draw-th sample, from 0 on."""
    low, high = 0, 1
    while shares.count(source, high) <= draw:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if shares.count(source, middle) <= draw else (low, middle)
    sources, ranks = _arrange_block(shares, low)
    return low * BLOCK + int(np.flatnonzero((sources == source) & (ranks == draw))[0])


@lru_cache(maxsize=64)
def _arrange_block(shares: Shares, block: int) -> tuple[Numbers, Numbers]:
    """Return the source of each sample of a block, and how many samples it gave before in the segment.

    Sample j of the n of a source belongs at (j + ½)·BLOCK/n, so that each source is spread evenly.
    """
    before, after = shares.counts(block), shares.counts(block + 1)
    counts = np.array(after) - np.array(before)
    sources = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts.tolist()])
    places = (2 * ranks + 1) * 10**9 // counts[sources]  # integers, so that no machine rounds differently
    order = np.argsort(places, kind="stable")
    sources = sources[order]
    return sources, ranks[order] + np.array(before, dtype=np.int64)[sources]
