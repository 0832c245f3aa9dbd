"""Runs of blocks on slices of the same sequences, chosen from the trials of the blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.utils._pytree import TreeSpec

from paceline.errors import PlanError
from paceline.parallel.context.check import check_sequence_length, no_attention_message
from paceline.parallel.context.find_splits import SequenceSplits
from paceline.parallel.data_parallel.reduced_buffers import list_first
from paceline.plan.plan import Plan


@dataclass(frozen=True)
class SplitTrial:
    """The result of a trial of one call of a block."""

    stage: int  # of a pipeline
    stack: int
    unit: str
    length: int | None  # of the sequences that its attention runs over
    splits: SequenceSplits | None


@dataclass
class SlicedRun:
    """Blocks of one stack that run on slices, from the first to the last."""

    first: str
    last: str
    splits: dict[str, list[SequenceSplits]]  # by block; each call with another structure has its own
    stages: range  # of a pipeline, whose input is sliced already
    length: int  # of the whole sequences of the current call
    # Behind the last run all ranks compute the same, and have the same gradient.
    is_final: bool = False
    is_sliced: bool = True  # whether the sequences of the current call are long enough
    lengths: set[int] = field(default_factory=set)  # of the sequences of all calls in the current pass

    def find_splits(self, unit: str, structure: TreeSpec) -> SequenceSplits | None:
        return next((splits for splits in self.splits[unit] if splits.structure == structure), None)

    def merge(self, other: "SlicedRun") -> None:
        """Add the splits of a pass with other arguments."""
        for unit, splits in other.splits.items():
            self.splits.setdefault(unit, []).extend(splits)
        self.is_final &= other.is_final


def choose_runs(
    plan: Plan, model: str, trials: Sequence[SplitTrial], display_names: Mapping[str, str]
) -> tuple[list[SlicedRun], list[str]]:
    """Return the runs of a pass, at most one for each stack: from its first block with attention to its last.

    Returns also the names of blocks with attention that run on whole sequences. A block at the start of a
    stack that numbers positions may compute what the other blocks share, such as a bias for each distance.
    A stack that cannot run on slices, or has too short sequences, runs whole if another stack does not.

    trials: in the order of calls.

    Raises PlanError if no stack can run on slices.
    """
    error: PlanError | None = None
    spans: list[tuple[int, int, SlicedRun]] = []
    for stack in sorted({trial.stack for trial in trials}):
        places = [place for place, trial in enumerate(trials) if trial.stack == stack]
        attending = [place for place in places if trials[place].length]
        if not attending:
            continue
        places = [place for place in places if attending[0] <= place <= attending[-1]]
        try:
            run = _choose_run(plan, [trials[place] for place in places], display_names)
        except PlanError as refusal:
            error = error or refusal
            continue
        # Blocks of two stacks that take turns cannot both have slices.
        if all(end < places[0] or places[-1] < begin for begin, end, _ in spans):
            spans.append((places[0], places[-1], run))
    if not spans:
        raise error or PlanError(no_attention_message(plan, model))
    spans.sort(key=lambda span: span[0])
    last = spans[-1][2]
    last.is_final = sum(trial.unit == last.last for trial in trials) == 1
    runs = [run for _, _, run in spans]
    whole = (
        trial.unit for trial in trials if trial.length and not any(trial.unit in run.splits for run in runs)
    )
    return runs, list(dict.fromkeys(whole))


def describe_whole_blocks(plan: Plan, names: Sequence[str]) -> str:
    """Return what to report of blocks with attention that run on whole sequences."""
    return (
        f"plan {plan}: on each rank, whole sequences run through {list_first(names)}; their slices would "
        "need other numbers of positions, or are shorter than two positions"
    )


def _choose_run(plan: Plan, trials: Sequence[SplitTrial], display_names: Mapping[str, str]) -> SlicedRun:
    length = next(trial.length for trial in trials if trial.length)
    check_sequence_length(plan, length)
    first = next((place for place, trial in enumerate(trials) if trial.splits is not None), len(trials))
    refused = trials[0] if 2 * first > len(trials) else None
    refused = refused or next((trial for trial in trials[first:] if trial.splits is None), None)
    if refused is not None:
        raise PlanError(
            f"plan {plan}: {display_names[refused.unit]} mixes, numbers or masks positions outside of "
            "scaled_dot_product_attention, so it cannot run on a slice of the sequence; pass what depends on "
            "positions (a mask, rotary angles) as an argument, or use a plan without cp"
        )
    splits: dict[str, list[SequenceSplits]] = {}
    for trial in trials[first:]:
        assert trial.splits is not None
        length = trial.length or length if trial.unit == trials[first].unit else length
        if trial.length not in (None, length):
            raise PlanError(
                f"plan {plan}: sequences have {trial.length} positions in {display_names[trial.unit]} and "
                f"{length} in the blocks before; use a plan without cp"
            )
        splits.setdefault(trial.unit, []).append(trial.splits)
    stages = range(trials[first].stage + 1, trials[-1].stage + 1)
    return SlicedRun(trials[first].unit, trials[-1].unit, splits, stages, trials[first].length or length)
