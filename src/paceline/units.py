"""Parse and format bytes, seconds, counts and rates. GB is 10⁹ bytes, GiB is 2³⁰ bytes."""

import re
from collections.abc import Iterable, Sequence

# Characters that a terminal could take for a command or the end of a line; not tabs and line feeds.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
MAX_DIGITS = 18  # of a number that fits into 64 bits


def without_controls(text: str) -> str:
    """Return the text with control characters replaced, so that a terminal may show text of any origin."""
    return text if text.isprintable() else _CONTROL.sub("\ufffd", text)


def is_whole_number(text: str) -> bool:
    """Return whether a text is a count of at most 18 ASCII digits; `int` accepts digits of other scripts."""
    return text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS


_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str) -> int:
    """Return the bytes that a text specifies: `"80 GiB"` -> 85899345920. Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text, re.ASCII)
    unit = (match[2] or "B").upper() if match else ""
    if not match or unit not in _BYTES:
        raise ValueError(f"{text!r} is not a number of bytes; write it as '80 GiB' or '500 MB'")
    return round(float(match[1]) * _BYTES[unit])


def format_bytes(count: float) -> str:
    """Return a number of bytes as text: 85899345920 -> `"80.0 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a time: 4.2e-6 -> `"4.2 µs"`, 0.0042 -> `"4.2 ms"`, 75 -> `"1:15"`, 7384 -> `"2:03:04"`."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_DURATION = re.compile(
    r"(?=\d)" + "".join(rf"(?:(\d{{1,6}}(?:\.\d{{1,6}})?){unit})?" for unit in "dhms"), re.ASCII
)


def parse_duration_s(text: str) -> float:
    """Return the seconds that a text specifies: `"90m"` -> 5400.0, `"1h30m"` -> 5400.0. Raises ValueError."""
    match = _DURATION.fullmatch(text)
    seconds = (
        sum(
            float(number or 0) * unit_s
            for number, unit_s in zip(match.groups(), (86400, 3600, 60, 1), strict=True)
        )
        if match
        else 0.0
    )
    if not seconds:
        raise ValueError(f"{text!r} is not a duration; write it as '90m', '1h30m' or '2d'")
    return seconds


def format_count(count: float) -> str:
    """Return a count as text with three digits: 1234567 -> `"1.23 M"`."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.4g}"


def several(count: int, noun: str) -> str:
    """Return a count with its noun: 1, "rank" -> `"1 rank"`; 1024, "rank" -> `"1,024 ranks"`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Return a noun with its numbers: "rank", [2, 3] -> `"ranks 2, 3"`."""
    return f"{noun}{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def format_ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: [0, 1, 2, 8] -> `"0-2,8"`."""
    ranges: list[list[int]] = []
    for number in sorted(set(numbers)):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
