"""A drill breaks trainings, passes those that recover, and finds planted defects."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command import TASK, clean_environment, find_marked_processes, paceline, start, write_task
from paceline.cli.operate.drill import _prepare
from paceline.drill import sample_audit
from paceline.drill.clock import ALL, install_clock, set_clock
from paceline.drill.compare import find_loss_difference, find_weight_difference
from paceline.drill.faults import BY_NAME, FAULTS, choose_save_every, schedule_faults, select_faults
from paceline.drill.inject import INJECT, FaultContext
from paceline.drill.sample_audit import SampledUpdate, audit, audit_reference, merge_ranks, parse_updates
from paceline.errors import SpecError
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Launch, Save, Spec
from runs import NEVER, make_spec, train_run

pytestmark = pytest.mark.processes

# Moments


def test_a_moment_follows_from_the_seed_alone() -> None:
    faults = select_faults("kill,stop")
    assert schedule_faults(faults, 3, 2, 24, 4) == schedule_faults(faults, 3, 2, 24, 4)
    assert schedule_faults(faults, 3, 2, 24, 4) != schedule_faults(faults, 4, 2, 24, 4)
    assert schedule_faults(FAULTS, 3, 1, 24, 4)[1] == schedule_faults(select_faults("stop"), 3, 1, 24, 4)[0]


@pytest.mark.parametrize("steps", [8, 12, 24, 100])
def test_moments_have_checkpoints_before_and_after_them(steps: int) -> None:
    moments = schedule_faults(FAULTS, 0, 100, steps, 4)
    every, chosen = choose_save_every(steps), {moment.step for moment in moments}
    assert 2 * every < min(chosen) <= max(chosen) < steps - 2 * every
    assert len(chosen) == steps - 4 * every - 1
    assert {moment.rank for moment in moments} == {0, 1, 2, 3}


def test_faults_are_selected_by_name() -> None:
    assert select_faults("stop,kill") == [BY_NAME["kill"], BY_NAME["stop"]]
    with pytest.raises(SpecError, match=r"unknown fault 'kil'; did you mean kill\?"):
        select_faults("delay,kil")


# Samples

EXPECTED = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


def test_logs_of_ranks_are_read_as_steps() -> None:
    """A trial before the first step, a nested optimizer, and an incomplete line."""
    lines = [[1, [9, 9]], [2, [0, 1]], [3, [2, 3]], [4], [5], [6, [4, 5]], [7, [6, 7]], [8], [9]]
    text = "".join(f"{json.dumps(line)}\n" for line in lines) + "[10, [8,"
    assert parse_updates(text, 2) == [SampledUpdate(4, ((0, 1), (2, 3))), SampledUpdate(8, ((4, 5), (6, 7)))]


def test_steps_are_merged_from_the_ranks() -> None:
    plan = parse("tp=2,microbatches=2").resolve(4)
    first, second = (
        [SampledUpdate(1, ((0, 1), (4, 5))), SampledUpdate(2, ((8, 9), (12, 13)))],
        [SampledUpdate(1, ((2, 3), (6, 7)))],
    )
    assert merge_ranks({0: first, 1: first[:1], 2: second, 3: second}, plan) == ([tuple(range(8)), None], [])
    _, wrong = merge_ranks({0: first, 1: [SampledUpdate(1, ((0, 2), (4, 5)))], 2: second}, plan)
    assert wrong == ["ranks 0 and 1 must consume the same samples, got different ones"]


def test_the_last_stage_of_a_pipeline_logs_the_samples(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"0-0-{rank}").write_text(f"[1, [{rank}]]\n[2]\n")
    (tmp_path / "0-1-1").write_text("[1, [7]]\n")
    assert sample_audit.read_starts(tmp_path, parse("pp=2,microbatches=1,pp_schedule=gpipe").resolve(2)) == [
        {1: [SampledUpdate(2, ((1,),))]}
    ]


@pytest.mark.parametrize(
    ("starts", "wrong"),
    [
        ([EXPECTED], None),
        ([[*EXPECTED[:3], None], EXPECTED[2:]], None),
        ([EXPECTED[:3], EXPECTED], None),
        (
            [EXPECTED[:2], EXPECTED[3:]],
            "the samples of steps 3 to 3 were lost: start 2 began with those of step 4",
        ),
        ([EXPECTED[:4]], "the samples of steps 5 to 5 were lost at the end"),
        ([[*EXPECTED, (10, 11)]], "start 1 continued past the end, with step 6 of 5"),
        (
            [EXPECTED[:2], [(2, 3), (2, 3), *EXPECTED[3:]]],
            "start 2 consumed 2, 3 … (2) in step 3, instead of 4, 5 … (2)",
        ),
        (
            [EXPECTED[:2], [(2, 9)]],
            "start 2 began with samples 2, 9 … (2), with which no step of the undisturbed training begins",
        ),
        ([[*EXPECTED[:4], None]], "start 1 consumed  … (0) in step 5, instead of 8, 9 … (2)"),
    ],
    ids=["once", "resumed", "restarted", "lost", "short", "past the end", "twice", "unknown", "incomplete"],
)
def test_the_audit_finds_lost_and_repeated_samples(starts: list, wrong: str | None) -> None:
    sentences = audit(EXPECTED, starts, [])
    assert sentences[:1] == ([wrong] if wrong is not None else [])


def test_samples_and_weights_must_continue_from_the_same_step() -> None:
    assert audit(EXPECTED, [EXPECTED[:3], EXPECTED[2:]], [0, 2]) == []
    assert audit(EXPECTED, [EXPECTED[:3], EXPECTED[2:]], [0, 1]) == [
        "start 2 had the weights of step 1, and began with the samples of step 3"
    ]


def test_the_audit_of_an_undisturbed_training() -> None:
    assert audit_reference([(0, 1), (2, 0), (2, 1)], 2, 3) == []
    assert audit_reference([(0, 1), (1, 0), (2, 1)], 2, 3) == ["1 samples came twice in epoch 1"]
    assert audit_reference([(0, 1), (2,)], 2, 4) == ["step 2 must consume 2 samples, got 1"]


def test_differences_are_named(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    spec = make_spec(task, steps=4, save=Save(every=2, minutes=NEVER))
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        train_run(2, spec.model_copy(update={"seed": seed}), "zero3", tmp_path / name)
    a, b, c = (RunFolder(tmp_path / name) for name in "abc")
    assert find_weight_difference(b, a, 4) is None
    assert find_weight_difference(c, a, 4) == "0.bias differs in 10 of 10 elements"
    assert find_weight_difference(b, a, 5) == "there is no checkpoint of the last step, 5"
    for run in (a, b, c):
        run.events.write_text("")
    assert find_loss_difference(b, a) is None


def test_clocks_are_shifted(tmp_path: Path) -> None:
    env = clean_environment(RANK="1") | install_clock(tmp_path / "clock")

    def hours_off() -> int:
        result = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        return round((float(result.stdout) - time.time()) / 3600)

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
        (("--faults", "kil"), "unknown fault 'kil'; did you mean kill?"),
        (
            ("--steps", "7"),
            "a drill disturbs a training in its middle and requires at least 8 steps, got --steps 7",
        ),
        (("--keep", "."), ". exists already; name a new folder with --keep"),
        (
            ("--plan", "parameter-server"),
            "plan parameter-server computes a different result in each training, so drill cannot "
            "compare them",
        ),
        (
            ("--ranks", "3", "--plan", "tp=2"),
            "plan tp=2 requires a multiple of tp=2 = 2 ranks, got 3: use --ranks 2 or 4",
        ),
        (("--json", "nowhere/found.json"), "cannot write nowhere/found.json: no such folder: nowhere"),
    ],
)
def test_bad_input_is_reported_in_one_sentence(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = paceline("drill", *words, at=tmp_path)
    assert (result.status, result.err.count("\n")) == (2, 1), result.all
    assert result.err.startswith(f"paceline: {message}")
    assert not list(tmp_path.iterdir())


# Real trainings

RANKS = ("--ranks", "2", "--batch", "16")


def run_drill(folder: Path, *words: str | Path, timeout_s: float = 280.0) -> tuple[int, str, dict[str, dict]]:
    """Run a drill and return its exit status, its output and its results by fault."""
    result = paceline("drill", *words, "--json", "found.json", at=folder, timeout_s=timeout_s)
    assert result.status in (0, 1), result.all
    return (
        result.status,
        result.all,
        {fault["fault"]: fault for fault in json.loads((folder / "found.json").read_text())["faults"]},
    )


@pytest.mark.slow
def test_drill_with_a_killed_rank_loses_nothing(tmp_path: Path) -> None:
    """The task has augmentation, dropout and BatchNorm. The tour runs a drill without them."""
    status, output, results = run_drill(
        tmp_path, write_task(tmp_path), *RANKS, "--faults", "kill", "--steps", "12", "--seed", "5"
    )
    assert status == 0, output
    kill = results["kill"]
    assert (kill["wrong"], kill["starts"], kill["untried"]) == ({}, 2, None)
    assert 0 < kill["noticed_s"] < kill["again_s"]
    assert "1 of 1 faults left no trace" in output
    assert not list((tmp_path / "runs").iterdir()), "passed trainings are not kept"


# After the first start: samples of another step, wrong weights from a checkpoint, and a process that stays.
PLANTED = """
import subprocess
from paceline.training import loop, resume

load_, parts_ = resume.load_, loop.training_parts


def load_wrong_weights_(path, model, *rest):
    load_(path, model, *rest)
    for parameter in model.parameters():
        parameter.data.add_(1e-7)
        break


def skip_a_step(part, order, first, steps):
    yield from parts_(part, order, first + (first > 0), steps + (first > 0))


resume.load_, loop.training_parts = load_wrong_weights_, skip_a_step
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1":
    subprocess.Popen(["sleep", "300"], start_new_session=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "gradients"), [("ddp", "found"), ("zero3", "escaped")])
def test_flipped_bits_are_found_if_another_rank_computes_the_same(
    plan: str, gradients: str, tmp_path: Path
) -> None:
    names = "flip-weight,flip-gradient,flip-activation,flip-data"
    words = (*RANKS, "--plan", plan, "--faults", names, "--seed", "2")
    status, output, results = run_drill(tmp_path, write_task(tmp_path), *words)
    assert status == 0, output
    assert all(not fault["wrong"] and fault["untried"] is None for fault in results.values()), output
    assert "changed outside of an update" in results["flip-weight"]["found"]
    assert results["flip-gradient"][gradients] is not None, output
    for name in ("flip-activation", "flip-data"):
        fault = results[name]
        assert (fault["found"] is None) == (fault["escaped"] is not None), output
    found = [name for name, fault in results.items() if fault["found"] is not None]
    assert all(results[name]["starts"] == 2 for name in found)


@pytest.mark.slow
def test_planted_defects_are_found(tmp_path: Path) -> None:
    task = write_task(tmp_path, TASK + PLANTED)
    status, output, results = run_drill(tmp_path, task, *RANKS, "--faults", "kill", "--keep", "kept")
    assert status == 1, output
    wrong = results["kill"]["wrong"]
    assert wrong.keys() == {"weights", "losses", "samples", "left"}, output
    assert "(sleep 300)" in wrong["left"]
    assert wrong["samples"].startswith("start 2 had the weights of step "), output
    assert (tmp_path / "kept/1-kill/run/events.jsonl").exists()


@pytest.mark.slow
def test_a_task_that_is_not_reproducible_is_found(tmp_path: Path) -> None:
    task = write_task(tmp_path, TASK.replace("0.1 * torch.randn(6)", "1e-3 * os.getpid()"))
    status, output, results = run_drill(tmp_path, task, *RANKS, "--faults", "delay")
    assert status == 1
    assert results["delay"]["wrong"].keys() == {"weights", "losses"}, output


@pytest.mark.slow
def test_faults_that_require_two_ranks_are_not_tried_on_one(tmp_path: Path) -> None:
    status, output, results = run_drill(
        tmp_path, write_task(tmp_path), "--ranks", "1", "--faults", "kill,cut,preempt", "--batch", "16"
    )
    assert status == 0, output
    assert "cut was not tried: one rank waits for no other rank; use --ranks 2 or more" in output
    assert [fault["untried"] is None for fault in results.values()] == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_drill_leaves_no_process_and_reports_its_results(
    number: signal.Signals, tmp_path: Path
) -> None:
    words = (*RANKS, "--faults", "kill,stop", "--keep", "kept")
    with start("drill", write_task(tmp_path), *words, at=tmp_path) as running:
        running.wait_until(
            (tmp_path / "kept/2-stop/run/ranks/0.alive").exists, "in the middle of the second training"
        )
        running.process.send_signal(number)
        result = running.wait()
        assert result.status == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        assert not find_marked_processes(running.mark)
    assert "ended after 1 of 2 faults" in result.out
    assert re.search(r"kill +\d+ .* SIGKILL .* holds", result.out), result.all
    assert "1 of 1 faults left no trace" in result.out


@pytest.mark.slow
def test_a_fault_after_the_last_step_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the drill had to wait for a core: the ranks restart and have nothing left to do."""

    def kill_late(context: FaultContext) -> str:
        rank, training = context.rank, context.training
        training.set_pace(None)
        training.wait_until(lambda: training.count_steps() >= context.steps, "the last step")
        rank.kill()
        return "SIGKILL"

    monkeypatch.setitem(INJECT, "kill", kill_late)
    spec = Spec(task=str(write_task(tmp_path)), steps=12, batch=16)
    drill = _prepare(spec, Launch(ranks=2, device="cpu"), tmp_path / "drill")
    [moment] = schedule_faults(select_faults("kill"), 0, 1, 12, 2)
    outcome = drill.run_fault(moment, drill.run_reference(), "late")
    assert outcome.wrong == {}
    assert (
        outcome.untried == "the training had done its last step, 12, before the fault came; use more --steps"
    )


# Each fault under each plan, nightly

PLANS = {"ddp": None, "zero1": None, "zero3": None, "tp=2": "digits", "pp=2": "digits"}
NIGHTLY = [
    (plan, seed, FAULTS if seed == 0 else FAULTS[seed % 3 :: 3]) for plan in PLANS for seed in range(4)
]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("plan", "seed", "faults"), [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in NIGHTLY]
)
def test_every_fault_under_every_plan(plan: str, seed: int, faults: tuple, tmp_path: Path) -> None:
    task = PLANS[plan] or write_task(tmp_path)
    names = ",".join(fault.name for fault in faults)
    words = ("--ranks", "2", "--batch", "16", "--plan", plan, "--seed", str(seed), "--faults", names)
    status, output, results = run_drill(tmp_path, task, *words, timeout_s=1400)
    assert status == 0, output
    assert {name: fault["wrong"] for name, fault in results.items()} == {fault.name: {} for fault in faults}
    if os.geteuid() == 0:
        tried = [fault for fault in faults if fault.flips not in ("activation", "data")]
        assert all(results[fault.name]["untried"] is None for fault in tried), output
