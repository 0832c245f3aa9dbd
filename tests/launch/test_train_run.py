"""`paceline.train` with `ranks`: a script starts ranks and gets their events.

The scripts define their task themselves and have no `if __name__ == "__main__":`.
"""

import json
import os
import signal
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as package
from command import Result, Running, checkpoint_weights, paceline, read_events, start, succeed
from paceline import LaunchError, PlanError, RunError, Spec, SpecError, TaskError, World, train
from paceline.events import Ended, Failed, Saved, Step
from paceline.launch import sent_task
from pages import read_blocks

pytestmark = pytest.mark.processes

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn

import paceline
from paceline.events import Ended, Failed, Saved, Started, Step

SAMPLES = 21  # a global of the script, which the ranks get, too
READ = []


class Points:
    def __init__(self, delay_s):
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
        self.y = torch.randn(SAMPLES, 3, generator=draw, dtype=torch.float64)
        self.delay_s = delay_s

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        time.sleep(self.delay_s)
        READ.append(index)
        return self.x[index], self.y[index], index


class Net(paceline.Task):
    width: int = 8
    fails_at: int = -1
    delay_s: float = 0.0

    def model(self):
        return nn.Sequential(nn.Linear(6, self.width), nn.Tanh(), nn.Linear(self.width, 3))

    def dataset(self, split):
        return Points(self.delay_s) if split == "train" else None

    def loss(self, output, batch):
        if self.fails_at in batch[2].tolist():
            raise ValueError("no such number")
        return (output - batch[1]).square()


def spec(steps=8, **more):
    optimizer = paceline.spec.Optimizer(name="sgd", lr=0.1)
    return paceline.Spec(batch=8, steps=steps, precision="fp64", seed=2, optimizer=optimizer, **more)
"""


def run_script(folder: Path, body: str, **env: str) -> Running:
    """Start a script with the task `Net`."""
    (folder / "temporary").mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT + textwrap.dedent(body))
    return start("python", folder / "script.py", at=folder, TMPDIR=str(folder / "temporary"), **env)


def finish(running: Running, folder: Path) -> Result:
    """Wait for a script, which must leave no process and no temporary file."""
    with running:
        result = running.wait(120.0)
        running.wait_until_all_ended()
    assert not list((folder / "temporary").iterdir()), result.all
    return result


def train_by_hand(width: int, steps: int) -> list[float]:
    """Return the losses of a plain loop over the batches and from the initial weights of one process."""
    script: dict = {"__name__": "by_hand"}
    exec(SCRIPT, script)
    found: dict[str, torch.Tensor] = {}

    def observe(model: nn.Module, what: str, step: int) -> None:
        if not found:
            found.update({name: value.detach().clone() for name, value in model.state_dict().items()})

    task = script["Net"](width=width)
    list(train(script["spec"](steps, threads=1), task=task, world=World(), device="cpu", observe=observe))
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()
    model.load_state_dict(found)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    points, losses = script["Points"](0.0), []
    for step in range(steps):
        indices = script["READ"][8 * step : 8 * (step + 1)]
        loss = (model(points.x[indices]) - points.y[indices]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_script_trains_on_ranks_without_a_folder(tmp_path: Path) -> None:
    body = """
    events = list(paceline.train(spec(), "zero3", task=Net(width=12), ranks=2, device="cpu"))
    losses = [event.loss for event in events if isinstance(event, Step)]
    kinds = [type(event).__name__ for event in (events[0], events[-1])]
    saved = [event for event in events if isinstance(event, Saved)]
    print(json.dumps([losses, events[0].ranks, events[0].plan, kinds, events[-1].reason, len(saved)]))
    """
    result = finish(run_script(tmp_path, body), tmp_path)
    assert result.status == 0, result.all
    assert result.err == ""
    losses, *rest = json.loads(result.out)  # once: the ranks do not run the script
    assert rest == [2, "zero3", ["Started", "Ended"], "done", 0]
    expected = train_by_hand(12, 8)
    assert losses == pytest.approx(expected, rel=1e-10)
    assert losses != pytest.approx(train_by_hand(11, 8), rel=1e-10)  # negative control
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "temporary"}


def test_stop_resume_and_the_run_folder(tmp_path: Path) -> None:
    """The run is a run folder like that of the command line, and a named task is found in the script."""
    body = """
    named = spec(8, task="script.py:Net", set={"width": 12, "delay_s": 0.01})
    seen = []
    for event in paceline.train(named, ranks=2, run="run", stop=lambda: len(seen) >= 2, device="cpu"):
        seen += [event.step] if isinstance(event, Step) else []
    print(json.dumps([event.reason, event.step]))
    events = list(paceline.train(named, "zero2", ranks=2, run=Path("run"), device="cpu"))
    print(json.dumps([events[0].step, events[-1].reason, events[-1].step]))
    """
    result = finish(run_script(tmp_path, body), tmp_path)
    assert result.status == 0, result.all
    (reason, stopped), (resumed, done, last) = map(json.loads, result.out.splitlines())
    assert (reason, done, last) == ("stopped", "done", 8)
    assert 2 <= stopped == resumed < 8
    run = tmp_path / "run"
    steps = {event.step: event.loss for event in read_events(run) if isinstance(event, Step)}
    assert [steps[step] for step in range(1, 9)] == pytest.approx(train_by_hand(12, 8), rel=1e-10)
    assert checkpoint_weights(run).keys() == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {"spec.toml", "events.jsonl", "log.txt", "ckpt", "ranks", "provenance.json"} <= {
        path.name for path in run.iterdir()
    }
    assert f"from step {stopped} to step 8" in succeed("show", run, at=tmp_path).out
    # the script has no guard, which ranks of the command line must report
    refused = paceline("resume", run, "--steps", 9, at=tmp_path)
    assert refused.status == 2
    assert "script.py calls paceline.train when it is imported" in refused.err
    assert len(refused.err.strip().splitlines()) == 1


def test_a_notebook_has_no_file(tmp_path: Path) -> None:
    """Its run can be evaluated where the task is defined, and nowhere else."""
    body = """
    del __file__
    short = spec(2, save=paceline.spec.Save(best="min loss"))
    for event in paceline.train(short, task=Net(width=5), ranks=2, run="run", device="cpu"):
        name = event.task if isinstance(event, Started) else name
    losses = [paceline.evaluate("run", split="train", ranks=ranks).metrics["loss"] for ranks in (1, 2)]
    print(json.dumps([name, *losses]))
    """
    name, alone, on_two = json.loads(finish(run_script(tmp_path, body), tmp_path).out)
    assert name == "__main__:Net"
    assert alone == pytest.approx(on_two, rel=1e-10)
    refused = paceline("evaluate", "run", "--split", "train", at=tmp_path)
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "the task Net was defined in a notebook" in refused.err


def test_errors_of_a_rank_have_their_class(tmp_path: Path) -> None:
    body = """
    try:
        list(paceline.train(spec(set={"fails_at": 20}), task=Net, ranks=2, device="cpu", run="run"))
    except paceline.Error as error:
        print(json.dumps([type(error).__name__, str(error)]))
    """
    result = finish(run_script(tmp_path, body), tmp_path)
    kind, message = json.loads(result.out)
    assert kind == "TaskError", message
    assert "ValueError: no such number (script.py, line" in message
    assert "\n" not in message
    assert result.err == ""
    failed = next(event for event in read_events(tmp_path / "run") if isinstance(event, Failed))
    assert failed.error == "TaskError"


@pytest.mark.slow
def test_a_rank_reports_its_error_before_it_disconnects(tmp_path: Path) -> None:
    """The others fail when it disconnects, and the launcher then kills a rank that does not end."""
    body = """
    import torch.distributed as dist

    class Stops(Net):
        def loss(self, output, batch):
            if self.fails_at in batch[2].tolist():
                dist.destroy_process_group = destroy_and_stop
            return super().loss(output, batch)

    destroy = dist.destroy_process_group

    def destroy_and_stop():
        destroy()
        os.kill(os.getpid(), signal.SIGSTOP)

    try:
        list(paceline.train(spec(set={"fails_at": 20}), task=Stops, ranks=2, device="cpu", run="run"))
    except paceline.Error as error:
        print(json.dumps([type(error).__name__, str(error)]))
    """
    kind, message = json.loads(finish(run_script(tmp_path, body), tmp_path).out)
    assert kind == "TaskError", message
    assert "ValueError: no such number (script.py, line" in message
    failed = next(event for event in read_events(tmp_path / "run") if isinstance(event, Failed))
    assert failed.error == "TaskError"


def test_a_killed_rank_restarts_and_then_fails(tmp_path: Path) -> None:
    body = """
    from paceline.doctor.rank_state import read_heartbeats
    killed, seen = [], []
    try:
        task = Net(delay_s=0.01)
        for event in paceline.train(spec(40), task=task, ranks=2, run="run", device="cpu", restarts=1):
            seen.append(type(event).__name__)
            if isinstance(event, Step) and event.step in (3, 4) and len(killed) < seen.count("Started"):
                beat = read_heartbeats(paceline.RunFolder(Path("run")))[1]
                killed.append(beat.pid)
                os.kill(beat.pid, signal.SIGKILL)
    except paceline.RankError as error:
        print(json.dumps([seen.count("Started"), seen.count("Failed"), len({*killed}), str(error)]))
    """
    result = finish(run_script(tmp_path, body), tmp_path)
    starts, restarts, killed, message = json.loads(result.out)
    assert (starts, restarts, killed) == (2, 1, 2), result.all
    assert message.startswith("rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("how", ["break", pytest.param("raise", marks=pytest.mark.slow), "interrupt"])
def test_no_rank_outlives_the_loop(how: str, tmp_path: Path) -> None:
    """Ranks without a folder end at once; with a folder they save first."""
    ends = {
        "break": "break",
        "raise": "raise KeyError(1)",
        "interrupt": "os.kill(os.getpid(), signal.SIGINT)",
    }
    body = f"""
    import psutil
    run = "run" if {how!r} == "interrupt" else None
    began = time.monotonic()
    try:
        for event in paceline.train(spec(10**6), task=Net(delay_s=0.01), ranks=2, run=run, device="cpu"):
            if isinstance(event, Step) and event.step == 3:
                {ends[how]}
    except (KeyError, KeyboardInterrupt) as error:
        print(type(error).__name__, end=" ")
    print(len(psutil.Process().children(recursive=True)))
    """
    result = finish(run_script(tmp_path, body), tmp_path)
    expected = {"break": "0", "raise": "KeyError 0", "interrupt": "KeyboardInterrupt 0"}
    assert result.out.strip() == expected[how], result.all
    if how == "interrupt":
        *_, saved, ended = (event for event in read_events(tmp_path / "run") if not isinstance(event, Step))
        assert isinstance(saved, Saved)
        assert isinstance(ended, Ended)
        assert ended.reason == "stopped"


def test_ranks_end_with_a_killed_caller(tmp_path: Path) -> None:
    body = """
    for event in paceline.train(spec(10**6), task=Net(delay_s=0.01), ranks=2, device="cpu"):
        if isinstance(event, Step) and event.step == 3:
            print("training", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    result = finish(run_script(tmp_path, body), tmp_path)
    assert result.out == "training\n"
    assert result.status == -signal.SIGKILL


@pytest.mark.parametrize("name", ["one", "ranks"])
def test_programs_of_the_page(name: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(read_blocks("docs/python.md")[name])
    result = succeed("python", "script.py", at=tmp_path)
    assert result.err == ""
    lines = [line.split() for line in result.out.splitlines()]
    if name == "one":
        assert float(lines[-1][1]) > 0.2
        return
    assert [int(step) for step, _ in lines] == [*range(1, 31)]
    assert float(lines[-1][1]) < float(lines[0][1])
    assert "zero3" in succeed("show", "runs/line", at=tmp_path).out


class Unsendable(package.Task):
    lock: object = None

    def model(self):
        return nn.Linear(2, 1)

    def dataset(self, split):
        return [(torch.zeros(2), torch.zeros(1))] * 8 if split == "train" else None

    def loss(self, output, batch):
        return (output - batch[1]).square()


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"ranks": 0}, SpecError, "ranks"),
        ({"ranks": 10**6}, LaunchError, "at most"),
        ({"ranks": 2, "plan": "zerro3"}, PlanError, "zerro3"),
        ({"ranks": 2, "plan": 3}, PlanError, "got int"),
        ({"ranks": 3}, PlanError, "batch"),
        ({"ranks": 2, "device": "tpu"}, SpecError, "device"),
        ({"ranks": 2, "observe": print}, LaunchError, "observe"),
        (
            {"ranks": 2, "world": World(rank=0, size=4, launcher="torchrun")},
            LaunchError,
            "torchrun has 4 ranks",
        ),
        ({"restarts": 1}, LaunchError, "restarts=1"),
        ({"ranks": 2, "task": 3}, TaskError, "got 3"),
        ({"task": 3}, TaskError, "got 3"),
        ({"ranks": 2, "run": 3}, RunError, "got int"),
        ({"ranks": 2, "task": Unsendable(lock=threading.Lock())}, TaskError, "TypeError: cannot pickle"),
        ({"ranks": 2, "task": Unsendable(lock=torch.zeros(1)), "run": "run"}, TaskError, "spec.toml"),
        ({"ranks": 2, "run": "."}, RunError, "exists"),
        ({"ranks": 2, "monitor": 0}, SpecError, 'got 0; write monitor=1.0 or monitor="off"'),
        ({"monitor": True, "run": "run"}, SpecError, "monitor must be off, or seconds"),
    ],
)
def test_refused_before_anything_starts(arguments, kind, words, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=words) as raised:
        next(train(Spec(task="digits", batch=8, steps=1), **arguments))
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


SAMPLED = """
    for words in ({}, {"ranks": 2}):
        for every in (0.2, "off"):
            run = Path(f"{len(words)}-{every}")
            task = Net(delay_s=0.02)
            events = [*paceline.train(spec(12), task=task, run=run, monitor=every, **words)]
            assert isinstance(events[-1], Ended), events[-1]
"""


@pytest.mark.slow
def test_the_node_is_sampled_in_its_run_folder(tmp_path: Path) -> None:
    """In this process, and on ranks; by default as well, as on the command line."""
    assert finish(run_script(tmp_path, SAMPLED), tmp_path).status == 0
    for ranks in (0, 1):
        [file] = (tmp_path / f"{ranks}-0.2" / "monitor").glob("*.csv")
        header = next(line for line in file.read_text().splitlines() if line.startswith("time [s]"))
        assert ",rank0 file memory [MiB]," in header
        assert ("rank1 cpu" in header) == (ranks == 1)
        assert not (tmp_path / f"{ranks}-off" / "monitor").exists()


def test_a_task_of_another_user_is_not_read(tmp_path: Path, monkeypatch) -> None:
    sent_task.send_task(Unsendable(), "x:Y", tmp_path / "task")
    assert (tmp_path / "task").stat().st_mode & 0o777 == 0o600
    sent_task.receive_task(tmp_path / "task")
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    (tmp_path / "task").chmod(0o644)
    if (tmp_path / "task").stat().st_uid == 0:
        os.chown(tmp_path / "task", 54321, -1)
    with pytest.raises(RunError, match="belongs to user"):
        sent_task.receive_task(tmp_path / "task")
