"""How quickly a task's samples are read is measured on what reads them in a training."""

import json

import pytest
import torch

from command import paceline, succeed, write_task
from paceline import Spec, Task
from paceline.bench.data_loading import measure, summary, up_to_cores, ways
from paceline.data.loader import RankBatchSlice, training_parts
from paceline.errors import DataError

CPU = torch.device("cpu")
READ: list[int] = []


class Slow(Task):
    """Its samples take 5 ms each, and say that they were read."""

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


def measured(task, how, budget_s=0.6, batch=4):
    found = list(measure(Spec(batch=batch), task, CPU, budget_s, how))
    return [row for row in found if not isinstance(row, str)], [row for row in found if isinstance(row, str)]


def test_slow_samples_are_the_limit_and_are_told_slow():
    READ.clear()
    rows, notes = measured(Slow(), [(0, 1)])
    step, read, both = rows
    assert (step["what"], read["what"], both["what"]) == ("step", "read", "read and step")
    assert read["per_s"] < 200  # 5 ms each
    assert both["per_s"] < 200
    assert both["wait_share"] > 0.5
    assert read["workers"] == 0
    assert read["prefetch"] is None
    [told] = summary(rows)
    assert told["limits"]
    assert told["share_of_step"] == both["per_s"] / step["per_s"]
    assert not notes


def test_the_samples_are_those_of_a_training_in_its_order():
    READ.clear()
    measured(Slow(), [(0, 1)])
    parts = training_parts(RankBatchSlice(4, 1, 0, 1), 40, 0, 0, 3)
    expected = [index for _, indices in parts for index in indices]
    assert READ[4 : 4 + len(expected)] == expected  # before them comes the batch that the step is timed on


def test_workers_read_more():
    rows, _ = measured(Slow(samples=400), [(0, 1), (2, 2)], 2.0)
    alone, helped = (row for row in rows if row["what"] == "read")
    assert helped["workers"] == 2
    assert helped["prefetch"] == 2
    assert helped["memory_bytes"] > alone["memory_bytes"]
    assert helped["first_s"] > 0
    assert helped["per_s"] < 2 * 200


def test_samples_that_are_read_over_and_over_are_remarked():
    _, notes = measured(Slow(samples=8), [(0, 1)])
    assert len(notes) == 1
    assert notes[0].startswith("the 8 samples were read up to")


def test_the_first_way_that_is_enough():
    def row(what, workers, per_s, waits=None):
        return {"what": what, "workers": workers, "prefetch": 2, "per_s": per_s, "wait_share": waits}

    step, read = row("step", None, 100.0), row("read", 1, 500.0)
    together = [
        row("read and step", workers, rate, waits)
        for workers, rate, waits in ((0, 50.0, 0.5), (1, 96.0, 0.04), (2, 99.0, 0.01))
    ]
    enough = {"workers": 1, "prefetch": 2, "wait_share": 0.04, "limits": False, "share_of_step": 0.96}
    assert summary([step, read, *together]) == [enough]
    assert summary([read, *together]) == []
    [limit] = summary([step, together[0], row("read and step", 1, 60.0, 0.4)])
    assert (limit["limits"], limit["workers"], limit["share_of_step"]) == (True, 1, 0.6)


def test_ways_to_read():
    assert ways([0, 2], [2, 4]) == [(0, 1), (2, 2), (2, 4)]
    assert up_to_cores()[:2] == [0, 1]


def test_a_task_that_cannot_be_stepped():
    rows, notes = measured(NoStep(), [(0, 1)])
    assert [row["what"] for row in rows] == ["read"]
    assert "cannot be stepped" in notes[0]
    assert summary(rows) == []


@pytest.mark.filterwarnings("ignore")
def test_a_sample_that_cannot_be_read():
    with pytest.raises(DataError, match="raised OSError: no such image"):
        measured(Torn(), [(0, 1)])


def test_the_command(tmp_path):
    write_task(tmp_path)
    words = (
        "--batch",
        "8",
        "--workers",
        "0,1",
        "--prefetch",
        "2",
        "--seconds",
        "2",
        "--json",
        "a.json",
        "--plot",
        "a.png",
    )
    result = succeed("bench", "input", "my.py:Regression", *words, at=tmp_path)
    found = json.loads((tmp_path / "a.json").read_text())
    assert [(row["what"], row.get("workers")) for row in found["rows"]] == [
        ("step", None),
        ("read", 0),
        ("read and step", 0),
        ("read", 1),
        ("read and step", 1),
    ]
    assert "reading is" in result.out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["my.py:Regression", "--workers", "two"],
            "--workers takes numbers from 0 on, such as 1,2,4; got 'two'",
        ),
        (
            ["my.py:Regression", "--prefetch", "0"],
            "--prefetch takes numbers from 1 on, such as 1,2,4; got '0'",
        ),
        (["my.py:None"], "my.py has no class None"),
        (["my.py:Regression", "--set", "depths=3"], "my.py:Regression has no field depths"),
    ],
)
def test_bad_input_is_one_sentence(words, said, tmp_path):
    write_task(tmp_path)
    result = paceline("bench", "input", *words, at=tmp_path)
    assert (result.status, result.out) == (2, ""), result.all
    assert result.err.count("\n") == 1
    assert result.err.startswith(f"paceline: {said}")
