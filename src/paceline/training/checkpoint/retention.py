"""Which checkpoints of a run are kept: scores, deletion, and quarantine of damaged ones."""

import contextlib
import math
import shutil

from paceline.errors import CheckpointError
from paceline.run import RunFolder
from paceline.training.checkpoint.index import read_index


def read_scores(run: RunFolder, best: str) -> dict[int, float]:
    """Return the score of each checkpoint by step, lower being better.

    Checkpoints without a score are left out.

    best: such as "min loss" or "max accuracy".
    """
    direction, name = best.split()
    values = {}
    for step in run.checkpoints():
        with contextlib.suppress(CheckpointError):
            values[step] = read_index(run.checkpoint(step)).metrics.get(name, math.nan)
    return {
        step: score if direction == "min" else -score
        for step, score in values.items()
        if not math.isnan(score)
    }


def read_best_score(run: RunFolder, best: str) -> float | None:
    """Return the lowest of the scores; None if there is none."""
    return min(read_scores(run, best).values(), default=None)


def prune(run: RunFolder, keep: int, best: str) -> None:
    """Delete all but the last `keep` checkpoints and the best."""
    scores = read_scores(run, best)
    kept = {*run.checkpoints()[-keep:], *([min(scores, key=scores.__getitem__)] if scores else [])}
    for step in run.checkpoints():
        if step not in kept:
            deleted = run.ckpt / f".old_{step}"
            run.checkpoint(step).rename(
                deleted
            )  # so that an interrupted deletion leaves no partial checkpoint
            shutil.rmtree(deleted, ignore_errors=True)


def quarantine(run: RunFolder, after: int) -> None:
    """Rename the checkpoints after step `after`, which are damaged.

    Otherwise `prune` would keep them as the last checkpoints.
    """
    for step in run.checkpoints():
        if step > after:
            damaged = run.ckpt / f"damaged_{step}"
            shutil.rmtree(damaged, ignore_errors=True)
            run.checkpoint(step).rename(damaged)


def delete_unfinished(run: RunFolder) -> None:
    """Delete what an earlier process left unfinished."""
    for path in run.ckpt.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
