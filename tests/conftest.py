import gc
import importlib.util
import os

# Threads of OpenMP that wait for work would use the cores of other tests. libgomp reads this when torch is
# imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import network
import slurm
from browser import find_chromium
from harness import ranks

# A shell ignores Ctrl-C in background jobs. Commands that tests start would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup ignores hangups, and so would these commands. A handler ends with the program, not so SIG_IGN.
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

# Facts about the tests' models do not belong into the user's cache.
CACHE = tempfile.TemporaryDirectory(prefix="paceline-cache-")
os.environ.setdefault(
    "MPLCONFIGDIR", str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "matplotlib")
)
os.environ["XDG_CACHE_HOME"] = CACHE.name


def _without_ray() -> str | None:
    if importlib.util.find_spec("ray") is not None:
        return None
    return 'Ray is not installed: pip install "paceline[ray]"'


def _without_mpi(program: str) -> str | None:
    package = {"mpirun": "openmpi-bin", "mpiexec.hydra": "mpich"}[program]
    return None if shutil.which(program) else f"{program} is not installed: apt-get install {package}"


def _without_browser() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "Playwright is not installed: make install"
    return None if find_chromium() else "Chromium is not installed: apt-get install chromium"


def _without_prometheus() -> str | None:
    return None if shutil.which("prometheus") else "Prometheus is not installed: apt-get install prometheus"


def _without_sshd() -> str | None:
    has_both = shutil.which("ssh") and Path("/usr/sbin/sshd").exists()
    return None if has_both else "sshd is not installed: apt-get install openssh-server"


# By mark: a function that returns why such a test cannot run on this machine, or None.
REQUIREMENTS: dict[str, Callable[..., str | None]] = {
    "slurm": slurm.find_missing_requirement,
    "mpi": _without_mpi,
    "ray": _without_ray,
    "browser": _without_browser,
    "prometheus": _without_prometheus,
    "ssh": _without_sshd,
    "network": network.find_missing_requirement,
}

# The longest files start first, so that no worker is left with one of them at the end.
LONGEST = (
    "bad_inputs",
    "resume",
    "slurm",
    "readme",
    "generate_run",
    "comms",
    "context",
    "parity",
    "verify",
    "launchers",
    "named_optimizers",
    "histograms",
    "pipeline",
    "traces",
    "guard",
    "profile",
    "train_run",
    "mixtures",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the cores: a worker often waits, for ranks, Slurm or a browser."""
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for name, why_not in REQUIREMENTS.items():
        for mark in item.iter_markers(name):
            if reason := why_not(*mark.args):
                pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_collection_finish() -> None:
    """Spare each later collection of garbage the 650,000 objects of torch and the tests: it takes 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _end_ranks():
    yield
    for size in range(1, 9):
        ranks(size).end()
