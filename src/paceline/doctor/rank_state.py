"""What is known of each rank of a run: its file, its process where that is on this machine, and what it answers when it is asked."""

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

from paceline.doctor import heartbeat as beat
from paceline.doctor.heartbeat import Collective, Frame, Heartbeat, StackAnswer
from paceline.doctor.heartbeat_writer import EVERY_S, SIGNAL
from paceline.errors import RunError
from paceline.files import has_open, write_whole
from paceline.run import RunFolder

HERE_S, ELSEWHERE_S = (
    2 * EVERY_S,
    6 * EVERY_S,
)  # to wait for an answer; file systems between nodes take some seconds to show a new file
STACK_S = 0.5  # for a process to write its stack
LINE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, kw_only=True)
class ReaderProcess:
    """A process that reads samples for a rank."""

    pid: int
    state: str  # as Seen.state
    stack: Sequence[Frame] = ()


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What is known of one rank."""

    rank: int
    beat: Heartbeat | None
    state: str = "missing"  # not started yet; "runs", "stopped", "gone" (its process), "silent" (on another machine), "ended"
    stack: Sequence[Frame] = ()  # innermost last
    collectives: Sequence[Collective] = ()
    readers: Sequence[ReaderProcess] = ()
    answered: bool = False


def beats(run: RunFolder) -> list[Heartbeat | None]:
    """That of each rank of the last start, by our clock; None for one that has not written any yet."""
    found: list[Heartbeat] = []
    ahead_s = beat.ahead_s(run.ranks)
    for path in _files(run):
        if (one := _read(path)) is not None:
            found.append(beat.moved(one, ahead_s))
    if not found:
        return []
    newest = max(found, key=lambda one: one.began)
    late_s = {
        one.rank: 0.0 if one.host == newest.host else beat.CLOCK_S for one in found
    }  # clocks of other machines may differ so much
    of_this_start = {one.rank: one for one in found if one.time >= newest.began - late_s[one.rank]}
    return [of_this_start.get(rank) for rank in range(newest.ranks)]


def _files(run: RunFolder) -> list[Path]:
    return sorted(run.ranks.glob("*.alive")) if run.ranks.is_dir() else []


def _read(path: Path) -> Heartbeat | None:
    """Also one that is being written now."""
    for _ in range(3):
        one: Heartbeat | None = beat.read(path, Heartbeat)
        if one is not None:
            return one
        time.sleep(0.01)
    return None


def unreadable(run: RunFolder) -> list[Path]:
    """Return the files in which ranks say what they are at, as far as these are damaged."""
    return [path for path in _files(run) if _read(path) is None]


def state(one: Heartbeat | None) -> str:
    """Of one on another machine only whether it has ended."""
    if one is None:
        return "missing"
    if one.phase == beat.ENDED:
        return "ended"
    if _is_elsewhere(one):
        return "runs"
    with contextlib.suppress(psutil.Error):
        if beat.birth(one.pid) == one.birth:  # else another process has its id by now
            return _state_of(psutil.Process(one.pid))
    return "gone"


def ask(run: RunFolder) -> list[RankState]:
    """Takes some seconds at the most. No rank is disturbed but one that runs and does not answer: it gets a signal that it expects."""
    found = beats(run)
    states = list(map(state, found))
    asked = uuid.uuid4().hex
    waiting = {rank for rank, its in enumerate(states) if its == "runs"}
    if waiting:
        with contextlib.suppress(
            RunError
        ):  # it may be the folder of somebody else, where we cannot write, or a link could lie
            write_whole(run.asked, asked)
    answers: dict[int, StackAnswer] = {}
    began = time.monotonic()
    while waiting:
        for rank in list(waiting):
            answer = beat.read(run.said(rank), StackAnswer)
            if answer is not None and answer.asked == asked:
                answers[rank] = answer
                waiting.remove(rank)
        if time.monotonic() - began > (
            ELSEWHERE_S if any(_is_elsewhere(found[rank]) for rank in waiting) else HERE_S
        ):
            break
        time.sleep(0.05)
    seen = []
    for rank, (before, its) in enumerate(zip(found, states, strict=True)):
        now: Heartbeat | None = beat.read(run.alive(rank), Heartbeat) if before is not None else None
        one = beat.moved(now, beat.ahead_s(run.ranks)) if now is not None else before
        if one is not None and before is not None and _is_elsewhere(one) and its == "runs":
            its = "silent" if rank in waiting and one.time < before.time + EVERY_S / 10 else "runs"
            one = _by_our_clock(one) if its == "runs" else one
        seen.append(_seen(run, rank, one, its, answers.get(rank)))
    return seen


def _is_elsewhere(one: Heartbeat | None) -> bool:
    return one is not None and one.host != platform.node()


def _by_our_clock(one: Heartbeat) -> Heartbeat:
    """What was written just now, on a machine whose clock may be another."""
    return beat.moved(one, time.time() - one.time)


def _seen(
    run: RunFolder, rank: int, one: Heartbeat | None, its: str, answer: StackAnswer | None
) -> RankState:
    here = one is not None and not _is_elsewhere(one)
    stack: Sequence[Frame] = answer.stack if answer is not None else ()
    if one is not None and here and its == "runs" and answer is None:  # something holds Python's lock
        stack = _signalled(run, rank, one.pid)
    readers: list[ReaderProcess] = []
    if one is not None and here and its in ("runs", "stopped") and one.phase in (beat.DATA, beat.EVALUATE):
        readers = [_reader(run, rank, process) for process in _readers(one.pid)]
    return RankState(
        rank=rank,
        beat=one,
        state=its,
        stack=stack,
        collectives=answer.collectives if answer is not None else (),
        readers=readers,
        answered=answer is not None,
    )


def _state_of(process: psutil.Process) -> str:
    status = process.status()
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "stopped"
    return "gone" if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else "runs"


def _readers(rank: int) -> list[psutil.Process]:
    """What it has forked and not become another program."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(rank)
        words = process.cmdline()
        return [child for child in process.children() if child.cmdline() == words]
    return []


def _reader(run: RunFolder, rank: int, process: psutil.Process) -> ReaderProcess:
    with contextlib.suppress(psutil.Error):
        its = _state_of(process)
        return ReaderProcess(
            pid=process.pid, state=its, stack=_signalled(run, rank, process.pid) if its == "runs" else ()
        )
    return ReaderProcess(pid=process.pid, state="gone")


def _signalled(run: RunFolder, rank: int, pid: int) -> Sequence[Frame]:
    """The stack that a process writes when it is told to; nothing where it would be killed by that."""
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
        return parsed(file.read())


def _expects_signal(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def parsed(text: str) -> list[Frame]:
    """Of what faulthandler writes, the first thread of the process, which it writes last."""
    last = re.split(r"\n(?=Current thread|Thread)", text)[-1]
    return [
        Frame(found[1], int(found[2]), found[3]) for line in last.splitlines() if (found := LINE.match(line))
    ][::-1]
