"""drill breaks trainings, finds nothing where they hold, and finds what is planted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import TASK, environment, marked, paceline, start, write_task
from paceline.cli.drill import _prepare
from paceline.drill import sample_audit
from paceline.drill.clock import ALL, set_clock, settable
from paceline.drill.compare import losses_differ, weights_differ
from paceline.drill.faults import BY_NAME, FAULTS, chosen, save_every, schedule
from paceline.drill.inject import DISTURB, FaultContext
from paceline.drill.sample_audit import Update, audit, audit_alone, consumed, updates_of
from paceline.errors import SpecError
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Launch, Save, Spec
from runs import NEVER, trained, wanted

# When what happens


def test_a_moment_follows_from_the_seed_alone() -> None:
    faults = chosen("kill,stop")
    assert schedule(faults, 3, 2, 24, 4) == schedule(faults, 3, 2, 24, 4)
    assert schedule(faults, 3, 2, 24, 4) != schedule(faults, 4, 2, 24, 4)
    assert schedule(FAULTS, 3, 1, 24, 4)[1] == schedule(chosen("stop"), 3, 1, 24, 4)[0]


@pytest.mark.parametrize("steps", [8, 12, 24, 100])
def test_moments_have_checkpoints_before_them_and_room_behind(steps: int) -> None:
    moments = schedule(FAULTS, 0, 100, steps, 4)
    every, hit = save_every(steps), {moment.step for moment in moments}
    assert 2 * every < min(hit) <= max(hit) < steps - 2 * every
    assert len(hit) == steps - 4 * every - 1
    assert {moment.rank for moment in moments} == {0, 1, 2, 3}


def test_faults_by_name() -> None:
    assert chosen("stop,kill") == [BY_NAME["kill"], BY_NAME["stop"]]
    with pytest.raises(SpecError, match=r"there is no fault 'kil'; did you mean kill\?"):
        chosen("delay,kil")


# What was consumed

EXPECTED = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


def test_what_ranks_note_is_read_as_steps() -> None:
    """A trial before the first step, an optimizer within another one, and a line that was torn."""
    lines = [[1, [9, 9]], [2, [0, 1]], [3, [2, 3]], [4], [5], [6, [4, 5]], [7, [6, 7]], [8], [9]]
    text = "".join(f"{json.dumps(line)}\n" for line in lines) + "[10, [8,"
    assert updates_of(text, 2) == [Update(4, ((0, 1), (2, 3))), Update(8, ((4, 5), (6, 7)))]


def test_steps_are_put_together_from_the_ranks() -> None:
    plan = parse("tp=2,microbatches=2").resolve(4)
    first, second = (
        [Update(1, ((0, 1), (4, 5))), Update(2, ((8, 9), (12, 13)))],
        [Update(1, ((2, 3), (6, 7)))],
    )
    assert consumed({0: first, 1: first[:1], 2: second, 3: second}, plan) == ([tuple(range(8)), None], [])
    _, wrong = consumed({0: first, 1: [Update(1, ((0, 2), (4, 5)))], 2: second}, plan)
    assert wrong == ["ranks 0 and 1 consumed other samples, and should have shared them"]


def test_of_a_pipeline_the_last_stage_tells(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"0-0-{rank}").write_text(f"[1, [{rank}]]\n[2]\n")
    (tmp_path / "0-1-1").write_text("[1, [7]]\n")
    assert sample_audit.read(tmp_path, parse("pp=2,microbatches=1,pp_schedule=gpipe").resolve(2)) == [
        {1: [Update(2, ((1,),))]}
    ]


@pytest.mark.parametrize(
    ("starts", "wrong"),
    [
        ([EXPECTED], None),
        ([[*EXPECTED[:3], None], EXPECTED[2:]], None),
        ([EXPECTED[:3], EXPECTED], None),
        (
            [EXPECTED[:2], EXPECTED[3:]],
            "the samples of step 3 to 3 were lost: start 2 began with those of step 4",
        ),
        ([EXPECTED[:4]], "the samples of step 5 to 5 were lost at the end"),
        ([[*EXPECTED, (10, 11)]], "start 1 went on past the end, with step 6 of 5"),
        (
            [EXPECTED[:2], [(2, 3), (2, 3), *EXPECTED[3:]]],
            "start 2 consumed 2, 3 … (2) in step 3, in place of 4, 5 … (2)",
        ),
        (
            [EXPECTED[:2], [(2, 9)]],
            "start 2 began with samples 2, 9 … (2), with which no step of the undisturbed training did",
        ),
        ([[*EXPECTED[:4], None]], "start 1 consumed  … (0) in step 5, in place of 8, 9 … (2)"),
    ],
    ids=["once", "again", "from the start", "lost", "short", "further", "twice", "others", "not whole"],
)
def test_the_audit(starts: list, wrong: str | None) -> None:
    found = audit(EXPECTED, starts, [])
    assert found[:1] == ([wrong] if wrong is not None else [])


def test_samples_and_weights_go_on_from_the_same_step() -> None:
    assert audit(EXPECTED, [EXPECTED[:3], EXPECTED[2:]], [0, 2]) == []
    assert audit(EXPECTED, [EXPECTED[:3], EXPECTED[2:]], [0, 1]) == [
        "start 2 had the weights of step 1, and began with the samples of step 3"
    ]


def test_the_audit_of_what_nobody_disturbed() -> None:
    assert audit_alone([(0, 1), (2, 0), (2, 1)], 2, 3) == []
    assert audit_alone([(0, 1), (1, 0), (2, 1)], 2, 3) == ["1 samples came twice in epoch 1"]
    assert audit_alone([(0, 1), (2,)], 2, 4) == ["step 2 consumed 1 samples of 2"]


def test_what_differs_is_named(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    spec = wanted(task, steps=4, save=Save(every=2, minutes=NEVER))
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        trained(2, spec.model_copy(update={"seed": seed}), "zero3", tmp_path / name)
    a, b, c = (RunFolder(tmp_path / name) for name in "abc")
    assert weights_differ(b, a, 4) is None
    assert weights_differ(c, a, 4) == "0.bias differs in 10 of 10 elements"
    assert weights_differ(b, a, 5) == "there is no checkpoint of step 5, the last one"
    for run in (a, b, c):
        run.events.write_text("")
    assert losses_differ(b, a) is None


def test_a_clock_is_set(tmp_path: Path) -> None:
    env = environment(RANK="1") | settable(tmp_path / "clock")

    def hours_off() -> int:
        told = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        return round((float(told.stdout) - time.time()) / 3600)

    assert hours_off() == 0
    set_clock(tmp_path / "clock", "0", 3600)
    assert hours_off() == 0
    set_clock(tmp_path / "clock", "1", 3600)
    assert hours_off() == 1
    set_clock(tmp_path / "clock", ALL, -3600)
    assert hours_off() == -1


# Bad input


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--faults", "kil"), "there is no fault 'kil'; did you mean kill?"),
        (("--steps", "7"), "a drill hits a training in its middle and takes 8 steps at least, got --steps 7"),
        (("--keep", "."), ". exists already; name a new folder with --keep"),
        (
            ("--plan", "parameter-server"),
            "plan parameter-server computes a different result in each training, so drill cannot compare them",
        ),
        (
            ("--ranks", "3", "--plan", "tp=2"),
            "plan tp=2 requires a multiple of tp=2 = 2 ranks, got 3: use --ranks 2 or 4",
        ),
        (("--json", "nowhere/found.json"), "cannot write nowhere/found.json: no such folder: nowhere"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = paceline("drill", *words, at=tmp_path)
    assert (result.status, result.err.count("\n")) == (2, 1), result.all
    assert result.err.startswith(f"paceline: {message}")
    assert not list(tmp_path.iterdir())


# Real trainings

RANKS = ("--ranks", "2", "--batch", "16")


def drilled(folder: Path, *words: str | Path, timeout_s: float = 280.0) -> tuple[int, str, dict[str, dict]]:
    """Exit status, what it said, and what was found of each fault."""
    result = paceline("drill", *words, "--json", "found.json", at=folder, timeout_s=timeout_s)
    assert result.status in (0, 1), result.all
    return (
        result.status,
        result.all,
        {one["fault"]: one for one in json.loads((folder / "found.json").read_text())["faults"]},
    )


@pytest.mark.slow
def test_a_rank_is_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    """With augmentation, dropout and BatchNorm. (Without, the README's tour does so each time.)"""
    status, said, found = drilled(
        tmp_path, write_task(tmp_path), *RANKS, "--faults", "kill", "--steps", "12", "--seed", "5"
    )
    assert status == 0, said
    kill = found["kill"]
    assert (kill["wrong"], kill["starts"], kill["untried"]) == ({}, 2, None)
    assert 0 < kill["noticed_s"] < kill["again_s"]
    assert "1 of 1 faults left no trace" in said
    assert not list((tmp_path / "runs").iterdir()), "trainings that held are not kept"


# A start that is no first one reads samples of another step, a checkpoint forgets, and a process stays.
PLANTED = """
import subprocess
from paceline.training import loop
from paceline.training.checkpoint import save as checkpoint

load_, parts_ = checkpoint.load_, loop.training_parts


def forgetful(path, model, *rest):
    load_(path, model, *rest)
    for parameter in model.parameters():
        parameter.data.add_(1e-7)
        break


def greedy(part, samples, seed, first, steps):
    yield from parts_(part, samples, seed, first + (first > 0), steps + (first > 0))


checkpoint.load_, loop.training_parts = forgetful, greedy
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1":
    subprocess.Popen(["sleep", "300"], start_new_session=True)
"""


@pytest.mark.slow
def test_planted_defects_are_found(tmp_path: Path) -> None:
    task = write_task(tmp_path, TASK + PLANTED)
    status, said, found = drilled(tmp_path, task, *RANKS, "--faults", "kill", "--keep", "kept")
    assert status == 1, said
    wrong = found["kill"]["wrong"]
    assert wrong.keys() == {"weights", "losses", "samples", "left"}, said
    assert "(sleep 300)" in wrong["left"]
    assert wrong["samples"].startswith("start 2 had the weights of step "), said
    assert (tmp_path / "kept/1-kill/run/events.jsonl").exists()


@pytest.mark.slow
def test_a_task_that_is_not_the_same_twice_is_found(tmp_path: Path) -> None:
    task = write_task(tmp_path, TASK.replace("0.1 * torch.randn(6)", "1e-3 * os.getpid()"))
    status, said, found = drilled(tmp_path, task, *RANKS, "--faults", "delay")
    assert status == 1
    assert found["delay"]["wrong"].keys() == {"weights", "losses"}, said


@pytest.mark.slow
def test_one_rank(tmp_path: Path) -> None:
    status, said, found = drilled(
        tmp_path, write_task(tmp_path), "--ranks", "1", "--faults", "kill,cut,preempt", "--batch", "16"
    )
    assert status == 0, said
    assert "cut was not tried: one rank waits for no other one; use --ranks 2 or more" in said
    assert [one["untried"] is None for one in found.values()] == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_interrupted_leaves_nothing_and_tells_what_it_has_found(
    number: signal.Signals, tmp_path: Path
) -> None:
    words = (*RANKS, "--faults", "kill,stop", "--keep", "kept")
    with start("drill", write_task(tmp_path), *words, at=tmp_path) as running:
        running.until(
            (tmp_path / "kept/2-stop/run/ranks/0.alive").exists, "in the middle of the second training"
        )
        running.process.send_signal(number)
        result = running.wait()
        assert result.status == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert not marked(running.mark)
    assert "ended after 1 of 2 faults" in result.out
    assert re.search(r"kill +\d+ .* SIGKILL .* holds", result.out), result.all
    assert "1 of 1 faults left no trace" in result.out


@pytest.mark.slow
def test_a_fault_that_comes_after_the_last_step_is_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the drill waits for a core: the ranks are started again, and have nothing left to do."""

    def late(scene: FaultContext) -> str:
        killed = scene.rank
        scene.training.pace(None)
        scene.training.until(lambda: scene.training.steps_done() >= scene.steps, "the last step")
        killed.kill()
        return "SIGKILL"

    monkeypatch.setitem(DISTURB, "kill", late)
    spec = Spec(task=str(write_task(tmp_path)), steps=12, batch=16)
    one = _prepare(spec, Launch(ranks=2, device="cpu"), tmp_path / "drill")
    [moment] = schedule(chosen("kill"), 0, 1, 12, 2)
    outcome = one.hit(moment, one.reference(), "late")
    assert outcome.wrong == {}
    assert (
        outcome.untried == "the training had done its last step, 12, before the fault came; use more --steps"
    )


# Each fault, each plan: at night

PLANS = {"ddp": None, "zero1": None, "zero3": None, "tp=2": "digits", "pp=2": "digits"}
NIGHTLY = [
    (plan, seed, FAULTS if seed == 0 else FAULTS[seed % 3 :: 3]) for plan in PLANS for seed in range(4)
]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("plan", "seed", "faults"), [pytest.param(*one, id=f"{one[0]}-{one[1]}") for one in NIGHTLY]
)
def test_every_fault_under_every_plan(plan: str, seed: int, faults: tuple, tmp_path: Path) -> None:
    task = PLANS[plan] or write_task(tmp_path)
    names = ",".join(fault.name for fault in faults)
    words = ("--ranks", "2", "--batch", "16", "--plan", plan, "--seed", str(seed), "--faults", names)
    status, said, found = drilled(tmp_path, task, *words, timeout_s=1400)
    assert status == 0, said
    assert {name: one["wrong"] for name, one in found.items()} == {fault.name: {} for fault in faults}
    if os.geteuid() == 0:
        assert all(one["untried"] is None for one in found.values()), said
