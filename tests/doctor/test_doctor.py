"""What the doctor reports of stopped, stuck, killed and healthy ranks, and what happens to the run."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from command import (
    TASK,
    TORCHRUN,
    Running,
    checkpoint_weights,
    events_of_kind,
    paceline,
    read_events,
    set_sample_delay,
    start,
    unequal_tensors,
    write_task,
)
from paceline.doctor import heartbeat, rank_state
from paceline.doctor.diagnose import Diagnosis, diagnose, stall_threshold_s
from paceline.doctor.heartbeat import Collective, Frame, Heartbeat
from paceline.doctor.heartbeat_writer import SIGNAL, HeartbeatWriter
from paceline.doctor.rank_state import RankState, ReaderProcess
from paceline.events import Event, Failed, Stalled, Started, Step
from paceline.run import RunFolder
from runs import train_run

pytestmark = pytest.mark.processes

# Rank 1 stays in its data as long as the file STUCK exists.
STUCK = TASK.replace(
    "        return self.x[index]",
    """        while os.environ.get("RANK") == "1" and os.path.exists(os.environ.get("STUCK", "")):
            time.sleep(0.1)
        return self.x[index]""",
)


def start_training(
    folder: Path, *options: str, steps: int = 60, program: Sequence[str] | None = None
) -> Running:
    """Start two ranks whose steps take about 0.1 s."""
    set_sample_delay(folder / "slow", 0.01)
    words = (
        "train",
        write_task(folder, STUCK),
        "--ranks",
        "2",
        "--batch",
        "16",
        "--steps",
        str(steps),
        "--run-dir",
        "run",
        *options,
    )
    return start(*words, at=folder, program=program, SLOW=str(folder / "slow"), STUCK=str(folder / "stuck"))


def doctor(folder: Path) -> tuple[int, str, dict]:
    result = paceline("doctor", "run", "--json", "found.json", at=folder, timeout_s=60.0)
    assert result.err == "", result.all
    return result.status, result.out, json.loads((folder / "found.json").read_text())


# Real ranks


@pytest.mark.slow
def test_a_healthy_run_is_reported_healthy_and_is_not_changed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(tmp_path, steps=120) as running:
        running.wait_for_step(run, 6)
        for _ in range(3):
            status, out, diagnosis = doctor(tmp_path)
            assert (status, diagnosis["verdict"], diagnosis["at_fault"]) == (0, "healthy", []), out
            assert out.startswith("run: healthy: step "), out
            assert [seen["state"] for seen in diagnosis["seen"]] == ["runs", "runs"]
            assert all(seen["stack"] and seen["collectives"] for seen in diagnosis["seen"])
        set_sample_delay(tmp_path / "slow", 0)
        assert running.wait().status == 0
    assert train_run(2, RunFolder(run).request()[0], "ddp", tmp_path / "undisturbed")[-1].reason == "done"
    assert not unequal_tensors(checkpoint_weights(run), checkpoint_weights(tmp_path / "undisturbed"))
    assert not events_of_kind(run, Stalled)
    assert not RunFolder(run).diagnosis.exists()
    out = paceline("doctor", "run", at=tmp_path).out
    assert out.startswith("run is not running: it was done at step 120\n")


def test_ranks_that_are_stuck_and_stopped_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(tmp_path, "--timeout", "60", steps=1000) as running:
        running.wait_for_step(run, 4)
        (tmp_path / "stuck").touch()
        running.wait_until(lambda: doctor(tmp_path)[2]["verdict"] == "stuck", "stuck")
        status, out, diagnosis = doctor(tmp_path)
        assert (status, diagnosis["at_fault"]) == (1, [1]), out
        assert "rank 1 is in Points.__getitem__ (my.py:" in out
        assert " collective behind; rank 0 waits in all_reduce of " in out
        (tmp_path / "stuck").unlink()
        running.wait_until(lambda: doctor(tmp_path)[2]["verdict"] == "healthy", "healthy")
        stopped = running.ranks()[1]
        stopped.suspend()
        status, out, diagnosis = doctor(tmp_path)
        assert (status, diagnosis["at_fault"]) == (1, [1]), out
        assert f"run: rank 1 is stopped by a signal (process {stopped.pid} on " in out
        assert out.splitlines()[0].endswith(f"; resume it with: kill -CONT {stopped.pid}")


@pytest.mark.slow
def test_a_stuck_rank_restarts_all_ranks_and_a_second_stall_ends_the_run(tmp_path: Path) -> None:
    """Each stall is reported once with its cause."""
    run = tmp_path / "run"
    options = ("--timeout", "10", "--save-every", "4", "--restarts", "1")
    with start_training(tmp_path, *options, steps=1000) as running:
        running.wait_until(lambda: (run / "ckpt" / "step_4").exists(), "saved")
        (tmp_path / "stuck").touch()
        running.wait_until(lambda: bool(events_of_kind(run, Failed)), "given up")
        (tmp_path / "stuck").unlink()
        running.wait_until(
            lambda: (
                len(events_of_kind(run, Started)) == 2
                and len(events_of_kind(run, Step)) > len(steps_before_second_start(run))
            ),
            "restarted",
        )
        stopped = running.ranks()[1]
        stopped.suspend()
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status == 2, result.all
    assert "Traceback" not in result.all
    assert result.err.count("rank 1 is stopped by a signal") == 1
    assert f"continue from step {RunFolder(run).checkpoints()[-1]} with: paceline resume run" in result.err
    restarted, ended = [event for event in events_of_kind(run, Failed) if not event.lost_peer]
    assert [(restarted.what, restarted.rank), (ended.what, ended.rank)] == [("rank", 1), ("run", 1)]
    first, second = events_of_kind(run, Stalled)
    assert restarted.message.startswith("rank 1 is in Points.__getitem__ (my.py:")
    assert restarted.message.endswith(f"see {RunFolder(Path('run')).diagnosis}; all ranks are restarted")
    assert first.message.startswith("rank 1 is in Points.__getitem__ (my.py:")
    assert second.message.startswith(f"rank 1 is stopped by a signal (process {stopped.pid} on ")
    assert first.message in result.out
    assert second.message in result.out
    assert second.message in RunFolder(run).diagnosis.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("program", [None, TORCHRUN], ids=["alone", "torchrun"])
def test_missing_message_between_stages_ends_the_run(program: tuple[str, ...], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(
        tmp_path, "--plan", "pp=2,microbatches=2", "--timeout", "6", steps=1000, program=program
    ) as running:
        running.wait_for_step(run, 4)
        (tmp_path / "stuck").touch()
        result = running.wait(60)
        running.wait_until_all_ended()
    assert result.status == (2 if program is None else 1), result.all
    [message] = [line for line in result.err.splitlines() if line.startswith("paceline: ")]
    assert message.startswith("paceline: rank 1 is in Points.__getitem__ (my.py:"), result.all
    assert "the training was ended after step" in message
    if program is None:
        assert "Traceback" not in result.all


def steps_before_second_start(run: Path) -> list[Event]:
    begins = [at for at, event in enumerate(read_events(run)) if isinstance(event, Started)]
    return [event for event in read_events(run)[: begins[1]] if isinstance(event, Step)]


@pytest.mark.slow
def test_stuck_and_stopped_readers_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(tmp_path, "--timeout", "60", "--workers", "1", steps=1000) as running:
        running.wait_for_step(run, 4)
        (tmp_path / "stuck").touch()
        running.wait_until(lambda: doctor(tmp_path)[2]["verdict"] == "stuck", "stuck")
        status, out, diagnosis = doctor(tmp_path)
        assert (status, diagnosis["at_fault"]) == (1, [1]), out
        assert "run: rank 1 is in DataLoader.__next__ for " in out
        assert ", which is in __getitem__ (my.py:" in out
        [reader] = diagnosis["seen"][1]["readers"]
        psutil.Process(reader["pid"]).suspend()
        assert f"for its reader (process {reader['pid']}), which is stopped" in doctor(tmp_path)[1]
        psutil.Process(reader["pid"]).resume()
        (tmp_path / "stuck").unlink()
        running.wait_until(lambda: doctor(tmp_path)[2]["verdict"] == "healthy", "healthy")


@pytest.mark.slow
def test_torchrun_names_the_cause_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with start_training(tmp_path, "--timeout", "6", steps=1000, program=TORCHRUN) as running:
        running.wait_for_step(run, 4)
        [stopped] = [
            process for process in running.remaining_processes() if process.environ().get("RANK") == "1"
        ]
        stopped.suspend()
        status, out, diagnosis = doctor(tmp_path)
        assert (status, diagnosis["at_fault"]) == (1, [1]), out
        assert "; rank 0 waits in all_reduce of " in out
        running.wait_until(lambda: bool(events_of_kind(run, Failed)), "given up")
        stopped.kill()
        result = running.wait()
        running.wait_until_all_ended()
    assert result.status != 0
    [stall] = events_of_kind(run, Stalled)
    assert (
        f"paceline: rank 0 lost the connection to another rank: {stall.message}; no checkpoint was "
        "written yet\n" in result.err
    )
    assert result.err.count(stall.message) == 1


# Processes without torch


HOLDS_PYTHON = """
import re, sys, time
from pathlib import Path
from paceline.doctor.heartbeat_writer import HeartbeatWriter
from paceline.run import RunFolder
with HeartbeatWriter(RunFolder(Path(sys.argv[1])), 0, 1, 60.0, 60.0) as writer:
    writer.begin(3, 9)
    writer.done(4)
    print("ready", flush=True)
    sys.stdin.readline()
    re.match("(a+)+$", "a" * 60 + "b")
"""


def test_the_stack_of_a_rank_that_cannot_answer_is_read_by_a_signal(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS_PYTHON, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdout.readline()
            deadline = time.monotonic() + 60
            while not run.alive(0).exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            [seen] = rank_state.inspect_ranks(run)
            assert (seen.state, seen.answered, seen.beat.step) == ("runs", True, 4)
            print("go", file=child.stdin, flush=True)
            while seen.answered or not seen.stack or seen.stack[-1].function != "match":
                assert time.monotonic() < deadline
                [seen] = rank_state.inspect_ranks(run)
            assert seen.state == "runs"
            assert seen.stack[0].function == "<module>"
        finally:
            child.kill()
    assert rank_state.find_state(seen.beat) == "gone"


def test_a_process_that_does_not_expect_the_signal_gets_none(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.ranks.mkdir()
    run.stacks(0).touch()
    with subprocess.Popen(["sleep", "20"]) as other:
        assert rank_state._signal_for_stack(run, 0, other.pid) == ()
        time.sleep(0.1)
        assert other.poll() is None, "the process was killed"
        os.kill(other.pid, SIGNAL)
        assert other.wait() == -SIGNAL, "the signal would have killed it"


def test_ranks_on_other_machines_are_known_by_their_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if their clocks are wrong."""
    monkeypatch.setattr(rank_state, "REMOTE_ANSWER_S", 0.5)
    run, over = RunFolder(tmp_path), threading.Event()
    run.ranks.mkdir()

    def write(rank: int, ahead_s: float) -> None:
        now = time.time() + ahead_s
        heartbeat.write(
            run.alive(rank),
            replace(WAITS.beat, rank=rank, host="another", began=1.0, time=now, since=now - 2, ranks=2),
        )

    def write_heartbeats() -> None:
        while not over.wait(0.05):
            write(0, -100.0)

    write(0, -100.0)
    write(1, -100.0)
    thread = threading.Thread(target=write_heartbeats)
    thread.start()
    try:
        first, second = rank_state.inspect_ranks(run)
    finally:
        over.set()
        thread.join()
    assert (first.state, second.state) == ("runs", "silent")
    assert 0 < time.time() - first.beat.since < 10


# From rank states to the sentence

NOW = 1000.0
READS = (
    Frame("/x/site-packages/torch/data.py", 3, "f"),
    Frame("/home/me/my.py", 12, "Points.__getitem__"),
    Frame("<frozen x>", 1, "g"),
)
COMPUTES = (
    Frame("/home/me/my.py", 30, "Net.forward"),
    Frame("/x/site-packages/torch/nn/linear.py", 3, "Linear.forward"),
)
BACKWARD = (
    Frame("/home/me/my.py", 1, "<module>"),
    Frame("/x/site-packages/torch/autograd/graph.py", 3, "_engine_run_backward"),
)
RECEIVES = (Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 3, "recv"),)


def state_of(
    rank: int, phase: str, since_s: float, stack: tuple[Frame, ...] = (), number: int = 0, **changes: object
) -> RankState:
    """Return the state of one of three ranks after `number` collectives; the last is not done."""
    beat = Heartbeat(
        rank=rank,
        ranks=3,
        host=changes.pop("host", "here"),
        pid=100 + rank,
        began=0.0,
        time=NOW - 0.5,
        step=changes.pop("step", 7),
        steps=50,
        stepped=changes.pop("stepped", NOW - since_s),
        longest_s=0.1,
        phase=phase,
        since=NOW - since_s,
        patience_s=60.0,
        spent_s=changes.pop("spent_s", {heartbeat.DATA: 0.01, heartbeat.BACKWARD: 0.03}),
    )
    operation = changes.pop("operation", "all_reduce")
    called = Collective(
        group="0",
        members=(0, 1, 2),
        number=number,
        kind="collective",
        operation=str(operation),
        items=12345,
        dtype="float",
        called=NOW - since_s,
        is_over=changes.pop("is_over", False),
    )
    seen = RankState(
        rank=rank,
        beat=beat,
        state="runs",
        stack=stack,
        collectives=(called,) if number else (),
        answered=bool(stack),
    )
    return replace(seen, **changes)


def diagnose_ranks(*seen: RankState) -> Diagnosis:
    return diagnose(seen, NOW, stall_threshold_s([rank.beat for rank in seen], on_request=True))


@pytest.mark.parametrize("wrong_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("ours_s", [0.0, 3600.0, -3600.0])
def test_heartbeats_are_read_correctly_with_wrong_clocks(
    wrong_s: float, ours_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a rank whose clock is ahead hides a stall; if ours is ahead, healthy ranks appear stalled."""
    run, now = RunFolder(tmp_path), time.time()
    run.ranks.mkdir()
    beat = heartbeat.shift_times(state_of(0, heartbeat.BACKWARD, 42.0).beat, now - NOW + 0.5)
    assert beat.time == pytest.approx(now)
    heartbeat.write(run.alive(0), heartbeat.shift_times(replace(beat, ranks=1, began=now - 100), wrong_s))
    monkeypatch.setattr(time, "time", lambda true=time.time: true() + ours_s)
    [beat] = rank_state.read_heartbeats(run)
    assert time.time() - beat.since == pytest.approx(42, abs=1)
    assert time.time() - beat.began == pytest.approx(100, abs=1)


def test_the_start_of_a_rank_is_right_after_its_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the rank would seem to begin after its last heartbeat."""
    writer = HeartbeatWriter(None, 0, 1, 60.0, 60.0)
    monkeypatch.setattr(time, "time", lambda true=time.time: true() - 3600)
    beat = writer._now()
    assert 0 <= beat.time - beat.began < 10


WAITS = state_of(0, heartbeat.BACKWARD, 42.0, BACKWARD, 17)
BEHIND = state_of(1, heartbeat.DATA, 43.0, READS, 16)


@pytest.mark.parametrize(
    ("seen", "at_fault", "sentence"),
    [
        (
            (WAITS, BEHIND, replace(WAITS, rank=2)),
            (1,),
            "rank 1 is in Points.__getitem__ (my.py:12) for 43.0 s and 1 collective behind; "
            "the others wait in all_reduce of 12,345 float32 for 42.0 s",
        ),
        (
            (
                WAITS,
                state_of(1, heartbeat.FORWARD, 43.0, COMPUTES, 16),
                state_of(2, heartbeat.BACKWARD, 41.0, BACKWARD, 17),
            ),
            (1,),
            "rank 1 is in Net.forward (my.py:30) for 43.0 s and 1 collective behind; "
            "the others wait in all_reduce of 12,345 float32 for 42.0 s",
        ),
        (
            (
                WAITS,
                replace(BEHIND, state="stopped", stack=(), collectives=(), answered=False),
                replace(WAITS, rank=2),
            ),
            (1,),
            "rank 1 is stopped by a signal (process 101 on here); "
            "the others wait in all_reduce of 12,345 float32 for 42.0 s",
        ),
        (
            (
                WAITS,
                replace(BEHIND, state="gone", stack=(), collectives=(), answered=False),
                replace(WAITS, rank=2),
            ),
            (1,),
            "rank 1 ended without an error message (process 101 on here), in data of step 8; "
            "the others wait in all_reduce of 12,345 float32 for 42.0 s",
        ),
        (
            (
                state_of(0, heartbeat.FORWARD, 42.0, RECEIVES),
                state_of(1, heartbeat.FORWARD, 43.0, COMPUTES),
                state_of(2, heartbeat.FORWARD, 42.0, RECEIVES),
            ),
            (1,),
            "rank 1 is in Net.forward (my.py:30) for 43.0 s; "
            "the others wait in recv (distributed_c10d.py:3) for 42.0 s",
        ),
        (
            (
                WAITS,
                state_of(1, heartbeat.BACKWARD, 42.0, BACKWARD, 17, operation="broadcast"),
                replace(WAITS, rank=2),
            ),
            (),
            "the ranks wait for one another in different places for 42.0 s: "
            "rank 0 in all_reduce of 12,345 float32; rank 1 in broadcast of 12,345 float32",
        ),
        (
            tuple(replace(WAITS, rank=rank) for rank in range(3)),
            (),
            "all ranks wait in all_reduce of 12,345 float32 for 42.0 s, and none is behind: "
            "the network between them is at fault",
        ),
        (
            (state_of(0, heartbeat.DATA, 42.0, READS, readers=(ReaderProcess(pid=7, state="stopped"),)),),
            (0,),
            "rank 0 is in Points.__getitem__ (my.py:12) for 42.0 s; no rank has made progress for 42.0 s",
        ),
    ],
)
def test_the_blocking_rank_is_named(
    seen: tuple[RankState, ...], at_fault: tuple[int, ...], sentence: str
) -> None:
    diagnosis = diagnose_ranks(*seen)
    assert (diagnosis.verdict, diagnosis.at_fault) == ("stuck", at_fault)
    assert diagnosis.sentence == sentence


def test_a_run_with_progress_is_healthy_and_slow_ranks_are_named() -> None:
    well = [state_of(rank, heartbeat.BACKWARD, 0.2, BACKWARD, 17) for rank in range(3)]
    diagnosis = diagnose_ranks(*well)
    assert (diagnosis.verdict, diagnosis.at_fault) == ("healthy", ())
    assert diagnosis.sentence == "healthy: step 7 of 50, the last step ended 200.0 ms ago"
    slow = [
        *well[:2],
        state_of(2, heartbeat.DATA, 0.2, READS, 16, spent_s={heartbeat.DATA: 0.03, heartbeat.BACKWARD: 0.01}),
    ]
    assert diagnose_ranks(*slow).sentence.endswith(
        "; rank 2 is slow: 30.0 ms a step in data, the others 10.0 ms"
    )


def test_a_run_with_a_dead_worker_of_a_parameter_server_is_healthy() -> None:
    served = state_of(0, heartbeat.UPDATE, 0.2, COMPUTES)
    worker = state_of(1, heartbeat.START, 200.0, stepped=None)
    dead = replace(worker, state="gone", beat=replace(worker.beat, patience_s=None))
    assert diagnose_ranks(served, worker, dead).verdict == "healthy"
    assert diagnose_ranks(served, replace(worker, state="gone"), dead).verdict == "stuck", (
        "the others wait for this rank"
    )


def test_a_slow_start_is_not_a_stall() -> None:
    starts = [
        state_of(rank, heartbeat.START, 20.0 + rank, COMPUTES, stepped=None, step=0) for rank in range(3)
    ]
    diagnosis = diagnose_ranks(*starts)
    assert (diagnosis.verdict, diagnosis.sentence) == (
        "starting",
        "no step has ended yet; rank 0 is in Net.forward (my.py:30) for 20.0 s",
    )


def test_no_stall_is_reported_before_half_of_the_timeout() -> None:
    beats = [WAITS.beat, BEHIND.beat]
    assert stall_threshold_s(beats, on_request=True) == 3.0
    assert stall_threshold_s(beats, on_request=False) == 30.0
    assert stall_threshold_s([replace(beat, longest_s=20.0) for beat in beats], on_request=False) == 100.0
    assert (
        stall_threshold_s([replace(beat, phase=heartbeat.ENDED) for beat in beats], on_request=False) is None
    )


# The commands of docs/hangs.md


def test_the_commands_of_the_hangs_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/hangs.md").read_text()
    [block] = re.findall(
        r"<!-- run as tests/doctor/test_doctor.py: commands -->\n+```sh\n(.*?)```", page, re.S
    )
    words = (
        "train",
        write_task(tmp_path),
        "--ranks",
        "2",
        "--batch",
        "16",
        "--steps",
        "2",
        "--run-dir",
        "runs/a",
    )
    assert paceline(*words, at=tmp_path).status == 0
    for line in block.splitlines():
        out = paceline(*line.split()[1:], at=tmp_path).out
        assert out.startswith("runs/a is not running: it was done at step 2\n")
    assert json.loads((tmp_path / "found.json").read_text())["verdict"] is None
