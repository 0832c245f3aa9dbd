"""Parse several numbers of ranks, or batches, such as 1,2,4,…,4096."""

import re
from itertools import pairwise

from paceline.errors import SpecError
from paceline.units import is_whole_number

MAX_COUNTS = 100  # numbers of ranks in one list
HINT = "write 1,2,8, or 1,2,4,…,64, or 1:64"


def parse_counts(text: str, option: str = "--ranks") -> tuple[int, ...]:
    """Return the numbers that `text` lists.

    `1,2,8` is taken literally. `1,2,4,…,64` (or ...) continues by doubling or by equal steps. `1:64` doubles.
    option: for messages. Raises SpecError.
    """
    given = f"{option} {text!r}"
    if match := re.fullmatch(r"\s*([0-9]+)\s*:\s*([0-9]+)\s*", text):
        first, last = _parse_count(match[1], given), _parse_count(match[2], given)
        return _check_length(_fill_up_to(first, last, given, factor=2), given)
    words = [word.strip() for word in text.replace("...", "…").split(",")]
    if "…" not in words:
        return _check_length(sorted({_parse_count(word, given) for word in words}), given)
    if words.count("…") > 1 or words[-2] != "…" or len(words) < 3:
        raise SpecError(f"{given}: … must stand between the first numbers and the last; {HINT}")
    begun, last = [_parse_count(word, given) for word in words[:-2]], _parse_count(words[-1], given)
    return _check_length([*begun[:-1], *_continue(begun, last, given)], given)


def _continue(begun: list[int], last: int, given: str) -> list[int]:
    """Return the numbers from the last of `begun` to `last`.

    They continue by the common factor of `begun`, or else by its common step.
    """
    if len(begun) == 1:
        return _fill_up_to(begun[0], last, given, factor=2)
    pairs = list(pairwise(begun))
    factor, step = begun[1] // begun[0], begun[1] - begun[0]
    doubles, steps = all(b == a * factor > a for a, b in pairs), all(b == a + step > a for a, b in pairs)
    if doubles and (not steps or _reaches(begun[-1], last, factor)):
        return _fill_up_to(begun[-1], last, given, factor=factor)
    if steps:
        return _fill_up_to(begun[-1], last, given, step=step)
    raise SpecError(f"{given}: {','.join(map(str, begun))} has no common factor or step; {HINT}")


def _reaches(at: int, last: int, factor: int) -> bool:
    while at < last:
        at *= factor
    return at == last


def _fill_up_to(first: int, last: int, given: str, factor: int = 1, step: int = 0) -> list[int]:
    counts = [first]
    while counts[-1] < last and len(counts) <= MAX_COUNTS:
        counts.append(counts[-1] * factor + step)
    if counts[-1] > last:
        near = " or ".join(map(str, counts[-2:]))
        raise SpecError(f"{given} does not reach {last}; end it with {near}")
    return counts


def _parse_count(word: str, given: str) -> int:
    if not is_whole_number(word):
        raise SpecError(f"{given}: {word!r} is not a whole number; {HINT}")
    if not int(word):
        raise SpecError(f"{given}: each number must be at least 1, got 0")
    return int(word)


def _check_length(counts: list[int], given: str) -> tuple[int, ...]:
    if len(counts) > MAX_COUNTS:
        raise SpecError(f"{given} has more than {MAX_COUNTS} numbers; leave some out")
    return tuple(counts)
