"""The state of each rank of a run: its heartbeat, its process if it is local, its answer to a request."""

import contextlib
import os
import platform
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.doctor import heartbeat
from paceline.doctor.heartbeat import Collective, Frame, Heartbeat, StackAnswer
from paceline.doctor.heartbeat_writer import EVERY_S, SIGNAL
from paceline.errors import RunError
from paceline.files import has_open, write_whole
from paceline.run import RunFolder

# How long to wait for an answer. A shared file system takes seconds to show a new file.
LOCAL_ANSWER_S, REMOTE_ANSWER_S = 2 * EVERY_S, 6 * EVERY_S
STACK_S = 0.5  # how long to wait for a process to write its stack
LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, kw_only=True)
class ReaderProcess:
    """A process that reads samples for a rank."""

    pid: int
    state: str  # as RankState.state
    stack: Sequence[Frame] = ()


@dataclass(frozen=True, kw_only=True)
class RankState:
    """The state of one rank."""

    rank: int
    beat: Heartbeat | None
    # "missing" (not started), "runs", "stopped", "gone" (its process), "silent" (on another machine), "ended"
    state: str = "missing"
    stack: Sequence[Frame] = ()  # innermost last
    collectives: Sequence[Collective] = ()
    readers: Sequence[ReaderProcess] = ()
    answered: bool = False


def read_heartbeats(run: RunFolder, offset_s: float | None = None) -> list[Heartbeat | None]:
    """Return the heartbeat of each rank of the last start, by our clock; None for a rank without one.

    offset_s: seconds that our clock is ahead of the file system's; None: measured by touching the folder."""
    beats: list[Heartbeat] = []
    if offset_s is None:
        offset_s = heartbeat.clock_offset_s(run.ranks)
    for path in _heartbeat_files(run):
        if (beat := _read(path)) is not None:
            beats.append(heartbeat.shift_times(beat, offset_s))
    if not beats:
        return []
    newest = max(beats, key=lambda beat: beat.began)
    # Clocks of other machines may differ by this much.
    tolerance_s = {beat.rank: 0.0 if beat.host == newest.host else heartbeat.CLOCK_S for beat in beats}
    of_this_start = {beat.rank: beat for beat in beats if beat.time >= newest.began - tolerance_s[beat.rank]}
    return [of_this_start.get(rank) for rank in range(newest.ranks)]


def _heartbeat_files(run: RunFolder) -> list[Path]:
    return sorted(run.ranks.glob("*.alive")) if run.ranks.is_dir() else []


def _read(path: Path) -> Heartbeat | None:
    """Return the heartbeat in a file, which may be being written now."""
    for _ in range(3):
        beat: Heartbeat | None = heartbeat.read(path, Heartbeat)
        if beat is not None:
            return beat
        time.sleep(0.01)
    return None


def find_damaged_heartbeats(run: RunFolder) -> list[Path]:
    """Return the heartbeat files that cannot be read."""
    return [path for path in _heartbeat_files(run) if _read(path) is None]


def find_state(beat: Heartbeat | None) -> str:
    """Return the state of a rank by its heartbeat and process. On another machine it is "runs" or "ended"."""
    if beat is None:
        return "missing"
    if beat.phase == heartbeat.ENDED:
        return "ended"
    if is_remote(beat):
        return "runs"
    with contextlib.suppress(psutil.Error):
        if heartbeat.process_birth(beat.pid) == beat.birth:  # otherwise another process has its id now
            return _process_state(psutil.Process(beat.pid))
    return "gone"


def inspect_ranks(run: RunFolder) -> list[RankState]:
    """Return the state of each rank. Takes a few seconds at most.

    A rank that runs and does not answer gets a signal that it expects; no other rank is disturbed."""
    beats = read_heartbeats(run)
    states = list(map(find_state, beats))
    request = uuid.uuid4().hex
    waiting = {rank for rank, state in enumerate(states) if state == "runs"}
    if waiting:
        # The folder may belong to another user, who denies writing to it or planted a link.
        with contextlib.suppress(RunError):
            write_whole(run.asked, request)
    answers: dict[int, StackAnswer] = {}
    began = time.monotonic()
    while waiting:
        for rank in list(waiting):
            answer = heartbeat.read(run.said(rank), StackAnswer)
            if answer is not None and answer.asked == request:
                answers[rank] = answer
                waiting.remove(rank)
        limit_s = REMOTE_ANSWER_S if any(is_remote(beats[rank]) for rank in waiting) else LOCAL_ANSWER_S
        if time.monotonic() - began > limit_s:
            break
        time.sleep(0.05)
    ranks = []
    for rank, (before, state) in enumerate(zip(beats, states, strict=True)):
        now: Heartbeat | None = heartbeat.read(run.alive(rank), Heartbeat) if before is not None else None
        beat = heartbeat.shift_times(now, heartbeat.clock_offset_s(run.ranks)) if now is not None else before
        if beat is not None and before is not None and is_remote(beat) and state == "runs":
            state = "silent" if rank in waiting and beat.time < before.time + EVERY_S / 10 else "runs"
            beat = _shift_to_now(beat) if state == "runs" else beat
        ranks.append(_inspect_rank(run, rank, beat, state, answers.get(rank)))
    return ranks


def is_remote(beat: Heartbeat | None) -> bool:
    return beat is not None and beat.host != platform.node()


def _shift_to_now(beat: Heartbeat) -> Heartbeat:
    """Return a heartbeat that was written just now, by a clock that may differ, by our clock."""
    return heartbeat.shift_times(beat, time.time() - beat.time)


def _inspect_rank(
    run: RunFolder, rank: int, beat: Heartbeat | None, state: str, answer: StackAnswer | None
) -> RankState:
    is_local = beat is not None and not is_remote(beat)
    stack: Sequence[Frame] = answer.stack if answer is not None else ()
    if beat is not None and is_local and state == "runs" and answer is None:  # C code holds Python's lock
        stack = _signal_for_stack(run, rank, beat.pid)
    readers: list[ReaderProcess] = []
    if (
        beat is not None
        and is_local
        and state in ("runs", "stopped")
        and beat.phase in (heartbeat.DATA, heartbeat.OWN_CODE, heartbeat.EVALUATE)
    ):
        readers = [_inspect_reader(run, rank, process) for process in _find_readers(beat.pid)]
    return RankState(
        rank=rank,
        beat=beat,
        state=state,
        stack=stack,
        collectives=answer.collectives if answer is not None else (),
        readers=readers,
        answered=answer is not None,
    )


def _process_state(process: psutil.Process) -> str:
    status = process.status()
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else "runs"


def _find_readers(rank_pid: int) -> list[psutil.Process]:
    """Return the forked children of a rank that still run its program."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(rank_pid)
        command = process.cmdline()
        return [child for child in process.children() if child.cmdline() == command]
    return []


def _inspect_reader(run: RunFolder, rank: int, process: psutil.Process) -> ReaderProcess:
    with contextlib.suppress(psutil.Error):
        state = _process_state(process)
        stack = _signal_for_stack(run, rank, process.pid) if state == "runs" else ()
        return ReaderProcess(pid=process.pid, state=state, stack=stack)
    return ReaderProcess(pid=process.pid, state="gone")


def _signal_for_stack(run: RunFolder, rank: int, pid: int) -> Sequence[Frame]:
    """Return the stack that a process writes on a signal; empty if the signal would kill the process."""
    path = run.stacks(rank)
    if not _expects_signal(pid) or not has_open(pid, path):
        return ()
    before = path.stat().st_size
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)
    deadline = time.monotonic() + STACK_S
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.03)
        now = path.stat().st_size
        if now == size > before:
            break
        size = now
    with open(path, errors="replace") as file:
        file.seek(before)
        return parse_faulthandler(file.read())


def _expects_signal(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def parse_faulthandler(text: str) -> list[Frame]:
    """Return the stack of the process's first thread, which faulthandler writes last."""
    last = re.split(r"\n(?=Current thread|Thread)", text)[-1]
    matches = map(LINE.match, last.splitlines())
    return [Frame(match[1], int(match[2]), match[3]) for match in matches if match][::-1]
