"""Read files of Paceline: sections of comments, a header and rows. `paceline.monitor.samples` shows one."""

from array import array
from collections.abc import Iterator, Sequence

from paceline.monitor.columns import unit_of
from paceline.monitor.table import NAN, FilePosition, SampleBuilder, SampleTable
from paceline.units import without_controls

VERSION = 1
FIRST_LINE = f"# paceline samples {VERSION}"
CLOCK = "clock ahead [s]"  # comment: how far the clock of the node is ahead of that of the file system
MAX_COLUMNS = 2**14
MAX_COMMENTS = 2**12
MAX_VALUE_CHARACTERS = 30
MAX_TIME = 253e9  # the latest date, in seconds since the epoch
CHUNK_LINES = 4096
_NUMBER_CHARACTERS = b"0123456789.,-"


def is_own(line: bytes) -> bool:
    """Return whether the first line of a file begins a file of Paceline."""
    return line.startswith((b"# paceline samples", b"time [s],"))


def read_sections(
    builder: SampleBuilder, lines: Iterator[tuple[int, bytes]], after: FilePosition | None
) -> None:
    """Read lines with their positions. With `after`, the lines begin with those of its section."""
    samples = builder.samples
    section = _Section(builder)
    end = 0
    if after is not None:
        for begin, line in lines:
            if begin >= after.end:
                break
            if _is_row(line):
                section.is_new = False
                break
            section.read_head(begin, line)
        builder.file.seek(after.end)
        samples.notes.clear()  # an earlier call has reported them
        end = after.end
    for begin, line in lines:
        if _is_row(line):
            section.rows.append(line)
            if len(section.rows) == CHUNK_LINES:
                section.flush()
        else:
            section.flush()
            if not builder.is_full:
                section.read_head(begin, line)
        if builder.is_full and not section.rows:
            end = begin + len(line) if _is_row(line) else begin
            break
        end = begin + len(line)
    section.flush()
    samples.position = FilePosition(
        end, section.begin, samples=len(samples) + (after.samples if after else 0)
    )


def _is_row(line: bytes) -> bool:
    return not line.startswith((b"#", b"time"))


class _Section:
    """The section that is being read."""

    def __init__(self, builder: SampleBuilder):
        self.builder = builder
        self.begin = 0  # position in bytes
        self.names: list[str] = []  # of the columns
        self.ahead_s = 0.0
        self.is_new = True  # whether the next row is its first
        self.rows: list[bytes] = []

    def read_head(self, begin: int, line: bytes) -> None:
        """Read a comment or a header."""
        samples = self.builder.samples
        text = without_controls(line.decode("utf-8", "replace").rstrip("\r\n"))
        if text.startswith("# paceline samples"):
            self.begin, self.ahead_s, self.is_new, self.names = begin, 0.0, True, []
            samples.absent.clear()
            note = f"written by another version of Paceline: {text[2:60]}"
            if text != FIRST_LINE and note not in samples.notes:
                samples.notes.append(note)
        elif text.startswith("#"):
            self.ahead_s = _read_comment(samples, text, self.ahead_s)
        else:
            if self.names:  # the columns changed while the sampler ran
                self.begin = begin
            self.names = _read_header(samples, text)

    def flush(self) -> None:
        """Add the rows to the samples."""
        if not self.rows:
            return
        samples = self.builder.samples
        before = len(samples)
        _add_rows(self.builder, self.names, self.rows, self.ahead_s)
        self.rows.clear()
        if self.is_new and len(samples) > before:
            samples.sections.append(before)
            self.is_new = False


def _read_comment(samples: SampleTable, text: str, ahead_s: float) -> float:
    """Add a comment to the samples. Return how far the clock of the node is ahead."""
    topic, _, content = text[1:].strip().partition(": ")
    if topic == "node":
        samples.node = content
    elif topic == "absent":
        sensor, _, why = content.partition(": ")
        if len(samples.absent) < MAX_COMMENTS:
            samples.absent[sensor] = why
    elif topic == CLOCK:
        try:
            ahead_s = float(content)
        except ValueError:
            return ahead_s
        if not abs(ahead_s) < MAX_TIME:
            return 0.0
        samples.notes.append(
            f"the clock of {samples.node or 'the node'} is {abs(ahead_s):.0f} s"
            f" {'ahead of' if ahead_s > 0 else 'behind'} that of the file system; times are corrected"
        )
    elif len(samples.comments) < MAX_COMMENTS:
        samples.comments[topic] = content
    return ahead_s


def _read_header(samples: SampleTable, text: str) -> list[str]:
    names = []
    for cell in text.split(",")[:MAX_COLUMNS]:
        name, _, unit = cell.strip().partition(" [")
        names.append(name)
        samples.units[name] = unit.removesuffix("]") or unit_of(name)
    return names


def _add_rows(builder: SampleBuilder, names: Sequence[str], lines: Sequence[bytes], ahead_s: float) -> None:
    """Add rows of numbers. Rows that have another number of values, or that are not numbers, are counted."""
    samples = builder.samples
    rows = []
    for line in lines:
        line = line.rstrip(b"\r\n")
        cells = line.split(b",")
        if line.translate(None, _NUMBER_CHARACTERS) or len(cells) != len(names) or not cells[0]:
            samples.damaged += 1
        else:
            rows.append(cells)
    if not rows:
        return
    try:
        _add_cells(builder, names, rows, ahead_s)
    except ValueError:
        for cells in rows:
            try:
                _add_cells(builder, names, [cells], ahead_s)
            except ValueError:
                samples.damaged += 1


def _add_cells(
    builder: SampleBuilder, names: Sequence[str], rows: Sequence[Sequence[bytes]], ahead_s: float
) -> None:
    """Add rows of the right number of cells. Raises ValueError, and adds none, if one is damaged."""
    cells = list(zip(*rows, strict=True))
    if max(len(cell) for column in cells for cell in column) > MAX_VALUE_CHARACTERS:
        raise ValueError("a number is too long")
    times = [float(cell) - ahead_s for cell in cells[0]]
    if not all(0 <= at < MAX_TIME for at in times):
        raise ValueError("not a time")
    builder.add(
        times,
        {
            name: array("d", [float(cell) if cell else NAN for cell in column])
            for name, column in zip(names[1:], cells[1:], strict=True)
            if builder.only(name)
        },
    )
