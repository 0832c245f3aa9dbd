"""Lessons played by tests, each once for a number of ranks."""

import functools
from collections.abc import Sequence

from paceline.lesson.blocks import Block, LessonTable
from paceline.lesson.catalogue import find_lesson
from paceline.lesson.play import play


@functools.cache
def play_lesson(name: str, ranks: int, has_pictures: bool = False) -> tuple[Block, ...]:
    """Return all blocks of a lesson."""
    blocks: list[Block] = []
    play(find_lesson(name), ranks, blocks.append, has_pictures)
    return tuple(blocks)


def tables_of(blocks: Sequence[Block]) -> dict[str, Sequence]:
    """Return the rows of all tables by their titles, without those that contain times."""
    tables = [block for block in blocks if isinstance(block, LessonTable) and not block.is_measured]
    named = {block.title: block.rows for block in tables}
    assert len(named) == len(tables), "two tables have the same title"
    return named
