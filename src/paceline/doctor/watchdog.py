"""Follow a run from beside it: say once when it does not go on, and why."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Container

from paceline import events
from paceline.doctor.diagnose import Diagnosis, bound_s, patience_s, still_s
from paceline.doctor.examine import examine
from paceline.doctor.heartbeat import CLOCK_S
from paceline.doctor.rank_state import beats
from paceline.doctor.text import details, sentences
from paceline.events import Failed, Stalled, Started
from paceline.run import RunFolder

EVERY_S = 1.0
LATE_S = 5.0  # that ranks may take to give up
GRACE_S = (
    3.0  # that ranks have to end once another rank has failed; a rank that is stopped or stuck never would
)
ALL = range(2**31)
FILES = 100  # of ranks, at the most, that are read in a second
GAVE_UP = re.compile("timed out", re.I)


class HangWatchdog:
    """A thread for as long as the context lasts. `found`: why the present start did not go on, if it did not.

    failed: called every second from GRACE_S after the first rank failed until the ranks are started again, of which `begin` must be told.
    hung: called with the ranks at fault every second while ranks wait that should have given up: a message between two ranks is waited
    for without end (gloo, torch 2.13: for as long as was said when the group was made).
    tells: of several lookouts, on several machines, one does."""

    def __init__(
        self,
        run: RunFolder,
        failed: Callable[[], None] = lambda: None,
        hung: Callable[[Container[int]], None] = lambda ranks: None,
        tells: bool = True,
    ):
        self.run, self.failed, self.hung, self.tells = run, failed, hung, tells
        self.found: Diagnosis | None = None
        self._began = time.monotonic()  # our clock may be set
        self._events = events.EventReader(run.events, events.end(run.events))
        self._told_s: float | None = None  # when the ranks had last gone on, of a standstill that was told of
        self._every_s = EVERY_S
        self._failed_at: float | None = None  # when a failure was read, by the monotonic clock
        self._at_fault: Container[int] = ()  # of a standstill that was told of
        self._failed: set[int] = set()  # ranks that said why they end
        self._over = threading.Event()
        self._lock = threading.Lock()  # ranks that start are never ended for those before them
        self._thread = threading.Thread(target=self._follow, name="lookout", daemon=True)

    def __enter__(self) -> "HangWatchdog":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def begin(self) -> None:
        """Call when no rank of the last start is left, before the first rank of the next one: what was written so far is of the last."""
        with self._lock:
            self._events = events.EventReader(self.run.events, events.end(self.run.events))
            self._forget()

    def _forget(self) -> None:
        self.found = self._failed_at = None
        self._at_fault = ()
        self._failed.clear()

    def _follow(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(OSError):  # of a folder that is gone, or cannot be written to
                with self._lock:
                    gave_up = self._happened()
                if gave_up and self.tells:
                    self._tell(bound=0.0)
                elif self.tells and (bound := self._is_still_for()) is not None:
                    self._tell(bound)
            with self._lock:
                if self._failed_at is not None:
                    if time.monotonic() > self._failed_at + GRACE_S:
                        self.failed()
                elif self._at_fault and self._is_hung():
                    self.hung(self._at_fault)

    def _happened(self) -> bool:
        """Whether a rank has just given up waiting for another one that nothing was said about."""
        if not self.run.events.exists():
            return False
        gave_up = False
        for event in self._events.new(Started, Stalled, Failed):
            if isinstance(event, Started):
                self._forget()
            elif isinstance(event, Stalled):
                self._at_fault = event.ranks or ALL
            elif isinstance(event, Failed) and event.what == "run":
                self._failed_at = self._failed_at or time.monotonic()
                self._failed.add(event.rank or 0)
                gave_up |= event.lost_peer and bool(GAVE_UP.search(event.message)) and self.found is None
        return gave_up

    def _is_still_for(self) -> float | None:
        """More than so many seconds, and nothing was said about it."""
        now = time.time()
        began = now - (time.monotonic() - self._began)
        earliest = (
            began - EVERY_S - CLOCK_S
        )  # ranks of somebody else's launcher may start first, and on other machines by other clocks
        found = [one if one is not None and one.began >= earliest else None for one in beats(self.run)]
        self._every_s = max(EVERY_S, len(found) / FILES)
        bound = bound_s(found, soon=False)
        still = still_s(found, now)
        if (
            bound is None
            or still < bound
            or (self._told_s is not None and now - still < self._told_s + EVERY_S)
        ):
            return None
        self._told_s = now - still
        return bound

    def _is_hung(self) -> bool:
        found = beats(self.run)
        patience = patience_s(found)
        return patience is not None and still_s(found, time.time()) > patience + LATE_S

    def _tell(self, bound: float) -> None:
        found = examine(self.run, bound, self._failed)
        if found is None or found.verdict != "stuck":
            return
        self.found = found
        self.run.diagnosis.write_text(
            "\n".join([time.strftime("%F %T"), sentences(found), *details(found), ""]), encoding="utf-8"
        )
        events.append(
            self.run.events, Stalled(step=found.step, ranks=found.at_fault, message=sentences(found))
        )
