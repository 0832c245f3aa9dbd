"""The commands of docs/batch-size.md, as they stand there."""

import json
import shlex
from pathlib import Path

import pytest

from command import succeed
from pages import read_blocks

pytestmark = [pytest.mark.processes, pytest.mark.slow]
BLOCKS = read_blocks("docs/batch-size.md")


def run(name: str, at: Path, *more: str) -> str:
    return "".join(succeed(*shlex.split(line)[1:], *more, at=at).out for line in BLOCKS[name].splitlines())


def test_noise_scale(tmp_path: Path) -> None:
    assert "noise scale" in run("noise", tmp_path)


def test_comparison(tmp_path: Path) -> None:
    printed = run("compare", tmp_path, "--json", "found.json")
    for word in ("knee", "least time", "runs/digits-batch-size"):
        assert word in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["batch"] for row in found["rows"]] == [64, 128, 256, 512, 1024]
    keys = found.keys() | found["rows"][0].keys() | found["fit"].keys() | found["choices"]["time"].keys()
    page = (Path(__file__).parents[2] / "docs/batch-size.md").read_text()
    assert not [key for key in keys if f"`{key}`" not in page and f"`{key}[]`" not in page]


def test_batches_that_grow(tmp_path: Path) -> None:
    run("grow", tmp_path, "--epochs", "6")
    for path in tmp_path.glob("runs/*/events.jsonl"):
        steps = [json.loads(line) for line in path.read_text().splitlines()]
        samples = [step["samples"] for step in steps if step["event"] == "step"]
        batches = [second - first for first, second in zip([0, *samples], samples, strict=False)]
        assert batches == sorted(batches)
        assert (batches[0], batches[-1]) == (64, 256)
