"""The file checkpoint.json: what a checkpoint is of, and the sizes and checksums of its files."""

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from paceline.data.order import FULL
from paceline.errors import CheckpointError
from paceline.files import is_plain_name, open_regular
from paceline.training.optimization.plateau import PlateauState
from paceline.training.stop_policy import StopState

INDEX = "checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class Index:
    """The contents of checkpoint.json: what a checkpoint is of."""

    step: int
    samples: int  # consumed so far, which is the state of the data
    epoch_samples: int  # of the training split, which determines the order of samples
    task: str
    set: Mapping[str, Any]
    plan: str
    ranks: int
    seed: int
    shapes: Mapping[str, list[int]]  # of the whole parameters and buffers
    tied: Mapping[str, str]  # other names of tied parameters -> the name above
    own: bool = False  # whether it also has the state of each rank: local SGD
    loss_scale: Mapping[str, float] | None = None  # of fp16
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation
    stop: StopState | None = None  # if a metric may end the training
    plateau: PlateauState | None = None  # of the schedule plateau
    identity: Mapping[str, str] = field(default_factory=dict)  # as by describe_identity
    files: Mapping[str, list[int]] = field(default_factory=dict)  # name -> [bytes, CRC-32]
    # name of a parameter -> [digest, bytes per element], with guard.every; as by digest_weights
    digests: Mapping[str, list[int]] = field(default_factory=dict)
    order: str = FULL  # of the samples so far, as by Order.describe


def write_index(path: Path, index: Index) -> None:
    """Write checkpoint.json, with its checksum, into the folder of a checkpoint."""
    with open(path / INDEX, "w") as file:
        content = json.loads(json.dumps(asdict(index), default=str))
        json.dump(content | {"crc": _crc(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_index(path: Path) -> Index:
    """Read checkpoint.json in the folder `path`.

    Raises CheckpointError if it cannot be read or is damaged.
    """
    try:
        with open_regular(path / INDEX) as file:
            content = json.load(file)
        crc = content.pop("crc", None)  # older checkpoints have none
        index = TypeAdapter(Index).validate_python(content)
        _check(index)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path} is damaged: its {INDEX} cannot be read ({where}: {first['msg']})"
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its {INDEX} cannot be read ({error})") from error
    if crc not in (None, _crc(content)):
        raise CheckpointError(f"{path} is damaged: its {INDEX} has another checksum than when it was written")
    return index


def _check(index: Index) -> None:
    """Raise ValueError for values that Paceline does not write."""
    if min(index.step, index.samples, index.epoch_samples, index.ranks) < 1:
        raise ValueError("step, samples, epoch_samples and ranks must be at least 1")
    if bad := next((name for name in index.files if not is_plain_name(name)), None):
        raise ValueError(f"{bad!r} is no name of a file in its folder")
    if bad := next((name for name, sums in index.files.items() if len(sums) != 2), None):
        raise ValueError(f"{bad!r} has no size and checksum")


def _crc(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())
