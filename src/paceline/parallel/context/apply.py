"""Context parallelism: blocks run on slices of the sequence, with ring attention between ranks.

Each of these ranks runs what comes before and after the blocks on the whole sequence, so that positions are
right and the loss sees the whole output. The arguments of the first block with attention are sliced; the
output of the last one is gathered.

Gradients: the ranks that share a sequence have the same loss, and the engines average over them. So a rank
multiplies the gradient of its slice of the output by their number. Its gradients in blocks, and before them,
are summands of a sum whose average is the whole gradient. After the blocks each rank has the whole gradient,
and the average is the same.
"""

import contextlib
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from paceline.batch import find_tensors
from paceline.data.fake import is_close
from paceline.distributed.mesh import build_cp_mesh
from paceline.distributed.rng import derive_seed, seed_torch
from paceline.errors import PlanError
from paceline.parallel.context.check import check_sequence_length, no_attention_message
from paceline.parallel.context.find_splits import SequenceSplits, find_sequence_splits
from paceline.parallel.context.replace_attention import fused_layers_disabled, replace_attention
from paceline.parallel.context.ring_attention import RingAttention
from paceline.parallel.context.sliced_attention import SlicedAttention
from paceline.parallel.context.slices import GatherSlices, rank_positions
from paceline.parallel.pytree import flatten
from paceline.plan.plan import ResolvedPlan

# relative tolerance between a model's output with cp and without: only roundoff
RTOL = {torch.float64: 1e-8}
REDUCED_RTOL = 1e-2
TRIAL_SAMPLES = 2  # samples of a trial pass


def install_context_parallel(
    model: nn.Module, units: list[nn.Module], plan: ResolvedPlan, device: torch.device
) -> None:
    """Replace the forward of `model` by one that slices the sequence at `units`, its blocks."""
    ContextParallel(model, units, plan, device).learn_before_first_pass()


def _take_few_samples(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first samples of a batch, if all tensors have the same first dimension."""
    leaves, structure = flatten((args, kwargs))
    lengths = [leaf.size(0) if leaf.dim() else 0 for leaf in leaves if isinstance(leaf, Tensor)]
    has_hidden_tensors = len(lengths) < len(find_tensors((args, kwargs)))  # in a dataclass
    if len({*lengths}) != 1 or has_hidden_tensors:
        return args, kwargs
    few: tuple[tuple[Any, ...], dict[str, Any]] = tree_unflatten(
        [leaf[:TRIAL_SAMPLES] if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
    )
    return few


@dataclass(frozen=True)
class SplitTrial:
    """The result of a trial of one call of a block."""

    stage: int  # of a pipeline
    unit: str
    length: int | None  # of the sequences that its attention runs over
    splits: SequenceSplits | None


class ContextParallel:
    """Slices the arguments of blocks, and gathers the output of the last one."""

    def __init__(self, model: nn.Module, units: list[nn.Module], plan: ResolvedPlan, device: torch.device):
        self.model, self.plan, self.device = model, plan, device
        self.kind = type(model).__name__
        self.units = {name: module for name, module in model.named_modules() if module in units}
        # before engines change the classes
        self.display_names = {
            name: f"{name} ({type(module).__name__})" for name, module in self.units.items()
        }
        self.mesh = build_cp_mesh(plan, device)
        self.ring = RingAttention(self.mesh)
        self.is_learning = False
        self.stage = 0  # the stage of a pipeline that runs
        self.sliced_stages: Container[int] = ()  # stages whose input is sliced already
        self.trial_length: int | None = None  # of the sequences of a trial pass, once it is known
        self.trials: list[SplitTrial] = []  # of one pass, in the order of calls
        # of the units from the first with attention to the last
        self.splits: dict[nn.Module, list[SequenceSplits]] = {}
        self.first: nn.Module | None = None
        self.last: nn.Module | None = None
        self.length = 0  # of the whole sequences of the current pass
        self.current_splits: SequenceSplits | None = None
        self.streams: list[tuple[torch.Generator, Tensor]] = []  # generators, and their states before blocks
        for name, unit in self.units.items():
            self._wrap_unit(name, unit)

    def _wrap_unit(self, name: str, unit: nn.Module) -> None:
        inner = unit.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.is_learning:
                length, splits = find_sequence_splits(unit, inner, (args, kwargs), self.trial_length)
                self.trial_length = self.trial_length or length
                self.trials.append(SplitTrial(self.stage, name, length, splits))
            if self.is_learning or unit not in self.splits:
                return inner(*args, **kwargs)
            # Inside of the forward and not around the call, because recomputation calls the forward again.
            splits = self._find_splits(unit, flatten((args, kwargs))[1])
            with replace_attention(SlicedAttention(self.ring, self.plan, self.length, splits.calls)):
                return inner(*args, **kwargs)

        unit.forward = forward
        unit.register_forward_pre_hook(self._enter, with_kwargs=True)
        unit.register_forward_hook(self._leave)

    def learn_before_first_pass(self) -> None:
        """Call `learn` before the first pass with each structure of arguments."""
        inner = self.model.forward
        known: list[TreeSpec] = []

        def forward(*args: Any, **kwargs: Any) -> Any:
            _, structure = flatten((args, kwargs))
            if structure not in known:
                few_args, few_kwargs = _take_few_samples(args, kwargs)
                with fused_layers_disabled():
                    self.learn(lambda: inner(*few_args, **few_kwargs))
                known.append(structure)
            # A layer of torch that passes nested tensors to its blocks would not let them see positions.
            with fused_layers_disabled():
                return inner(*args, **kwargs)

        self.model.forward = forward

    def learn(self, run: Callable[[], Any], gather: Callable[[list[Any]], list[Any]] = list) -> None:
        """Find by a trial pass where and how to slice, and check by a second pass that the output is equal.

        run: a pass.
        gather: returns the concatenated lists of all ranks of a pipeline.

        Raises PlanError on all of these ranks.
        """
        with _without_side_effects(self.model, self.device):
            expected, trials = self._run_trials(run, gather)
            if any(trial.splits is None for trial in trials):
                # A later stage of a pipeline may have begun before the length of the sequences was known.
                self.trial_length = next((trial.length for trial in trials if trial.length), None)
                expected, trials = self._run_trials(run, gather)
            self._choose_units(trials)
            for difference in gather([self._find_difference(expected, run)]):
                if difference:
                    raise PlanError(difference)

    def _run_trials(
        self, run: Callable[[], Any], gather: Callable[[list[Any]], list[Any]]
    ) -> tuple[Any, list[SplitTrial]]:
        """Return the output, and the trials of all blocks in the order of their calls."""
        self.is_learning, self.trials = True, []
        try:
            output = run()
        finally:
            self.is_learning, self.trial_length = False, None
        return output, sorted(gather(self.trials), key=lambda trial: trial.stage)

    def _choose_units(self, trials: list[SplitTrial]) -> None:
        """Slice all units from the first with attention to the last.

        Raises PlanError if a unit cannot be sliced.
        """
        attending = [index for index, trial in enumerate(trials) if trial.length]
        if not attending:
            raise PlanError(no_attention_message(self.plan, self.kind))
        check_sequence_length(self.plan, trials[attending[0]].length or 0)
        chosen = trials[attending[0] : attending[-1] + 1]
        for trial in chosen:
            if trial.splits is None:
                raise PlanError(
                    f"plan {self.plan}: {self.display_names[trial.unit]} mixes, numbers or masks positions "
                    "outside of scaled_dot_product_attention, so it cannot run on a slice of the sequence; "
                    "pass what depends on positions (a mask, rotary angles) as an argument, or use a plan "
                    "without cp"
                )
            self.splits.setdefault(self.units[trial.unit], []).append(trial.splits)
        self.first, self.last = self.units[chosen[0].unit], self.units[chosen[-1].unit]
        self.sliced_stages, self.length = (
            range(chosen[0].stage + 1, chosen[-1].stage + 1),
            trials[attending[0]].length or 0,
        )

    def _find_difference(self, expected: Any, run: Callable[[], Any]) -> str | None:
        """Return what is wrong with the output of a pass on slices.

        Operations between the blocks are not tried separately, nor are values that leave blocks otherwise
        than as their output.
        """
        what = f"plan {self.plan}: the output of {self.kind} with its blocks on slices of the sequence"
        try:
            output = run()
        except RuntimeError as error:
            if not any(word in str(error) for word in ("size", "shape")):  # another rank failed
                raise
            return f"{what} fails: {error}; use a plan without cp"
        for leaf, expected_leaf in zip(tree_leaves(output), tree_leaves(expected), strict=True):
            if not isinstance(expected_leaf, Tensor) or not expected_leaf.is_floating_point():
                continue
            rtol = RTOL.get(expected_leaf.dtype, REDUCED_RTOL)
            if not is_close(leaf, expected_leaf, rtol, equal_nan=True):
                return (
                    f"{what} differs: the model mixes positions between its blocks, or blocks store "
                    "results elsewhere than in their output; use a plan without cp"
                )
        return None

    def _find_splits(self, unit: nn.Module, structure: TreeSpec) -> SequenceSplits:
        splits = next((splits for splits in self.splits[unit] if splits.structure == structure), None)
        if splits is None:
            name = next(name for name, module in self.units.items() if module is unit)
            raise PlanError(
                f"plan {self.plan}: {self.display_names[name]} is called with other arguments than in the "
                "first pass; use a plan without cp"
            )
        return splits

    def _enter(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_learning or unit not in self.splits:
            return None
        leaves, structure = flatten((args, kwargs))
        splits = self._find_splits(unit, structure)
        if unit is self.first:
            self.length = next(
                leaf.size(dim) for leaf, dim in zip(leaves, splits.arguments, strict=True) if dim is not None
            )
            check_sequence_length(self.plan, self.length)
            self._start_private_streams()
        self.current_splits = splits
        local = rank_positions(self.length, self.mesh.get_local_rank(), self.plan.cp, self.device)
        sliced = [
            leaf.index_select(dim, local)
            if isinstance(leaf, Tensor) and dim is not None and leaf.size(dim) == self.length
            else leaf
            for leaf, dim in zip(leaves, splits.arguments, strict=True)
        ]
        return tree_unflatten(sliced, structure)

    def _leave(self, unit: nn.Module, args: Any, output: Any) -> Any:
        if self.is_learning or unit is not self.last:
            return None
        assert self.current_splits is not None
        for generator, state in self.streams:
            generator.set_state(state)
        leaves, structure = flatten(output)
        whole = [
            leaf if dim is None else GatherSlices.apply(leaf, dim, self.length, self.mesh)
            for leaf, dim in zip(leaves, self.current_splits.output, strict=True)
        ]
        return tree_unflatten(whole, structure)

    def begin(self, stage: int) -> None:
        """Prepare for the pass of this stage of a pipeline, with sequences of `length` positions."""
        self.stage = stage
        if stage in self.sliced_stages and not self.is_learning:
            self._start_private_streams()

    def _start_private_streams(self) -> None:
        """Let dropout draw different numbers for each slice.

        Before and after the blocks, the ranks that share a sequence draw the same numbers.
        """
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
    """Run passes without dropout that leave no graph, and no change of buffers or random streams."""
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
            for module_buffers, key, buffer, before in buffers:
                module_buffers[key] = buffer  # the model may have assigned another tensor
                buffer.copy_(before)
    finally:
        for module, mode in modes.items():
            module.training = mode
