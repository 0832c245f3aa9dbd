"""Read recordings of nvidia-smi into samples."""

from array import array
from collections.abc import Iterator, Sequence

from paceline.monitor.columns import unit_of
from paceline.monitor.gpus.nvidia_smi import GpuLineParser, parse_header
from paceline.monitor.table import NAN, FilePosition, SampleBuilder
from paceline.units import without_controls

CHUNK_LINES = 4096


def decode(line: bytes) -> str:
    """Return the text of a line, without characters that a terminal could take for a command."""
    return without_controls(line.decode("utf-8-sig", "replace").rstrip("\r\n"))


def read_recording(
    builder: SampleBuilder,
    lines: Iterator[tuple[int, bytes]],
    fields: Sequence[str],
    after: FilePosition | None,
) -> None:
    """Read a recording of nvidia-smi."""
    samples = builder.samples
    samples.source = "nvidia-smi"
    first = after.samples if after else 0
    parser = GpuLineParser(
        fields, list(after.gpus) if after else [], num_lines=after.num_lines if after else 0
    )
    begin, line = next(lines)
    section, end = begin, begin + len(line)
    if after is not None:
        builder.file.seek(after.end)
        end = after.end
    samples.has_clock = parser.has_clock
    parsed: list[tuple[float, str | None, dict[str, float]]] = []
    ends: list[int] = []

    def flush(is_last: bool) -> None:
        nonlocal end, parsed, ends
        groups = list(parser.group(parsed))
        is_known = len(groups) > 1 or parser.num_lines > 0 or after is None
        widest = max(parser.num_lines, max(map(len, groups), default=0))
        if parser.identity and is_known:
            parser.num_lines = widest
        if groups and not (is_last and is_known and len(groups[-1]) == widest):
            del groups[-1]  # it may lack lines that are not written yet
        used = sum(map(len, groups))
        if used:
            _add_groups(builder, parser, groups, first)
            end = ends[used - 1]
        parsed, ends = parsed[used:], ends[used:]

    for begin, line in lines:
        text = decode(line)
        if not text.strip():
            continue
        if again := parse_header(text):
            if again != list(parser.fields):
                flush(True)
                parser = GpuLineParser(again, parser.gpus, descriptions=parser.descriptions)
                section = begin
            continue
        try:
            parsed.append(parser.parse(text))
        except ValueError:
            samples.damaged += 1
            continue
        ends.append(begin + len(line))
        if len(parsed) >= CHUNK_LINES:
            flush(False)
            if builder.is_full:
                break
    else:
        flush(True)
    if len(samples) and not first:
        samples.sections.append(0)
    samples.comments |= parser.descriptions
    samples.ignored = tuple(parser.ignored)
    samples.absent = {
        name: "nvidia-smi reported no value"
        for name, column in samples.columns.items()
        if len(column) and all(value != value for value in column)
    }
    if parser.identity is None and parser.num_lines > 1:
        samples.notes.append(
            f"the recording does not name its GPUs: the lines of each time are taken as GPU 0 to"
            f" {parser.num_lines - 1}; add index to --query-gpu"
        )
    samples.position = FilePosition(end, section, tuple(parser.gpus), parser.num_lines, first + len(samples))


def _add_groups(
    builder: SampleBuilder,
    parser: GpuLineParser,
    groups: Sequence[Sequence[tuple[float, str | None, dict[str, float]]]],
    first: int,
) -> None:
    """Add samples of a recording. Each group has the lines of one time."""
    begin = first + len(builder.samples)
    times = [group[0][0] if parser.has_clock else float(begin + row) for row, group in enumerate(groups)]
    columns: dict[str, array[float]] = {}
    for row, group in enumerate(groups):
        for position, (_, gpu, values) in enumerate(group):
            number = parser.number(gpu, position)
            for kind, value in values.items():
                name = f"gpu{number} {kind}"
                if name not in columns:
                    if not builder.only(name):
                        continue
                    columns[name] = array("d", [NAN]) * len(groups)
                    builder.samples.units[name] = unit_of(name)
                columns[name][row] = value
    builder.add(times, columns)
