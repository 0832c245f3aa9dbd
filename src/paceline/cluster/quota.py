"""Quotas: what `quota`, `lfs quota` and a site's `myquota` say."""

import re
from collections.abc import Iterator

from paceline.cluster.machine import Quota

USED = ("kbytes", "blocks", "space", "used")  # heads of the column of bytes
UNITS = {"": 2**10, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}  # no unit: blocks of 1 KiB
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse(text: str, source: str) -> list[tuple[str, Quota]]:
    """Rows of (file system, quota) below each head line of `Filesystem … quota limit [grace] files quota limit [grace]`.

    Of a user's own quotas, those of groups left out. A head line that is not known is passed over with its rows.
    """
    heads: list[str] = []
    rows, own = [], True
    for line in _whole_lines(text):
        words = line.split()
        if words[0] == "Disk" and "quotas" in words:
            own, heads = words[words.index("for") + 1].startswith("us") if "for" in words else True, []
        elif words[0].lower() == "filesystem":
            heads = [word.lower() for word in words]
        elif own and heads and (quota := _row(heads, words, source)):
            rows.append((words[0], quota))
    return rows


def _whole_lines(text: str) -> Iterator[str]:
    """A long name stands on a line of its own, with its numbers on the next."""
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
    """`quota` leaves the grace empty where there is none: which it is, is told by the star behind what exceeds."""
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
    """`101G*` -> bytes, `382k` -> files. None for `-`, `none`, `unlimited`. Raises ValueError for another thing."""
    if text in ("-", "none", "unlimited"):
        return None
    found = re.fullmatch(r"\[?(\d+(?:\.\d+)?)([A-Za-z]?)(?:i?B)?\]?\*?", text)
    if not found or found[2].lower() not in units:
        raise ValueError(text)
    return round(float(found[1]) * units[found[2].lower()])


def of_directory(
    path: str, mount: str | None, device: str | None, rows: list[tuple[str, Quota]]
) -> Quota | None:
    """The row that is about the file system of a directory: named as it is mounted, as its device, or as a folder above."""
    named = [
        (name, quota)
        for name, quota in rows
        if name in (mount, device) or path == name or path.startswith(name.rstrip("/") + "/")
    ]
    return max(named, key=lambda row: (row[0] in (mount, device), len(row[0])))[1] if named else None
