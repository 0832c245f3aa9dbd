"""bench data: rates of reading a task's samples with the loader of a training."""

import json
import time

import numpy as np
import pytest
import torch

from command import paceline, succeed, write_task
from image_files import write_images
from paceline import Spec, Task
from paceline.bench.data_loading import default_worker_counts, loader_settings, measure, summarize
from paceline.bench.data_stages import advise, check_workers, judge_order, measure_stages
from paceline.data import Folder
from paceline.data.batch_slices import RankBatchSlice, training_parts
from paceline.data.order import SampleOrder
from paceline.data.samples import Samples
from paceline.errors import DataError

pytestmark = pytest.mark.processes

CPU = torch.device("cpu")
READ: list[int] = []


class Slow(Task):
    """A task whose samples take 5 ms each, and record that they were read."""

    samples: int = 40

    def model(self):
        return torch.nn.Linear(2, 1)

    def dataset(self, split):
        return _Slow(self.samples) if split == "train" else None

    def loss(self, output, batch):
        return output.square()


class _Slow:
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        import time

        time.sleep(0.005)
        READ.append(index)
        return torch.ones(2) * index, torch.zeros(1)


class NoStep(Slow):
    def model(self):
        raise NotImplementedError("this model is not written yet")


class Torn(Slow):
    def dataset(self, split):
        return _Torn(self.samples)


class _Torn(_Slow):
    def __getitem__(self, index):
        raise OSError("no such image")


def measure_input(task, settings, budget_s=0.6, batch=4):
    """Return the rows and the notes."""
    items = list(measure(Spec(batch=batch), task, CPU, budget_s, settings))
    rows = [item for item in items if not isinstance(item, str)]
    return [row for row in rows if row["what"] in ("step", "read", "read and step")], [
        item for item in items if isinstance(item, str)
    ]


def test_slow_samples_limit_the_training():
    READ.clear()
    rows, notes = measure_input(Slow(), [(0, 1)])
    step, read, both = rows
    assert (step["what"], read["what"], both["what"]) == ("step", "read", "read and step")
    assert read["per_s"] < 200  # 5 ms each
    assert both["per_s"] < 200
    assert both["wait_share"] > 0.5
    assert read["workers"] == 0
    assert read["prefetch"] is None
    [summary] = summarize(rows)
    assert summary["limits"]
    assert summary["share_of_step"] == both["per_s"] / step["per_s"]
    assert not notes


def test_samples_are_read_in_the_order_of_a_training():
    READ.clear()
    measure_input(Slow(), [(0, 1)])
    parts = training_parts(RankBatchSlice(4, 1, 0, 1), SampleOrder(40, 0), 0, 3)
    expected = [index for _, indices in parts for index in indices]
    assert any(READ[at : at + len(expected)] == expected for at in range(len(READ)))  # after the stages


def test_workers_need_memory():
    rows, _ = measure_input(Slow(samples=400), [(0, 1), (2, 2)], 2.0)
    without, with_workers = (row for row in rows if row["what"] == "read")
    assert with_workers["workers"] == 2
    assert with_workers["prefetch"] == 2
    assert with_workers["memory_bytes"] > without["memory_bytes"]
    assert with_workers["first_s"] > 0
    assert with_workers["per_s"] < 2 * 200


def test_samples_that_are_read_repeatedly_are_noted():
    _, notes = measure_input(Slow(samples=8), [(0, 1)])
    assert len(notes) == 1
    assert notes[0].startswith("the 8 samples were read up to")


def test_summary_names_the_first_setting_that_suffices():
    def row(what, workers, per_s, waits=None):
        return {"what": what, "workers": workers, "prefetch": 2, "per_s": per_s, "wait_share": waits}

    step, read = row("step", None, 100.0), row("read", 1, 500.0)
    combined = [
        row("read and step", workers, rate, waits)
        for workers, rate, waits in ((0, 50.0, 0.5), (1, 96.0, 0.04), (2, 99.0, 0.01))
    ]
    enough = {"workers": 1, "prefetch": 2, "wait_share": 0.04, "limits": False, "share_of_step": 0.96}
    assert summarize([step, read, *combined]) == [enough]
    assert summarize([read, *combined]) == []
    [limit] = summarize([step, combined[0], row("read and step", 1, 60.0, 0.4)])
    assert (limit["limits"], limit["workers"], limit["share_of_step"]) == (True, 1, 0.6)


def test_loader_settings():
    assert loader_settings([0, 2], [2, 4]) == [(0, 1), (2, 2), (2, 4)]
    assert default_worker_counts()[:2] == [0, 1]


def test_failing_training_step_is_noted_and_reading_is_still_measured():
    rows, notes = measure_input(NoStep(), [(0, 1)])
    assert [row["what"] for row in rows] == ["read"]
    assert "the training step failed" in notes[0]
    assert summarize(rows) == []


@pytest.mark.filterwarnings("ignore")
def test_unreadable_sample_raises():
    with pytest.raises(DataError, match="raised OSError: no such image"):
        measure_input(Torn(), [(0, 1)])


def test_quality_of_orders():
    labels = np.repeat(np.arange(100), 600)
    full = judge_order(SampleOrder(60_000, 1), 60_000, labels)
    assert abs(full.displacement - 1) < 0.02
    assert abs(full.label_correlation) < 0.02
    window = judge_order(SampleOrder(60_000, 1, "window"), 60_000, labels)
    assert abs(window.displacement - 1) < 0.2
    assert abs(window.label_correlation) < 0.05
    none = judge_order(SampleOrder(60_000, 1, "none"), 60_000, labels)
    assert none.displacement == 0
    assert none.label_correlation > 0.99
    assert judge_order(SampleOrder(50, 1), 50).label_correlation is None


def test_stages_of_a_folder_and_what_would_be_faster(tmp_path):
    write_images(tmp_path, {"a": 30, "b": 30})
    spec = Spec(batch=8, data={"shuffle": "none"})

    def decode(content):
        time.sleep(0.002)
        return torch.zeros(3)

    folder = Folder(tmp_path, decode)
    rows = list(measure_stages(Samples(folder, "train", 0, None), spec, 0.2))
    assert [row["what"] for row in rows] == ["fetch", "decode", "collate"]
    fetch, decoded, _ = rows
    assert 100 < fetch["sample_bytes"] < 400  # a PNG of 5 x 4 pixels
    assert decoded["per_s"] < 500
    assert abs(sum(row["share"] for row in rows) - 1) < 1e-9
    order = {"what": "order", "label_correlation": 0.9}
    decode_advice, label_advice = advise(Samples(folder, "train", 0, None), [*rows, order])
    assert decode_advice.startswith("decode takes 9")
    assert label_advice.startswith("neighbors in the order have related labels (correlation 0.90)")
    assert not list(advise(Samples([1, 2], "train", 0, None), [{"what": "order", "label_correlation": 0.1}]))


def test_number_of_workers_that_the_step_needs():
    def rows(step, alone):
        return [{"what": "step", "per_s": step}, {"what": "read", "workers": 1, "per_s": alone}]

    assert check_workers(rows(950.0, 100.0), 16) == "the step would need about 10 workers"
    assert check_workers(rows(950.0, 100.0), 2).endswith("10 workers, more than the 2 cores of this machine")
    assert check_workers(rows(90.0, 100.0)) is None
    assert check_workers(rows(90.0, 100.0)[:1]) is None


def test_command(tmp_path):
    write_task(tmp_path)
    words = (
        "--batch",
        "8",
        "--workers",
        "0,1",
        "--prefetch",
        "2",
        "--seconds",
        "1",
        "--json",
        "a.json",
        "--plot",
        "a.png",
    )
    result = succeed("bench", "data", "my.py:Regression", *words, at=tmp_path)
    tree = json.loads((tmp_path / "a.json").read_text())
    assert [(row["what"], row.get("workers")) for row in tree["rows"]] == [
        ("get", None),
        ("collate", None),
        ("order", None),
        ("step", None),
        ("read", 0),
        ("read and step", 0),
        ("read", 1),
        ("read and step", 1),
    ]
    assert "reading is" in result.out
    assert "order full: mean displacement" in result.out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["my.py:Regression", "--workers", "two"],
            "--workers must be a list of numbers of at least 0, e.g. 1,2,4; got 'two'",
        ),
        (
            ["my.py:Regression", "--prefetch", "0"],
            "--prefetch must be a list of numbers of at least 1, e.g. 1,2,4; got '0'",
        ),
        (["my.py:None"], "my.py has no class None"),
        (["my.py:Regression", "--set", "depths=3"], "my.py:Regression has no field depths"),
    ],
)
def test_bad_input_gives_one_sentence(words, message, tmp_path):
    write_task(tmp_path)
    result = paceline("bench", "data", *words, at=tmp_path)
    assert (result.status, result.out) == (2, ""), result.all
    assert result.err.count("\n") == 1
    assert result.err.startswith(f"paceline: {message}")
