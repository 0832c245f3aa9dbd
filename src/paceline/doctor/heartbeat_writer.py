"""The heartbeat of a rank: step and phase about once a second, stack and collectives on request."""

import contextlib
import faulthandler
import json
import math
import os
import platform
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.doctor import heartbeat
from paceline.doctor.heartbeat import (
    DATA,
    ENDED,
    OWN_CODE,
    SAVE,
    START,
    Collective,
    Frame,
    Heartbeat,
    StackAnswer,
)
from paceline.run import RunFolder

EVERY_S = 1.0
WARM_UP_STEPS = 5  # of a start, which the sums over all steps leave out
BEFORE_S = 0.1  # interval until the run folder exists, which rank 0 may have to create
# Makes a process write its stack, whatever it is executing. No other library uses this signal.
SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1) + 7


class HeartbeatWriter:
    """Records the state of a rank in memory; a thread writes it to the run folder.

    Call `enter` at each change of phase and `done` at the end of each step."""

    def __init__(self, run: RunFolder | None, rank: int, ranks: int, patience_s: float, saving_s: float):
        self.run, self.rank, self.ranks = run, rank, ranks
        self.patience_s: float | None = patience_s
        self.saving_s = saving_s
        self.on_phase: Callable[[str], None] | None = None  # called at the begin of each phase
        self.step = 0
        self.steps: int | None = None
        self._birth = heartbeat.process_birth(os.getpid())
        # All times here are by the performance counter: the system clock may be set.
        self._began = time.perf_counter()
        self._phase, self._since = START, self._began
        self._step_began = self._began
        self._stepped: float | None = None
        self._longest_s = 0.0
        self._spent_s: dict[str, float] = defaultdict(float)
        # Of the last heartbeat: step, seconds per phase until that step, seconds per phase and step.
        self._reported: tuple[int, dict[str, float], dict[str, float]] = (0, {}, {})
        # After the warm-up: step, seconds per phase until then, seconds of waiting for a core.
        self._warm: tuple[int, dict[str, float], float | None] | None = None
        self._first = 0
        self._last_request: str | None = None
        self._over = threading.Event()
        self._training_thread, self._native_thread = threading.get_ident(), threading.get_native_id()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "HeartbeatWriter":
        if self.run is not None:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._thread is None:
            return
        if kind is None:
            self.enter(ENDED)
        self._over.set()
        self._thread.join()

    def enter(self, phase: str) -> None:
        now = time.perf_counter()
        self._spent_s[self._phase] += now - self._since
        self._phase, self._since = phase, now
        if self.on_phase is not None:
            self.on_phase(phase)
        if phase in (DATA, OWN_CODE):
            self._step_began = now

    def begin(self, step: int, steps: int) -> None:
        """Start at `step` of `steps`."""
        self.step, self.steps, self._reported = step, steps, (step, {}, {})
        self._first, self._warm = step, None

    def done(self, step: int) -> None:
        now = time.perf_counter()
        if self._stepped is not None:
            self._longest_s = max(self._longest_s, now - self._step_began)
        self.step, self._stepped = step, now
        if self._warm is None and step >= self._first + WARM_UP_STEPS:
            self._warm = step, dict(self._spent_s), self._read_core_wait_s()

    def _beat(self) -> None:
        assert self.run is not None
        with contextlib.ExitStack() as registered:
            is_ready = False
            while True:
                last = self._over.wait(EVERY_S if is_ready else BEFORE_S)
                with contextlib.suppress(OSError):  # the disk is full, or absent for a while
                    if not is_ready and self.run.path.exists():
                        self.run.ranks.mkdir(exist_ok=True)
                        stacks = registered.enter_context(open(self.run.stacks(self.rank), "wb", buffering=0))
                        faulthandler.register(SIGNAL, stacks)
                        registered.callback(faulthandler.unregister, SIGNAL)
                        is_ready = True
                    if is_ready:
                        heartbeat.write(self.run.alive(self.rank), self._now())
                        self._answer(self.run)
                if last:
                    return

    def _now(self) -> Heartbeat:
        step, before, spent = self._reported
        if self.step > step:
            so_far = dict(self._spent_s)
            spent = {
                phase: (seconds - before.get(phase, 0.0)) / (self.step - step)
                for phase, seconds in so_far.items()
            }
            self._reported = self.step, so_far, spent
        warm_step, warm_s, warm_wait_s = self._warm if self._warm is not None else (self.step, None, None)
        wait_s = self._read_core_wait_s() if warm_wait_s is not None else None
        total_s = (
            {name: seconds - warm_s.get(name, 0.0) for name, seconds in dict(self._spent_s).items()}
            if warm_s is not None
            else {}
        )
        phase, since, stepped = self._phase, self._since, self._stepped
        now, clock = time.time(), time.perf_counter()
        return Heartbeat(
            rank=self.rank,
            ranks=self.ranks,
            host=platform.node(),
            pid=os.getpid(),
            began=now - (clock - self._began),
            time=now,
            step=self.step,
            steps=self.steps,
            stepped=now - (clock - stepped) if stepped is not None else None,
            longest_s=self._longest_s,
            phase=phase,
            since=now - (clock - since),
            patience_s=self.saving_s if phase == SAVE else self.patience_s,
            spent_s={name: seconds for name, seconds in spent.items() if name != START},
            birth=self._birth,
            total_steps=self.step - warm_step,
            total_s={name: seconds for name, seconds in total_s.items() if name != START},
            core_wait_s=wait_s - warm_wait_s if wait_s is not None and warm_wait_s is not None else None,
        )

    def _read_core_wait_s(self) -> float | None:
        """Return the seconds in which the training thread could run and had no core; None if unknown."""
        try:
            words = Path(f"/proc/self/task/{self._native_thread}/schedstat").read_text().split()
            return int(words[1]) / 1e9
        except (OSError, ValueError, IndexError):  # another system, or a kernel without these statistics
            return None

    def _answer(self, run: RunFolder) -> None:
        try:
            request = run.asked.read_text(errors="replace")
        except FileNotFoundError:
            return
        if request and request != self._last_request:
            stack = _read_frames(sys._current_frames().get(self._training_thread))
            heartbeat.write(
                run.said(self.rank),
                StackAnswer(
                    asked=request, time=time.time(), stack=stack, collectives=_read_flight_recorder()
                ),
            )
            self._last_request = request


def _read_frames(frame: FrameType | None) -> list[Frame]:
    """Return the stack that ends in a frame, innermost last."""
    frames = []
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        frame = frame.f_back
    return frames[::-1]


def _read_flight_recorder() -> list[Collective]:
    """Return the last collective that this rank called in each group. torch 2.13 records gloo's as well."""
    distributed = sys.modules.get("torch.distributed")
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    if distributed is None or dump is None or not distributed.is_initialized():
        return []
    world = distributed.distributed_c10d._world
    members = {
        name: sorted(world.pg_group_ranks.get(group, ())) for group, name in list(world.pg_names.items())
    }
    last: dict[tuple[str, bool], Any] = {}
    for entry in json.loads(dump(True, False)).get("entries", ()):
        last[entry["process_group"][0], entry["is_p2p"]] = entry
    return [_parse_entry(entry, members.get(group, [])) for (group, _), entry in last.items()]


def _parse_entry(entry: Any, members: list[int]) -> Collective:
    is_message = entry["is_p2p"]
    dtypes = entry["input_dtypes"] or entry["output_dtypes"] or ["?"]
    return Collective(
        group=entry["process_group"][0],
        members=members,
        number=entry["p2p_seq_id" if is_message else "collective_seq_id"],
        kind="message" if is_message else "collective",
        operation=entry["profiling_name"].rpartition(":")[2],
        items=sum(map(math.prod, entry["input_sizes"] or entry["output_sizes"])),
        dtype=dtypes[0].lower(),
        called=entry["time_created_ns"] / 1e9,
        is_over=bool(entry["retired"]),  # torch 2.13: with gloo, "state" stays "scheduled"
    )
