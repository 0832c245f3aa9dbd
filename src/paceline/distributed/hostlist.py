"""Slurm's compressed lists of hosts."""

import itertools
import re


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list: `"n[1-3,07],login"` -> `["n1", "n2", "n3", "n07", "login"]`.

    Raises ValueError if `text` is not a list of hosts.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if not text or ",".join(parts) != text:
        raise ValueError(f"{text!r} is not a list of hosts")
    return [host for part in parts for host in _expand(part)]


def _expand(part: str) -> list[str]:
    """`"r[1-2]n[3,5]"` -> `["r1n3", "r1n5", "r2n3", "r2n5"]`"""
    pieces = re.split(r"\[([^\]]*)\]", part)  # outside, inside, outside, … of brackets
    choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(text: str) -> list[str]:
    """`"1-3,07"` -> `["1", "2", "3", "07"]`, with leading zeros."""
    numbers: list[str] = []
    for span in text.split(","):
        match = re.fullmatch("([0-9]{1,9})(?:-([0-9]{1,9}))?", span)
        if match is None:
            raise ValueError(f"{span!r} in [{text}] is not a number or a range")
        first, last = match[1], match[2] or match[1]
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers
