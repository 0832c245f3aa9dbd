"""Context parallelism: the blocks of a model run on slices of the sequence, and attention goes round the ranks that share it.

What comes before the blocks and after them runs on the whole sequence on each of these ranks, so that positions are right and the
loss sees the whole output. At the first block with attention the arguments are cut, after the last one the output is gathered.

Gradients: the loss is the same on the ranks that share a sequence, and the engines average over them. So a rank passes the gradient
of its own slice of the output back, times their number: what it adds up in blocks, and before them, is its part of a sum, whose
average is the whole; what comes after the blocks has the whole gradient on each rank, and averages to it.
"""

import contextlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map, tree_unflatten

from paceline.data.fake import is_close
from paceline.data.loader import FailedSample, Samples, open_dataset
from paceline.distributed.mesh import build_cp_mesh
from paceline.distributed.rng import derive_seed, seed_torch
from paceline.errors import PlanError
from paceline.parallel.blocks import find_blocks
from paceline.parallel.context.find_splits import IdentityAttention, SequenceSplits, find_sequence_splits
from paceline.parallel.context.ring_attention import (
    GatherSlices,
    RingAttention,
    no_dropout_message,
    rank_positions,
    replace_attention,
)
from paceline.parallel.forward import call_model
from paceline.parallel.pytree import flatten
from paceline.plan.plan import Plan, ResolvedPlan
from paceline.spec import Spec
from paceline.task import Task, read_layout
from paceline.user_code import UserCode

RTOL = {torch.float64: 1e-8}  # of a model's output under cp to its output without; roundoff only
REDUCED_RTOL = 1e-2
TRIAL_SAMPLES = 2  # samples of which is found out how to cut


def install_context_parallel(
    model: nn.Module, units: list[nn.Module], plan: ResolvedPlan, device: torch.device
) -> None:
    """Let the forward of `model` cut the sequence at `units`, its blocks."""
    ContextParallel(model, units, plan, device).learn_first()


def _take_few_samples(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The first of a batch, where all tensors are as long as the batch."""
    leaves, structure = flatten((args, kwargs))
    lengths = {leaf.size(0) if leaf.dim() else 0 for leaf in leaves if isinstance(leaf, Tensor)}
    if len(lengths) != 1:
        return args, kwargs
    few: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(
        [leaf[:TRIAL_SAMPLES] if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
    )
    return few


@dataclass(frozen=True)
class SplitTrial:
    """What is found out of a call of a block."""

    stage: int  # of a pipeline
    unit: str
    length: int | None  # of the sequences that attention runs over in it
    cuts: SequenceSplits | None


class ContextParallel:
    """Cuts the arguments of blocks, and gathers what the last one makes of them."""

    def __init__(self, model: nn.Module, units: list[nn.Module], plan: ResolvedPlan, device: torch.device):
        self.model, self.plan, self.device = model, plan, device
        self.kind = type(model).__name__
        self.units = {name: module for name, module in model.named_modules() if module in units}
        self.names = {
            name: f"{name} ({type(module).__name__})" for name, module in self.units.items()
        }  # before engines change classes
        self.mesh = build_cp_mesh(plan, device)
        self.ring = RingAttention(self.mesh, plan)
        self.learning = False
        self.stage = 0  # of a pipeline, that runs
        self.inside: Container[int] = ()  # stages that begin with slices
        self.known: int | None = None  # length of the sequences that a pass is tried with, once it is known
        self.trials: list[SplitTrial] = []  # of one pass, in the order of calls
        self.cuts: dict[
            nn.Module, list[SequenceSplits]
        ] = {}  # of the units from the first with attention to the last
        self.first: nn.Module | None = None
        self.last: nn.Module | None = None
        self.length = 0  # of the sequences of the present pass
        self.leaving: SequenceSplits | None = None
        self.streams: list[tuple[torch.Generator, Tensor]] = []
        for name, unit in self.units.items():
            self._follow(name, unit)

    def _follow(self, name: str, unit: nn.Module) -> None:
        inner = unit.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.learning:
                length, cuts = find_sequence_splits(unit, inner, (args, kwargs), self.known)
                self.known = self.known or length
                self.trials.append(SplitTrial(self.stage, name, length, cuts))
            if self.learning or unit not in self.cuts:
                return inner(*args, **kwargs)
            with replace_attention(
                self.ring
            ):  # here and not around the call, since recomputation calls what is here again
                return inner(*args, **kwargs)

        unit.forward = forward
        unit.register_forward_pre_hook(self._enter, with_kwargs=True)
        unit.register_forward_hook(self._leave)

    def learn_first(self) -> None:
        """Before the first pass with arguments of one kind, find out where and how to cut, and that it makes no difference."""
        inner = self.model.forward
        known: list[TreeSpec] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            _, structure = flatten((args, kwargs))
            if structure not in known:
                few, named = _take_few_samples(args, kwargs)
                self.learn(lambda: inner(*few, **named))
                known.append(structure)
            return inner(*args, **kwargs)

        self.model.forward = forward

    def learn(self, run: Callable[[], Any], gather: Callable[[list[Any]], list[Any]] = list) -> None:
        """Find out from a pass where and how to cut, and from another one that it makes no difference. `run`: a pass. `gather`: what
        the ranks of a pipeline have each found. Raises PlanError on all of them."""
        with _without_side_effects(self.model, self.device):
            expected, trials = self._look(run, gather)
            if any(trial.cuts is None for trial in trials):
                # A later stage of a pipeline may have begun without knowing how long sequences are.
                self.known = next((trial.length for trial in trials if trial.length), None)
                expected, trials = self._look(run, gather)
            self._choose(trials)
            for differs in gather([self._differs(expected, run)]):
                if differs:
                    raise PlanError(differs)

    def _look(
        self, run: Callable[[], Any], gather: Callable[[list[Any]], list[Any]]
    ) -> tuple[Any, list[SplitTrial]]:
        """What comes out, and the trials of all blocks in the order of their calls."""
        self.learning, self.trials = True, []
        try:
            output = run()
        finally:
            self.learning, self.known = False, None
        return output, sorted(gather(self.trials), key=lambda trial: trial.stage)

    def _choose(self, trials: list[SplitTrial]) -> None:
        attending = [at for at, trial in enumerate(trials) if trial.length]
        if not attending:
            raise PlanError(no_attention_message(self.plan, self.kind))
        check_sequence_length(self.plan, trials[attending[0]].length or 0)
        inside = trials[attending[0] : attending[-1] + 1]
        for trial in inside:
            if trial.cuts is None:
                raise PlanError(
                    f"plan {self.plan}: {self.names[trial.unit]} mixes, numbers or masks positions outside of "
                    "scaled_dot_product_attention, so that it cannot run on a slice of the sequence; give it what depends on "
                    "positions as an argument and is_causal=True for a mask, or use a plan without cp"
                )
            self.cuts.setdefault(self.units[trial.unit], []).append(trial.cuts)
        self.first, self.last = self.units[inside[0].unit], self.units[inside[-1].unit]
        self.inside, self.length = (
            range(inside[0].stage + 1, inside[-1].stage + 1),
            trials[attending[0]].length or 0,
        )

    def _differs(self, expected: Any, run: Callable[[], Any]) -> str | None:
        """What is wrong with the output of a pass on slices. What lies between the blocks is not tried for itself, nor what leaves
        them by side ways."""
        what = f"plan {self.plan}: the output of {self.kind} with its blocks on slices of the sequence"
        try:
            found = run()
        except RuntimeError as error:
            if not any(word in str(error) for word in ("size", "shape")):  # of a rank that died
                raise
            return f"{what} fails: {error}; use a plan without cp"
        for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            if not isinstance(other, Tensor) or not other.is_floating_point():
                continue
            if not is_close(one, other, RTOL.get(other.dtype, REDUCED_RTOL), equal_nan=True):
                return f"{what} differs: positions are mixed between its blocks, or results leave them on the way; use a plan without cp"
        return None

    def _enter(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.learning or unit not in self.cuts:
            return None
        leaves, structure = flatten((args, kwargs))
        cuts = next((cuts for cuts in self.cuts[unit] if cuts.structure == structure), None)
        if cuts is None:
            name = next(name for name, module in self.units.items() if module is unit)
            raise PlanError(
                f"plan {self.plan}: {self.names[name]} is called with other arguments than in the first pass; use a plan without cp"
            )
        if unit is self.first:
            self.length = next(
                leaf.size(dim) for leaf, dim in zip(leaves, cuts.arguments, strict=True) if dim is not None
            )
            check_sequence_length(self.plan, self.length)
            self._part_streams()
        self.leaving = cuts
        here = rank_positions(self.length, self.mesh.get_local_rank(), self.plan.cp, self.device)
        cut = [
            leaf.index_select(dim, here)
            if isinstance(leaf, Tensor) and dim is not None and leaf.size(dim) == self.length
            else leaf
            for leaf, dim in zip(leaves, cuts.arguments, strict=True)
        ]
        return tree_unflatten(cut, structure)

    def _leave(self, unit: nn.Module, args: Any, output: Any) -> Any:
        if self.learning or unit is not self.last:
            return None
        assert self.leaving is not None
        for generator, state in self.streams:
            generator.set_state(state)
        leaves, structure = flatten(output)
        whole = [
            leaf if dim is None else GatherSlices.apply(leaf, dim, self.length, self.mesh)
            for leaf, dim in zip(leaves, self.leaving.output, strict=True)
        ]
        return tree_unflatten(whole, structure)

    def begin(self, stage: int) -> None:
        """This stage of a pipeline is the next to run, with sequences of `length` positions."""
        self.stage = stage
        if stage in self.inside and not self.learning:
            self._part_streams()

    def _part_streams(self) -> None:
        """Dropout draws the same on the ranks that share a sequence before and after the blocks, and other numbers for each slice."""
        cuda = torch.cuda.default_generators[self.device.index or 0] if self.device.type == "cuda" else None
        seed = int(torch.randint(2**62, (), device="cpu"))
        self.streams = [
            (generator, generator.get_state())
            for generator in (torch.default_generator, cuda)
            if generator is not None
        ]
        seed_torch(derive_seed(seed, "cp", self.mesh.get_local_rank()), self.device)


@contextlib.contextmanager
def _without_side_effects(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Passes in this context leave nothing behind: no graph, no change of buffers or random streams; and dropout is off."""
    modes = {module: module.training for module in model.modules()}
    buffers = [
        (module._buffers, key, buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = [device] if device.type == "cuda" else []
    model.eval()
    try:
        with (
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
            torch.random.fork_rng(devices=devices),
        ):
            yield
            for own, key, buffer, before in buffers:
                own[key] = buffer  # the model may have assigned another tensor
                buffer.copy_(before)
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_context_parallel(task: Task, spec: Spec, plan: Plan, model: nn.Module) -> None:
    """Raise PlanError for what can be known before a rank starts, from one sample that passes the model, on the meta device, without
    its numbers. A model that looks at them (or breaks) ends that pass early, and is told what is wrong with it by its first step."""
    dataset = open_dataset(task, "train")
    assert dataset is not None
    batch = Samples(dataset, "train", spec.seed, torch.float64 if spec.precision == "fp64" else None)[
        [0], [0]
    ]
    if isinstance(batch, FailedSample):
        return
    alone, units = IdentityAttention(), find_blocks(model, read_layout(task))
    kept = [vars(unit).get("forward") for unit in units]
    for unit in units:
        unit.forward = replace_attention(alone)(unit.forward)
    batch = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, batch)
    passed = False
    suppressed = contextlib.suppress(Exception)  # SystemExit and its like are not
    with (
        UserCode("the forward pass without values", task.model),
        suppressed,
        torch.no_grad(),
        torch.device("meta"),
    ):
        call_model(task, model, batch)
        passed = True
    for unit, own in zip(units, kept, strict=True):
        del unit.forward
        vars(unit).update({} if own is None else {"forward": own})
    if passed and not alone.lengths:
        raise PlanError(no_attention_message(plan, type(model).__name__))
    if alone.dropout:
        raise PlanError(no_dropout_message(plan, alone.dropout))
    for length in sorted(alone.lengths):
        check_sequence_length(plan, length)


def no_attention_message(plan: Plan, model: str) -> str:
    return (
        f"plan {plan}: cp splits the sequence that attention runs over, and {model} calls no F.scaled_dot_product_attention "
        "in its blocks (nn.MultiheadAttention does with need_weights=False, Hugging Face with attn_implementation='sdpa'); "
        "use a plan without cp, or name its blocks in layout()"
    )


def check_sequence_length(plan: Plan, length: int) -> None:
    """Raise PlanError for sequences that cannot be cut."""
    if length % plan.cp:
        fitting = [str(cp) for cp in range(2, plan.cp) if length % cp == 0]
        below, above = length - length % plan.cp, length - length % plan.cp + plan.cp
        hint = f"cut them to {below}" if below else f"pad them to {above}"
        raise PlanError(
            f"plan {plan}: sequences of {length} positions are not divisible by cp={plan.cp}; {hint}, "
            + (f"or use cp={' or '.join(fitting)}" if fitting else "or use a plan without cp")
        )
