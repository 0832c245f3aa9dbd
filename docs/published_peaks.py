"""Write the tables of published peaks into machine.md: python docs/published_peaks.py.

With --check, only report whether the page is current.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from paceline.cluster.facts import DTYPES
from paceline.cluster.published import Chip, PublishedRow, sheets

PAGE = Path(__file__).parent / "machine.md"
BEGIN, END = "<!-- published_peaks.py writes from here -->\n", "<!-- to here -->\n"


def build_tables() -> str:
    chips = {sheet.chip.name: sheet.chip for sheet in sheets().values()}
    sources = dict.fromkeys(
        source for sheet in sheets().values() for source in (sheet.chip.source, sheet.source)
    )
    peaks = _table(["10¹² operations/s", *DTYPES, "SMs", "L2"], [_peaks(chip) for chip in chips.values()])
    devices = _table(
        ["`--cluster`", "device", "chip", "memory", "GB/s of it", "GB/s in a node", "W"],
        [_device(*item) for item in sheets().items()],
    )
    return f"{peaks}\n{devices}\n" + "".join(
        fill(f"- {source}", 100, subsequent_indent="  ", break_on_hyphens=False) + "\n" for source in sources
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["--"] + ["-:"] * (len(heads) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _peaks(chip: Chip) -> list[str]:
    """Return the peaks of a chip, with those for 2:4 sparsity in brackets."""
    cells = [f"{chip.dense[dtype]:,g}" if dtype in chip.dense else "" for dtype in DTYPES]
    sparse = [f" ({chip.sparse[dtype]:,g})" if dtype in chip.sparse else "" for dtype in DTYPES]
    anatomy = [f"{chip.sms or ''}", f"{chip.l2_MB:g} MiB" if chip.l2_MB is not None else ""]
    return [chip.name, *(f"{dense}{half}" for dense, half in zip(cells, sparse, strict=True)), *anatomy]


def _device(name: str, sheet: PublishedRow) -> list[str]:
    link = f"{sheet.link_GBps:g} ({sheet.link})" if sheet.link_GBps else ""
    return [
        f"`{name}`",
        sheet.name,
        sheet.chip.name,
        f"{sheet.memory_GB:g} GB",
        f"{sheet.memory_GBps:,g}",
        link,
        f"{sheet.power_W:g}" if sheet.power_W is not None else "",
    ]


def main() -> int:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    new = before + BEGIN + "\n" + build_tables() + "\n" + END + after
    if "--check" in sys.argv[1:]:
        if new != page:
            print(f"{PAGE} is not current; run python docs/published_peaks.py", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
