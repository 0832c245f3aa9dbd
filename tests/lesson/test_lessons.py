"""Lessons: every value that they print, on 1, 2, 3 and 4 ranks.

The expected values are computed here without torch.distributed and without the code of the lessons.
"""

import math

import numpy as np
import pytest

import lesson_concepts
import lesson_faults
import lesson_operations
import lesson_scale
import lesson_tools
import lesson_values
from lesson_tables import play_lesson, tables_of
from paceline.lesson.blocks import LessonClaim, LessonQuestion
from paceline.lesson.catalogue import ORDER
from paceline.lesson.cells import COURSE, EXERCISES

MAX_LINES = 150
RANKS = (1, 2, 3, 4)


def total(n: int) -> int:
    return sum(range(n))


def expect_ranks(n: int) -> dict:
    pairs = [[first, first + 1][: n - first] for first in range(0, n, 2)]
    return {
        "What each rank has": [[r, n, r + 1] for r in range(n)],
        "Environment variables": [[r, r, r, n, n] for r in range(n)],
        "After the rendezvous": [[r, " ".join(f"host-{o}" for o in range(n)), n] for r in range(n)],
        "A sum within pairs of ranks": [[r, pairs[r // 2], r, sum(pairs[r // 2])] for r in range(n)],
    }


def expect_point_to_point(n: int) -> dict:
    previous = [(r - 1) % n for r in range(n)]
    return {
        "Running sums": [[r, [total(r)], [total(r + 1)]] for r in range(n)],
        "Each rank sends to the next rank": [
            [r, [10 * r, 10 * r + 1], [10 * p, 10 * p + 1]] for r, p in enumerate(previous)
        ],
        "Messages by tag (rank 0 only sends)": [
            [r, [100 + r if r else -1], [200 + r if r else -1]] for r in range(n)
        ],
    }


def expect_collectives(n: int) -> dict:
    x = np.arange(4) + np.arange(n)[:, None]
    square = np.arange(n) + np.arange(n)[:, None]
    parts = [[10 * r, 10 * r + 1] for r in range(n)]
    sums = square.sum(0).tolist()
    return {
        "broadcast from rank 0": [[r, [10 * r + i for i in range(4)], [0, 1, 2, 3]] for r in range(n)],
        "scatter from rank 0": [[r, parts if r == 0 else None, parts[r]] for r in range(n)],
        "gather to rank 0": [[r, [r], list(range(n)) if r == 0 else None] for r in range(n)],
        "reduce to rank 0": [[r, x[r].tolist(), x.sum(0).tolist() if r == 0 else None] for r in range(n)],
        "An all-reduce in two steps": [[r, square[r].tolist(), [sums[r]], sums, sums] for r in range(n)],
        "all-reduce of [0, 1, 2, 3] + rank": [
            [r, *(v.tolist() for v in (x[r], x.sum(0), x.min(0), x.max(0), x.prod(0), x.mean(0)))]
            for r in range(n)
        ],
        "all-to-all": [[r, [10 * r + i for i in range(n)], [10 * s + r for s in range(n)]] for r in range(n)],
    }


def expect_ring_all_reduce(n: int) -> dict:
    tables = {}
    x = [[float(i + r) for i in range(n)] for r in range(n)]
    for step in range(2 * n - 1 if n > 1 else 1):
        name = "before" if step == 0 else "reduce-scatter" if step < n else "all-gather"
        tables[f"step {step}: {name}"] = [[r, list(x[r])] for r in range(n)]
        before = [list(values) for values in x]
        for r in range(n):
            left = (r - 1) % n
            if step < n - 1:
                x[r][(left - step) % n] += before[left][(left - step) % n]
            else:
                chunk = (left + 1 - (step - n + 1)) % n
                x[r][chunk] = before[left][chunk]
    size = 4800
    tables["An all-reduce of 4,800 bytes"] = [[r, 2 * (n - 1) * size // n, n] for r in range(n)]
    tables["Bytes through the busiest link, as a multiple of S"] = [
        [p, 2 * (p - 1), 2 * (p - 1) / p, 2 * (p - 1), 2 * round(math.log2(p))] for p in (2, 4, 8, 64, 1024)
    ]
    return tables


EXPECTED = {
    "ranks": expect_ranks,
    "point-to-point": expect_point_to_point,
    "collectives": expect_collectives,
    "ring-all-reduce": expect_ring_all_reduce,
    "data-parallel": lesson_values.expect_data_parallel,
    "mistakes": lesson_values.expect_mistakes,
    "zero": lesson_values.expect_zero,
    "tensor-parallel": lesson_values.expect_tensor_parallel,
    "pipeline": lesson_values.expect_pipeline,
    "context-parallel": lesson_values.expect_context_parallel,
    "mesh": lesson_values.expect_mesh,
    "bandwidth": lesson_concepts.expect_bandwidth,
    "local-sgd": lesson_concepts.expect_local_sgd,
    "mixed-precision": lesson_concepts.expect_mixed_precision,
    "products": lesson_concepts.expect_products,
    "recurrent": lesson_concepts.expect_recurrent,
    "machine": lesson_scale.expect_machine,
    "parameter-server": lesson_scale.expect_parameter_server,
    "large-batch": lesson_scale.expect_large_batch,
    "growth": lesson_operations.expect_growth,
    "scaling": lesson_operations.expect_scaling,
    "overlap": lesson_operations.expect_overlap,
    "data-loading": lesson_operations.expect_data_loading,
    "checkpoint": lesson_operations.expect_checkpoint,
    "rpc": lesson_tools.expect_rpc,
    "profiling": lesson_tools.expect_profiling,
    "planning": lesson_tools.expect_planning,
    "streams": lesson_faults.expect_streams,
    "start-mistakes": lesson_faults.expect_start_mistakes,
    "split-mistakes": lesson_faults.expect_split_mistakes,
}  # the tables of each lesson by title; None: a table of text


def params(ranks: tuple[int, ...] = RANKS) -> list:
    """Return all lessons on all numbers of ranks; one case of each lesson is not slow."""
    fast = {("collectives", 4), ("ring-all-reduce", 2)}
    return [
        pytest.param(name, n, marks=() if (name, n) in fast else pytest.mark.slow, id=f"{name}-{n}")
        for name in ORDER
        for n in ranks
    ]


def is_close(got, expected) -> bool:
    got = got.tolist() if hasattr(got, "tolist") else got
    if isinstance(expected, list):
        return (
            isinstance(got, list | tuple) and len(got) == len(expected) and all(map(is_close, got, expected))
        )
    if isinstance(expected, float) or isinstance(got, float):
        return got is not None and math.isclose(got, expected, rel_tol=1e-5, abs_tol=1e-9)
    return got == expected


@pytest.mark.processes
@pytest.mark.parametrize(("name", "n"), params())
def test_every_printed_value(name: str, n: int) -> None:
    blocks = play_lesson(name, n)
    tables, expected = tables_of(blocks), EXPECTED[name](n)
    assert tables.keys() == expected.keys()
    for title, lines in expected.items():
        assert lines is None or is_close([list(row) for row in tables[title]], lines), (
            title,
            tables[title],
            lines,
        )
    assert any(isinstance(block, LessonClaim) for block in blocks)
    assert any(isinstance(block, LessonQuestion) for block in blocks)


def test_comparison_finds_a_wrong_value() -> None:
    assert is_close([[0, np.array([6.0, 10.0])]], [[0, [6, 10]]])
    assert not is_close([[0, np.array([6.0, 10.0])]], [[0, [6, 11]]])
    assert not is_close([[0, None]], [[0, 1.0]])
    assert not is_close([[0, [6.0]]], [[0, [6, 10]]])


def test_each_file_is_a_lesson_of_the_course() -> None:
    lessons, exercises = (list(folder.rglob("[a-z]*.py")) for folder in (COURSE, EXERCISES))
    assert {path.stem for path in lessons} == {name.replace("-", "_") for name in ORDER}
    assert {path.stem for path in exercises} <= {name.replace("-", "_") for name in ORDER}
    assert {*EXPECTED} == {*ORDER}
    for path in [*lessons, *exercises]:
        assert len(path.read_text().splitlines()) <= MAX_LINES, path.name
