"""Read the samples that ranks logged, and check that none was lost or repeated.

The audit uses no counter of Paceline. Each start of each rank appends to a file COMMAND-RESTART-RANK:
`[time, [index, …]]` for the samples of a computed loss, `[time]` for an update of the weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.plan.plan import ResolvedPlan

Indices = tuple[int, ...]


@dataclass(frozen=True)
class SampledUpdate:
    """An update of the weights on one rank."""

    time: float  # of the monotonic clock, which all processes of a machine share
    batches: tuple[Indices, ...]  # samples of its micro-batches


Start = Mapping[int, Sequence[SampledUpdate]]  # rank -> its updates, for the ranks that compute the loss


def read_starts(folder: Path, plan: ResolvedPlan) -> list[Start]:
    """Return the starts in order, without those that reached no update."""
    starts: dict[tuple[int, int], dict[int, list[SampledUpdate]]] = {}
    for path in folder.iterdir():
        command, restart, rank = map(int, path.name.split("-"))
        if plan.place(rank).pp == plan.loss_pp_rank and (
            updates := parse_updates(path.read_text(), plan.microbatches)
        ):
            starts.setdefault((command, restart), {})[rank] = updates
    return [starts[key] for key in sorted(starts)]


def parse_updates(text: str, microbatches: int) -> list[SampledUpdate]:
    """Return the updates of one rank.

    A rank may try out the loss before its first step: only the last `microbatches` batches count there."""
    updates: list[SampledUpdate] = []
    batches: list[Indices] = []
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        time, *indices = json.loads(line)
        if indices:
            batches.append(tuple(indices[0]))
        elif batches:  # a nested optimizer updates first, then the outer optimizer without new batches
            updates.append(SampledUpdate(time, tuple(batches if updates else batches[-microbatches:])))
            batches = []
    return updates


def merge_ranks(start: Start, plan: ResolvedPlan) -> tuple[list[Indices | None], list[str]]:
    """Return the samples of each step in order, and a sentence for each contradiction between ranks.

    The samples are None for a step that some rank did not finish."""
    longest: dict[int, int] = {}  # place along dp -> its rank with most updates
    wrong: list[str] = []
    for rank, updates in sorted(start.items()):
        place = plan.place(rank).dp
        other = longest.setdefault(place, rank)
        if any(mine.batches != theirs.batches for mine, theirs in zip(updates, start[other], strict=False)):
            wrong.append(f"ranks {other} and {rank} must consume the same samples, got different ones")
        if len(updates) > len(start[other]):
            longest[place] = rank
    ranks = [start[longest[place]] if place in longest else [] for place in range(plan.dp)]
    steps: list[Indices | None] = []
    for at in range(max(map(len, ranks))):
        batches = [updates[at].batches for updates in ranks if at < len(updates)]
        if len(batches) < len(ranks):
            steps.append(None)
            continue
        # Micro-batch by micro-batch, and in each rank by rank.
        microbatches = zip(*batches, strict=False)
        steps.append(tuple(index for parts in microbatches for part in parts for index in part))
    return steps, wrong


def audit_reference(steps: Sequence[Indices | None], batch: int, samples: int) -> list[str]:
    """Return what is wrong in an undisturbed training.

    Each step must have a whole batch, and each epoch each sample once."""
    wrong = [
        f"step {number} must consume {batch} samples, got {len(step or ())}"
        for number, step in enumerate(steps, 1)
        if len(step or ()) != batch
    ]
    stream = [index for step in steps for index in step or ()]
    for begin in range(0, len(stream), samples):
        epoch = stream[begin : begin + samples]
        if len(set(epoch)) < len(epoch):
            wrong.append(f"{len(epoch) - len(set(epoch))} samples came twice in epoch {begin // samples + 1}")
    return wrong


def audit(
    expected: Sequence[Indices | None],
    starts: Sequence[Sequence[Indices | None]],
    first_steps: Sequence[int],
) -> list[str]:
    """Return what is wrong in a disturbed training. For each step, its last execution counts.

    These steps must be the expected steps, each once.

    first_steps: the steps of the weights with which the starts began."""
    wrong: list[str] = []
    done = 0
    for number, steps in enumerate(starts, 1):
        first = _find_first_step(expected, steps)
        if first is None:
            wrong.append(
                f"start {number} began with samples {_format_samples(steps[0])}, "
                "with which no step of the undisturbed training begins"
            )
            continue
        if first > done:
            wrong.append(
                f"the samples of steps {done + 1} to {first} were lost: "
                f"start {number} began with those of step {first + 1}"
            )
        if len(first_steps) == len(starts) and first != first_steps[number - 1]:
            wrong.append(
                f"start {number} had the weights of step {first_steps[number - 1]}, "
                f"and began with the samples of step {first + 1}"
            )
        completed = steps if number == len(starts) else [step for step in steps if step is not None]
        for at, step in enumerate(completed, first):
            if at >= len(expected):
                wrong.append(f"start {number} continued past the end, with step {at + 1} of {len(expected)}")
            elif step != expected[at]:
                wrong.append(
                    f"start {number} consumed {_format_samples(step)} in step {at + 1}, "
                    f"instead of {_format_samples(expected[at])}"
                )
            else:
                continue
            break
        done = first + len(completed)
    if done < len(expected):
        wrong.append(f"the samples of steps {done + 1} to {len(expected)} were lost at the end")
    return wrong


def _find_first_step(expected: Sequence[Indices | None], steps: Sequence[Indices | None]) -> int | None:
    """Return the number of steps done before `steps`: the last position that matches their first step."""
    return next((at for at in reversed(range(len(expected))) if expected[at] == steps[0]), None)


def _format_samples(step: Indices | None) -> str:
    return f"{', '.join(map(str, (step or ())[:3]))} … ({len(step or ())})"
