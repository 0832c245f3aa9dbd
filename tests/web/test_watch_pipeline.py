"""The timeline of a pipeline. Traces are written here by json alone; ideal bubbles are the published ones."""

import gzip
import json
from pathlib import Path

import pytest

from paceline.errors import RunError
from paceline.events import Started
from paceline.web.pipeline import (
    Action,
    build_timeline,
    compute_pipeline,
    measure_bubble,
    read_actions,
    simulate,
)
from run_lines import folder, started

NAMES = ("forward", "backward", "weight gradients")


def order_1f1b(stages: int, microbatches: int) -> list[list[tuple[int, int, int]]]:
    """Return stage, kind and micro-batch of 1F1B by rank, by its definition: warm-up, steady state, rest."""
    order = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, microbatches)
        actions = [(stage, 0, at) for at in range(warm)]
        for at in range(microbatches - warm):
            actions += [(stage, 0, warm + at), (stage, 1, at)]
        actions += [(stage, 1, at) for at in range(microbatches - warm, microbatches)]
        order.append(actions)
    return order


def time_actions(order, seconds: dict[int, float]) -> list[list[Action]]:
    """Give each action the time of its kind, one after the other on each rank; begins do not matter."""
    timed = []
    for actions in order:
        now, row = 0.0, []
        for stage, kind, batch in actions:
            row.append(Action(stage, kind, batch, now, now + seconds[kind]))
            now += seconds[kind]
        timed.append(row)
    return timed


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 4), (4, 16), (8, 24), (3, 1)])
@pytest.mark.parametrize("seconds", [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 2.0}])
def test_ideal_bubble_is_the_published_one(stages, microbatches, seconds):
    """1F1B: (p - 1)/(m + p - 1), whatever the times of forward and backward (arXiv 2104.04473, 2.2.1)."""
    ideal = simulate(time_actions(order_1f1b(stages, microbatches), seconds))
    assert measure_bubble(ideal) == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-4)
    gpipe = [
        [(stage, 0, at) for at in range(microbatches)] + [(stage, 1, at) for at in range(microbatches)]
        for stage in range(stages)
    ]
    ideal = simulate(time_actions(gpipe, seconds))
    assert measure_bubble(ideal) == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-4)


def test_split_backward_fills_the_bubble():
    """Gradients of weights that are computed last need no other stage."""
    order = order_1f1b(4, 8)
    split = [[*actions, *((actions[0][0], 2, at) for at in range(8))] for actions in order]
    assert measure_bubble(simulate(time_actions(split, {0: 1.0, 1: 1.0, 2: 1.0}))) < 3 / 11


def test_trace_that_lacks_an_action_has_no_ideal():
    order = time_actions(order_1f1b(2, 4), {0: 1.0, 1: 1.0})
    del order[1][0]
    assert simulate(order) == []
    assert build_timeline(order, 3)["ideal_bubble"] is None


def write_trace(path: Path, rank: int, actions: list[Action], step_us: tuple[float, float]) -> None:
    """Write a step before, the step 7, and in each the actions, of which those before must not be shown."""
    events = [{"name": "aten::mm", "cat": "op", "ts": 0, "dur": 1}]
    for step, shift in ((6, 0.0), (7, step_us[0])):
        events.append(
            {"ph": "X", "name": f"step {step}", "cat": "step", "ts": shift, "dur": step_us[1], "tid": 1}
        )
        for action in actions:
            events.append(
                {
                    "ph": "X", "name": f"{NAMES[action.kind]} {action.microbatch}", "cat": "schedule",
                    "ts": shift + action.begin, "dur": action.end - action.begin, "tid": 1000,
                    "args": {"stage": action.stage, "micro_batch": action.microbatch},
                }
            )  # fmt: skip
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    path.write_bytes(gzip.compress(b'{"traceEvents": [\n' + lines.encode() + b'\n],\n"otherData": {}}\n'))


def build_run(at: Path, slow: float = 1.0):
    """Return a run on four ranks with pp=2, of which ranks 0 and 2 are the first pipeline."""
    run = folder(at / "run", [started(0, 1.7e9) | {"ranks": 4, "plan": "dp=2,pp=2,microbatches=2"}])
    traces = run.traces / "steps_6-7"
    traces.mkdir(parents=True)
    (run.traces / "steps_2-3").mkdir()
    first = [
        Action(0, 0, 0, 10, 20),
        Action(0, 0, 1, 20, 30),
        Action(0, 1, 0, 50, 60),
        Action(0, 1, 1, 70, 80),
    ]
    last = [
        Action(1, 0, 0, 20, 30),
        Action(1, 1, 0, 30, 50),
        Action(1, 0, 1, 50, 60),
        Action(1, 1, 1, 60, 70),
    ]
    last[1] = last[1]._replace(end=30 + 20 * slow)
    for rank, actions in ((0, first), (2, last)):
        write_trace(traces / f"{rank}.json.gz", rank, actions, (1000.0, 500.0))
    return run


def test_last_traced_step_is_shown(tmp_path):
    panel = compute_pipeline(build_run(tmp_path), START)
    assert (panel["step"], panel["stages"], panel["span_us"]) == (7, [0, 1], 70)
    assert [0, 0, 0, 0, 10] in panel["actions"]
    assert [1, 1, 1, 50, 60] in panel["actions"]
    assert len(panel["actions"]) == 8
    busy = 10 * 4 + (10 + 20 + 10 + 10)
    assert panel["bubble"] == pytest.approx(1 - busy / (2 * 70), abs=1e-4)
    assert panel["ideal_bubble"] < panel["bubble"]


START = Started(
    task="my.py:T", plan="dp=2,pp=2,microbatches=2", ranks=4, batch=8, step=0, steps=9, samples=8,
    parameters=1, device="cpu", precision="fp32", threads=1,
)  # fmt: skip


def test_plan_without_a_pipeline_has_no_panel(tmp_path):
    run = build_run(tmp_path)
    assert compute_pipeline(run, None) is None
    assert compute_pipeline(run, Started(**{**vars(START), "plan": "ddp"})) is None
    assert compute_pipeline(run, Started(**{**vars(START), "plan": "a new kind of plan"})) is None


def test_run_without_traces_names_the_option(tmp_path):
    run = folder(tmp_path / "run", [started(0, 1.7e9)])
    assert "--trace FIRST:LAST" in compute_pipeline(run, START)["problem"]


@pytest.mark.parametrize(
    "data",
    [
        b"no gzip",
        gzip.compress(b'{"cat":"schedule"'),
        gzip.compress(b'{"traceEvents": [\n{"cat":"step", '),
        gzip.compress(b"a" * 1000)[:-6],
        gzip.compress(b'"cat":"step"' + b"[" * 60_000),
    ],
    ids=["no gzip", "half an event", "half a step", "half a file", "deep"],
)
def test_damaged_trace_is_one_sentence(tmp_path, data):
    (tmp_path / "0.json.gz").write_bytes(data)
    with pytest.raises(RunError, match="is damaged"):
        read_actions(tmp_path / "0.json.gz", "step 7")


def test_events_of_wrong_types_are_skipped(tmp_path):
    good = {"name": "forward 0", "cat": "schedule", "ts": 5, "dur": 1, "args": {"stage": 0, "micro_batch": 0}}
    wrong = [
        {**good, "ts": "5"},
        {**good, "dur": -1},
        {**good, "args": []},
        {**good, "args": {"stage": 0}},
        {**good, "name": 3},
        {**good, "args": {"stage": -1, "micro_batch": 0}},
        {**good, "name": "sideways 0"},
    ]
    step = {"name": "step 7", "cat": "step", "ts": 0, "dur": 10}
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in [*wrong, step, good])
    (tmp_path / "0.json.gz").write_bytes(gzip.compress(lines.encode()))
    assert read_actions(tmp_path / "0.json.gz", "step 7") == [Action(0, 0, 0, 5, 6)]
