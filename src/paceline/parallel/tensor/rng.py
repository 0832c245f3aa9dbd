"""Random draws on ranks that share a layer: alike for what each of them has whole, apart for what each has a part of.

All ranks of a tensor axis start a micro-batch with one stream. A module that drops parts draws one number from it, the same on each
rank, and goes on in a stream that is made of this number and its rank: so the shared stream stays the same on all ranks, and whatever
puts that back (recomputation) puts back all.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from paceline.distributed.rng import derive_seed, seed_torch
from paceline.parallel.tensor.find_sequence_parallel import SequenceParallelPlan


def plan_dropout_rng(
    features: Sequence[tuple[str, bool]], between: SequenceParallelPlan | None
) -> tuple[dict[str, bool], list[str]]:
    """Of modules that draw at random whether they do so for parts, by the draws of a pass in their order: of `features`, or of activations.
    And modules that do both: they draw for parts as if those were whole."""
    others = between.draws if between is not None else features
    ways: dict[str, set[bool]] = {}
    for (name, of_features), (_, of_activations) in zip(features, others, strict=True):
        ways.setdefault(name, set()).add(of_features or of_activations)
    return {name: found == {True} for name, found in ways.items()}, [
        name for name, found in ways.items() if len(found) > 1
    ]


def install_dropout_rng(
    model: nn.Module, draws: Mapping[str, bool], group: dist.ProcessGroup, device_type: str
) -> None:
    if not any(draws.values()):
        return
    streams = _DropoutStreams(group.rank(), device_type)
    for name, apart in draws.items():
        module = model.get_submodule(name)
        module.forward = _with_stream(module, module.forward, streams.own if apart else streams.shared)


def _with_stream(
    module: nn.Module,
    inner: Callable[..., Any],
    stream: Callable[[], contextlib.AbstractContextManager[None]],
) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return inner(*args, **kwargs)
        with stream():
            return inner(*args, **kwargs)

    return forward


class _DropoutStreams:
    def __init__(self, rank: int, device_type: str):
        cuda = torch.cuda.default_generators[torch.cuda.current_device()] if device_type == "cuda" else None
        self.rank, self.device = rank, torch.device(device_type)
        self.generators = [
            generator for generator in (torch.default_generator, cuda) if generator is not None
        ]
        self.put_by: list[Tensor] | None = None  # states of the shared stream, while the own one runs

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        if self.put_by is not None:
            yield
            return
        with (
            _disable_current_modes()
        ):  # the stream is real, also in a step without numbers (that of paceline comms)
            seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
            self.put_by = self._states()
            seed_torch(derive_seed(seed, "tp", self.rank), self.device)
        try:
            yield
        finally:
            self._set(self.put_by)
            self.put_by = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Inside of what runs in the own stream."""
        if self.put_by is None:
            yield
            return
        own = self._states()
        self._set(self.put_by)
        self.put_by = None
        try:
            yield
        finally:
            self.put_by = self._states()
            self._set(own)

    def _states(self) -> list[Tensor]:
        with _disable_current_modes():
            return [generator.get_state() for generator in self.generators]

    def _set(self, states: list[Tensor]) -> None:
        with _disable_current_modes():
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
