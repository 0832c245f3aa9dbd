"""A training that is stopped in any way resumes and computes the same as an undisturbed one."""

import os
import platform
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

import command
from command import (
    Running,
    checkpoint_weights,
    events_of_kind,
    last_step,
    paceline,
    set_sample_delay,
    start,
    succeed,
    unequal_tensors,
    write_task,
)
from harness import ranks, relative_difference
from paceline import Spec, World, train
from paceline import spec as specs
from paceline.errors import CheckpointError, RunError
from paceline.events import Ended, Evaluated, Failed, Saved, Started, Step
from paceline.run import RunFolder
from paceline.spec import Launch, Save
from paceline.training import prepared
from paceline.training.checkpoint.index import Index, read_index
from paceline.training.checkpoint.integrity import verify_files
from paceline.training.checkpoint.retention import read_best_score
from paceline.training.checkpoint.save import _writer
from paceline.training.step import step_metrics
from runs import NEVER, STEPS, make_spec, train_run, train_run_on_this_rank

pytestmark = pytest.mark.processes

PLANS = ["single", "ddp", "zero1", "zero2", "zero3", "hsdp"]
NUM_RANKS = {plan: 1 if plan == "single" else 2 for plan in PLANS}


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


# Stop at a step and resume: all bits are equal

CASES = [
    (3, "ddp", 10),  # the order of DDP's buckets matters on three ranks or more
]
SLOW_CASES = [
    (size, f"{plan}{microbatches}", stop)
    for plan in PLANS
    for size in ((1,) if plan == "single" else (2, 4))
    for microbatches in ("", ",microbatches=2")
    for stop in (1, 2, 7, 11, STEPS - 2)
    if (size, f"{plan}{microbatches}", stop) not in CASES
]


@pytest.mark.parametrize(
    ("size", "plan", "stop"), [*CASES, *[pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES]]
)
def test_resumed_training_equals_an_undisturbed_one(size, plan, stop, task, tmp_path):
    spec = make_spec(task, validation=17)
    train_run(size, spec, plan, tmp_path / "undisturbed")
    stopped = train_run(size, spec, plan, tmp_path / "stopped", stop)[-1]
    assert stopped.reason == "stopped"
    assert stopped.step - stop in (0, 1), (
        "when the metrics of a step are read, the next step may be in progress"
    )
    started, *_, ended = train_run(size, spec, plan, tmp_path / "stopped")
    assert (started.step, ended.reason, ended.step) == (stopped.step, "done", STEPS)
    assert not unequal_tensors(
        checkpoint_weights(tmp_path / "stopped"), checkpoint_weights(tmp_path / "undisturbed")
    )


@pytest.mark.parametrize(
    ("size", "plan", "at"),
    [(2, "zero3", 5), (1, "single", STEPS), pytest.param(2, "pp=2", 5, marks=pytest.mark.slow)],
)
def test_stop_during_an_evaluation_does_not_change_the_result(size, plan, at, task, tmp_path):
    """The stop is in the first or the last evaluation. The resumed training repeats that evaluation."""
    spec = make_spec(task, validation=100, norm="pp" not in plan).model_copy(update={"evaluate_every": at})
    undisturbed = train_run(size, spec, plan, tmp_path / "undisturbed")
    *events_before, saved, ended = train_run(
        size, spec, plan, tmp_path / "stopped", at + 1
    )  # stop() is called once per step, then in the evaluation
    assert (saved.step, ended.step, ended.reason) == (at, at, "stopped")
    assert not any(isinstance(event, Evaluated) for event in events_before)
    resumed = train_run(size, spec, plan, tmp_path / "stopped")
    assert (resumed[0].step, resumed[-1].reason) == (at, "done")
    metrics = [
        [(event.step, event.metrics) for event in events if isinstance(event, Evaluated)]
        for events in (resumed, undisturbed)
    ]
    assert metrics[0] == metrics[1]
    assert metrics[0]
    assert not unequal_tensors(
        checkpoint_weights(tmp_path / "stopped"), checkpoint_weights(tmp_path / "undisturbed")
    )
    best = [read_best_score(RunFolder(tmp_path / run), spec.save.best) for run in ("stopped", "undisturbed")]
    assert best[0] == best[1] is not None


def test_ranks_stop_at_the_same_step_of_a_reduction(task, tmp_path):
    stopped = train_run(
        2, make_spec(task, steps=10**6), "ddp", tmp_path / "stopped", 100, every_s=step_metrics.REDUCE_EVERY_S
    )[-1]
    assert stopped.reason == "stopped"
    assert 100 <= stopped.step <= 100 + 2 * step_metrics.MAX_STEPS_PER_REDUCTION
    assert checkpoint_steps(tmp_path / "stopped") == [stopped.step]


def train_with_zeroed_state(lost: str, *args) -> list:
    """Train with checkpoints in which the tensors named `lost` are zero."""
    original = prepared.collect_state

    def zeroed(*of) -> dict[str, torch.Tensor]:
        return {
            name: torch.zeros_like(tensor) if name.endswith(lost) else tensor
            for name, tensor in original(*of).items()
        }

    prepared.collect_state = zeroed
    try:
        return train_run_on_this_rank(*args)
    finally:
        prepared.collect_state = original


@pytest.mark.parametrize(
    "lost",
    [
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("0.weight/exp_avg", "0.bias/exp_avg_sq")],
        *("5.bias/step", "running_mean"),
    ],
)
def test_checkpoint_without_state_changes_the_weights(lost, task, tmp_path):
    """A negative control."""
    spec = make_spec(task)
    train_run(2, spec, "ddp", tmp_path / "undisturbed")
    (tmp_path / "stopped").mkdir()
    ranks(2)(train_with_zeroed_state, lost, spec, "ddp", tmp_path / "stopped", 7, 0.0)
    train_run(2, spec, "ddp", tmp_path / "stopped")
    assert unequal_tensors(
        checkpoint_weights(tmp_path / "stopped"), checkpoint_weights(tmp_path / "undisturbed")
    )


def test_run_stopped_at_each_step_equals_an_undisturbed_one(task, tmp_path):
    """The run is stopped six times in a row."""
    spec = make_spec(task, steps=8)
    train_run(2, spec, "zero3", tmp_path / "undisturbed")
    for _ in range(6):
        train_run(2, spec, "zero3", tmp_path / "stopped", 1)  # one step, and the step in progress
    assert checkpoint_steps(tmp_path / "stopped")[-1] == 8
    assert not unequal_tensors(
        checkpoint_weights(tmp_path / "stopped"), checkpoint_weights(tmp_path / "undisturbed")
    )


def checkpoint_steps(run: Path) -> list[int]:
    return RunFolder(run).checkpoints()


# On another number of ranks, under another plan

OTHER_PLANS = [
    *[(1, plan) for plan in ("single", "ddp", "zero1", "zero2", "zero3")],
    *[
        (size, plan)
        for size in (2, 3)
        for plan in ("ddp", "zero1", "zero2", "zero3", f"hsdp,replicate={size}")
    ],
]
FAST_OTHER_PLANS = [(3, "hsdp,replicate=3")]


@pytest.fixture(scope="module")
def saved_by_four(task, tmp_path_factory) -> tuple[Spec, Path, Path]:
    """Return a request, a stopped run under zero3 on 4 ranks, and an undisturbed run."""
    spec, folder = make_spec(task, dropout=0.0, norm=False), tmp_path_factory.mktemp("four")
    train_run(4, spec, "zero3", folder / "undisturbed")
    train_run(4, spec, "zero3", folder / "stopped", 10)
    return spec, folder / "stopped", folder / "undisturbed"


@pytest.mark.parametrize(
    ("size", "plan"),
    [
        *FAST_OTHER_PLANS,
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in OTHER_PLANS
            if case not in FAST_OTHER_PLANS
        ],
    ],
)
def test_checkpoint_of_four_ranks_resumes_under_other_plans(size, plan, saved_by_four, tmp_path):
    spec, stopped, undisturbed = saved_by_four
    shutil.copytree(stopped, tmp_path / "resumed")
    started, *_, ended = train_run(size, spec, plan, tmp_path / "resumed")
    assert (started.step, ended.step) == (11, STEPS)
    found, expected = checkpoint_weights(tmp_path / "resumed"), checkpoint_weights(undisturbed)
    assert max(relative_difference(found[name], expected[name]) for name in expected) < 1e-6


# All ways to stop a command


def request(spec: Spec, at: Path) -> Path:
    specs.save(at / "run.toml", spec, Launch())
    return at / "run.toml"


@dataclass(frozen=True)
class StopMethod:
    """A way to end a training before its last step."""

    words: tuple[str, ...] = ()
    status: int = 75
    saves: bool = True  # a checkpoint of the last completed step
    restarts: bool = False  # without a resume command

    def __call__(self, running: Running) -> None:
        raise NotImplementedError


class Interrupt(StopMethod):
    def __call__(self, running: Running) -> None:
        running.process.send_signal(signal.SIGINT)


class ControlC(StopMethod):
    """Like a terminal, send the signal to all processes in the foreground."""

    def __call__(self, running: Running) -> None:
        os.killpg(running.process.pid, signal.SIGINT)


class Terminate(StopMethod):
    def __call__(self, running: Running) -> None:
        running.process.send_signal(signal.SIGTERM)


class HangUp(StopMethod):
    def __call__(self, running: Running) -> None:
        running.process.send_signal(signal.SIGHUP)


class KillLauncher(StopMethod):
    def __call__(self, running: Running) -> None:
        running.process.kill()


class KillFirst(StopMethod):
    def __call__(self, running: Running) -> None:
        running.ranks()[0].kill()


class KillLast(StopMethod):
    def __call__(self, running: Running) -> None:
        running.ranks()[1].kill()


class TerminateLast(StopMethod):
    def __call__(self, running: Running) -> None:
        running.ranks()[1].terminate()


class PowerCut(StopMethod):
    def __call__(self, running: Running) -> None:
        for process in running.remaining_processes():
            process.kill()


def wait_until_unlocked(run: Path) -> None:
    """Wait until killed processes, which have no environment any more, have closed their files."""
    deadline = time.monotonic() + 60
    while RunFolder(run).is_locked():
        assert time.monotonic() < deadline, f"{run} is still locked"
        time.sleep(0.02)


STOP_METHODS = {
    "SIGINT": Interrupt(),
    "Ctrl-C": ControlC(("--workers", "1")),
    "SIGTERM": Terminate(("--workers", "1")),
    "SIGHUP": HangUp(),
    "rank 1 terminated": TerminateLast(),
    "launcher killed": KillLauncher(status=-signal.SIGKILL),
    "rank 1 killed": KillLast(status=2, saves=False),
    "rank 0 killed": KillFirst(status=2, saves=False),
    "rank 0 killed, restarted": KillFirst(("--restarts", "1"), status=0, restarts=True),
    "rank 1 killed, restarted": KillLast(("--restarts", "1"), status=0, restarts=True),
    "all killed": PowerCut(status=-signal.SIGKILL, saves=False),
}
ON_ONE_RANK = ("SIGINT", "Ctrl-C", "SIGTERM", "SIGHUP", "all killed")  # the launcher is the rank
# Plan, way to stop, and how the run resumes: by a command, by train() in existing ranks, which is faster,
# or by restarts ("-").
FAST_STOPS = [
    ("ddp", "Ctrl-C", "resume"),
]
TRAIN_AFTER_KILL = ("zero1", "launcher killed", "train")
ALL_STOPS = [
    (plan, method, "-" if stop.restarts else "resume")
    for plan in PLANS
    for method, stop in STOP_METHODS.items()
    if plan != "single" or method in ON_ONE_RANK
]


@pytest.mark.parametrize(
    ("plan", "method", "resume_by"),
    [
        *FAST_STOPS,
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [TRAIN_AFTER_KILL, *ALL_STOPS]
            if case not in FAST_STOPS
        ],
    ],
)
def test_run_resumes_after_each_way_to_stop(plan, method, resume_by, task, tmp_path):
    stop, size, run = STOP_METHODS[method], NUM_RANKS[plan], tmp_path / "r"
    spec = make_spec(task, steps=60, save=Save(every=4, minutes=NEVER))
    train_run(size, replace_save(spec), plan, tmp_path / "undisturbed")
    slow = set_sample_delay(tmp_path / "slow", 0.01)
    words = (
        "train",
        request(spec, tmp_path),
        "--run-dir",
        "r",
        "--plan",
        plan,
        "--ranks",
        str(size),
        *stop.words,
    )
    with start(*words, at=tmp_path, SLOW=str(slow)) as running:
        running.wait_until(
            lambda: last_step(run) >= 6 and checkpoint_steps(run), "at step 6, with a checkpoint"
        )
        stop(running)
        if stop.restarts:
            slow.unlink()
        result = running.wait()
        slow.unlink(missing_ok=True)
        assert result.status == stop.status, result.all
        running.wait_until_all_ended()
    assert "Traceback" not in result.out, result.all
    wait_until_unlocked(run)
    if stop.restarts:
        assert [started.step > 0 for started in events_of_kind(run, Started)] == [False, True]
        [failed] = [event for event in events_of_kind(run, Failed) if event.what == "rank"]
        rank = 0 if "0" in method else 1
        assert re.fullmatch(
            rf"rank {rank} was killed by SIGKILL, after step \d+; all ranks are restarted",
            failed.message,
        )
        assert failed.message in result.out
    else:
        assert checkpoint_steps(run)[-1] < 60, "the run ended before it was stopped"
        if stop.saves:
            stopped = events_of_kind(run, Ended)[-1]
            assert (stopped.reason, stopped.step) == ("stopped", checkpoint_steps(run)[-1])
        if stop.status == 75:
            assert "continue with: paceline resume r" in result.out
            assert result.err == ""
        if stop.status == 2:
            rank, kept = (0 if "0" in method else 1), checkpoint_steps(run)[-1]
            hint = f"continue from step {kept} with: paceline resume r\n"
            message = f"paceline: rank {rank} was killed by SIGKILL, after step {last_step(run)}; {hint}"
            assert result.err.startswith(message), result.all
            assert [event.rank for event in events_of_kind(run, Failed) if not event.lost_peer] == [rank]
        if resume_by == "resume":
            assert succeed("resume", "r", at=tmp_path).err == ""
        else:
            assert train_run(size, RunFolder(run).request()[0], plan, run)[-1].reason == "done"
    if resume_by != "train":
        assert events_of_kind(run, Ended)[-1].reason == "done"
    assert not unequal_tensors(checkpoint_weights(run), checkpoint_weights(tmp_path / "undisturbed"))


def test_second_signal_ends_the_run_at_once(task, tmp_path):
    slow = set_sample_delay(tmp_path / "slow", 0.01)
    spec = make_spec(task, steps=120, save=Save(every=2, minutes=NEVER))
    words = ("train", request(spec, tmp_path), "--run-dir", "r", "--ranks", "2")
    with start(*words, at=tmp_path, SLOW=str(slow)) as running:
        running.wait_until(
            lambda: last_step(tmp_path / "r") >= 4 and checkpoint_steps(tmp_path / "r"),
            "at step 4, with a checkpoint",
        )
        set_sample_delay(slow, 600)
        running.process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGINT)
        result = running.wait()
        running.wait_until_all_ended()
    kept = checkpoint_steps(tmp_path / "r")[-1]
    assert result.status == 75
    assert (
        result.err == "paceline: stopped by SIGINT before all ranks had saved; "
        f"continue from step {kept} with: paceline resume r\n"
    )


@pytest.mark.slow
def test_starting_ranks_end_if_their_launcher_is_killed(task, tmp_path):
    """The launcher hosts the store of the rendezvous."""
    with start(
        "train", request(make_spec(task), tmp_path), "--run-dir", "r", "--ranks", "2", at=tmp_path
    ) as running:
        running.wait_until(lambda: 1 in running.ranks(), "with two ranks")
        slow_rank = running.ranks()[1]
        slow_rank.suspend()  # the other rank waits for it
        time.sleep(0.5)
        running.process.kill()
        slow_rank.resume()
        running.wait_until_all_ended()
    wait_until_unlocked(tmp_path / "r")
    assert not events_of_kind(tmp_path / "r", Started)
    succeed("resume", "r", at=tmp_path)
    assert events_of_kind(tmp_path / "r", Ended)[-1].step == STEPS


@pytest.mark.slow
def test_run_under_nohup_survives_a_hang_up(task, tmp_path):
    """The command is nohup paceline train …"""
    slow = set_sample_delay(tmp_path / "slow", 0.01)
    words = ("train", request(make_spec(task, steps=30), tmp_path), "--run-dir", "r", "--ranks", "2")
    with start(*words, at=tmp_path, program=("nohup", *command.PACELINE), SLOW=str(slow)) as running:
        running.wait_for_step(tmp_path / "r", 4)
        running.process.send_signal(signal.SIGHUP)
        slow.unlink()
        assert running.wait().status == 0


# Damaged checkpoints


def flip_a_byte(checkpoint: Path) -> str:
    path = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return f"{path.name} has another checksum than when it was written"


def truncate(checkpoint: Path) -> str:
    path = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    return f"{path.name} has {size - 1} bytes, {size} were written"


def delete_a_file(checkpoint: Path) -> str:
    path = min(checkpoint.glob("*.distcp"))
    path.unlink()
    return f"{path.name}: No such file or directory"


def delete_the_index(checkpoint: Path) -> str:
    (checkpoint / "checkpoint.json").unlink()
    return "its checkpoint.json cannot be read"


def truncate_the_index(checkpoint: Path) -> str:
    os.truncate(checkpoint / "checkpoint.json", 100)
    return "its checkpoint.json cannot be read"


def change_the_index(checkpoint: Path) -> str:
    index = checkpoint / "checkpoint.json"
    index.write_text(replace_text(index.read_text(), '"seed": 5', '"seed": 7'))
    return "its checkpoint.json has another checksum than when it was written"


def empty(checkpoint: Path) -> str:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    return "its checkpoint.json cannot be read"


def replace_save(spec: Spec, **fields) -> Spec:
    return spec.model_copy(update={"save": Save(**{"minutes": NEVER} | fields)})


CHECKPOINT_DAMAGES = [
    *[flip_a_byte, truncate, delete_a_file, truncate_the_index, change_the_index],
    *[pytest.param(damage, marks=pytest.mark.slow) for damage in (delete_the_index, empty)],
]
EVERY_3 = Save(every=3, minutes=NEVER, keep=9)


@pytest.fixture(scope="module")
def with_checkpoints(task, tmp_path_factory) -> tuple[Spec, Path, Path]:
    """Return a request, a run that stopped after checkpoints of steps 3, 6 and 8, and an undisturbed run."""
    spec, folder = make_spec(task, steps=14, save=EVERY_3), tmp_path_factory.mktemp("checkpoints")
    train_run(2, spec, "zero3", folder / "undisturbed")
    train_run(2, spec, "zero3", folder / "stopped", 7)
    specs.save(folder / "stopped/spec.toml", spec, Launch(ranks=2, plan="zero3"))
    assert checkpoint_steps(folder / "stopped") == [3, 6, 8]
    return spec, folder / "stopped", folder / "undisturbed"


@pytest.mark.parametrize("damage", CHECKPOINT_DAMAGES)
def test_damaged_checkpoint_is_named_and_skipped(damage, with_checkpoints, tmp_path):
    spec, stopped, undisturbed = with_checkpoints
    run = tmp_path / "r"
    shutil.copytree(stopped, run)
    reason = damage(run / "ckpt/step_8")
    started, *_, ended = train_run(2, spec, "zero3", run)
    assert (started.step, ended.reason, ended.step) == (6, "done", 14)
    [note] = started.notes
    assert f"{run}/ckpt/step_8 is damaged" in note
    assert reason in note
    assert not unequal_tensors(checkpoint_weights(run), checkpoint_weights(undisturbed))


def test_each_damaged_checkpoint_is_named(with_checkpoints, tmp_path):
    spec, stopped, _ = with_checkpoints
    shutil.copytree(stopped, tmp_path / "r")
    flip_a_byte(tmp_path / "r/ckpt/step_8")
    truncate(tmp_path / "r/ckpt/step_6")
    started, *_ = train_run(1, spec, "single", tmp_path / "r")
    assert started.step == 3
    assert ["step_8" in started.notes[0], "step_6" in started.notes[1], len(started.notes)] == [True, True, 2]


def test_run_without_a_complete_checkpoint_starts_again_with_a_note(with_checkpoints, tmp_path):
    spec, stopped, undisturbed = with_checkpoints
    shutil.copytree(stopped, tmp_path / "r")
    for step in (3, 6, 8):
        flip_a_byte(tmp_path / f"r/ckpt/step_{step}")
    started, *_ = train_run(2, spec, "zero3", tmp_path / "r")
    assert (started.step, len(started.notes)) == (0, 3)
    assert not unequal_tensors(checkpoint_weights(tmp_path / "r"), checkpoint_weights(undisturbed))


def test_unfinished_checkpoint_is_deleted(with_checkpoints, tmp_path):
    spec, stopped, undisturbed = with_checkpoints
    run = tmp_path / "r"
    shutil.copytree(stopped, run)
    shutil.copytree(run / "ckpt/step_8", run / "ckpt/.step_9")
    shutil.copytree(run / "ckpt/step_3", run / "ckpt/.old_3")
    started, *_ = train_run(2, spec, "zero3", run)
    assert (started.step, started.notes) == (8, ())
    assert {path.name for path in (run / "ckpt").iterdir()} == {
        f"step_{step}" for step in (3, 6, 8, 9, 12, 14)
    }
    assert not unequal_tensors(checkpoint_weights(run), checkpoint_weights(undisturbed))


def test_damaged_checkpoint_does_not_replace_a_complete_one(with_checkpoints, tmp_path):
    """It is newer than checkpoints after the resume; pruning must not keep it and delete the complete one."""
    spec, stopped, _ = with_checkpoints
    run = tmp_path / "r"
    shutil.copytree(stopped, run)
    for step in (6, 8):
        flip_a_byte(run / f"ckpt/step_{step}")
    spec = replace_save(spec, keep=1)
    ended = train_run(1, spec, "single", run, 1)[-1]
    assert ended.step < 6
    started, *_ = train_run(1, spec, "single", run)
    assert (started.step, started.notes) == (ended.step, ())


def test_damaged_older_checkpoint_is_ignored(with_checkpoints, tmp_path):
    spec, stopped, undisturbed = with_checkpoints
    run = tmp_path / "r"
    shutil.copytree(stopped, run)
    delete_the_index(run / "ckpt/step_3")
    started, *_ = train_run(2, spec, "zero3", run)
    assert started.step == 8
    assert not unequal_tensors(checkpoint_weights(run), checkpoint_weights(undisturbed))


def test_export_takes_the_last_complete_checkpoint_and_refuses_a_damaged_one(with_checkpoints, tmp_path):
    run = tmp_path / "r"
    shutil.copytree(with_checkpoints[1], run)
    reason = flip_a_byte(run / "ckpt/step_8")
    result = succeed("export", "r", "w.safetensors", at=tmp_path)
    assert "r/ckpt/step_8 is damaged and was skipped" in result.out
    assert "of r/ckpt/step_6" in result.out
    refused = paceline("export", "r", "w8.safetensors", "--step", "8", at=tmp_path)
    assert (refused.status, refused.err) == (2, f"paceline: checkpoint r/ckpt/step_8 is damaged: {reason}\n")
    assert not (tmp_path / "w8.safetensors").exists()
    absent = paceline("export", "r", "w7.safetensors", "--step", "7", at=tmp_path)
    assert (absent.status, absent.err) == (
        2,
        "paceline: r has no checkpoint of step 7; steps with a checkpoint: 3, 6, 8\n",
    )


# Which checkpoints are kept


def test_last_and_best_checkpoints_are_kept(task, tmp_path):
    """The model memorizes random points, so an early checkpoint has the best validation loss."""
    save = Save(every=2, minutes=NEVER, keep=2, best="min loss")
    spec = make_spec(task, steps=20, save=save, validation=17).model_copy(update={"evaluate_every": 4})
    events = train_run(1, spec, "single", tmp_path / "r")
    losses = {event.step: event.metrics["loss"] for event in events if isinstance(event, Evaluated)}
    best = min(losses, key=losses.__getitem__)
    assert best < 18
    assert checkpoint_steps(tmp_path / "r") == [best, 18, 20]
    assert {event.step for event in events if isinstance(event, Saved)} == {*range(2, 21, 2)}


def test_better_model_is_saved_at_once(task, tmp_path):
    """The best model is saved even if no save is due, and the best score survives a stop."""
    spec = make_spec(task, steps=21, save=Save(minutes=NEVER, keep=1), validation=17).model_copy(
        update={"evaluate_every": 3}
    )
    events = train_run(1, spec, "single", tmp_path / "undisturbed")
    losses = {event.step: event.metrics["loss"] for event in events if isinstance(event, Evaluated)}
    best = [
        step for step in losses if losses[step] == min(losses[other] for other in losses if other <= step)
    ]
    assert [event.step for event in events if isinstance(event, Saved)] == sorted({*best, 21})
    assert checkpoint_steps(tmp_path / "undisturbed") == sorted({best[-1], 21})
    train_run(1, spec, "single", tmp_path / "stopped", 16)
    train_run(1, spec, "single", tmp_path / "stopped")
    assert checkpoint_steps(tmp_path / "stopped") == checkpoint_steps(tmp_path / "undisturbed")


def test_nan_metric_is_never_the_best(task, tmp_path):
    source = (
        command.TASK + "\n    def metrics(self, output, batch):\n"
        '        return {"score": (output - batch[1]).mean(-1).log()}\n'
    )
    path = write_task(tmp_path, source, "nan.py")
    spec = make_spec(path, steps=9, save=Save(minutes=NEVER, keep=1, best="max score"), validation=17)
    spec = spec.model_copy(update={"evaluate_every": 3})
    events = train_run(1, spec, "single", tmp_path / "r")
    assert all(np.isnan(event.metrics["score"]) for event in events if isinstance(event, Evaluated))
    assert [event.step for event in events if isinstance(event, Saved)] == [9]


@pytest.mark.parametrize(("minutes", "is_often"), [(1e-6, True), (NEVER, False)])
def test_save_minutes_sets_the_checkpoint_interval(minutes, is_often, task, tmp_path):
    spec = make_spec(task, steps=8, save=Save(minutes=minutes, keep=2))
    events = train_run(2, spec, "ddp", tmp_path / "r")
    saved = [event.step for event in events if isinstance(event, Saved)]
    assert (len(saved) > 3) == is_often
    assert saved[-1] == 8


# A full disk


@pytest.mark.slow
def test_training_continues_after_a_failed_save(task, tmp_path):
    """For a while, files cannot exceed 200 kB: less than a checkpoint, more than the event file."""
    run, slow = tmp_path / "r", set_sample_delay(tmp_path / "slow", 0.004)
    spec = make_spec(task, steps=60, save=Save(every=3, minutes=NEVER), width=256)
    with start(
        "train", request(spec, tmp_path), "--run-dir", "r", "--ranks", "2", at=tmp_path, SLOW=str(slow)
    ) as running:
        running.wait_until(lambda: bool(events_of_kind(run, Saved)), "saved once")
        for rank in running.ranks().values():
            rank.rlimit(psutil.RLIMIT_FSIZE, (200_000, psutil.RLIM_INFINITY))
        running.wait_until(lambda: bool(events_of_kind(run, Failed)), "failed to save")
        kept = checkpoint_steps(run)
        assert all(not is_damaged(run, step) for step in kept)
        for rank in running.ranks().values():
            rank.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
        slow.unlink()
        result = running.wait()
    assert result.status == 0, result.all
    failed = events_of_kind(run, Failed)[0]
    last = max(event.step for event in events_of_kind(run, Saved) if event.step < failed.step)
    assert failed.what == "save"
    assert (
        failed.message == f"checkpoint of step {failed.step} was not written: File too large; "
        f"the last good checkpoint is step {last}"
    )
    assert failed.message in result.out
    assert checkpoint_steps(run)[-1] == 60
    assert not list((run / "ckpt").glob(".*"))
    train_run(2, spec, "ddp", tmp_path / "undisturbed")
    assert not unequal_tensors(checkpoint_weights(run), checkpoint_weights(tmp_path / "undisturbed"))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoint_without_the_state_of_all_ranks_is_refused(tmp_path):
    """torch writes such a checkpoint if the process group is gone when the writing thread starts."""
    index = Index(
        step=4,
        samples=8,
        epoch_samples=8,
        task="my.py:Points",
        set={},
        plan="pp=2",
        ranks=2,
        seed=0,
        shapes={"w": [3]},
        tied={},
    )
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    for count, kept in ((2, False), (1, True)):
        final = tmp_path / "step_4"
        writer = _writer(tmp_path / ".step_4", final, index, 0, count)
        with (
            nullcontext()
            if kept
            else pytest.raises(CheckpointException, match="has the state of 1 of 2 ranks")
        ):
            torch.distributed.checkpoint.save({"model/w": torch.ones(3)}, storage_writer=writer)
        assert final.exists() == kept
    assert os.getpriority(os.PRIO_PROCESS, 0) == priority, "only a thread beside the training is lowered"


def is_damaged(run: Path, step: int) -> bool:
    return (
        verify_files(RunFolder(run).checkpoint(step), read_index(RunFolder(run).checkpoint(step))) is not None
    )


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """Mount a file system of 6 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", disk], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_full_disk_fails_a_run_only_if_its_last_checkpoint_is_not_written(task, small_disk, tmp_path):
    """The disk has the whole run with events, logs and TensorBoard files. Two checkpoints of 2.4 MB fit."""
    run = small_disk / "r"
    spec = make_spec(task, steps=12, save=Save(every=3, minutes=NEVER), width=256)
    result = paceline("train", request(spec, tmp_path), "--run-dir", run, "--ranks", "2", at=tmp_path)
    assert result.status == 2, result.all
    message = (
        "the training came to step 12 of 12, but its last checkpoint was not written: "
        "No space left on device; "
        f"the last good checkpoint is step 6; make room in {run}/ckpt, then: paceline resume {run}"
    )
    assert result.err == f"paceline: {message}\n"
    assert succeed("status", run, at=tmp_path).out.startswith(f"{run}: failed after step 12 of 12: {message}")
    assert (
        "checkpoint of step 9 was not written: No space left on device; the last good checkpoint is step 6"
        in result.out
    )
    assert checkpoint_steps(run) == [3, 6]
    assert not list((run / "ckpt").glob(".*"))
    assert [(event.what, event.step) for event in events_of_kind(run, Failed) if event.what == "save"] == [
        ("save", 9),
        ("save", 12),
    ]
    assert events_of_kind(run, Ended) == []
    shutil.copytree(run, tmp_path / "more room")
    train_run(2, spec, "ddp", tmp_path / "undisturbed")
    train_run(2, spec, "ddp", tmp_path / "more room")
    assert not unequal_tensors(
        checkpoint_weights(tmp_path / "more room"), checkpoint_weights(tmp_path / "undisturbed")
    )


def test_run_without_room_for_a_checkpoint_fails_and_resumes(task, tmp_path):
    """With `ulimit -f 16`, 8 KiB, neither a checkpoint nor all events fit. One rank, without a launcher."""
    spec = make_spec(task, steps=40, save=Save(every=10, minutes=NEVER))
    limited_program = ("sh", "-c", 'ulimit -f 16; exec "$@"', "sh", *command.PACELINE)
    result = paceline(
        "train", request(spec, tmp_path), "--run-dir", "r", at=tmp_path, program=limited_program
    )
    assert result.status == 2, result.all
    message = (
        "the training came to step 40 of 40, but its last checkpoint was not written: File too large; "
        "there is no checkpoint; make room in "
    )
    assert result.err.startswith(f"paceline: {message}")
    assert "Traceback" not in result.err
    assert "done" not in succeed("status", "r", at=tmp_path).out
    assert "checkpoint  step 40" in succeed("resume", "r", at=tmp_path).out
    train_run(1, spec, "single", tmp_path / "undisturbed")
    assert not unequal_tensors(
        checkpoint_weights(tmp_path / "r"), checkpoint_weights(tmp_path / "undisturbed")
    )


# Runs that cannot be resumed


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """Return a folder with my.py and r, a run on one rank that was stopped at step 2."""
    at = tmp_path_factory.mktemp("refused")
    path = write_task(at, command.TASK + "\n\nclass Other(Regression):\n    pass\n")
    spec = make_spec(path, steps=6, norm=False)
    train_run(1, spec, "single", at / "r", 1)
    specs.save(at / "r/spec.toml", spec, Launch(ranks=1, plan="single"))
    return at


def replace_text(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "r/spec.toml",
            "my.py:Regression",
            "my.py:Other",
            "is of the task {stopped}/my.py:Regression, not of {at}/my.py:Other; ",
        ),
        (
            "my.py",
            "width: int = 10",
            "width: int = 12",
            "is of another model: 0.weight has shape (10, 6) in the checkpoint and has ",
        ),
        (
            "r/spec.toml",
            "norm = false",
            "norm = false\nwidth = 12",
            "is of another model (--set width=None then, 12 now): 0.weight ",
        ),
        ("r/spec.toml", "batch = 24", "batch = 12", "was made with batch 24, got 12; "),
        ("r/spec.toml", "seed = 5", "seed = 6", "was made with seed 5, got 6; "),
        ("my.py", "samples: int = 53", "samples: int = 54", "was made with training samples 53, got 54; "),
    ],
    ids=["task", "task file", "--set", "batch", "seed", "data"],
)
def test_changed_training_is_refused(file, old, new, message, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    run = RunFolder(tmp_path / "r")
    run.spec.write_text(replace_text(run.spec.read_text(), str(stopped), str(tmp_path)))
    (tmp_path / file).write_text(replace_text((tmp_path / file).read_text(), old, new))
    with pytest.raises(CheckpointError) as caught:
        next(train(specs.load_own(run.spec, {}, edited=True)[0], world=World(), run=run))
    assert str(caught.value).startswith(
        f"{run.path}/ckpt/step_2 {message}".format(at=tmp_path, stopped=stopped)
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("my.py", "width: int = 10", "width: int = 12", "r/ckpt/step_2 is of another model: "),
        ("r/spec.toml", "batch = 24", "bach = 24", "unknown key bach; did you mean batch?"),
    ],
    ids=["model", "key"],
)
def test_refusal_is_one_sentence(file, old, new, message, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    run = RunFolder(tmp_path / "r")
    run.spec.write_text(replace_text(run.spec.read_text(), str(stopped), str(tmp_path)))
    (tmp_path / file).write_text(replace_text((tmp_path / file).read_text(), old, new))
    result = paceline("resume", "r", "--edited", at=tmp_path)
    assert result.status == 2, result.all
    assert result.err.startswith(f"paceline: {message}"), result.all
    assert result.err.count("\n") == 1
    assert checkpoint_steps(run.path) == [2]


def without_line(text: bytes, start: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(keepends=True) if not line.startswith(start))


REQUEST_DAMAGES = {
    "empty": lambda text: b"",
    "cut": lambda text: text[: len(text) // 2],
    "zeros": lambda text: bytes(len(text)),
    "a table lost": lambda text: text[: text.index(b"[optimizer]")],
    "a line lost": lambda text: without_line(text, b"steps"),
    "a digit": lambda text: text.replace(b"lr = 0.01", b"lr = 0.03"),
    "the last line lost": lambda text: without_line(text, b"# checksum"),
    "the last byte lost": lambda text: text[:-1],
    "a line added": lambda text: text + b"threads = 1\n",
}


def test_damaged_request_is_refused_and_kept(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    run = RunFolder(tmp_path / "r")
    whole = run.spec.read_bytes()
    assert b"lr = 0.01" in whole
    for name, damage in REQUEST_DAMAGES.items():
        run.spec.write_bytes(damage(whole))
        assert run.spec.read_bytes() != whole, name
        found = paceline("resume", "r", at=tmp_path)
        assert (found.status, found.err.count("\n")) == (2, 1), (name, found.all)
        assert found.err.startswith("paceline: r/spec.toml is not "), (name, found.all)
        assert run.spec.read_bytes() == damage(whole), name
        assert not run.next_spec.exists()
    for name in ("empty", "cut", "a table lost"):
        run.spec.write_bytes(REQUEST_DAMAGES[name](whole))
        found = paceline("resume", "r", "--edited", at=tmp_path)
        assert found.status == 2, (name, found.all)
        assert run.spec.read_bytes() == REQUEST_DAMAGES[name](whole), name
    assert "r/spec.toml lacks optimizer.name and " in found.err, found.all
    run.spec.write_bytes(whole)
    succeed("resume", "r", "--steps", "3", at=tmp_path)  # positive control: the intact request


def test_edited_request_is_accepted_with_the_option(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    run = RunFolder(tmp_path / "r")
    run.spec.write_text(replace_text(run.spec.read_text(), "lr = 0.01", "lr = 0.03"))
    succeed("resume", "r", "--edited", "--steps", "3", at=tmp_path)
    assert run.request()[0].optimizer.lr == 0.03
    assert events_of_kind(run.path, Step)[-1].lr == 0.03
    assert not run.next_spec.exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_request_is_replaced_only_when_the_new_one_starts(ranks, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    run = RunFolder(tmp_path / "r")
    (tmp_path / "my.py").write_text(
        replace_text((tmp_path / "my.py").read_text(), "samples: int = 53", "samples: int = 54")
    )
    run.spec.write_text(replace_text(run.spec.read_text(), str(stopped), str(tmp_path)))
    before = run.spec.read_bytes()
    found = paceline("resume", "r", "--edited", "--lr", "0.5", "--ranks", str(ranks), at=tmp_path)
    assert found.status != 0
    assert "made with training samples 53, got 54" in found.err, found.all
    assert (run.spec.read_bytes(), run.next_spec.exists()) == (before, False)
    assert checkpoint_steps(run.path) == [2], "a failed command does not delete a run that it did not create"


def test_finished_run_resumes_only_with_more_steps(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    assert "ended" not in (result := succeed("resume", "r", "--steps", "4", at=tmp_path)).err, result.all
    done = paceline("resume", "r", at=tmp_path)
    assert (done.status, done.err) == (
        2,
        "paceline: r is done: it was trained to step 4; train longer with --epochs or --steps\n",
    )
    flip_a_byte(tmp_path / "r/ckpt/step_4")
    assert "damaged" in succeed("resume", "r", at=tmp_path).out, "a damaged checkpoint does not count as done"
    assert succeed("resume", "r", "--epochs", "3", at=tmp_path).out.count("step 7  done") == 1
    assert [event.step for event in events_of_kind(tmp_path / "r", Ended)] == [4, 4, 7]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "no such run: nowhere; available: r"),
        ("rr", "no such run: rr; did you mean r?"),
        (".", ". is not a run folder: it has no spec.toml"),
        ("my.py", "no such run: my.py; available: r"),
    ],
)
def test_invalid_run_folder_is_refused(path, message, stopped):
    for command_name, *words in (("resume",), ("show",), ("export", "w.safetensors")):
        result = paceline(command_name, path, *words, at=stopped)
        assert (result.status, result.err) == (2, f"paceline: {message}\n"), result.all


def test_active_run_is_not_resumed(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    with RunFolder(tmp_path / "r").lock(), pytest.raises(RunError) as caught:
        RunFolder(tmp_path / "r").lock(wait_s=0)
    message = (
        f"{tmp_path}/r is being trained by process {os.getpid()} on {platform.node()}; wait for it or end it"
    )
    assert str(caught.value) == message
    RunFolder(tmp_path / "r").lock(wait_s=0).close()


@pytest.mark.slow
def test_active_run_is_not_resumed_by_command(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    with RunFolder(tmp_path / "r").lock():
        result = paceline("resume", "r", at=tmp_path)
    assert (result.status, result.err.count("\n")) == (2, 1)
    assert result.err.startswith(f"paceline: r is being trained by process {os.getpid()} ")
