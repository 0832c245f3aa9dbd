"""Live ranks that call functions of one process."""

import os
import signal
import threading
import time
from typing import NoReturn

import pytest

from paceline.launch.rank_pool import Ranks

pytestmark = pytest.mark.processes


class InterruptedCallError(Exception):
    pass


def sleep_until_interrupted(pool: Ranks) -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    pool(time.sleep, 30.0, timeout_s=60)


@pytest.mark.parametrize("is_started", [True, False])
def test_an_interrupted_call_leaves_no_answer_for_the_next(is_started: bool) -> None:
    def interrupt(number: int, frame: object) -> NoReturn:
        raise InterruptedCallError

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with Ranks(2) as pool:
            if is_started:
                assert pool(abs, -1, timeout_s=60) == [1, 1]
            with pytest.raises(InterruptedCallError):
                sleep_until_interrupted(pool)
            assert pool(abs, -3, timeout_s=60) == [3, 3]
    finally:
        signal.signal(signal.SIGUSR1, before)
