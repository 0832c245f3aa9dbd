"""Lines of events in blocks of bytes: which are steps, found without parsing, and which are unusable."""

import re
from collections import Counter
from dataclasses import dataclass, field

from paceline.events.json_lines import UnknownEventError, loads
from paceline.events.kinds import Event
from paceline.units import several

BLOCK_BYTES = 2**18  # bytes per read
MAX_LINE_BYTES = 2**20
MAX_KINDS = 5  # unknown kinds that a message names
# How `dumps` begins the line of a step, and the text between two lines: these are found without parsing.
_HEAD, _STEP, _SEAM = b'{"time": ', b'"event": "step", ', b'}\n{"time": '
_OTHER_EVENT = re.compile(rb'"event": "(?!step", )')


@dataclass
class Skipped:
    """Counts of the lines that a reader could not use."""

    damaged: int = 0
    unknown: Counter[str] = field(default_factory=Counter)  # events of unknown kinds, by kind

    def parse(self, line: bytes) -> Event | None:
        """Return the event of a line; count the line and return None if it has no usable event."""
        try:
            return loads(line)
        except UnknownEventError as error:
            self.unknown[
                error.kind if error.kind in self.unknown or len(self.unknown) < MAX_KINDS else "others"
            ] += 1
        except ValueError:
            self.damaged += bool(line)  # see EventWriter: an empty line may end a line that was not torn
        return None

    def __bool__(self) -> bool:
        return bool(self.damaged or self.unknown)

    def __str__(self) -> str:
        """Return `skipped 1 damaged line and 2 events of unknown kinds (paused) in events.jsonl`, or ""."""
        damaged = several(self.damaged, "damaged line") if self.damaged else ""
        count = self.unknown.total()
        kinds = ", ".join(sorted(self.unknown))
        unknown = (
            f"{several(count, 'event')} of {'an unknown kind' if count == 1 else 'unknown kinds'} ({kinds})"
            if count
            else ""
        )
        return f"skipped {' and '.join(filter(None, (damaged, unknown)))} in events.jsonl" if self else ""


def is_step(line: bytes) -> bool:
    """Return whether a line looks like a whole step, without parsing it."""
    return (
        line.startswith(_HEAD) and _STEP in line and line.endswith(b"}") and line.isascii() and 0 not in line
    )


def is_all_steps(block: bytes) -> int:
    """Return the number of lines of a block if all look like whole steps, without parsing them; else 0."""
    count = block.count(b"\n")
    is_whole = (
        block.count(_STEP) == count
        and block.count(_SEAM) == count - 1
        and block.startswith(_HEAD)
        and block.endswith(b"}\n")
    )
    return count if is_whole and block.isascii() and 0 not in block else 0


def split_at_others(block: bytes) -> list[bytes]:
    """Return the parts of a block of whole lines: lines that name other events than steps, and the rest."""
    if is_all_steps(block):
        return [block]
    parts, begin = [], 0
    for match in _OTHER_EVENT.finditer(block):
        if match.start() < begin:  # in the same line
            continue
        line = block.rfind(b"\n", begin, match.start()) + 1 or begin
        parts += [block[begin:line]] if line > begin else []
        begin = block.find(b"\n", match.end()) + 1
        parts.append(block[line:begin])
    return [*parts, block[begin:]] if begin < len(block) else parts
