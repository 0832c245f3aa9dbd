"""Blocks of the documentation that tests run."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


BLOCK = re.compile(r"<!-- run as tests/[\w/]+\.py: (\S+) -->\n+```\w+\n(.*?)```", re.S)


def read_blocks(page: str) -> dict[str, str]:
    return dict(BLOCK.findall((ROOT / page).read_text()))
