"""Branches of a run: the same state and position in the data, continued with another batch."""

import dataclasses
import os
import shutil
from pathlib import Path

from paceline.errors import RunError
from paceline.run import RunFolder, open_run
from paceline.training.checkpoint.index import Index, write_index
from paceline.training.checkpoint.integrity import find_last_complete


def find_branch_point(path: Path, batches: tuple[int, ...]) -> tuple[Path, Index]:
    """Return the last checkpoint of a run, from which trainings with these batches continue.

    Raises RunError if there is none, or if a batch does not divide its samples.
    """
    checkpoint, index, _ = find_last_complete(open_run(path))
    if checkpoint is None or index is None:
        raise RunError(f"{path} has no complete checkpoint to branch from; train it first")
    for batch in batches:
        if index.samples % batch:
            raise RunError(
                f"{checkpoint} was made after {index.samples:,} samples, not a multiple of batch "
                f"{batch}; branch from a checkpoint after a multiple of {max(batches):,} samples"
            )
    if index.own or index.plateau is not None:
        raise RunError(
            f"{checkpoint} is of local SGD or of schedule plateau, whose state belongs to its batch; branch "
            "from another run"
        )
    return checkpoint, index


def branch(checkpoint: Path, index: Index, run: RunFolder, batch: int) -> None:
    """Copy a checkpoint into a new run, as that of the step which has the same samples with `batch`."""
    step = index.samples // batch
    unfinished = run.ckpt / f".step_{step}"
    unfinished.mkdir(parents=True)
    for name in index.files:  # names were checked when the index was read
        target = unfinished / name
        try:
            os.link(checkpoint / name, target, follow_symlinks=False)
        except OSError:  # another file system
            shutil.copyfile(checkpoint / name, target, follow_symlinks=False)
    write_index(unfinished, dataclasses.replace(index, step=step, stop=None, metrics={}))
    unfinished.rename(run.ckpt / f"step_{step}")
