"""Checkpoints on torch's distributed checkpoint: written in the background, complete or not there, readable under any plan.

    ckpt/step_50/.metadata, *.distcp   torch's files: tensors `model/NAME`, `optimizer/NAME/KEY`, whole or in shards
                                       local SGD: besides, what only rank N has as `rank/N/model/…` and `rank/N/optimizer/…`
    ckpt/step_50/checkpoint.json       step, samples, task, plan, shapes; size and CRC-32 of each file, and its own: written last

A checkpoint is written as `.step_50` and renamed when it is complete.
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
from collections.abc import Container, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from paceline.distributed.dtensor import is_dtensor, is_materialized
from paceline.distributed.process_group import SAVE_TIMEOUT_S
from paceline.errors import CheckpointError
from paceline.files import is_plain_name, open_regular, reason
from paceline.plan.plan import ResolvedPlan
from paceline.run import RunFolder
from paceline.training.init.named_tensors import find_aliases, named_tensors
from paceline.training.optimizer import balance_by_size, local_optimizer

INDEX = "checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class Index:
    """What a checkpoint is of."""

    step: int
    samples: int  # consumed so far: the state of the data
    epoch_samples: int  # which the order of samples counts on
    task: str
    set: Mapping[str, Any]
    plan: str
    ranks: int
    seed: int
    shapes: Mapping[str, list[int]]  # of the whole parameters and buffers
    tied: Mapping[str, str]  # other names of tied parameters -> the name above
    own: bool = False  # whether it has each rank's own state besides: local SGD
    loss_scale: Mapping[str, float] | None = None  # of fp16
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the last evaluation
    identity: Mapping[str, str] = field(default_factory=dict)  # what makes the training what it is
    files: Mapping[str, list[int]] = field(default_factory=dict)  # name -> [bytes, CRC-32]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that a state dict of `model` has, each once, under its first name; those of other stages on the meta device."""
    kept = model.state_dict().keys()
    return {name: tensor.detach() for name, tensor in named_tensors(model).items() if name in kept}


def tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, elsewhere: Container[str] = ()
) -> dict[str, Tensor]:
    """All the state that lies on this rank, by its name in a checkpoint; without that of `elsewhere`, which another stage writes."""
    found = {
        f"model/{name}": tensor
        for name, tensor in model_tensors(model).items()
        if is_materialized(tensor) and name not in elsewhere
    }
    # Only now: a state dict makes `fully_shard` put its shards back in place of whole parameters.
    names: dict[Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters() if name not in elsewhere
    }
    for parameter, state in local_optimizer(optimizer).state.items():
        if parameter not in names:
            continue
        found |= {
            f"optimizer/{names[parameter]}/{key}": value
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
    return found


def written_here(found: Mapping[str, Tensor], copy: int, copies: int) -> dict[str, Tensor]:
    """The part of the state that this rank writes: shards where they lie, what all copies of its layers hold dealt out by size."""
    keys = sorted(found)
    owners = balance_by_size([0 if is_dtensor(found[key]) else found[key].numel() for key in keys], copies)
    return {
        key: found[key]
        for key, owner in zip(keys, owners, strict=True)
        if is_dtensor(found[key]) or owner == copy
    }


@dataclass
class _Saving:
    index: Index
    began: float
    blocked_s: float
    future: Future[Any]


@dataclass(frozen=True)
class SaveResult:
    index: Index
    bytes: int
    seconds: float
    blocked_s: float
    error: str | None


class Saver:
    """Writes checkpoints of one run, one at a time. The collectives are on a group of their own, so that training may go on."""

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
        self.state_is_cut = (
            plan.zero == 1
        )  # each rank has optimizer state that no other one has, though its tensors are whole
        if rank == 0:  # before any rank can begin to save: they meet in making the group
            for unfinished in run.ckpt.glob(".step_*"):
                shutil.rmtree(unfinished)
        self.group = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=SAVE_TIMEOUT_S)) if ranks > 1 else group
        )
        self._pinned = device.type == "cuda"
        self._stager: Any = None
        self._saving: _Saving | None = None

    def prepare(self) -> None:
        """Import torch's distributed checkpoint aside, which takes a second, so that the first save does not wait for it."""
        threading.Thread(
            target=importlib.import_module, args=("torch.distributed.checkpoint",), daemon=True
        ).start()

    def start(
        self, index: Index, found: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None
    ) -> None:
        """Copy the state aside and write it in the background. Waits for a save that is still under way: look at `result` first.

        found: what other ranks may have too. `own`: what no other rank has.
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
            for key, tensor in found.items()
            if not (self.state_is_cut and key.startswith("optimizer/"))
        }
        mine = (
            written_here(whole, self.copy, self.copies)
            | {key: found[key] for key in found.keys() - whole.keys()}
            | dict(own or {})
        )
        future = async_save(
            mine,
            storage_writer=_writer(unfinished, self.run.checkpoint(index.step), index, self.rank, self.ranks),
            process_group=self.group,
            async_stager=self._stager,
        )
        assert isinstance(future, Future)
        self._saving = _Saving(index, began, time.perf_counter() - began, future)

    @property
    def busy(self) -> bool:
        return self._saving is not None

    def result(self, wait: bool) -> SaveResult | None:
        """How the save under way ended, once; None while there is none to tell of. All ranks must agree on `wait`."""
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
            # The frames of its traceback hold threads of torch's, which abort the process if they are there when Python ends (torch 2.13).
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
        if self._stager is not None:
            self._stager.close()


def _cause(error: BaseException) -> str:
    """The system's own words from under torch's wrapping."""
    failures = getattr(error, "failures", None)  # CheckpointException: rank -> (exception, traceback)
    inner: BaseException = next(iter(failures.values()))[0] if failures else error
    return inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner).splitlines()[0]


def _writer(unfinished: Path, final: Path, index: Index, rank: int, ranks: int) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    class Writer(FileSystemWriter):
        """torch's writer, with a checksum of each file beside it and the renaming at the end."""

        def write_data(self, plan: Any, planner: Any) -> Any:
            _step_back()
            try:
                done = super().write_data(plan, planner)
            except RuntimeError as error:  # of torch.save, which a full disk makes stumble over itself
                if isinstance(error.__context__, OSError):
                    raise error.__context__ from None
                raise
            names = {result.storage_data.relative_path for result in done.value()}
            sums = {name: checksum(unfinished / name) for name in sorted(names)}
            (unfinished / f"sums.{rank}.json").write_text(json.dumps(sums))
            return done

        def finish(self, metadata: Any, results: Any) -> None:
            # Where the process group is gone when a save begins, as in a rank that has just failed, each rank writes alone (torch 2.13).
            if len(results) != ranks:
                raise CheckpointError(f"{unfinished} has the state of {len(results)} of {ranks} ranks")
            super().finish(metadata, results)
            files = {".metadata": checksum(unfinished / ".metadata")}
            for sums in sorted(unfinished.glob("sums.*.json")):
                files |= json.loads(sums.read_text())
                sums.unlink()
            with open(unfinished / INDEX, "w") as file:
                content = json.loads(json.dumps(asdict(index) | {"files": files}, default=str))
                json.dump(content | {"crc": _crc(content)}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            if final.exists():  # a step that was done again
                shutil.rmtree(final)
            unfinished.rename(final)
            directory = os.open(final.parent, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)

    return Writer(unfinished, sync_files=True)


def _step_back() -> None:
    """Let this thread run where the training leaves a core idle. (On Linux each thread has a priority of its own.)"""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def checksum(path: Path) -> list[int]:
    """[bytes, CRC-32] of a file."""
    crc = size = 0
    with open_regular(path) as file:
        while block := file.read(2**22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def read_index(path: Path) -> Index:
    """Raises CheckpointError for what is no checkpoint."""
    try:
        with open_regular(path / INDEX) as file:
            content = json.load(file)
        crc = content.pop("crc", None)  # one of before had none
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
    """Raises ValueError for what no checkpoint of ours says."""
    if min(index.step, index.samples, index.epoch_samples, index.ranks) < 1:
        raise ValueError("step, samples, epoch_samples and ranks must be at least 1")
    if bad := next((name for name in index.files if not is_plain_name(name)), None):
        raise ValueError(f"{bad!r} is no name of a file in its folder")
    if bad := next((name for name, sums in index.files.items() if len(sums) != 2), None):
        raise ValueError(f"{bad!r} has no size and checksum")


def _crc(content: Any) -> int:
    return zlib.crc32(json.dumps(content).encode())


def verify(path: Path, index: Index, rank: int = 0, ranks: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, of which this rank reads its part; None when nothing is."""
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


def last_good(run: RunFolder, rank: int = 0, ranks: int = 1) -> tuple[Path | None, Index | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence on each newer one that is not. The ranks share the reading."""
    notes: list[str] = []
    for step in reversed(run.checkpoints()):
        path = run.checkpoint(step)
        wrong: str | None
        try:
            index = read_index(path)
            wrong = verify(path, index, rank, ranks)
        except CheckpointError as error:
            index, wrong = None, str(error)
        if ranks > 1:
            answers: list[str | None] = [None] * ranks
            dist.all_gather_object(answers, wrong)
            wrong = next((answer for answer in answers if answer), None)
        if wrong is None:
            return path, index, notes
        notes.append(f"checkpoint {path} is damaged and was passed over: {wrong}")
    return None, None, notes


def check_same_model(
    path: Path, index: Index, task: str, settings: Mapping[str, Any], model: nn.Module
) -> None:
    """Raise CheckpointError when a checkpoint is of another task or of other shapes."""
    if index.task.rpartition(":")[2] != task.rpartition(":")[2]:
        raise CheckpointError(
            f"{path} is of the task {index.task}, not of {task}; start that one in a run of its own"
        )
    own = {name: list(tensor.shape) for name, tensor in model_tensors(model).items()}
    if own == index.shapes:
        return
    name = next(name for name in [*own, *index.shapes] if own.get(name) != index.shapes.get(name))
    here, there = (
        f"has shape {tuple(of[name])}" if name in of else "is not there" for of in (own, index.shapes)
    )
    changed = [key for key in {*settings, *index.set} if settings.get(key) != index.set.get(key)]
    why = (
        f" (--set {changed[0]}={index.set.get(changed[0])!r} then, {settings.get(changed[0])!r} now)"
        if changed
        else ""
    )
    raise CheckpointError(
        f"{path} is of another model{why}: {name} {there} in the checkpoint and {here} in the model"
    )


def own(rank: int) -> str:
    """What the names of a rank's own state begin with."""
    return f"rank/{rank}/"


def load_(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    begin: str = "",
    among: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint into a model and optimizer that are laid out by any plan; each rank reads what it holds.

    begin: of the names to read: "", or those of a rank's `own`. `among`: the ranks that read; None: all.
    """
    from paceline.training.checkpoint.metadata import read_tensors

    metadata = _metadata(path, read_index(path))
    stored = metadata.state_dict_metadata
    wanted: dict[str, Any] = {
        f"{begin}model/{name}": tensor
        for name, tensor in model_tensors(model).items()
        if is_materialized(tensor)
    }
    local = local_optimizer(optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    keys: dict[str, list[str]] = {}
    for entry in stored:
        if entry.startswith(f"{begin}optimizer/"):
            name, _, key = entry.removeprefix(f"{begin}optimizer/").rpartition("/")
            keys.setdefault(name, []).append(key)
    for group in local.param_groups:
        for parameter in group["params"]:
            for key in keys.get(names[parameter], []):
                entry = f"{begin}optimizer/{names[parameter]}/{key}"
                meta = stored[entry]
                dtype = meta.properties.dtype
                if meta.size == parameter.shape and parameter.dim():
                    value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                else:
                    on_cpu = not (group.get("fused") or group.get("capturable"))
                    value = torch.empty(meta.size, dtype=dtype, device="cpu" if on_cpu else parameter.device)
                local.state[parameter][key] = wanted[entry] = value
    read_tensors(path, metadata, wanted, among)


def _metadata(path: Path, index: Index) -> Any:
    from paceline.training.checkpoint.metadata import read_metadata

    return read_metadata(path, index.files, sum(size for size, _ in index.files.values()))


def load_whole(path: Path) -> dict[str, Tensor]:
    """The whole weights of a checkpoint on one process, under all of the model's own names."""
    from paceline.training.checkpoint.metadata import read_tensors

    index = read_index(path)
    if wrong := verify(path, index):
        raise CheckpointError(f"checkpoint {path} is damaged: {wrong}")
    metadata = _metadata(path, index)
    wanted = {
        entry: torch.empty(meta.size, dtype=meta.properties.dtype)
        for entry, meta in metadata.state_dict_metadata.items()
        if entry.startswith("model/")
    }
    read_tensors(path, metadata, wanted, alone=True)
    whole = {entry.removeprefix("model/"): tensor for entry, tensor in wanted.items()}
    return whole | {alias: whole[name].clone() for alias, name in index.tied.items() if name in whole}


def describe(model: nn.Module) -> dict[str, Any]:
    """The fields of an Index that are of the model."""
    return {
        "shapes": {name: list(tensor.shape) for name, tensor in model_tensors(model).items()},
        "tied": find_aliases(model),
    }


def scores(run: RunFolder, best: str) -> dict[int, float]:
    """How good each checkpoint is by `best` ("min loss", "max accuracy"), lower being better. Those without a number are left out."""
    direction, name = best.split()
    found = {}
    for step in run.checkpoints():
        with contextlib.suppress(CheckpointError):
            found[step] = read_index(run.checkpoint(step)).metrics.get(name, math.nan)
    return {
        step: score if direction == "min" else -score
        for step, score in found.items()
        if not math.isnan(score)
    }


def best_score(run: RunFolder, best: str) -> float | None:
    return min(scores(run, best).values(), default=None)


def prune(run: RunFolder, keep: int, best: str) -> None:
    """Delete all but the last `keep` checkpoints and the best."""
    by_score = scores(run, best)
    kept = {*run.checkpoints()[-keep:], *([min(by_score, key=by_score.__getitem__)] if by_score else [])}
    for step in run.checkpoints():
        if step not in kept:
            doomed = run.ckpt / f".old_{step}"
            run.checkpoint(step).rename(
                doomed
            )  # so that a deletion that is cut short leaves no half checkpoint
            shutil.rmtree(doomed, ignore_errors=True)


def quarantine(run: RunFolder, after: int) -> None:
    """Rename the damaged checkpoints that are newer than the good one: as "the last" they would be kept in place of good ones."""
    for step in run.checkpoints():
        if step > after:
            aside = run.ckpt / f"damaged_{step}"
            shutil.rmtree(aside, ignore_errors=True)
            run.checkpoint(step).rename(aside)


def clean(run: RunFolder) -> None:
    """Delete what an earlier process left unfinished."""
    for path in run.ckpt.glob(".*"):
        shutil.rmtree(path, ignore_errors=True)
