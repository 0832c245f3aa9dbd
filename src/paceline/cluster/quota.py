"""Parse the output of `quota`, `lfs quota` and a site's `myquota`."""

import re
from collections.abc import Iterator

from paceline.cluster.machine import Quota

USED = ("kbytes", "blocks", "space", "used")  # possible headers of the column of bytes
UNITS = {"": 2**10, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}  # no unit: 1 KiB blocks
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse(text: str, source: str) -> list[tuple[str, Quota]]:
    """Return (file system, quota) of each row below a header line, without the quotas of groups.

    A header line is `Filesystem … quota limit [grace] files quota limit [grace]`. An unknown header line is
    skipped with its rows. source: the command, which becomes `Quota.source`.
    """
    heads: list[str] = []
    rows, is_users = [], True
    for line in _join_lines(text):
        words = line.split()
        if words[0] == "Disk" and "quotas" in words:
            match = re.search(r"quotas for (\w+)", line)
            is_users, heads = match is None or match[1].startswith("us"), []
        elif words[0].lower() == "filesystem":
            heads = [word.lower() for word in words]
        elif is_users and heads and (quota := _row(heads, words, source)):
            rows.append((words[0], quota))
    return rows


def _join_lines(text: str) -> Iterator[str]:
    """Yield the lines. A long name is on a separate line, and is joined with the numbers on the next line."""
    name = ""
    for line in text.splitlines():
        words = line.split()
        if len(words) == 1 and ("/" in words[0] or ":" in words[0]) and not name:
            name = words[0] + " "
        elif words:
            yield name + line
            name = ""


def _row(heads: list[str], words: list[str], source: str) -> Quota | None:
    cells = _with_grace(heads, words)
    used = next((head for head in USED if head in heads), None)
    if cells is None or used is None or "quota" not in heads or "limit" not in heads:
        return None
    at, limits = heads.index(used), [k for k, head in enumerate(heads) if head == "limit"]
    softs = [k for k, head in enumerate(heads) if head == "quota"]
    try:
        size = [_amount(cells[k], UNITS) for k in (at, softs[0], limits[0])]
        count: list[int | None] = [None, None, None]
        if "files" in heads and len(limits) > 1:
            count = [_amount(cells[k], COUNTS) for k in (heads.index("files"), softs[1], limits[1])]
    except ValueError:
        return None
    return Quota(
        used_bytes=size[0] or 0,
        soft_bytes=size[1] or None,
        limit_bytes=size[2] or None,
        used_files=count[0],
        soft_files=count[1] or None,
        limit_files=count[2] or None,
        source=source,
    )


def _with_grace(heads: list[str], words: list[str]) -> list[str] | None:
    """Return the cells of a row, with an empty cell for each grace period that `quota` leaves out.

    A star after the used amount means that this amount exceeds its quota, so that its grace is not left out.
    """
    missing = len(heads) - len(words)
    if missing <= 0:
        return words[: len(heads)]
    graces = [k for k, head in enumerate(heads) if head == "grace"]
    if missing == len(graces):
        empty = graces
    elif missing == 1 and len(graces) == 2:
        empty = [graces[1] if words[1].endswith("*") else graces[0]]
    else:
        return None
    filled = list(words)
    for k in empty:
        filled.insert(k, "")
    return filled


def _amount(text: str, units: dict[str, int]) -> int | None:
    """Return the amount in a cell such as `101G*` (bytes) or `382k` (files); None without a limit.

    `-`, `none` and `unlimited` mean no limit. Raises ValueError for other text.
    """
    if text in ("-", "none", "unlimited"):
        return None
    match = re.fullmatch(r"\[?(\d{1,18}(?:\.\d+)?)([A-Za-z]?)(?:i?B)?\]?\*?", text, re.ASCII)
    if not match or match[2].lower() not in units:
        raise ValueError(text)
    return round(float(match[1]) * units[match[2].lower()])


def find_quota(
    path: str, mount: str | None, device: str | None, rows: list[tuple[str, Quota]]
) -> Quota | None:
    """Return the quota of the file system of a directory.

    A row matches if it has the name of the mount point, the device or a parent folder.
    """
    matches = [
        (name, quota)
        for name, quota in rows
        if name in (mount, device) or path == name or path.startswith(name.rstrip("/") + "/")
    ]
    return max(matches, key=lambda row: (row[0] in (mount, device), len(row[0])))[1] if matches else None
