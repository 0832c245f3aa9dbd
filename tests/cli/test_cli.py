"""Commands on successful runs: what they start, what they print, and the files that they write."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from rich.emoji import Emoji
from safetensors.torch import load_file

import warm
from command import (
    MPIRUN,
    TASK,
    TORCHRUN,
    Result,
    checkpoint_weights,
    clean_environment,
    events_of_kind,
    last_step,
    paceline,
    run_and_list_imports,
    set_sample_delay,
    start,
    succeed,
    unequal_tensors,
    write_task,
)
from paceline import RunFolder, Spec, cli
from paceline import spec as specs
from paceline.errors import RunError
from paceline.events import Ended, Evaluated, EventWriter, Failed, Started, Step
from paceline.run import choose_path, create, find_latest, release, reserve
from paceline.spec import Launch, Optimizer
from paceline.task import load_task
from paceline.training.init.named_tensors import named_tensors

pytestmark = pytest.mark.processes

SCRIPT = str(Path(sys.executable).parent / "paceline")
TIED = (
    TASK
    + """

class Body(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.up, self.down = body, nn.Linear(3, 6, bias=False), nn.Linear(3, 6, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x):
        x = self.body(x)
        return x + self.up(x) @ self.down.weight


class Tied(Regression):
    validation: int = 17

    def model(self):
        return Body(super().model())

    def metrics(self, output, batch):
        return {"close": (output - batch[1]).abs().mean(-1) < 1}
"""
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Result]:
    """A folder with my.py, run.toml and the run r of two ranks, and the result of the command."""
    at = tmp_path_factory.mktemp("trained")
    write_task(at, TIED)
    (at / "run.toml").write_text(
        'task = "my.py:Tied"\nranks = 2\nplan = "zero3"\nbatch = 12\nsteps = 9\nseed = 3\n'
        '[set]\nwidth = 12\ndropout = 0.1\n[optimizer]\nname = "sgd"\nlr = 0.5\n[save]\nkeep = 9\n'
    )
    flags = (
        "--run-dir",
        "r",
        "--plan",
        "ddp,microbatches=2",
        "--steps",
        "12",
        "--lr",
        "0.01",
        "--set",
        "width=10",
        "--save-every",
        "5",
    )
    return at, succeed("train", "run.toml", *flags, at=at)


# Help and version


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("--version",),
        ("train", "--help"),
        ("resume", "--help"),
        ("show", "--help"),
        ("export", "--help"),
        (),
    ],
)
def test_help_does_not_wait_for_torch(words, tmp_path):
    result, imported = run_and_list_imports(*words, at=tmp_path)
    command = words[0] if words and not words[0].startswith("-") else None
    modules = {f"paceline.cli.{module}" for module in cli.MODULES.values()}
    assert modules & imported == ({f"paceline.cli.{cli.MODULES[command]}"} if command is not None else set())
    slow = ("torch", "numpy", "tensorboard", *(("pydantic", "pydantic_core") if command is None else ()))
    assert not {name for name in imported if name.partition(".")[0] in slow}
    assert result.out.strip(), "the output must not be empty"
    assert result.status == (0 if words else 2)


def test_version(tmp_path):
    assert re.fullmatch(r"paceline \d+\.\d+\.\d+\n", succeed("--version", at=tmp_path).out)


def test_the_table_of_commands_matches_their_help(monkeypatch):
    """The table of commands and the help of each command have the same first sentence."""
    folder = Path(cli.__file__).parent
    modules = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")}
    for name, sentence in cli.COMMANDS.items():
        assert cli.MODULES[name] in modules
        command = cli.load(name)
        assert (command.name, command.hidden) == (name, name in cli.HIDDEN)
        text = " ".join(command.help.split())
        assert text.startswith(sentence), f"{name}: the table has {sentence!r}, the help {text!r}"
    assert [*cli.load("bench").commands] == [
        "collectives",
        "compute",
        "overlap",
        "host",
        "hierarchy",
        "storage",
        "data",
    ]


def test_a_mistyped_command_suggests_the_nearest(tmp_path):
    refused = paceline("trian", at=tmp_path)
    assert refused.status == 2
    assert "No such command 'trian'. Did you mean 'train'" in refused.err


def test_help_shows_the_commands_in_panels(tmp_path):
    text = succeed("--help", at=tmp_path).out
    for panel, commands in cli.PANELS.items():
        assert (f"─ {panel} ─" in text) == (panel != "Internal")
        for command in commands:
            assert (f"│ {command} " in text) == (panel != "Internal")


def test_help_shows_defaults_in_brackets(tmp_path):
    """Rich takes unescaped brackets for markup."""
    text = " ".join(succeed("train", "--help", at=tmp_path).out.replace("│", " ").split())
    assert "Number of processes [default: one per GPU, or 1]" in text
    assert "\\[" not in text


def test_help_has_no_names_of_emoji():
    """Rich takes a word between colons for the name of an emoji: `A:B:2` became `A🅱2`."""
    commands = [cli.load(name) for name in cli.COMMANDS]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        texts = [command.help, *(getattr(option, "help", None) for option in command.params)]
        for text in filter(None, texts):
            assert Emoji.replace(text) == text, command.name
    assert len(commands) > len(cli.COMMANDS)
    assert Emoji.replace("A:B:2") != "A:B:2"  # control


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("verify", "--plan", "zero2", "--seed", "1", "--plan=zero3"),
            "--plan zero2 and --plan zero3 are different values of one option; give only one",
        ),
        (
            ("train", "--compile", "--no-compile"),
            "--compile and --no-compile are different values of one option; give only one",
        ),
        (
            ("bench", "--device", "cpu", "--device", "cuda"),
            "--device cpu and --device cuda are different values of one option; give only one",
        ),
        (
            ("bench", "overlap", "--json", "a.json", "--json", "b.json"),
            "--json a.json and --json b.json are different values of one option; give only one",
        ),
    ],
)
def test_two_values_of_an_option_are_refused(words, sentence, tmp_path):
    refused = paceline(*words, at=tmp_path)
    assert (refused.status, refused.err) == (2, f"paceline: {sentence}\n")


@pytest.mark.parametrize(
    "words",
    [
        ("probe", "--json", "a.json", "--json", "a.json", "none"),
        ("probe", "--json", "a.json", "--json", "b.json", "--help"),
    ],
)
def test_an_option_may_repeat_its_value(words, tmp_path):
    """Help is shown even with two values."""
    assert "different values" not in paceline(*words, at=tmp_path).all


def test_help_hides_internal_commands(tmp_path):
    text = succeed("--help", at=tmp_path).out
    for command in ("train", "resume", "show", "export", "--debug"):
        assert command in text
    assert not re.search(r"│ rank ", text)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", ["train"]),
        ("", [name for name in cli.COMMANDS if name not in cli.HIDDEN]),
        ("train --sav", ["--save-every"]),
        ("train --plan zero3 --ra", ["--ranks", "--ranks-per-node"]),
    ],
)
def test_completion(typed, offered, tmp_path):
    words = typed.split(" ")
    completion = {
        "_PACELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": f"paceline {typed}",
        "COMP_CWORD": str(len(words)),
    }
    completed = subprocess.run(
        [SCRIPT],
        cwd=tmp_path,
        env=clean_environment(**completion),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert completed.stdout.split() == offered, completed.stderr


def test_completion_can_be_installed(tmp_path):
    home = clean_environment(HOME=str(tmp_path), SHELL="/bin/bash")
    typed = [
        "bash",
        "-c",
        f"{shlex.quote(str(SCRIPT))} --show-completion; true",
    ]  # it detects the shell that started it
    completed = subprocess.run(typed, env=home, capture_output=True, text=True, timeout=60)
    assert "_PACELINE_COMPLETE=complete_bash" in completed.stdout, completed.stderr


# A run and its files


def test_options_override_the_file(trained):
    at, _ = trained
    spec, launch = RunFolder(at / "r").request()
    assert spec == Spec(
        task=f"{at}/my.py:Tied",
        set={"width": 10, "dropout": 0.1},
        batch=12,
        steps=12,
        seed=3,
        optimizer=Optimizer(name="sgd", lr=0.01),
        save=specs.Save(every=5, keep=9),
    )
    assert launch == Launch(ranks=2, plan="ddp,microbatches=2")


def test_train_prints_its_progress(trained):
    _, result = trained
    lines = result.out.splitlines()
    assert result.err == ""
    assert re.match(
        r"my.py:Tied with \d+ parameters: to step 12, batch 12 of 53 samples; plan ddp,microbatches=2 "
        r"on 2 ranks, cpu, fp32, \d threads? each",
        lines[0],
    )
    for pattern in (
        r"^step 1  loss \d\.\d{4}  grad norm \S+  lr 0\.01  [\d,]+ samples/s$",
        r"^step 5  evaluated: loss \d\.\d{4}  close \d\.\d{4}$",
        r"^step 12  saved ckpt/step_12, \S+ KiB in ",
        r"^step 12  done$",
        r"^loss +\d\.\d{4} → \d\.\d{4}",
        r"^validation close +\d\.\d{4}",
        r"^speed +[\d,]+ samples/s, ",
        r"^time +.*: data \d+%, communication \d+%, compute \d+%, evaluation \d+%, save \d+%",
        r"^checkpoint +step 12, ",
        r"^run  r$",
    ):
        assert re.search(pattern, result.out, re.MULTILINE), (pattern, result.out)
    assert "\x1b" not in result.out, "colours and cursor movements are for terminals"


def test_train_writes_events(trained):
    at, _ = trained
    lines = [json.loads(line) for line in (at / "r/events.jsonl").read_text().splitlines()]
    kinds = [line["event"] for line in lines]
    assert {*kinds} == {"started", "step", "evaluated", "saved", "ended"}
    assert (kinds[0], kinds[-1]) == ("started", "ended")
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == [*range(1, 13)]
    assert [line["samples"] for line in steps] == [*range(12, 145, 12)]
    fields = {
        "time",
        "event",
        "step",
        "samples",
        "loss",
        "grad_norm",
        "lr",
        "step_s",
        "data_s",
        "samples_per_s",
    }
    assert all({*line} == fields for line in steps)
    assert all(
        line["loss"] > 0 and line["grad_norm"] > 0 and 0 <= line["data_s"] <= line["step_s"] for line in steps
    )
    evaluated = [line for line in lines if line["event"] == "evaluated"]
    assert [line["step"] for line in evaluated] == [5, 9, 12], (
        "after each epoch of 53 samples, and at the end"
    )
    assert all({*line["metrics"]} == {"loss", "close"} for line in evaluated)
    assert {5, 10, 12} <= {line["step"] for line in lines if line["event"] == "saved"}
    times = [line["time"] for line in steps]
    assert times == sorted(times)


def test_train_writes_files(trained):
    at, _ = trained
    names = {path.name for path in (at / "r").iterdir()}
    assert {
        "spec.toml",
        "provenance.json",
        "events.jsonl",
        "log.txt",
        "ckpt",
        "ranks",
        "tensorboard",
    } <= names
    assert not [name for name in names if name.startswith(".")], "no temporary files"
    assert {path.name for path in (at / "r/ranks").iterdir()} >= {"0.log", "1.log"}
    assert not [path for path in (at / "r/ckpt").iterdir() if path.name.startswith(".")]
    log = (at / "r/log.txt").read_text()
    assert re.search(r"^\d\d:\d\d:\d\d step 12  done$", log, re.MULTILINE)


def test_train_writes_provenance(trained):
    at, _ = trained
    facts = json.loads((at / "r/provenance.json").read_text())
    assert facts["command"][1:] == ["train", "run.toml", *facts["command"][3:]]
    assert Path(facts["folder"]) == at
    assert facts["packages"]["torch"] == torch.__version__
    assert {"command", "folder", "host", "user", "system", "python", "packages"} <= {*facts}


def test_provenance_has_the_revision_of_the_task(tmp_path):
    """The revision is that of the current folder."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    write_task(tmp_path)
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    for words in (["init", "-q"], ["add", "my.py"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=60)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    (tmp_path / "my.py").write_text(TASK + "\n# changed\n")
    succeed("train", "my.py:Regression", "--steps", "2", "--device", "cpu", "--run-dir", "r", at=tmp_path)
    facts = json.loads((tmp_path / "r/provenance.json").read_text())
    assert (facts["git_revision"], facts["git_changed"]) == (head, True)


def test_tensorboard_reads_the_run(trained):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    at, _ = trained
    board = accumulator.EventAccumulator(str(at / "r/tensorboard"))
    board.Reload()
    names = {
        "train/loss",
        "train/grad_norm",
        "train/lr",
        "train/samples_per_s",
        "validation/loss",
        "validation/close",
    }
    assert {*board.Tags()["scalars"]} == names
    losses = {event.step: event.loss for event in events_of_kind(at / "r", Step)}
    assert all(scalar.value == pytest.approx(losses[scalar.step]) for scalar in board.Scalars("train/loss"))
    assert [scalar.step for scalar in board.Scalars("validation/close")] == [5, 9, 12]


def test_the_saved_request_can_be_trained_again(trained, tmp_path):
    """The weights are the same, bit for bit."""
    at, _ = trained
    again = succeed("train", at / "r/spec.toml", "--run-dir", "again", at=tmp_path)
    assert again.err == ""
    assert not unequal_tensors(checkpoint_weights(tmp_path / "again"), checkpoint_weights(at / "r"))


def test_resume_continues_on_other_ranks(trained, tmp_path):
    at, _ = trained
    shutil.copytree(at / "r", tmp_path / "r")
    result = succeed("resume", "r", "--ranks", "1", "--steps", "15", at=tmp_path)
    assert (
        "from step 12 to step 15, batch 12 of 53 samples; plan single,microbatches=2 on 1 rank" in result.out
    )
    assert [event.step for event in events_of_kind(tmp_path / "r", Ended)] == [12, 15]
    spec, launch = RunFolder(tmp_path / "r").request()
    assert spec.steps == 15, "the saved request is the last one"
    assert (launch.ranks, launch.plan, launch.asked, launch.asked_ranks) == (
        1,
        "single,microbatches=2",
        "ddp,microbatches=2",
        2,
    )


def test_simultaneous_trainings_have_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "T")
    first, second = reserve(None, "digits"), reserve(None, "digits")
    assert [str(first), str(second)] == ["runs/digits-T", "runs/digits-T-2"]
    create(second, Spec(), Launch())
    assert choose_path(None, "digits") == Path("runs/digits-T-3")
    release(first)
    assert choose_path(None, "digits") == first
    shutil.rmtree(second)
    release(reserve(None, "digits"))
    assert not os.listdir(tmp_path)
    (tmp_path / "mine").mkdir()
    release(reserve("mine/new", "digits"))
    assert os.listdir(tmp_path) == ["mine"], "a requested folder is not deleted"
    (tmp_path / "runs").touch()
    with pytest.raises(RunError, match="cannot create the run folder runs/digits-T: File exists"):
        reserve(None, "digits")


# export and show


def test_exported_weights_load_into_the_model(trained, tmp_path):
    at, _ = trained
    file = tmp_path / "w.safetensors"
    result = succeed("export", at / "r", file, at=tmp_path)
    assert re.fullmatch(rf"{file}: \d+ tensors, \S+ elements, \S+ KiB, of {at}/r/ckpt/step_12\n", result.out)
    weights_found = load_file(file)
    model = load_task(f"{at}/my.py:Tied", {"width": 10, "dropout": 0.1}).model()
    model.load_state_dict(weights_found, strict=True)
    assert weights_found["up.weight"].equal(weights_found["down.weight"]), (
        "a tied weight has both of its names"
    )
    for name, tensor in named_tensors(model).items():
        assert tensor.equal(weights_found[name])
    assert {name: tuple(tensor.shape) for name, tensor in weights_found.items()} == {
        k: tuple(v.shape) for k, v in model.state_dict().items()
    }


def test_export_an_earlier_step_and_overwrite_a_file(trained, tmp_path):
    at, _ = trained
    file = tmp_path / "w.safetensors"
    succeed("export", at / "r", file, "--step", "5", at=tmp_path)
    first = load_file(file)
    refused = paceline("export", at / "r", file, at=tmp_path)
    assert (refused.status, refused.err) == (
        2,
        f"paceline: {file} exists already; name another file, or add --force\n",
    )
    succeed("export", at / "r", file, "--force", at=tmp_path)
    assert not load_file(file)["up.weight"].equal(first["up.weight"])
    for name, fix in (("w.pt", "name it w.safetensors"), ("w.onnx", "add --format onnx")):
        renamed = paceline("export", at / "r", name, at=tmp_path)
        assert (renamed.status, renamed.err) == (
            2,
            f"paceline: --format safetensors writes no {Path(name).suffix} file, got {name}; {fix}\n",
        )
        assert not (tmp_path / name).exists()
    nowhere = paceline("export", at / "r", tmp_path / "no/w.safetensors", at=tmp_path)
    assert (nowhere.status, nowhere.err) == (
        2,
        f"paceline: cannot write {tmp_path}/no/w.safetensors: no such folder: {tmp_path}/no; create it "
        "first\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def shown(run: Path, monkeypatch, capsys) -> str:
    monkeypatch.setattr(sys, "argv", ["paceline", "show", str(run)])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    return capsys.readouterr().out


def test_show_a_finished_run(trained):
    at, result = trained
    text = succeed("show", "r", at=at).out
    assert text.startswith(result.out.splitlines()[0])
    assert "done at step 12" in text
    closing = result.out[result.out.index("\nloss ") : result.out.index("\nrun  r")]
    assert closing in text, "the same table as at the end"
    assert (
        "checkpoints kept: step 5, step 9, step 10, step 12" in text
        or "checkpoints kept: step 5, step 10, step 12" in text
    )


def pretend(run: Path, *events) -> Path:
    """Create a run with only a request and events."""
    run.mkdir()
    specs.save(run / "spec.toml", Spec(), Launch(ranks=2))
    writer = EventWriter(run / "events.jsonl")
    for event in events:
        writer.write(event)
    writer.close()
    return run


STARTED = Started(
    task="my.py:Points",
    plan="ddp",
    ranks=2,
    batch=8,
    step=0,
    steps=20,
    samples=53,
    parameters=9,
    device="cpu",
    precision="fp32",
    threads=1,
)
STEPS = [
    Step(step=n, samples=8 * n, loss=1 / n, grad_norm=1.0, lr=0.1, step_s=0.1, data_s=0.0, samples_per_s=80.0)
    for n in range(1, 8)
]


def test_show_an_interrupted_run(tmp_path, monkeypatch, capsys):
    text = shown(pretend(tmp_path / "r", STARTED, *STEPS), monkeypatch, capsys)
    assert f"interrupted after step 7 of 20; continue with: paceline resume {tmp_path}/r" in text
    assert "no checkpoint" in text
    assert "1.0000 → 0.1429" in text


def test_show_a_failed_run(tmp_path, monkeypatch, capsys):
    failed = [
        Failed(what="run", message="RuntimeError: Connection closed by peer", step=7, rank=0, lost_peer=True),
        Failed(what="run", message="MemoryError: no [room] for it", step=7, rank=1),
    ]
    text = shown(pretend(tmp_path / "r", STARTED, *STEPS, *failed), monkeypatch, capsys)
    assert "step 7  rank 1: MemoryError: no [room] for it" in text
    assert "Connection closed" not in text, "a lost connection is not the cause"


def test_show_a_running_run(tmp_path, monkeypatch, capsys):
    run = pretend(tmp_path / "r", STARTED, *STEPS)
    with RunFolder(run).lock():
        assert "running, step 7 of 20" in shown(run, monkeypatch, capsys)


def test_show_a_stopped_and_resumed_run(tmp_path, monkeypatch, capsys):
    again = Started(**{**vars(STARTED), "step": 7})
    events = [STARTED, *STEPS, Ended(step=7, reason="stopped"), again]
    assert "interrupted after step 7 of 20" in shown(pretend(tmp_path / "r", *events), monkeypatch, capsys)
    text = shown(pretend(tmp_path / "s", *events[:-1]), monkeypatch, capsys)
    assert "stopped at step 7" in text
    assert f"continue with: paceline resume {tmp_path}/s" in text


def test_show_a_run_that_has_not_started(tmp_path, monkeypatch, capsys):
    assert "not started yet" in shown(pretend(tmp_path / "r"), monkeypatch, capsys)


def test_show_does_not_change_the_run(trained):
    at, _ = trained
    before = {path: path.stat().st_mtime_ns for path in (at / "r").rglob("*") if path.is_file()}
    succeed("show", "r", at=at)
    assert {path: path.stat().st_mtime_ns for path in (at / "r").rglob("*") if path.is_file()} == before


# Under other launchers (more in test_launchers.py)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(TORCHRUN, id="torchrun"),
        pytest.param(MPIRUN, id="mpirun", marks=pytest.mark.mpi("mpirun")),
    ],
)
def test_weights_do_not_depend_on_the_launcher(launcher, tmp_path):
    """Bit for bit. The output has no control sequences, although mpirun gives its ranks a terminal."""
    write_task(tmp_path)
    words = (
        "train",
        "my.py:Regression",
        "--steps",
        "12",
        "--batch",
        "12",
        "--seed",
        "3",
        "--plan",
        "zero2",
        "--set",
        "validation=17",
    )
    result = succeed(*words, at=tmp_path, program=launcher)
    assert result.out.count("step 12  done") == 1, "only one rank prints"
    assert "\x1b" not in result.out
    [run] = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"regression-\d{8}-\d{6}", run.name)
    succeed("train", run / "spec.toml", "--run-dir", "own", at=tmp_path)
    assert not unequal_tensors(checkpoint_weights(run), checkpoint_weights(tmp_path / "own"))


def test_torchrun_passes_on_every_option():
    """torchrun expands abbreviations of its options even after the name of the module."""
    from torch.distributed.run import get_args_parser

    for name in cli.COMMANDS:
        for option in (
            option
            for parameter in cli.load(name).params
            for option in parameter.opts
            if option.startswith("-") and option != "--monitor"  # it has a second name, --monitor-every
        ):
            parsed = get_args_parser().parse_args(
                ["--nproc-per-node", "2", "-m", "paceline", name, option, "x"]
            )
            assert parsed.training_script_args == [name, option, "x"]


@pytest.mark.slow
def test_stop_and_resume_under_torchrun(tmp_path):
    write_task(tmp_path)
    slow, run = set_sample_delay(tmp_path / "slow", 0.01), tmp_path / "r"

    words = ("train", "my.py:Regression", "--steps", "100", "--batch", "12", "--run-dir", "r")
    with start(*words, at=tmp_path, program=TORCHRUN, SLOW=str(slow)) as running:
        running.wait_for_step(run, 4)
        running.process.send_signal(signal.SIGINT)
        running.wait()
        running.wait_until_all_ended()
    assert events_of_kind(run, Ended)[-1].reason == "stopped"
    stopped = RunFolder(run).checkpoints()[-1]
    result = succeed("resume", "r", "--steps", str(stopped + 2), at=tmp_path, program=TORCHRUN)
    assert f"from step {stopped} to step {stopped + 2}" in result.out
    assert last_step(run) == stopped + 2


# On a terminal


def on_a_terminal(
    *words: str, at: Path, columns: int = 120, timeout_s: float = 240.0, **env: str
) -> tuple[int, str]:
    """Run a command on a terminal. Return its exit status and its output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    variables = clean_environment(TERM="xterm-256color", **env)
    del variables["COLUMNS"]
    terminal = os.ttyname(theirs)
    process = warm.start(words, at, variables, terminal, terminal)
    seen = b""
    try:
        # Reading would fail if no process had the other end open, as before the command opens it.
        while not select.select([ours], [], [], 0.1)[0] and process.poll() is None:
            pass
        os.close(theirs)
        while select.select([ours], [], [], timeout_s)[0]:
            try:
                piece = os.read(ours, 2**16)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            seen += piece
        return process.wait(timeout_s), seen.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_progress_on_a_terminal(tmp_path):
    write_task(tmp_path)
    slow = set_sample_delay(tmp_path / "slow", 0.01)
    words = (
        "train",
        "my.py:Regression",
        "--steps",
        "20",
        "--batch",
        "12",
        "--set",
        "validation=6",
        "--run-dir",
        "r",
        "--device",
        "cpu",
    )
    status, seen = on_a_terminal(*words, at=tmp_path, SLOW=str(slow))
    assert status == 0, seen
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    bars = re.findall(r"(\d+)/20 loss (\d\.\d{4}) ([\d,]+) samples/s (\d:\d\d:\d\d|-:--:--)", plain)
    assert bars, plain
    assert "20" in {done for done, *_ in bars}, "the bar reaches the end"
    assert len({done for done, *_ in bars}) > 2, "the bar moves"
    assert {"0:00:00"} < {left for *_, left in bars}, "the remaining time is shown, and reaches zero"
    assert "step 20  done" not in plain, "lines go to the log only"
    assert "loss" in plain[plain.rindex("20/20") :], "the closing table"
    assert "step 20  done" in (tmp_path / "r/log.txt").read_text()


def test_the_default_training_learns_digits(tmp_path):
    """`paceline train` with few steps."""
    succeed("train", "--steps", "60", "--device", "cpu", "--ranks", "2", at=tmp_path)
    [run] = (tmp_path / "runs").iterdir()
    assert run.name.startswith("digits-")
    assert events_of_kind(run, Evaluated)[-1].metrics["accuracy"] > 0.7


def test_keys_lists_every_name_of_set(tmp_path):
    write_task(tmp_path)
    out = succeed("train", "my.py:Regression", "--keys", at=tmp_path).out.splitlines()
    fields = out[1 : out.index("keys of the request, by --set NAME=VALUE:")]
    assert [line.split() for line in fields[1:3]] == [["width", "int", "10"], ["depth", "int", "3"]]
    keys = {line.split()[0] for line in out[len(fields) + 3 :]}
    assert {
        "spec.threads",
        "spec.evaluate_every",
        "optimizer.betas",
        "save.best",
        "data.prefetch",
        "spec.restarts",
    } <= keys
    assert not list(tmp_path.glob("runs"))


def test_doctor_takes_the_latest_run(tmp_path):
    none = paceline("doctor", at=tmp_path)
    assert (none.status, none.err) == (2, "paceline: no runs in runs/; specify the folder of a run\n")
    for at, name in enumerate(("b", "c", "a")):
        create(tmp_path / "runs" / name, Spec(), Launch())
        os.utime(tmp_path / "runs" / name / "spec.toml", (10**9 + at, 10**9 + at))
    assert paceline("doctor", at=tmp_path) == paceline("doctor", "runs/a", at=tmp_path)
    assert "runs/a is not running" in paceline("doctor", at=tmp_path).out
    (tmp_path / "runs/b/events.jsonl").touch()
    with contextlib.chdir(tmp_path):
        assert find_latest() == Path("runs/b")
