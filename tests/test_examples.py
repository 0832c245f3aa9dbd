"""The examples: the commands on their page run as written."""

import csv
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from command import Result, events_of_kind, paceline, succeed
from paceline.events import Ended, Evaluated, Step
from paceline.tuning.journal import read_state

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parent.parent / "examples"
PAGE = (EXAMPLES / "README.md").read_text()
[BLOCK] = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
LINES = [shlex.split(line) for line in BLOCK.splitlines()]
SUBMIT = next(words for words in LINES if words[1] == "submit")
COMMANDS = {
    next(word for word in words if word.endswith(".py")): words for words in LINES if words is not SUBMIT
}
MAX_LINES = 80


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__", "runs"))
    )


def run(words: list[str], folder: Path) -> Result:
    program, *rest = words
    if program in ("paceline", "python"):
        return succeed(*(rest if program == "paceline" else words), at=folder)
    result = paceline(*rest, at=folder, program=(program,))
    assert result.status == 0, result.all
    return result


def test_page_lists_each_example_and_examples_are_short():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".toml")}
    assert files == set(re.findall(r"^\| \[(\S+)\]\(\1\)", PAGE, re.M))
    assert {*COMMANDS} == files - {"site.toml"}, "each example needs a command"
    for name in files:
        lines = (EXAMPLES / name).read_text().splitlines()
        assert len(lines) < MAX_LINES, name
        commands = [line for line in lines[:8] if line.startswith(("paceline ", "python "))]
        assert name == "site.toml" or commands[0] in BLOCK.splitlines(), (
            f"{name} and the page have different commands"
        )


@pytest.mark.parametrize(
    ("name", "metric", "above"),
    [
        pytest.param("image_classification.py", "accuracy", 0.3, marks=pytest.mark.slow),
        ("lstm.py", None, None),
        pytest.param("contrastive.py", "alignment", 0.5, marks=pytest.mark.slow),
        pytest.param("clip.py", None, None, marks=pytest.mark.slow),
        ("gan.py", None, None),
        pytest.param(
            "hugging_face.py", "right", -1.0, marks=pytest.mark.slow
        ),  # three processes import transformers
    ],
)
def test_example_task_learns(name, metric, above, folder):
    if name == "hugging_face.py" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    run([*COMMANDS[name], "--run-dir", "run"], folder)
    losses = [event.loss for event in events_of_kind(folder / "run", Step)]
    assert losses[-1] < 0.7 * losses[0] or name == "gan.py"  # the losses of adversaries need not decrease
    assert events_of_kind(folder / "run", Ended)[-1].reason == "done"
    if metric is not None:
        assert events_of_kind(folder / "run", Evaluated)[-1].metrics[metric] > above


def test_lstm_loss_ignores_padding(folder, monkeypatch):
    """The loss equals the mean over the values of each series, computed separately."""
    monkeypatch.syspath_prepend(folder)
    lstm = importlib.import_module("lstm")
    task = lstm.Forecast(samples=9)
    data, model = task.dataset("train"), task.model()
    batch = task.collate([*data])
    weights = task.weights(batch)
    padded_loss = (task.loss(model(task.inputs(batch)), batch) * weights).sum() / weights.sum()
    errors = [(model(series[None, :-1])[0] - series[1:]).square() for series in data]
    expected = sum(error.sum() for error in errors) / sum(error.numel() for error in errors)
    assert padded_loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert len({len(series) for series in data}) > 1


@pytest.mark.slow
def test_search_tries_architectures(folder):
    output = run([*COMMANDS["nas.py"], "--run-dir", "study"], folder).out
    assert "4 trials: 4 complete" in output
    trials = read_state(folder / "study" / "events.jsonl").trials.values()
    assert len({tuple(trial.values.items()) for trial in trials}) == 4
    assert len({trial.metrics["parameters"] for trial in trials}) > 1


def test_own_loop_stops_early_and_writes_its_losses(folder):
    output = run(COMMANDS["own_loop.py"], folder).out
    assert re.search(r"^step \d+: stopped, best accuracy 0\.[89]\d+$", output, re.M), output
    with (folder / "losses.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "loss"]
    assert [int(step) for step, _ in rows] == [*range(1, len(rows) + 1)]
    assert float(rows[-1][1]) < float(rows[0][1])


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["zero3", "tp=2", "pp=2"])
@pytest.mark.parametrize("name", ["image_classification.py", "lstm.py"])
def test_examples_train_under_the_documented_plans(name, plan, folder):
    result = paceline("verify", name, "--plan", plan, "--ranks", "2", "--steps", "1", at=folder)
    if name == "lstm.py" and plan != "zero3":
        assert result.status == 2, result.all
        assert plan.partition("=")[0] in result.err or "pipeline" in result.err
    else:
        assert result.status == 0, result.all
        assert "the same training as one process" in result.out


@pytest.mark.slow
def test_own_loop_runs_under_torchrun(folder):
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "own_loop.py")
    assert "plan ddp on 2 ranks" in run([sys.executable, *words], folder).out


def test_site_file_renders_a_job_script(folder):
    script = run(SUBMIT, folder).out
    assert (
        subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=20).stderr == ""
    )
    site = tomllib.loads((folder / "site.toml").read_text())
    values = [
        site["partition"],
        site["account"],
        site["venv"],
        site["interface"],
        site["stage_in"],
        f"USR1@{site['notice_s']}",
    ]
    for value in [*values, *site["modules"], *site["sbatch"], *site["environment"]]:
        assert value in script, value
    (folder / "site.toml").write_text(f"{(folder / 'site.toml').read_text()}\n[partitions]\n")
    assert "unknown key partitions" in paceline(*SUBMIT[1:], at=folder).err
