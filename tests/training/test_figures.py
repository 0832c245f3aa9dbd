"""Task.figures: drawn once from whole values under any plan, as PNG files and for TensorBoard."""

import base64
import json
import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from command import paceline, succeed, write_task
from harness import ranks
from paceline import Spec, train
from paceline.plan.plan import parse
from paceline.plotting.png import encode_png
from paceline.run import RunFolder
from paceline.spec import Optimizer, Save
from run_lines import folder, started

TASK = """
import json
from pathlib import Path

import torch
from torch import nn

from paceline import Task


class Points:
    def __init__(self, count):
        draw = torch.Generator().manual_seed(count)
        self.x, self.y = torch.randn(count, 6, generator=draw), torch.randn(count, 8, generator=draw)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index], index


class Drawn(Task):
    log: str = ""
    kind: str = "image"

    def model(self):
        return nn.Sequential(*(nn.Sequential(nn.Linear(6 if not at else 8, 8), nn.Tanh()) for at in range(4)))

    def dataset(self, split):
        return Points({"train": 40, "validation": 13}[split])

    def loss(self, output, batch):
        return (output - batch[1]).square()

    def figures(self, output, batch):
        with open(self.log, "a") as file:
            file.write(json.dumps({"rows": batch[2].tolist(), "sum": output.double().sum().item()}) + "\\n")
        if self.kind == "matplotlib":
            from matplotlib.figure import Figure

            figure = Figure(figsize=(2, 1), dpi=50)
            figure.subplots().plot(output[:, 0])
            return {"a curve": figure}
        wrong = {"shape": torch.zeros(5), "dtype": torch.zeros(2, 2, dtype=torch.int64), "kind": "text"}
        if self.kind == "name":
            return {"../x": torch.zeros(2, 2)}
        if self.kind == "no-dict":
            return [1]
        return {"errors": (output - batch[1]).abs().clamp(0, 1) if self.kind == "image" else wrong[self.kind]}
"""
BATCH = 10
PLANS = [("single", 1), ("ddp", 2), ("zero3", 2), ("tp=2", 2)]


def read_png(path: Path) -> np.ndarray:
    """Return the pixels of a file, by the PNG specification."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        content = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + content),)
        parts[kind] = parts.get(kind, b"") + content
        at += 12 + size
    width, height, depth, colour = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    assert depth == 8
    channels = {0: 1, 2: 3, 6: 4}[colour]
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, channels)


def train_under(plan: str, task: str, run: Path, log: Path) -> list[str]:
    """Train for two epochs of four steps on this rank."""
    spec = Spec(
        task=f"{task}:Drawn", set={"log": str(log)}, steps=8, batch=BATCH, seed=5, threads=1,
        optimizer=Optimizer(lr=1e-2), save=Save(minutes=float("inf")), precision="fp32",
    )  # fmt: skip
    return [type(event).__name__ for event in train(spec, parse(plan), run=RunFolder(run))]


@pytest.mark.processes
@pytest.mark.parametrize(("plan", "size"), PLANS, ids=[plan for plan, _ in PLANS])
def test_figures_are_drawn_once_from_whole_values(tmp_path, plan, size):
    task = write_task(tmp_path, TASK)
    drawn = {}
    for name, own, count in (("one", "single", 1), ("many", plan, size)):
        (tmp_path / name).mkdir()
        log = tmp_path / f"{name}.jsonl"
        names = ranks(count)(train_under, own, str(task), tmp_path / name, log)[0]
        calls = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(calls) == names.count("Evaluated") == 2
        assert all(call["rows"] == [*range(BATCH)] for call in calls)
        drawn[name] = calls
    for one, many in zip(drawn["one"], drawn["many"], strict=True):
        assert many["sum"] == pytest.approx(one["sum"], rel=1e-4, abs=1e-4)
    pictures = [sorted((tmp_path / name / "figures/errors").glob("*.png")) for name in ("one", "many")]
    assert [path.name for path in pictures[1]] == ["step_000000004.png", "step_000000008.png"]
    first, second = (read_png(path) for path in pictures[1])
    assert first.shape == (BATCH, 8, 1)
    assert (first != second).any()
    for own, other in zip(*pictures, strict=True):
        assert np.abs(read_png(own).astype(int) - read_png(other).astype(int)).max() <= 1


@pytest.mark.processes
def test_tensorboard_reads_the_images(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write_task(tmp_path, TASK)
    words = ("--set", "log=x", "--steps", "4", "--batch", "10", "--run-dir", "r")
    succeed("train", "my.py:Drawn", "--ranks", "1", *words, at=tmp_path)
    board = accumulator.EventAccumulator(str(tmp_path / "r/tensorboard/figures"), {"images": 0})
    board.Reload()
    [image] = board.Images("figures/errors")
    assert (image.step, image.width, image.height) == (4, 8, BATCH)
    assert image.encoded_image_string == (tmp_path / "r/figures/errors/step_000000004.png").read_bytes()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", "image of shape (5,) for 'errors'"),
        ("dtype", "image of int64 for 'errors'"),
        ("kind", "returned str for 'errors'"),
        ("name", "returned the name '../x'"),
        ("no-dict", "must return a dict of images, got list"),
    ],
)
def test_unsuitable_figures_are_refused(tmp_path, kind, message):
    write_task(tmp_path, TASK)
    words = ("--set", "log=x", "--set", f"kind={kind}", "--steps", "1", "--batch", "10")
    result = paceline("train", "my.py:Drawn", "--ranks", "1", *words, at=tmp_path)
    assert result.status == 2, result.all
    assert message in result.err
    assert "Traceback" not in result.all


@pytest.mark.processes
def test_figures_of_matplotlib(tmp_path):
    pytest.importorskip("matplotlib")
    write_task(tmp_path, TASK)
    words = ("--set", "log=x", "--set", "kind=matplotlib", "--steps", "1", "--batch", "10", "--run-dir", "r")
    succeed("train", "my.py:Drawn", "--ranks", "1", *words, at=tmp_path)
    assert (tmp_path / "r/figures/a curve/step_000000001.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("plan", ["pp=2,microbatches=2", "local-sgd,period=2", "parameter-server"])
def test_plans_without_whole_outputs_refuse(tmp_path, plan):
    write_task(tmp_path, TASK)
    result = paceline("train", "my.py:Drawn", "--ranks", "2", "--plan", plan, "--batch", "10", at=tmp_path)
    assert result.status == 2, result.all
    assert "cannot compute figures() of Drawn" in result.err
    assert "use single, ddp, zero1, zero2, zero3, hsdp, tp or cp" in result.err


def test_report_has_the_last_image_of_each_name(tmp_path):
    run = folder(tmp_path / "r", [started(0, 1.7e9)])
    pixels = [torch.full((4, 4, 1), value, dtype=torch.uint8).numpy() for value in (10, 20)]
    for name in ("errors", "<b>bold"):
        (run.figures / name).mkdir(parents=True)
        for step, image in zip((9, 10), pixels, strict=True):
            (run.figures / name / f"step_{step:09}.png").write_bytes(encode_png(image))
    (run.figures / "text").mkdir()
    (run.figures / "text/step_000000001.png").write_text("<script>")
    (tmp_path / "secret.png").write_bytes(encode_png(pixels[0]))
    (run.figures / "linked").mkdir()
    (run.figures / "linked/step_000000001.png").symlink_to(tmp_path / "secret.png")
    (run.figures / "other").symlink_to(run.figures / "errors")
    succeed("report", "r", at=tmp_path)
    page = (tmp_path / "r/report.html").read_text()
    images = re.findall(r'<img src="data:image/png;base64,([^"]*)" alt="([^"]*)">', page)
    assert [alt for _, alt in images] == ["&lt;b&gt;bold, step 10", "errors, step 10"]
    assert {base64.b64decode(data) for data, _ in images} == {encode_png(pixels[1])}
    assert "img-src data:;" in page
    assert "<b>bold" not in page
    shutil.rmtree(run.figures)
    succeed("report", "r", at=tmp_path)
    page = (tmp_path / "r/report.html").read_text()
    assert "<img" not in page
    assert "img-src" not in page


@pytest.mark.processes
def test_example_of_the_page(tmp_path):
    text = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
    [code] = [
        block.partition("```")[0] for block in text.split("```python\n")[1:] if "class Confused" in block
    ]
    write_task(tmp_path, code)
    succeed("train", "my.py:Confused", "--ranks", "1", "--steps", "30", "--run-dir", "r", at=tmp_path)
    image = read_png(tmp_path / "r/figures/confusion/step_000000030.png")
    assert image.shape == (3, 3, 1)
    assert image.max() == 255
    assert len({*image.flatten().tolist()}) > 2


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_png_files_have_the_pixels(tmp_path, channels):
    image = torch.randint(0, 256, (7, 5, channels), dtype=torch.uint8).numpy()
    path = tmp_path / "x.png"
    path.write_bytes(encode_png(image))
    assert (read_png(path) == image).all()
