"""Run a tool of the machine and return its output."""

import os
import subprocess

from paceline.errors import ClusterError


def run(*words: str, good: frozenset[int] = frozenset({0}), limit_s: float = 10.0) -> str:
    """Return the standard output of a tool, or "" if the tool is not installed.

    good: exit statuses that are not failures.
    Raises ClusterError if the tool fails or does not end within `limit_s` seconds.
    """
    env = os.environ | {"LC_ALL": "C"}
    try:
        result = subprocess.run(
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
    if result.returncode not in good:
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
        raise ClusterError(
            f"{words[0]} failed with exit status {result.returncode}" + (f": {lines[-1]}" if lines else "")
        )
    return result.stdout
