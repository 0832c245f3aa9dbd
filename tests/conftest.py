import signal

import pytest

from harness import ranks

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell does for what it starts in the background; what we start would do as we
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _end_ranks():
    yield
    for size in range(1, 9):
        ranks(size).end()
