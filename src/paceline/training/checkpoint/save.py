"""Checkpoints on torch's distributed checkpoint, written in the background and readable under any plan.

    ckpt/step_50/.metadata, *.distcp   torch's files: tensors `model/NAME`, `optimizer/NAME/KEY`, whole or in
                                       shards; averages of weights `ema/NAME`; with local SGD also
                                       `rank/N/model/…` and `rank/N/optimizer/…`, the state of rank N alone
    ckpt/step_50/checkpoint.json       step, samples, task, plan, shapes; size and CRC-32 of each file, and a
                                       CRC-32 of this file; written last

A checkpoint is written as `.step_50` and renamed when it is complete: it is complete or absent.
"""

import contextlib
import gc
import importlib
import json
import math
import os
import shutil
import sys
import threading
import time
import zlib
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from paceline.data.order import FULL
from paceline.distributed.balance import balance_by_size
from paceline.distributed.dtensor import is_dtensor, is_materialized
from paceline.distributed.process_group import SAVE_TIMEOUT_S
from paceline.errors import CheckpointError
from paceline.files import is_plain_name, open_regular, reason
from paceline.plan.plan import ResolvedPlan
from paceline.run import RunFolder
from paceline.training.init.named_tensors import find_aliases, named_tensors
from paceline.training.optimization.optimizer import local_optimizer
from paceline.training.optimization.optimizer_values import allocate_values, collect_values, restore_values
from paceline.training.optimization.plateau import PlateauState
from paceline.training.stop_policy import StopState

INDEX = "checkpoint.json"
AVERAGES = "ema/"  # prefix of the names of moving averages


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


def collect_model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict of `model`, each once under its first name.

    Tensors of other pipeline stages are on the meta device.
    """
    names = model.state_dict().keys()
    return {name: tensor.detach() for name, tensor in named_tensors(model).items() if name in names}


def collect_state(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], elsewhere: Container[str] = ()
) -> dict[str, Tensor]:
    """Return the state of model and optimizers on this rank, by names in a checkpoint.

    optimizers: each parameter belongs to one of them at most.
    elsewhere: names of parameters that another pipeline stage writes.
    """
    state = {
        f"model/{name}": tensor
        for name, tensor in collect_model_tensors(model).items()
        if is_materialized(tensor) and name not in elsewhere
    }
    # Read parameters only now: a state dict makes `fully_shard` put its shards back in place of whole
    # parameters.
    names: dict[Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters() if name not in elsewhere
    }
    for index, optimizer in enumerate(optimizers):
        values = collect_values(local_optimizer(optimizer), names, index)
        state |= {f"optimizer/{name}": value for name, value in values.items()}
    return state


def find_buffers(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers of `model` in a checkpoint."""
    return frozenset(f"model/{name}" for name, _ in model.named_buffers())


def select_written(
    state: Mapping[str, Tensor], copy: int, copies: int, buffers: Container[str] = ()
) -> dict[str, Tensor]:
    """Return the part of the state that this rank writes.

    These are its shards, and a share by size of what all copies of its layers hold. The first copy writes
    `buffers`, whose values may differ between copies. `copy`: the number of this rank's copy of its layers,
    of `copies`.
    """
    keys = sorted(state)
    sizes = [0 if is_dtensor(state[key]) or key in buffers else state[key].numel() for key in keys]
    owners = balance_by_size(sizes, copies)
    return {
        key: state[key]
        for key, owner in zip(keys, owners, strict=True)
        if is_dtensor(state[key]) or copy == (0 if key in buffers else owner)
    }


@dataclass
class _PendingSave:
    """A save under way."""

    index: Index
    began: float
    blocked_s: float
    future: Future[Any]


@dataclass(frozen=True)
class SaveResult:
    """How a save ended."""

    index: Index
    bytes: int
    seconds: float
    blocked_s: float  # that the training waited
    error: str | None  # why it was not written


class Saver:
    """Writes checkpoints of one run, one at a time.

    Its collectives use a separate process group, so that training can continue meanwhile.
    """

    def __init__(
        self,
        run: RunFolder,
        plan: ResolvedPlan,
        rank: int,
        ranks: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ):
        self.run = run
        self.rank = rank
        self.ranks = ranks
        self.copy, self.copies = plan.index_in_stage(plan.place(rank)), plan.ranks_per_stage
        # Under zero1 each rank has optimizer state that no other rank has, although its tensors are whole.
        self.state_is_sharded = plan.zero == 1
        if rank == 0:  # before any rank can start to save: the ranks meet when they create the group
            for unfinished in run.ckpt.glob(".step_*"):
                shutil.rmtree(unfinished)
        self.group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_TIMEOUT_S)) if ranks > 1 else group
        )
        self._pinned = device.type == "cuda"
        self._stager: Any = None
        self._saving: _PendingSave | None = None

    def prepare(self) -> None:
        """Import torch's distributed checkpoint in a thread.

        The import takes a second; the first save need not wait for it.
        """
        threading.Thread(
            target=importlib.import_module, args=("torch.distributed.checkpoint",), daemon=True
        ).start()

    def start(
        self,
        index: Index,
        state: Mapping[str, Tensor],
        rank_state: Mapping[str, Tensor] | None = None,
        buffers: Container[str] = (),
    ) -> None:
        """Copy the state and write the copy in the background.

        No other save may be under way: call `result` before.

        state: what other ranks may have too. `rank_state`: what no other rank has. `buffers`: names in
        `state` whose values may differ between ranks; those of the first rank with their layers are written.
        """
        began = time.perf_counter()
        from torch.distributed.checkpoint import async_save
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        assert self._saving is None
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(self._pinned, False, False, self._pinned))
        self.run.ckpt.mkdir(exist_ok=True)
        unfinished = self.run.ckpt / f".step_{index.step}"
        whole = {
            key: tensor
            for key, tensor in state.items()
            if not (self.state_is_sharded and key.startswith("optimizer/"))
        }
        written = (
            select_written(whole, self.copy, self.copies, buffers)
            | {key: state[key] for key in state.keys() - whole.keys()}
            | dict(rank_state or {})
        )
        future = async_save(
            written,
            storage_writer=_writer(unfinished, self.run.checkpoint(index.step), index, self.rank, self.ranks),
            process_group=self.group,
            async_stager=self._stager,
        )
        assert isinstance(future, Future)
        self._saving = _PendingSave(index, began, time.perf_counter() - began, future)

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._saving is not None

    def result(self, wait: bool) -> SaveResult | None:
        """Return how the save under way ended, once. None if there is no save, or if it has not ended.

        wait: until it has ended; the same on all ranks.
        """
        saving = self._saving
        if saving is None or not (wait or saving.future.done()):
            return None
        waited_from = time.perf_counter()
        error = saving.future.exception()
        cause = _cause(error) if error else None
        now = time.perf_counter()
        self._saving = None
        final = self.run.checkpoint(saving.index.step)
        if error is not None:
            if self.rank == 0:
                shutil.rmtree(self.run.ckpt / f".step_{saving.index.step}", ignore_errors=True)
            # torch 2.13: the frames of the traceback hold threads that abort the process if they exist when
            # Python ends.
            del error, saving.future
            gc.collect()
        return SaveResult(
            index=saving.index,
            bytes=0 if cause else sum(path.stat().st_size for path in final.iterdir()),
            seconds=now - saving.began,
            blocked_s=saving.blocked_s + now - waited_from,
            error=cause,
        )

    def close(self) -> None:
        """Free the memory of copies."""
        if self._stager is not None:
            self._stager.close()


def _cause(error: BaseException) -> str:
    """Return the message of the error that torch wrapped; of an OSError, the operating system's."""
    failures = getattr(error, "failures", None)  # CheckpointException: rank -> (exception, traceback)
    inner: BaseException = next(iter(failures.values()))[0] if failures else error
    return inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner).splitlines()[0]


def _writer(unfinished: Path, final: Path, index: Index, rank: int, ranks: int) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        """torch's writer, which also writes checksums, and renames the folder when it is complete."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            _lower_thread_priority()
            try:
                done = super().write_data(plan, planner)
            except RuntimeError as error:  # torch.save raises it in its cleanup if the disk is full
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            names = {result.storage_data.relative_path for result in done.value()}
            sums = {name: checksum(unfinished / name) for name in sorted(names)}
            (unfinished / f"sums.{rank}.json").write_text(json.dumps(sums))
            return done

        def finish(self, metadata: Any, results: Any) -> None:
            # torch 2.13: if the process group is gone when a save begins, as in a rank that has just failed,
            # each rank writes a checkpoint alone.
            if len(results) != ranks:
                raise CheckpointError(f"{unfinished} has the state of {len(results)} of {ranks} ranks")
            super().finish(metadata, results)
            files = {".metadata": checksum(unfinished / ".metadata")}
            for sums in sorted(unfinished.glob("sums.*.json")):
                files |= json.loads(sums.read_text())
                sums.unlink()
            write_index(unfinished, replace(index, files=files))
            if final.exists():  # the step was repeated after a restart
                shutil.rmtree(final)
            unfinished.rename(final)
            directory = os.open(final.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)

    return Writer(unfinished, sync_files=True)


def write_index(path: Path, index: Index) -> None:
    """Write checkpoint.json, with its checksum, into the folder of a checkpoint."""
    with open(path / INDEX, "w") as file:
        content = json.loads(json.dumps(asdict(index), default=str))
        json.dump(content | {"crc": _crc(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _lower_thread_priority() -> None:
    """Let this thread run only if the training leaves a core idle, unless it is the main thread.

    (On Linux each thread has a separate priority.)
    """
    if sys.platform == "linux" and threading.current_thread() is not threading.main_thread():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def checksum(path: Path) -> list[int]:
    """Return [bytes, CRC-32] of a file."""
    crc = size = 0
    with open_regular(path) as file:
        while block := file.read(2**22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


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


def verify_files(path: Path, index: Index, rank: int = 0, ranks: int = 1) -> str | None:
    """Return what is wrong with the files of a checkpoint; None if nothing is.

    Of `ranks` each reads a part.
    """
    for name, expected in sorted(index.files.items())[rank::ranks]:
        try:
            found = checksum(path / name)
        except OSError as error:
            return f"{name}: {reason(error)}"
        if found[0] != expected[0]:
            return f"{name} has {found[0]} bytes, {expected[0]} were written"
        if found != expected:
            return f"{name} has another checksum than when it was written"
    return None


def find_last_complete(
    run: RunFolder, rank: int = 0, ranks: int = 1, steps: Sequence[int] | None = None
) -> tuple[Path | None, Index | None, list[str]]:
    """Return the newest complete checkpoint, its index, and a note on each newer one that is damaged.

    steps: of the checkpoints to consider, oldest first [default: all]. A collective: the ranks divide the
    files among themselves.
    """
    notes: list[str] = []
    for step in reversed(steps if steps is not None else run.checkpoints()):
        path = run.checkpoint(step)
        wrong: str | None
        try:
            index = read_index(path)
            wrong = verify_files(path, index, rank, ranks)
        except CheckpointError as error:
            index, wrong = None, str(error)
        if ranks > 1:
            answers: list[str | None] = [None] * ranks
            dist.all_gather_object(answers, wrong)
            wrong = next((answer for answer in answers if answer), None)
        if wrong is None:
            return path, index, notes
        notes.append(f"checkpoint {path} is damaged and was skipped: {wrong}")
    return None, None, notes


def check_same_model(
    path: Path, index: Index, task: str, settings: Mapping[str, Any], model: nn.Module
) -> None:
    """Raise CheckpointError if a checkpoint is of another task, or its tensors have other shapes."""
    if index.task.rpartition(":")[2] != task.rpartition(":")[2]:
        raise CheckpointError(
            f"{path} is of the task {index.task}, not of {task}; start that task in another run"
        )
    shapes = {name: list(tensor.shape) for name, tensor in collect_model_tensors(model).items()}
    if shapes == index.shapes:
        return
    name = next(name for name in [*shapes, *index.shapes] if shapes.get(name) != index.shapes.get(name))
    in_model, in_checkpoint = (
        f"has shape {tuple(table[name])}" if name in table else "is missing"
        for table in (shapes, index.shapes)
    )
    changed = [key for key in {*settings, *index.set} if settings.get(key) != index.set.get(key)]
    why = (
        f" (--set {changed[0]}={index.set.get(changed[0])!r} then, {settings.get(changed[0])!r} now)"
        if changed
        else ""
    )
    raise CheckpointError(
        f"{path} is of another model{why}: {name} {in_checkpoint} in the checkpoint and {in_model} in the "
        "model"
    )


def rank_prefix(rank: int) -> str:
    """Return the prefix of the names of a rank's state."""
    return f"rank/{rank}/"


def load_(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    prefix: str = "",
    group: dist.ProcessGroup | None = None,
    averages: Mapping[str, Tensor] | None = None,
) -> bool:
    """Read a checkpoint into a model and its optimizers, distributed by any plan.

    Each rank reads what it holds.

    optimizers: none: only the weights are read. prefix: of the names to read, "" or that of a rank. `group`:
    the ranks that read; None: all. averages: tensors to read by their names in the checkpoint. A collective.

    Returns whether the checkpoint has the averages; if not, they are not changed.
    """
    from paceline.training.checkpoint.metadata import read_tensors

    metadata = load_metadata(path, read_index(path))
    stored = metadata.state_dict_metadata
    wanted: dict[str, Any] = {
        f"{prefix}model/{name}": tensor
        for name, tensor in collect_model_tensors(model).items()
        if is_materialized(tensor)
    }
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    begin = f"{prefix}optimizer/"
    of_optimizers = {
        name.removeprefix(begin): meta for name, meta in stored.items() if name.startswith(begin)
    }
    values = [
        allocate_values(of_optimizers, local_optimizer(optimizer), names, index)
        for index, optimizer in enumerate(optimizers)
    ]
    for of_optimizer in values:
        wanted |= {f"{begin}{name}": value for name, value in of_optimizer.items()}
    has_averages = all(name in stored for name in averages or ())
    if has_averages:
        wanted |= averages or {}
    read_tensors(path, metadata, wanted, group)
    for index, (optimizer, of_optimizer) in enumerate(zip(optimizers, values, strict=True)):
        restore_values(local_optimizer(optimizer), names, of_optimizer, index)
    return has_averages


def load_metadata(path: Path, index: Index) -> Any:
    """Return the metadata of a checkpoint: its tensors and their places. Raises CheckpointError."""
    from paceline.training.checkpoint.metadata import read_metadata

    return read_metadata(path, index.files, sum(size for size, _ in index.files.values()))


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return the fields of an Index that describe the model."""
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in collect_model_tensors(model).items()},
        "tied": find_aliases(model),
    }


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

    Otherwise `prune` would keep them as the last ones.
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
