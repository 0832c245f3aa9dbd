"""A thread that follows a run from outside and reports a stall and its cause once."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Container

from paceline import events
from paceline.doctor.diagnose import Diagnosis, shortest_patience_s, stall_threshold_s, stalled_s
from paceline.doctor.examine import examine
from paceline.doctor.heartbeat import CLOCK_S
from paceline.doctor.rank_state import read_heartbeats
from paceline.doctor.text import format_details, format_sentence
from paceline.events import Failed, Stalled, Started
from paceline.run import RunFolder

EVERY_S = 1.0
LATE_S = 5.0  # how long ranks may take to give up after their timeout
# How long ranks may take to end once another rank has failed. A stopped or stuck rank never ends.
GRACE_S = 3.0
ALL_RANKS = range(2**31)
MAX_FILES_PER_S = 100  # heartbeats read in a second
GAVE_UP = re.compile("timed out", re.I)


class HangWatchdog:
    """A thread that runs as long as the context. `diagnosis`: why the present start stalled, or None.

    on_failure: called every second from GRACE_S after the first rank failed until `begin` is called, which
        must be when the ranks start again.
    on_hang: called every second with the ranks at fault while ranks wait that should have given up. A message
        between two ranks has no timeout (gloo, torch 2.13: it waits as long as the group was created with).
    reports: with several watchdogs on several machines, exactly one of them reports."""

    def __init__(
        self,
        run: RunFolder,
        on_failure: Callable[[], None] = lambda: None,
        on_hang: Callable[[Container[int]], None] = lambda ranks: None,
        reports: bool = True,
    ):
        self.run, self.on_failure, self.on_hang, self.reports = run, on_failure, on_hang, reports
        self.diagnosis: Diagnosis | None = None
        self._began = time.monotonic()  # our clock may be set
        self._events = events.EventReader(run.events, events.end(run.events))
        self._reported_progress_s: float | None = None  # time of the last progress before the reported stall
        self._every_s = EVERY_S
        self._failed_at: float | None = None  # when a failure was read, by the monotonic clock
        self._at_fault: Container[int] = ()  # of the reported stall
        self._failed: set[int] = set()  # ranks that reported why they end
        self._over = threading.Event()
        self._lock = (
            threading.Lock()
        )  # ranks that start must not be ended for a failure of the previous start
        self._thread = threading.Thread(target=self._follow, name="watchdog", daemon=True)

    def __enter__(self) -> "HangWatchdog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def begin(self) -> None:
        """Forget the last start.

        Call after its last rank has ended and before the first rank of the next start."""
        with self._lock:
            self._events = events.EventReader(self.run.events, events.end(self.run.events))
            self._forget()

    def _forget(self) -> None:
        self.diagnosis = self._failed_at = None
        self._at_fault = ()
        self._failed.clear()

    def _follow(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(OSError):  # the folder is gone or cannot be written to
                with self._lock:
                    has_given_up = self._read_events()
                if has_given_up and self.reports:
                    self._report(threshold_s=0.0)
                elif self.reports and (threshold_s := self._exceeded_threshold_s()) is not None:
                    self._report(threshold_s)
            with self._lock:
                if self._failed_at is not None:
                    if time.monotonic() > self._failed_at + GRACE_S:
                        self.on_failure()
                elif self._at_fault and self._is_hung():
                    self.on_hang(self._at_fault)

    def _read_events(self) -> bool:
        """Return whether a rank has just given up waiting in a stall that was not reported."""
        if not self.run.events.exists():
            return False
        has_given_up = False
        for event in self._events.new(Started, Stalled, Failed):
            if isinstance(event, Started):
                self._forget()
            elif isinstance(event, Stalled):
                self._at_fault = event.ranks or ALL_RANKS
            elif isinstance(event, Failed) and event.what == "run":
                self._failed_at = self._failed_at or time.monotonic()
                self._failed.add(event.rank or 0)
                is_timeout = event.lost_peer and bool(GAVE_UP.search(event.message))
                has_given_up |= is_timeout and self.diagnosis is None
        return has_given_up

    def _exceeded_threshold_s(self) -> float | None:
        """Return the threshold if the run has stalled for longer and this was not reported, else None."""
        now = time.time()
        began = now - (time.monotonic() - self._began)
        # Ranks of another launcher may start first, and on other machines they use other clocks.
        earliest = began - EVERY_S - CLOCK_S
        beats = [
            beat if beat is not None and beat.began >= earliest else None
            for beat in read_heartbeats(self.run)
        ]
        self._every_s = max(EVERY_S, len(beats) / MAX_FILES_PER_S)
        threshold_s = stall_threshold_s(beats, on_request=False)
        still_s = stalled_s(beats, now)
        if threshold_s is None or still_s < threshold_s:
            return None
        if self._reported_progress_s is not None and now - still_s < self._reported_progress_s + EVERY_S:
            return None
        self._reported_progress_s = now - still_s
        return threshold_s

    def _is_hung(self) -> bool:
        beats = read_heartbeats(self.run)
        patience_s = shortest_patience_s(beats)
        return patience_s is not None and stalled_s(beats, time.time()) > patience_s + LATE_S

    def _report(self, threshold_s: float) -> None:
        diagnosis = examine(self.run, threshold_s, self._failed)
        if diagnosis is None or diagnosis.verdict != "stuck":
            return
        self.diagnosis = diagnosis
        sentence = format_sentence(diagnosis)
        self.run.diagnosis.write_text(
            "\n".join([time.strftime("%F %T"), sentence, *format_details(diagnosis), ""]), encoding="utf-8"
        )
        events.append(
            self.run.events, Stalled(step=diagnosis.step, ranks=diagnosis.at_fault, message=sentence)
        )
