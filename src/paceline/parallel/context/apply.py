"""Context parallelism: blocks run on slices of the sequence, with attention between ranks.

Each of these ranks runs what comes before and after the blocks on the whole sequence, so that positions are
right and the loss sees the whole output. The arguments of the first block with attention are sliced; the
output of the last block is gathered. Each stack of blocks (encoder, decoder) does so for its own sequences.

Gradients: the ranks that share a sequence have the same loss, and the engines average over them. So a rank
multiplies the gradient of its slice of the output by their number. Its gradients in blocks, and before them,
are summands of a sum whose average is the whole gradient. After the blocks each rank has the whole gradient,
and the average is the same. Between two stacks of blocks the gradients are summands: the output of the first
stack is gathered for slices, and the backward pass adds the gradients of all ranks.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from paceline.batch import find_tensors
from paceline.data.fake import is_close
from paceline.distributed.mesh import build_cp_mesh
from paceline.distributed.rng import derive_seed, seed_torch
from paceline.errors import PlanError
from paceline.evaluation_mode import evaluation_mode
from paceline.parallel.context.check import MIN_POSITIONS
from paceline.parallel.context.find_splits import SequenceSplits, find_sequence_splits, has_attention
from paceline.parallel.context.replace_attention import (
    replace_attention,
)
from paceline.parallel.context.ring_attention import RingAttention
from paceline.parallel.context.sliced_attention import SlicedAttention
from paceline.parallel.context.sliced_runs import (
    SlicedRun,
    SplitTrial,
    choose_runs,
    describe_whole_blocks,
)
from paceline.parallel.context.slices import GatherForSlices, GatherSlices, rank_positions
from paceline.parallel.pytree import flatten
from paceline.plan.plan import ResolvedPlan
from paceline.torch_compat import fused_layers_disabled

# relative tolerance between a model's output with cp and without: only roundoff
RTOL = {torch.float64: 1e-8}
REDUCED_RTOL = 1e-2
TRIAL_SAMPLES = 2  # samples of a trial pass


_INSTALLED: WeakKeyDictionary[nn.Module, "ContextParallel"] = WeakKeyDictionary()


def note_whole_blocks(model: nn.Module) -> str | None:
    """Return what to report of blocks of a model that do not run on slices; None if all do."""
    context = _INSTALLED.get(model)
    if context is None or not context.whole_units:
        return None
    return describe_whole_blocks(context.plan, context.whole_units)


def install_context_parallel(
    model: nn.Module, stacks: Sequence[Sequence[nn.Module]], plan: ResolvedPlan, device: torch.device
) -> None:
    """Replace the forward of `model` by one that slices the sequence at `stacks` of blocks."""
    ContextParallel(model, stacks, plan, device).learn_before_first_pass()


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


class ContextParallel:
    """Slices the arguments of blocks, and gathers the output of the last block."""

    def __init__(
        self,
        model: nn.Module,
        stacks: Sequence[Sequence[nn.Module]],
        plan: ResolvedPlan,
        device: torch.device,
    ):
        self.model, self.plan, self.device = model, plan, device
        self.kind = type(model).__name__
        stack_of = {id(unit): at for at, stack in enumerate(stacks) for unit in stack}
        self.units = {name: module for name, module in model.named_modules() if id(module) in stack_of}
        # before engines change the classes
        self.display_names = {
            name: f"{name} ({type(module).__name__})" for name, module in self.units.items()
        }
        self.mesh = build_cp_mesh(plan, device)
        self.ring = RingAttention(self.mesh)
        self.is_learning = False
        self.stage = 0  # the stage of a pipeline that runs
        self.trial_lengths: dict[int, int] = {}  # of the sequences of a trial pass, by stack, once known
        self.trials: list[SplitTrial] = []  # of one pass, in the order of calls
        self.runs: list[SlicedRun] = []
        self.whole_units: list[str] = []  # with attention that runs on whole sequences
        self.current_splits: SequenceSplits | None = None
        self.streams: list[tuple[torch.Generator, Tensor]] = []  # generators, and their states before blocks
        _INSTALLED[model] = self
        for name, unit in self.units.items():
            self._wrap_unit(name, unit, stack_of[id(unit)])

    def _wrap_unit(self, name: str, unit: nn.Module, stack: int) -> None:
        inner = unit.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.is_learning:
                return self._try_unit(name, unit, stack, inner, (args, kwargs))
            run = self._run_of(name)
            if run is None:
                return inner(*args, **kwargs)
            # Inside of the forward and not around the call, because recomputation calls the forward again.
            splits = self._find_splits(run, name, flatten((args, kwargs))[1])
            with replace_attention(SlicedAttention(self.ring, self.plan, run.length, splits.calls)):
                return inner(*args, **kwargs)

        unit.forward = forward
        unit.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
        unit.register_forward_hook(partial(self._leave, name))

    def _try_unit(
        self,
        name: str,
        unit: nn.Module,
        stack: int,
        inner: Callable[..., Any],
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
    ) -> Any:
        args, kwargs = arguments
        length, splits = None, None
        if stack == 0 or has_attention(inner, arguments):
            length, splits = find_sequence_splits(unit, inner, arguments, self.trial_lengths.get(stack))
        if length is not None:
            self.trial_lengths.setdefault(stack, length)
        self.trials.append(SplitTrial(self.stage, stack, name, length, splits))
        return inner(*args, **kwargs)

    def _run_of(self, name: str) -> SlicedRun | None:
        """Return the run of a block if its sequences are sliced in this pass."""
        return next((run for run in self.runs if name in run.splits and run.is_sliced), None)

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
            for run in self.runs:
                run.lengths.clear()
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
            trials = self._run_trials(run, gather)
            if any(trial.splits is None and trial.length is None for trial in trials):
                # A later stage of a pipeline may have begun before the length of the sequences was known.
                for trial in trials:
                    if trial.length:
                        self.trial_lengths.setdefault(trial.stack, trial.length)
                trials = self._run_trials(run, gather)
            # Not the output of the trials, in which hooks of inner modules see each block several times.
            expected = self._run_whole(run)
            runs, whole = choose_runs(self.plan, self.kind, trials, self.display_names)
            self._add_runs(runs)
            self.whole_units += [name for name in whole if name not in self.whole_units]
            for difference in gather([self._find_difference(expected, run)]):
                if difference:
                    raise PlanError(difference)

    def _add_runs(self, runs: list[SlicedRun]) -> None:
        for run in runs:
            known = next((known for known in self.runs if known.first == run.first), None)
            if known is None:
                self.runs.append(run)
            elif known.last == run.last:
                known.merge(run)
            else:
                raise PlanError(
                    f"plan {self.plan}: {self.kind} runs other blocks with other arguments; use a plan "
                    "without cp"
                )

    def _run_trials(
        self, run: Callable[[], Any], gather: Callable[[list[Any]], list[Any]]
    ) -> list[SplitTrial]:
        """Return the trials of all blocks in the order of their calls."""
        self.is_learning, self.trials = True, []
        try:
            run()
        finally:
            self.is_learning, self.trial_lengths = False, {}
        return sorted(gather(self.trials), key=lambda trial: trial.stage)

    def _run_whole(self, run: Callable[[], Any]) -> Any:
        """Return the output of a pass on whole sequences."""
        runs, self.runs = self.runs, []
        try:
            return run()
        finally:
            self.runs = runs

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
        leaves, expected_leaves = tree_leaves(output), tree_leaves(expected)
        if len(leaves) != len(expected_leaves):
            return f"{what} has {len(leaves)} values, expected {len(expected_leaves)}; use a plan without cp"
        for leaf, expected_leaf in zip(leaves, expected_leaves, strict=True):
            if not isinstance(expected_leaf, Tensor) or not expected_leaf.is_floating_point():
                continue
            rtol = RTOL.get(expected_leaf.dtype, REDUCED_RTOL)
            if not is_close(leaf, expected_leaf, rtol, equal_nan=True):
                return (
                    f"{what} differs: the model mixes positions between its blocks, or blocks store "
                    "results elsewhere than in their output; use a plan without cp"
                )
        return None

    def _find_splits(self, run: SlicedRun, name: str, structure: TreeSpec) -> SequenceSplits:
        splits = run.find_splits(name, structure)
        if splits is None:
            raise PlanError(
                f"plan {self.plan}: {self.display_names[name]} is called with other arguments than in the "
                "first pass; use a plan without cp"
            )
        return splits

    def _enter(self, name: str, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = next((run for run in self.runs if name in run.splits), None)
        if self.is_learning or run is None:
            return None
        leaves, structure = flatten((args, kwargs))
        if name == run.first:
            self._begin_run(run, leaves, self._find_splits(run, name, structure))
        if not run.is_sliced:
            return None
        self.current_splits = splits = self._find_splits(run, name, structure)
        local = rank_positions(run.length, self.mesh.get_local_rank(), self.plan.cp, self.device)
        sliced = [
            leaf.index_select(dim, local)
            if isinstance(leaf, Tensor) and dim is not None and leaf.size(dim) == run.length
            else leaf
            for leaf, dim in zip(leaves, splits.arguments, strict=True)
        ]
        return tree_unflatten(sliced, structure)

    def _begin_run(self, run: SlicedRun, leaves: list[Any], splits: SequenceSplits) -> None:
        run.length = next(
            leaf.size(dim) for leaf, dim in zip(leaves, splits.arguments, strict=True) if dim is not None
        )
        run.lengths.add(run.length)
        if len(run.lengths) > 1 and self.plan.recompute != "none":
            # A recomputation in the backward pass would take the last length for all.
            lengths = " and ".join(map(str, sorted(run.lengths)))
            raise PlanError(
                f"plan {self.plan}: {self.display_names[run.first]} is called with sequences of {lengths} "
                "positions in one pass; use recompute=none, or a plan without cp"
            )
        run.is_sliced = run.length >= MIN_POSITIONS * self.plan.cp
        if run.is_sliced:
            self._start_private_streams()

    def _leave(self, name: str, unit: nn.Module, args: Any, output: Any) -> Any:
        run = self._run_of(name)
        if self.is_learning or run is None or name != run.last:
            return None
        assert self.current_splits is not None
        for generator, state in self.streams:
            generator.set_state(state)
        leaves, structure = flatten(output)
        gather = GatherSlices if run.is_final else GatherForSlices
        whole = [
            leaf if dim is None else gather.apply(leaf, dim, run.length, self.mesh)
            for leaf, dim in zip(leaves, self.current_splits.output, strict=True)
        ]
        return tree_unflatten(whole, structure)

    def begin(self, stage: int) -> None:
        """Prepare for the pass of this stage of a pipeline."""
        self.stage = stage
        for run in self.runs:
            run.lengths.clear()
        if not self.is_learning and any(stage in run.stages for run in self.runs):
            self._start_private_streams()

    def set_length(self, length: int) -> None:
        """Set the length of whole sequences whose slices cross the cuts of a pipeline."""
        for run in self.runs:
            run.length = length

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
    buffers = [
        (module._buffers, key, buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = [device] if device.type == "cuda" else []
    with (
        evaluation_mode(model),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.random.fork_rng(devices=devices),
    ):
        yield
        for module_buffers, key, buffer, before in buffers:
            module_buffers[key] = buffer  # the model may have assigned another tensor
            buffer.copy_(before)
