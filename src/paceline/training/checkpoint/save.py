"""Save checkpoints by torch's distributed checkpoint in the background, readable under any plan.

    ckpt/step_50/.metadata, *.distcp   torch's files: tensors `model/NAME`, `optimizer/NAME/KEY`, whole or in
                                       shards; averages of weights `ema/NAME`; with local SGD also
                                       `rank/N/model/…` and `rank/N/optimizer/…`, the state of rank N alone
    ckpt/step_50/checkpoint.json       step, samples, task, plan, shapes; size and CRC-32 of each file, and a
                                       CRC-32 of this file; written last

A checkpoint is written as `.step_50` and renamed when it is complete: it is complete or absent.
"""

import gc
import importlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Container, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.process_group import SAVE_TIMEOUT_S
from paceline.errors import CheckpointError
from paceline.plan.plan import ResolvedPlan
from paceline.run import RunFolder
from paceline.training.checkpoint.index import Index, write_index
from paceline.training.checkpoint.integrity import checksum
from paceline.training.checkpoint.state import select_written


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


def _lower_thread_priority() -> None:
    """Let this thread run only if the training leaves a core idle, unless it is the main thread.

    (On Linux each thread has a separate priority.)
    """
    if sys.platform == "linux" and threading.current_thread() is not threading.main_thread():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
