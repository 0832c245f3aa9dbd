"""Random numbers on ranks that share a layer: equal for whole tensors, independent for parts.

All ranks of a tensor axis start a micro-batch with the same shared stream. A module that draws for parts
takes one number from it, the same on each rank, and continues in a private stream seeded by this number and
the rank. So the shared stream stays equal on all ranks, and restoring it (recomputation) restores both.
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
    features: Sequence[tuple[str, bool]], sequence: SequenceParallelPlan | None
) -> tuple[dict[str, bool], list[str]]:
    """Return whether each module that draws random numbers draws for parts, and the modules that do both.

    features: the draws of a pass in order, as (module, whether it draws for a part of the features).
    sequence: has the same draws, with whether they are for a part of the activations.

    Modules that draw both for parts and for whole tensors use the shared stream for both.
    """
    activations = sequence.draws if sequence is not None else features
    kinds: dict[str, set[bool]] = {}
    for (name, is_feature_part), (_, is_activation_part) in zip(features, activations, strict=True):
        kinds.setdefault(name, set()).add(is_feature_part or is_activation_part)
    return {name: kind == {True} for name, kind in kinds.items()}, [
        name for name, kind in kinds.items() if len(kind) > 1
    ]


def install_dropout_rng(
    model: nn.Module, draws: Mapping[str, bool], group: dist.ProcessGroup, device_type: str
) -> None:
    """Let modules draw from the private stream of this rank (True in `draws`) or from the shared one."""
    if not any(draws.values()):
        return
    streams = _DropoutStreams(group.rank(), device_type)
    for name, is_private in draws.items():
        module = model.get_submodule(name)
        module.forward = _with_stream(
            module, module.forward, streams.private if is_private else streams.shared
        )


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
    """The shared stream of a tensor axis and the private stream of this rank."""

    def __init__(self, rank: int, device_type: str):
        cuda = torch.cuda.default_generators[torch.cuda.current_device()] if device_type == "cuda" else None
        self.rank, self.device = rank, torch.device(device_type)
        self.generators = [
            generator for generator in (torch.default_generator, cuda) if generator is not None
        ]
        # states of the shared stream while the private one is active
        self.shared_states: list[Tensor] | None = None

    @contextlib.contextmanager
    def private(self) -> Iterator[None]:
        if self.shared_states is not None:
            yield
            return
        # The stream is real also in a step without values, as in `paceline comms`.
        with _disable_current_modes():
            seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
            self.shared_states = self._states()
            seed_torch(derive_seed(seed, "tp", self.rank), self.device)
        try:
            yield
        finally:
            self._set_states(self.shared_states)
            self.shared_states = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Return to the shared stream inside of a module that uses the private one."""
        if self.shared_states is None:
            yield
            return
        private_states = self._states()
        self._set_states(self.shared_states)
        self.shared_states = None
        try:
            yield
        finally:
            self.shared_states = self._states()
            self._set_states(private_states)

    def _states(self) -> list[Tensor]:
        with _disable_current_modes():
            return [generator.get_state() for generator in self.generators]

    def _set_states(self, states: list[Tensor]) -> None:
        with _disable_current_modes():
            for generator, state in zip(self.generators, states, strict=True):
                generator.set_state(state)
