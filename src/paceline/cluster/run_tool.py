"""Run a tool of the machine and read what it says."""

import os
import subprocess

from paceline.errors import ClusterError


def run(*words: str, good: frozenset[int] = frozenset({0}), limit_s: float = 10.0) -> str:
    """What it printed; the empty text where there is no such tool. Raises ClusterError when it fails or does not answer in time.

    good: exit statuses that are no failure.
    """
    env = os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=env,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{words[0]} did not answer within {limit_s:g} s") from None
    except OSError as error:
        raise ClusterError(f"{words[0]} cannot be run: {error.strerror}") from error
    if done.returncode not in good:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise ClusterError(
            f"{words[0]} failed with exit status {done.returncode}" + (f": {said[-1]}" if said else "")
        )
    return done.stdout
