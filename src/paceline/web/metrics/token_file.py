"""The token of /metrics, in a file that Prometheus reads too (`credentials_file`)."""

import re
import secrets
import stat
from pathlib import Path

from paceline.errors import LaunchError, RunError
from paceline.files import check_target, read_own, reason, write_secret

TOKEN = re.compile(r"[\w~.+/-]{16,200}=*", re.ASCII)


def read_or_create(path: Path) -> str:
    """Return the token in a file. A file that does not exist is created, with mode 0600.

    Raises LaunchError for a file that others can read or write, or that has no token."""
    try:
        if not path.exists():
            check_target(path, LaunchError)
            write_secret(path, secrets.token_urlsafe(24) + "\n")
        if path.stat().st_mode & (stat.S_IWGRP | stat.S_IRWXO):
            raise LaunchError(f"other users can read or write {path}: run chmod o=,g-w {path}")
        token = read_own(path).strip()
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"cannot read or create {path}: {reason(error)}") from error
    except RunError as error:
        raise LaunchError(str(error)) from error
    if not TOKEN.fullmatch(token):
        raise LaunchError(
            f"{path} has no token of 16 to 200 letters and digits; delete it, and a new token is made"
        )
    return token
