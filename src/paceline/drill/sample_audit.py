"""What ranks consumed, as they wrote it down themselves, and whether anything was lost or repeated. Nothing of it is Paceline's own count.

Each start of each rank appends to a file COMMAND-RESTART-RANK: `[time, [index, …]]` for the samples that a loss was computed of,
`[time]` for an update of the weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.plan.plan import ResolvedPlan

Indices = tuple[int, ...]


@dataclass(frozen=True)
class Update:
    """Of the weights on one rank."""

    time: float  # of the monotonic clock, which all processes of a machine share
    batches: tuple[Indices, ...]  # samples of its micro-batches


Start = Mapping[int, Sequence[Update]]  # of the ranks that compute the loss: rank -> its updates


def read(folder: Path, plan: ResolvedPlan) -> list[Start]:
    """The starts in their order, without those that came to no update."""
    found: dict[tuple[int, int], dict[int, list[Update]]] = {}
    for path in folder.iterdir():
        command, restart, rank = map(int, path.name.split("-"))
        if plan.place(rank).pp == plan.loss_pp_rank and (
            updates := updates_of(path.read_text(), plan.microbatches)
        ):
            found.setdefault((command, restart), {})[rank] = updates
    return [found[key] for key in sorted(found)]


def updates_of(text: str, microbatches: int) -> list[Update]:
    """Of one rank. Before its first step it may try the loss out: of that step the last `microbatches` batches count."""
    found: list[Update] = []
    batches: list[Indices] = []
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        time, *indices = json.loads(line)
        if indices:
            batches.append(tuple(indices[0]))
        elif batches:  # an optimizer within another one updates, and then the other one does
            found.append(Update(time, tuple(batches if found else batches[-microbatches:])))
            batches = []
    return found


def consumed(start: Start, plan: ResolvedPlan) -> tuple[list[Indices | None], list[str]]:
    """The samples of each step in their order, None where not all ranks came to its end; and what is wrong."""
    by_place: dict[int, int] = {}
    wrong: list[str] = []
    for rank, updates in sorted(start.items()):
        other = by_place.setdefault(plan.place(rank).dp, rank)
        if any(one.batches != two.batches for one, two in zip(updates, start[other], strict=False)):
            wrong.append(f"ranks {other} and {rank} consumed other samples, and should have shared them")
        if len(updates) > len(start[other]):
            by_place[plan.place(rank).dp] = rank
    ranks = [start[by_place[place]] if place in by_place else [] for place in range(plan.dp)]
    steps: list[Indices | None] = []
    for at in range(max(map(len, ranks))):
        here = [updates[at].batches for updates in ranks if at < len(updates)]
        whole = len(here) == len(ranks)
        steps.append(
            tuple(
                index for microbatches in zip(*here, strict=False) for part in microbatches for index in part
            )
            if whole
            else None
        )
    return steps, wrong


def audit_alone(steps: Sequence[Indices | None], batch: int, samples: int) -> list[str]:
    """Of a training that nobody disturbed: each step a whole batch, each epoch each sample once."""
    wrong = [
        f"step {at} consumed {len(step or ())} samples of {batch}"
        for at, step in enumerate(steps, 1)
        if len(step or ()) != batch
    ]
    stream = [index for step in steps for index in step or ()]
    for begin in range(0, len(stream), samples):
        epoch = stream[begin : begin + samples]
        if len(set(epoch)) < len(epoch):
            wrong.append(f"{len(epoch) - len(set(epoch))} samples came twice in epoch {begin // samples + 1}")
    return wrong


def audit(
    expected: Sequence[Indices | None], starts: Sequence[Sequence[Indices | None]], states: Sequence[int]
) -> list[str]:
    """Whether the steps that count, each where it was done last, are those that were expected, each once.

    states: the steps whose weights the starts began with."""
    wrong: list[str] = []
    done = 0
    for number, steps in enumerate(starts, 1):
        first = _first(expected, steps)
        if first is None:
            wrong.append(
                f"start {number} began with samples {_shown(steps[0])}, with which no step of the undisturbed training did"
            )
            continue
        if first > done:
            wrong.append(
                f"the samples of step {done + 1} to {first} were lost: start {number} began with those of step {first + 1}"
            )
        if len(states) == len(starts) and first != states[number - 1]:
            wrong.append(
                f"start {number} had the weights of step {states[number - 1]}, and began with the samples of step {first + 1}"
            )
        whole = steps if number == len(starts) else [step for step in steps if step is not None]
        for at, step in enumerate(whole, first):
            if at >= len(expected):
                wrong.append(f"start {number} went on past the end, with step {at + 1} of {len(expected)}")
            elif step != expected[at]:
                wrong.append(
                    f"start {number} consumed {_shown(step)} in step {at + 1}, in place of {_shown(expected[at])}"
                )
            else:
                continue
            break
        done = first + len(whole)
    if done < len(expected):
        wrong.append(f"the samples of step {done + 1} to {len(expected)} were lost at the end")
    return wrong


def _first(expected: Sequence[Indices | None], steps: Sequence[Indices | None]) -> int | None:
    """Steps that were done before these: the last place where the first of them fits."""
    return next((at for at in reversed(range(len(expected))) if expected[at] == steps[0]), None)


def _shown(step: Indices | None) -> str:
    return f"{', '.join(map(str, (step or ())[:3]))} … ({len(step or ())})"
