"""The models of benchmarks/zoo: their catalog, the page of results, and two plans for each."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline import Spec
from paceline.launch.rank_pool import Ranks, keep_server
from paceline.plan.plan import parse
from paceline.spec import parse_value
from paceline.verify.report import format_verdict
from paceline.verify.run import Verification, choose_batch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
SCRIPT, RESULTS, PAGE = FOLDER / "works.py", FOLDER / "works.jsonl", ROOT / "docs" / "works.md"
ENTRIES: dict[str, Any] = runpy.run_path(str(FOLDER / "zoo" / "catalog.py"))["ENTRIES"]
REQUIRED = """T5, Whisper, CLIP, Mixtral, Qwen3-MoE, Gemma 3, Mamba, ConvNeXt, Swin, EfficientNet,
    MobileNetV3, U-Net, DiT, VAE, VQ-VAE, InfoNCE, Barlow Twins, GAN"""


def rows_of(page: str) -> dict[str, list[str]]:
    """Return the marks of each model on the page."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| ([✓✗\d].*) \|$", page, re.MULTILINE)
    return {name: marks.split(" | ") for name, marks in rows}


def works(*options: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=280)


def test_the_page_has_every_model_of_the_catalog() -> None:
    rows = rows_of(PAGE.read_text())
    assert rows.keys() == ENTRIES.keys()
    assert len(rows) >= 60
    required = [" ".join(name.split()) for name in REQUIRED.split(",")]
    assert {*required, "LSTM, packed", "DLRM, sparse", "Llama, LoRA"} <= rows.keys()
    for name, marks in rows.items():
        assert all(mark == "✓" or mark.isdigit() for mark in marks), name


def test_the_results_verify_the_plans_of_the_catalog() -> None:
    """Each model has two plans of its own that are the same training as one process."""
    cells = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    same = {(cell["task"], cell["plan"]) for cell in cells if cell["outcome"] == "same"}
    for entry in ENTRIES.values():
        assert len({*entry.plans}) == 2, entry.name
        for plan in entry.plans:
            has_cell = any(cell["task"] == entry.task and cell["plan"] == plan for cell in cells)
            assert not has_cell or (entry.task, plan) in same, (entry.name, plan)


@pytest.mark.processes
def test_the_page_is_what_the_script_writes_from_the_results(tmp_path: Path) -> None:
    """The script computes nothing again, so it needs no time for it."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "docs").mkdir()
    shutil.copy(RESULTS, tmp_path / "benchmarks")
    done = works("--resume", "benchmarks/works.jsonl", "--write", "docs/works.md", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    version = re.compile(r"The torch version is \S+")
    written, kept = (version.sub("", file.read_text()) for file in (tmp_path / "docs" / "works.md", PAGE))
    assert written == kept
    assert (tmp_path / "benchmarks" / "works.jsonl").read_text() == RESULTS.read_text()


@pytest.mark.slow
@pytest.mark.processes
def test_a_second_start_computes_only_what_is_missing(tmp_path: Path) -> None:
    """A result that half a line describes is computed again; a planted one is kept, and shown as wrong."""
    words = ["--models", "Linear", "--resume", "cells", "--write", "page.md", "--plans"]
    first = works(*words, "ddp", "tp=2", cwd=tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    cells = (tmp_path / "cells").read_text().splitlines()
    assert [json.loads(cell)["outcome"] for cell in cells] == ["same", "refused"]

    planted = json.dumps(json.loads(cells[0]) | {"outcome": "differs", "reason": "planted"})
    (tmp_path / "cells").write_text(f"{planted}\n{cells[1][:40]}")
    second = works(*words, "ddp", "tp=2", cwd=tmp_path)
    assert second.returncode == 1
    assert (tmp_path / "cells").read_text().splitlines() == [planted, cells[1]]
    page = (tmp_path / "page.md").read_text()
    assert "| `ddp` | ✗ |" in page
    assert "✗ Linear, `ddp`: planted" in page


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ENTRIES)
def test_two_plans_are_the_training_of_one_process(name: str) -> None:
    entry = ENTRIES[name]
    keep_server()
    plans = [parse(plan) for plan in entry.plans]
    settings = {key: parse_value(value) for key, value in entry.settings.items()}
    spec = Spec(task=entry.reference, set=settings, batch=choose_batch(16, plans, 2), steps=2)
    with Ranks(2) as ranks, Verification(spec, ranks) as verification:
        for plan in plans:
            verdict = verification.verify(plan)
            assert verdict.same, f"{plan}: {format_verdict(verdict)}"
