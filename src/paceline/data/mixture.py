"""Mixture: several datasets in fixed shares, in an order that has a closed form."""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from paceline.data.mixture_schedule import MixtureSchedule, normalize
from paceline.data.order import Numbers, Order, SampleOrder
from paceline.distributed.rng import derive_seed
from paceline.errors import DataError
from paceline.spec import Loading
from paceline.task import MapDataset


class Mixture:
    """Several datasets that a training reads in fixed shares.

        class Both(paceline.Task):
            def dataset(self, split):
                code, prose = Tokens("code/", 512), Tokens("prose/", 512)
                return Mixture({code: 0.7, prose: 0.3}) if split == "train" else prose

    After every 1,000 samples, the number of samples of each source is within 1 of its share. Within each
    source the order is that of `data.shuffle`. All of it is a function of the seed and the number of the
    sample, so it is exact for any ranks and workers, and after a resume. `paceline resume --weights` changes
    the weights from the next step on.

    weights: of each dataset, at least 0; their sum need not be 1. A dataset that is not hashable is given
    as a pair: Mixture([(a, 0.7), (b, 0.3)]). Each share must be 0 or at least 1/1000.
    once: the datasets that end when all their samples were read in an epoch; the others then share their
    weight. All other datasets start again, in another order.

    An epoch ends when the datasets of `once` are used up; without any, when each had all its samples.
    `len()` and `[i]` are those of the datasets one after another, so that an evaluation has each sample once.

    Raises DataError.
    """

    def __init__(
        self,
        weights: Mapping[Any, float] | Sequence[tuple[Any, float]],
        once: Collection[Any] = (),
    ):
        pairs = list(weights.items()) if isinstance(weights, Mapping) else list(weights)
        if not pairs:
            raise DataError("a mixture requires at least one dataset")
        self.sources: list[MapDataset] = [source for source, _ in pairs]
        self.weights = [float(weight) for _, weight in pairs]
        normalize(self.weights, len(pairs))
        self.lengths = [len(source) for source in self.sources]
        if empty := [at for at, length in enumerate(self.lengths) if not length]:
            raise DataError(f"dataset {empty[0]} of the mixture is empty")
        self.once = [at for at, source in enumerate(self.sources) if any(source is each for each in once)]
        if len(self.once) != len(list(once)):
            raise DataError("once has a dataset that is not in the mixture")
        if unread := [at for at in self.once if not self.weights[at]]:
            raise DataError(f"dataset {unread[0]} of the mixture is in once, but its weight is 0")
        self._begins = [0, *accumulate(self.lengths)]

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        source = bisect_right(self._begins, index) - 1
        return self.sources[source][index - self._begins[source]]

    def make_order(self, seed: int, loading: Loading) -> Order:
        """Return the order in which a training reads the samples. Raises DataError."""
        changes = [(change.first, change.weights) for change in loading.weights]
        return MixtureOrder(self.lengths, [(0, self.weights), *changes], self.once, seed, loading)


class MixtureOrder:
    """The order of the samples of a mixture. Indices are those of `Mixture`.

    weights: (first sample, weight of each source) for each change, beginning with sample 0.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        weights: Sequence[tuple[int, Sequence[float]]],
        once: Sequence[int],
        seed: int,
        loading: Loading,
    ):
        self.schedule = MixtureSchedule(lengths, weights, once)
        self._orders = [
            SampleOrder(length, derive_seed(seed, "source", at), loading.shuffle, loading.window)
            for at, length in enumerate(lengths)
        ]
        self._begins = [0, *accumulate(lengths)]

    @property
    def epoch_samples(self) -> int:
        return self.schedule.epoch_samples

    def indices(self, numbers: Numbers) -> Numbers:
        """Return the indices of the samples with these numbers, int64 of shape (n,)."""
        sources, draws = self.schedule.locate(numbers)
        indices = np.empty_like(sources)
        for source in np.unique(sources).tolist():
            here = sources == source
            indices[here] = self._begins[source] + self._orders[source].indices(draws[here])
        return indices

    def describe(self, samples: int) -> str:
        """Return what the order of the first samples depends on, besides the seed."""
        schedule = self.schedule
        parts = [
            f"{', '.join(map(str, segment.shares))} from sample {segment.first:,}"
            for segment in schedule.segments
            if segment.first < max(1, samples)
        ]
        once = f", once {schedule.once}" if schedule.once else ""
        return (
            f"{self._orders[0].describe(samples)}, mixture of {schedule.lengths}{once} by {'; '.join(parts)}"
        )
