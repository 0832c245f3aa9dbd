"""Findings read the runs beside a run only as far as that is cheap."""

import random

import pytest

from paceline.inspect import read_facts
from run_lines import folder, started, step


@pytest.mark.parametrize(("share", "expected"), [(10.0, ["a", "b"]), (1.5, ["b"]), (0.5, [])])
def test_siblings_are_read_up_to_a_number_of_bytes(share, expected, tmp_path, monkeypatch):
    draw = random.Random(1)
    lines = [started(0, 1.7e9), *(step(n, 1.7e9 + n, draw) for n in range(1, 60))]
    runs = [folder(tmp_path / name, lines) for name in ("a", "b", "c")]
    size = runs[0].events.stat().st_size
    monkeypatch.setattr(read_facts, "MAX_SIBLING_BYTES", int(share * size))
    found = read_facts.read_facts(runs[-1]).siblings
    assert sorted(sibling.name for sibling in found) == expected
