"""The disk space that the run folders of a study need, predicted before it starts."""

import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.cluster import directories
from paceline.errors import ClusterError, Error, RunError
from paceline.spec import Spec
from paceline.task import load_task
from paceline.tuning.definition import StudyDefinition
from paceline.tuning.journal import StudyState
from paceline.tuning.samplers.table import draw_random
from paceline.units import format_bytes, several

SAMPLED = 4  # trials whose checkpoints are computed
SAMPLING_S = 3.0  # after which no further one is computed
FILES_PER_TRIAL = 24  # events, logs, heartbeats and request
FILES_PER_CHECKPOINT = 3


def check_disk(definition: StudyDefinition, folder: Path) -> None:
    """Raise RunError if all trials need more than the file system or the quota of a new folder has."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    quotas = []
    with contextlib.suppress(ClusterError):
        quotas = directories.read_quotas()
    directory = directories.examine(parent, (), quotas, directories.list_mounts())
    trials = definition.search.trials
    count, checkpoint_bytes = predict_checkpoints(definition)
    files = trials * (FILES_PER_TRIAL + count * FILES_PER_CHECKPOINT)
    shortages = [*directories.find_shortages(directory, trials * count * checkpoint_bytes, files)]
    if shortages:
        raise RunError(
            f"{several(trials, 'trial')} with {several(count, 'checkpoint')} of "
            f"{format_bytes(checkpoint_bytes)} each (predicted) need "
            f"{format_bytes(trials * count * checkpoint_bytes)} in {files:,} files, and {parent} has "
            f"{' and '.join(shortages)}; use another --run-dir, fewer --trials or --set save.keep=1"
        )


def predict_checkpoints(definition: StudyDefinition) -> tuple[int, float]:
    """Return how many checkpoints a trial keeps, and the mean of their bytes.

    0 bytes if the model cannot be built: the first trial then reports why.
    """
    spec, _ = definition.build_request({})
    sizes = list(_compute_sizes(definition))
    return spec.save.keep + 1, statistics.mean(sizes) if sizes else 0.0


def _compute_sizes(definition: StudyDefinition) -> Iterator[int]:
    from paceline.training.dry_run.checkpoint_size import compute_state_bytes

    known: dict[str, int] = {}
    deadline = time.monotonic() + SAMPLING_S
    for number in range(SAMPLED):
        if known and time.monotonic() > deadline:  # a large model takes long to build
            return
        with contextlib.suppress(Error):
            spec, _ = definition.build_request(draw_random(definition, StudyState(), number))
            key = _describe_model(spec)
            if key not in known:
                known[key] = compute_state_bytes(spec, load_task(spec.task, spec.set))
            yield known[key]


def _describe_model(spec: Spec) -> str:
    """Return what decides about the size of a checkpoint."""
    return repr((sorted(spec.set.items()), spec.optimizer.name, spec.precision))
