import os
import signal
import tempfile
from pathlib import Path

import pytest

from harness import ranks

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as a shell does for what it starts in the background; what we start would do as we
    signal.signal(signal.SIGINT, signal.default_int_handler)

CACHE = tempfile.TemporaryDirectory(
    prefix="paceline-cache-"
)  # what tests find out of their models is not the user's
os.environ.setdefault(
    "MPLCONFIGDIR", str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "matplotlib")
)
os.environ["XDG_CACHE_HOME"] = CACHE.name


@pytest.fixture(scope="session", autouse=True)
def _end_ranks():
    yield
    for size in range(1, 9):
        ranks(size).end()
