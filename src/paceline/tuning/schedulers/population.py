"""Population-based training: the worst trials of a generation continue from the weights of the best.

All trials of a generation train equally long. Then each of the worst quarter takes over checkpoint and values
of one of the best quarter, and its optimizer values are perturbed. Checkpoints are copied whole, so that the
training continues from exactly the same state.

Jaderberg et al., Population Based Training of Neural Networks, 2017.
"""

import math
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RunError
from paceline.files import reason
from paceline.run import RunFolder
from paceline.tuning.definition import StudyDefinition
from paceline.tuning.journal import StudyState, Trial
from paceline.tuning.parameter import Parameter

QUANTILE = 0.25
FACTORS = (0.8, 1.25)
REDRAWN = 0.25  # probability of a value from the whole range instead of a neighboring one


@dataclass(frozen=True)
class Exploit:
    """A trial that continues from the checkpoint of another, with other values."""

    trial: int
    parent: int
    values: dict[str, Any]


def list_exploits(definition: StudyDefinition, state: StudyState) -> list[Exploit]:
    """Return what changes before the next generation, if all trials have completed the same generation."""
    active = [trial for trial in state.trials.values() if not trial.is_over]
    generation = len(active[0].stages) if active else 0
    is_complete = all(trial.state == "paused" and len(trial.stages) == generation for trial in active)
    if not generation or not is_complete:
        return []
    done = state.exploited.get(generation, set())
    ranked = sorted(active, key=lambda trial: (_loss(definition, trial), trial.number))
    count = math.ceil(QUANTILE * len(ranked)) if len(ranked) > 1 else 0
    exploits = []
    for trial in (trial for trial in ranked[len(ranked) - count :] if trial.number not in done):
        draw = random.Random(f"{definition.search.seed}/{generation}/{trial.number}")
        parent = draw.choice(ranked[:count])
        exploits.append(Exploit(trial.number, parent.number, perturb(definition, parent.values, draw)))
    return exploits


def _loss(definition: StudyDefinition, trial: Trial) -> float:
    loss = definition.objectives[0].read_loss(trial.metrics)
    return loss if loss is not None else math.inf


def perturb(definition: StudyDefinition, values: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """Return values in which those that do not change the model are drawn anew or moved a little."""
    changed = dict(values)
    for parameter in definition.space.parameters:
        if parameter.name in values and can_change(parameter):
            if parameter.kind == "choice" or draw.random() < REDRAWN:
                is_kept = parameter.kind == "choice" and draw.random() >= REDRAWN
                new = values[parameter.name] if is_kept else parameter.from_unit(draw.random())
            else:
                moved = values[parameter.name] * draw.choice(FACTORS)
                new = min(max(moved, parameter.low), parameter.high)
                if parameter.step is not None and not parameter.is_log:
                    steps = round((new - parameter.low) / parameter.step)
                    new = parameter.low + steps * parameter.step
                new = round(new) if parameter.kind == "int" else new
            changed[parameter.name] = new
    return changed


def can_change(parameter: Parameter) -> bool:
    """Return whether a training can continue with another value: not if it changes model, data or batch."""
    is_of_training = parameter.key.startswith(("optimizer.", "schedule."))
    is_number_of_task = parameter.key.startswith("set.") and parameter.kind == "float"
    return parameter.key != "optimizer.name" and (is_of_training or is_number_of_task)


def copy_checkpoint(parent: RunFolder, child: RunFolder) -> None:
    """Replace the checkpoints of a run by the last checkpoint of another. Raises RunError.

    The copy is complete before the old checkpoints are deleted, and can be repeated.
    """
    steps = parent.checkpoints()
    if not steps:
        raise RunError(f"{parent.path} has no checkpoint to copy")
    fresh = child.path / "ckpt.new"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(parent.checkpoint(steps[-1]), fresh / f"step_{steps[-1]}", symlinks=True)
        _sync(fresh)
        shutil.rmtree(child.ckpt)
        fresh.rename(child.ckpt)
    except OSError as error:
        raise RunError(f"cannot copy the checkpoint of {parent.path}: {reason(error)}") from error


def _sync(folder: Path) -> None:
    """Write the files of a folder to the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
