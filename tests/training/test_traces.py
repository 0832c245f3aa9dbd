"""Traces of steps: what the files show, and that the training stays the same to the last bit."""

import copy
import gzip
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import models
from chrome_traces import ChromeTrace, Slice, parse_trace, read_trace
from command import paceline, succeed
from harness import ranks
from paceline import Spec, train
from paceline.distributed import clock_offset
from paceline.distributed.dtensor import is_materialized, local_tensor
from paceline.distributed.world import World
from paceline.errors import RunError, SpecError
from paceline.events import Noted, Profiled, Step
from paceline.plan.plan import parse
from paceline.run import RunFolder
from paceline.spec import Save
from paceline.training.init.named_tensors import named_tensors
from paceline.training.profiling.torch_profiler import TorchProfiler
from paceline.training.tracing import step_tracer
from paceline.training.tracing.collectives import find_collectives
from paceline.training.tracing.profiled_ops import ProfiledOp
from paceline.training.tracing.ranges import RangeStack
from paceline.training.tracing.trace_files import RankEvents, TextPart, merge_traces, write_rank_trace
from pages import read_blocks

pytestmark = pytest.mark.processes

SPEC = Spec(batch=8, steps=6, evaluate_every=100, save=Save(minutes=float("inf")), profile=False)
TRACED = SPEC.model_copy(update={"trace": "3:4"})
PHASES = ["data", "forward", "backward", "update", "report"]


def train_and_digest(task: Any, spec: Spec, plan: str, folder: str) -> tuple[list[Any], list[str]]:
    """Return losses and digests of this rank's gradients and weights in each step, and the notes."""
    digests: list[Any] = []

    def observe(model: nn.Module, what: str, step: int) -> None:
        tensors = {name: tensor for name, tensor in named_tensors(model).items() if is_materialized(tensor)}
        values = [tensor.grad if what == "gradients" else tensor for tensor in tensors.values()]
        content = [local_tensor(value.detach()).numpy().tobytes() for value in values if value is not None]
        digests.append((what, step, zlib.crc32(b"".join(content))))

    events = list(
        train(spec, parse(plan), task=task, run=RunFolder(Path(folder)), device="cpu", observe=observe)
    )
    losses = [(event.loss, event.grad_norm) for event in events if isinstance(event, Step)]
    notes = [event.message for event in events if isinstance(event, Noted)]
    return [*losses, *digests], notes


def trace(folder: Path, plan: str, task: Any = None, size: int = 2, spec: Spec = TRACED) -> ChromeTrace:
    """Train with and without a trace, compare the results, and return the trace of all ranks."""
    task = task or models.ShortText()
    for name in ("traced", "plain"):
        (folder / name).mkdir()
    traced = ranks(size)(train_and_digest, task, spec, plan, str(folder / "traced"))
    plain = ranks(size)(
        train_and_digest, task, spec.model_copy(update={"trace": None}), plan, str(folder / "plain")
    )
    assert [result for result, _ in traced] == [result for result, _ in plain], "a trace changes a result"
    steps = spec.trace_steps
    path = folder / "traced" / "traces" / f"steps_{steps[0]}-{steps[-1]}"
    assert traced[0][1] == [
        f"traced steps {steps[0]} to {steps[-1]}: {path}/all.json.gz; open it in https://ui.perfetto.dev"
    ]
    assert not (folder / "plain" / "traces").exists()
    whole = read_trace(path / "all.json.gz")
    for rank in range(size):
        alone = json.loads(gzip.decompress((path / f"{rank}.json.gz").read_bytes()))
        merged = json.loads(gzip.decompress((path / "all.json.gz").read_bytes()))["traceEvents"]
        assert alone["traceEvents"] == [event for event in merged if event["pid"] == rank]
    for file in path.iterdir():
        member = zlib.decompressobj(wbits=31)
        assert member.decompress(file.read_bytes())
        assert (member.eof, member.unused_data) == (True, b""), "browsers read only the first member"
    return whole


def phases_of(step: Slice) -> list[str]:
    """Return the names of the phases of a step, without repetitions by micro-batches."""
    return list(dict.fromkeys(phase.name for phase in step.find("phase")))


@pytest.mark.parametrize("plan", ["ddp,microbatches=2", "zero3", "tp=2", "zero1"])
def test_trace(plan: str, tmp_path: Path) -> None:
    found = trace(tmp_path, plan)
    microbatches = 2 if "microbatches" in plan else 1
    for rank in (0, 1):
        steps = found.find("step", rank)
        assert [step.name for step in steps] == ["step 3", "step 4"]
        for step in steps:
            assert phases_of(step) == PHASES
            parts = step.find("micro-batch")
            assert [part.name for part in parts] == [f"micro-batch {at}" for at in range(microbatches)]
            for part in parts:
                forward, backward = part.find("phase")
                assert (forward.name, backward.name) == ("forward", "backward")
                blocks = [block.name for block in forward.find("block") if block.name.startswith("blocks.")]
                assert blocks == ["blocks.0", "blocks.1"]
                assert forward.find("op")
                assert backward.find("op")
                reverse = [block.name for block in backward.find("block") if block.name.startswith("blocks.")]
                assert list(dict.fromkeys(reverse)) == ["blocks.1 backward", "blocks.0 backward"]
    collectives = found.find("collective")
    assert len({one.rank for one in collectives}) == 2
    numbered = [one for one in collectives if one.args]
    assert numbered, "no collective has a group"
    for one in numbered:
        for other in numbered:
            if (other.args["ranks"], other.args["number"]) == (one.args["ranks"], one.args["number"]):
                assert (other.name, other.args) == (one.name, one.args)
                assert "broadcast" in one.name or one.begin < other.end, "a collective waits for all ranks"
    arrows = [flow for flow in found.flows if flow.source.rank != flow.target.rank]
    assert arrows, "no collective is connected with that of the other rank"
    assert all(flow.source.args == flow.target.args for flow in arrows)


def dependencies(plan: str, size: int) -> set[tuple[str, int, int]]:
    """Return the passes of micro-batches that wait for another stage, written down from the definition."""
    options = dict(word.split("=") for word in plan.split(",") if "=" in word)
    stages = int(options["pp"]) * int(options.get("stages", "2" if "zbv" in plan else "1"))
    microbatches = range(int(options["microbatches"]))
    forward = {("forward", m, s) for m in microbatches for s in range(1, stages)}
    return forward | {("backward", m, s) for m in microbatches for s in range(stages - 1)}


PIPELINES = {
    "pp=2,microbatches=3": 2,
    "pp=2,stages=2,pp_schedule=interleaved,microbatches=2": 2,
    "pp=2,stages=2,pp_schedule=zero-bubble,microbatches=4": 2,
    "pp=2,pp_schedule=zbv,microbatches=4": 2,
    "pp=2,dp=2,zero=2,microbatches=2": 4,
}


@pytest.mark.parametrize(
    "plan",
    [
        plan if at in (0, 2) else pytest.param(plan, marks=pytest.mark.slow)
        for at, plan in enumerate(PIPELINES)
    ],
)
def test_pipeline_schedule(plan: str, tmp_path: Path) -> None:
    size = PIPELINES[plan]
    found = trace(tmp_path, plan, models.ShortText(depth=4), size, TRACED.model_copy(update={"batch": 12}))
    schedule = found.find("schedule")
    splits = "zero-bubble" in plan or "zbv" in plan
    arrows = [flow for flow in found.flows if flow.source.kind == "schedule"]
    copies = size // 2
    assert len(arrows) == 2 * copies * len(dependencies(plan, size)), "two steps"
    described = set()
    for flow in arrows:
        source, target = flow.source, flow.target
        assert source.name == target.name
        assert source.args["micro_batch"] == target.args["micro_batch"]
        what = source.name.rpartition(" ")[0]
        distance = target.args["stage"] - source.args["stage"]
        assert distance == (1 if what == "forward" else -1)
        assert source.end <= target.begin, "the next stage begins when the result is there"
        described.add((what, target.args["micro_batch"], target.args["stage"]))
    assert described == dependencies(plan, size)
    for one in schedule:
        name = found.names[one.rank, one.track]
        assert name == f"stage {one.args['stage']}"
    for step in found.find("step"):
        assert phases_of(step) == ["data", "forward", "update", "report"]
        assert len(step.find("action")) == len(
            [one for one in schedule if one.rank == step.rank and step.begin <= one.begin < step.end]
        )
        for action in step.find("action"):
            needs_no_gradient = action.name.startswith("backward") and action.name.endswith("stage 0")
            assert action.find("op") or (splits and needs_no_gradient), action
    assert any(one.name.startswith("weight gradients") for one in schedule) == splits
    blocks = {block.name for block in found.find("block") if block.name.startswith("blocks.")}
    assert blocks >= {f"blocks.{at}" for at in range(4)}
    assert blocks >= {f"blocks.{at} backward" for at in range(4)}


def test_checks_find_mistakes(tmp_path: Path) -> None:
    trace(tmp_path, "ddp")
    tree = json.loads(gzip.decompress((tmp_path / "traced/traces/steps_3-4/all.json.gz").read_bytes()))
    parse_trace(tree)
    late = copy.deepcopy(tree)
    for event in late["traceEvents"]:
        if event["pid"] == 1 and "ts" in event:
            event["ts"] -= 1e6  # a clock that is a second slow
    with pytest.raises(AssertionError, match="back in time"):
        parse_trace(late)
    long = copy.deepcopy(tree)
    phase = next(event for event in long["traceEvents"] if event.get("cat") == "phase")
    phase["dur"] += 1e5
    with pytest.raises(AssertionError, match="crosses"):
        parse_trace(long)
    lost = copy.deepcopy(tree)
    lost["traceEvents"].remove(next(event for event in lost["traceEvents"] if event["ph"] == "f"))
    with pytest.raises(AssertionError, match="two ends"):
        parse_trace(lost)


def test_one_process_and_an_evaluation(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"trace": "3:5", "evaluate_every": 4})
    found = trace(tmp_path, "single", None, 1, spec)
    assert [step.name for step in found.find("step")] == ["step 3", "step 4", "step 5"]
    assert not found.flows
    between = [one.name for one in found.tracks[0, 1] if one.kind == "phase"]
    assert "evaluate" in between, "an evaluation between two steps is in no step"


def stop_after(folder: str, polls: int) -> list[str]:
    asked = itertools.count()
    spec = SPEC.model_copy(update={"trace": "2:101", "steps": 2000})
    events = train(
        spec,
        parse("ddp"),
        task=models.Points(),
        run=RunFolder(Path(folder)),
        device="cpu",
        stop=lambda: next(asked) >= polls,
    )
    return [event.message for event in events if isinstance(event, Noted)]


def test_a_stop_ends_the_trace(tmp_path: Path) -> None:
    [note], _ = ranks(2)(stop_after, str(tmp_path), 5)
    [folder] = (tmp_path / "traces").iterdir()
    last = int(folder.name.rpartition("-")[2])
    assert note.startswith(f"traced steps 2 to {last}: ")
    assert 5 <= last < 101
    steps = [step.name for step in read_trace(folder / "all.json.gz").find("step", 0)]
    assert steps == [f"step {number}" for number in range(2, last + 1)]


def test_profiles_avoid_traced_steps(tmp_path: Path) -> None:
    spec = TRACED.model_copy(update={"profile": True, "trace": "4:5", "steps": 8})
    events = list(train(spec, task=models.Points(), run=RunFolder(tmp_path), device="cpu"))
    profiled = {event.step for event in events if isinstance(event, Profiled)}
    assert profiled
    assert not profiled & {4, 5}
    assert any(isinstance(event, Noted) and "traced steps" in event.message for event in events)


def test_another_profiler(tmp_path: Path) -> None:
    with torch.autograd.profiler.profile():
        events = list(train(TRACED, task=models.Points(), run=RunFolder(tmp_path), device="cpu"))
    [note] = [event.message for event in events if isinstance(event, Noted)]
    assert note == (
        "the trace of steps 3 to 4 is not complete: rank 0: another profiler of torch is active; "
        "leave either of them out"
    )


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "traces").write_text("")
    events = list(train(TRACED, task=models.Points(), run=RunFolder(tmp_path), device="cpu"))
    [note] = [event.message for event in events if isinstance(event, Noted)]
    assert note.startswith("the trace of steps 3 to 4 is not complete: rank 0: ")
    assert len([event for event in events if isinstance(event, Step)]) == 6


def test_joined_files_of_ranks(tmp_path: Path) -> None:
    texts = [[{"ph": "X", "name": f"{rank} é {at}"} for at in range(300 * rank + 1)] for rank in range(3)]
    parts = [write_rank_trace(tmp_path / f"{rank}.json.gz", text, {}) for rank, text in enumerate(texts)]
    assert merge_traces(tmp_path, parts, {"ranks": 3}) == ""
    found = json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))  # checks the CRC
    assert found["traceEvents"] == [event for text in texts for event in text]
    assert found["otherData"] == {"ranks": 3}
    wrong = [parts[0]._replace(text=parts[1].text), *parts[1:]]
    merge_traces(tmp_path, wrong, {})
    with pytest.raises(gzip.BadGzipFile, match="CRC"):
        gzip.decompress((tmp_path / "all.json.gz").read_bytes())
    assert "MiB, and at most 64 MiB" in merge_traces(tmp_path, [RankEvents(0, 2**27, parts[0].text)], {})


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 2**20 + 1])
def test_checksum_of_joined_texts(size: int) -> None:
    before, after = b"paceline", bytes(at % 251 for at in range(size))
    assert TextPart.of(before).join(TextPart.of(after)) == TextPart.of(before + after)


def test_file_of_a_rank_on_another_disk(tmp_path: Path) -> None:
    events = write_rank_trace(tmp_path / "0.json.gz", [{"ph": "X"}], {})
    os.truncate(tmp_path / "0.json.gz", events.end - 1)
    with pytest.raises(RunError, match=r"^0\.json\.gz is not complete$"):
        merge_traces(tmp_path, [events], {})
    (tmp_path / "0.json.gz").unlink()
    with pytest.raises(RunError, match=r"^0\.json\.gz is missing$"):
        merge_traces(tmp_path, [events], {})
    assert not list(tmp_path.iterdir())


def test_steps_outside_of_the_training(tmp_path: Path) -> None:
    spec = SPEC.model_copy(update={"trace": "6:7"})
    with pytest.raises(SpecError, match=r"^trace=6:7 has steps up to 7, and the training ends at step 6;"):
        list(train(spec, task=models.Points(), run=RunFolder(tmp_path), device="cpu"))


@pytest.mark.parametrize("text", ["5", "5:4", "0:3", "a:b", "1:2:3", "1:101"])
def test_values_that_are_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="trace"):
        Spec(trace=text)


def check_refused(message: str, *words: str | Path, at: Path) -> None:
    result = paceline(*words, at=at)
    assert (result.status, result.err.count("\n")) == (2, 1), result.all
    assert message in result.err


def test_commands_of_the_page(tmp_path: Path) -> None:
    train_line, resume_line = read_blocks("docs/traces.md")["traces"].splitlines()
    train_words, resume_words = shlex.split(train_line)[1:], shlex.split(resume_line)[1:]
    long = [word.replace("20:22", "20:31") for word in train_words]
    check_refused("trace=20:31 has steps up to 31, and the training ends at step 30", *long, at=tmp_path)
    assert "traced steps 20 to 22" in succeed(*train_words, at=tmp_path).out
    early = [word.replace("35:36", "30:36") for word in resume_words]
    message = "--trace 30:36 begins at step 30, and runs/a continues with step 31; use later steps"
    check_refused(message, *early, at=tmp_path)
    succeed(*resume_words, at=tmp_path)
    succeed("resume", "runs/a", "--steps", "42", at=tmp_path)  # the steps of the last trace are done
    traces = tmp_path / "runs/a/traces"
    assert {path.name for path in traces.iterdir()} == {"steps_20-22", "steps_35-36"}
    for folder, names in (
        ("steps_20-22", ["step 20", "step 21", "step 22"]),
        ("steps_35-36", ["step 35", "step 36"]),
    ):
        for rank in (0, 1):
            found = read_trace(traces / folder / "all.json.gz").find("step", rank)
            assert [step.name for step in found] == names


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed: pip install py-spy")
def test_flame_graph(tmp_path: Path) -> None:
    [line] = read_blocks("docs/traces.md")["flame"].splitlines()
    program, separator, words = line.partition(" -- paceline ")
    command = [*shlex.split(program), "--", sys.executable, "-m", "paceline", *shlex.split(words)]
    assert separator
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=200)
    assert "_run_steps (" in (tmp_path / "flame.svg").read_text()


def measure_with_shifted_clock(shift_ns: int, same_clock: bool) -> tuple[int, int]:
    rank = dist.get_rank()
    clock_offset.read_clock_id = lambda: "" if same_clock else str(min(rank, 1))
    clock_offset.time = SimpleNamespace(time_ns=lambda: time.time_ns() + shift_ns * (rank > 0))
    try:
        return clock_offset.measure_clock_offset(World(rank=rank, size=dist.get_world_size()))
    finally:
        clock_offset.time = time


def test_offset_of_the_clocks_of_nodes() -> None:
    shift_ns = 5_000_000_000
    found = ranks(3)(measure_with_shifted_clock, shift_ns, False)
    assert found[0] == (0, 0)
    for offset_ns, error_ns in found[1:]:
        assert abs(offset_ns + shift_ns) <= error_ns < 10**9
    assert found[1] == found[2], "ranks of a node have one clock"
    assert ranks(3)(measure_with_shifted_clock, shift_ns, True) == [(0, 0)] * 3


def train_with_recorded_nvtx(folder: str, nvtx: bool, trace: str | None) -> tuple[list[Any], list[str]]:
    """Train on the CPU, with functions that record the calls of NVTX in place of the device's."""
    log: list[str] = []
    spec = SPEC.model_copy(update={"nvtx": nvtx, "trace": trace, "steps": 3})
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(step_tracer, "uses_nvtx", lambda spec, device: spec.nvtx)
        patched.setattr(torch.cuda.nvtx, "range_push", log.append)
        patched.setattr(torch.cuda.nvtx, "range_pop", lambda: log.append(""))
        return train_and_digest(models.ShortText(), spec, "ddp,microbatches=2", folder)[0], log


def test_nvtx_ranges(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    marked = ranks(2)(train_with_recorded_nvtx, str(tmp_path / "a"), True, None)
    both = ranks(2)(train_with_recorded_nvtx, str(tmp_path / "b"), True, "2:2")
    plain = ranks(2)(train_with_recorded_nvtx, str(tmp_path / "c"), False, None)
    assert [result for result, _ in marked] == [result for result, _ in plain], "NVTX changes a result"
    assert all(not log for _, log in plain)
    assert [log for _, log in both] == [log for _, log in marked]
    for _, log in marked:
        depth, paths, names = 0, [], []
        for name in log:
            names = [*names, name] if name else names[:-1]
            depth += 1 if name else -1
            assert depth >= 0
            if name:
                paths.append("/".join(names))
        assert depth == 0, "each range is closed"
        for step in (1, 2, 3):
            for microbatch in (0, 1):
                inner = f"step {step}/micro-batch {microbatch}"
                assert {f"{inner}/forward/blocks.0", f"{inner}/forward/blocks.1", f"{inner}/backward"} < {
                    *paths
                }
            assert {f"step {step}/data", f"step {step}/update"} < {*paths}
    assert read_trace(tmp_path / "b/traces/steps_2-2/all.json.gz").find("step", 1)


def test_nvtx_on_a_cpu_is_noted(tmp_path: Path) -> None:
    started = next(train(Spec(steps=1, nvtx=True), task=models.Points(), device="cpu"))
    assert (
        "nvtx has no effect: it applies to CUDA devices, and this training runs on the CPU" in started.notes
    )


def entry(group: str, name: str, number: int, at: int) -> dict[str, Any]:
    return {
        "process_group": [group, ""],
        "profiling_name": f"gloo:{name}",
        "collective_seq_id": number,
        "time_created_ns": at,
        "is_p2p": False,
        "input_sizes": [[4]],
    }


def call(name: str, thread: int, begin: int, end: int) -> ProfiledOp:
    return ProfiledOp(f"gloo:{name}", "op", begin, end, thread, is_async=True)


US = 1000


def numbers_of(calls: list[ProfiledOp], entries: list[dict[str, Any]]) -> list[tuple[str, int]]:
    first = ProfiledOp("aten::mm", "op", 0, 1, 1)
    found = find_collectives([first, *calls], entries, {"a": [0, 1], "b": [0, 2]})
    return [(one.group, one.number) for one in found]


def test_groups_of_collectives() -> None:
    calls = [call("all_reduce", 2, 20 * US, 90 * US), call("all_reduce", 3, 400 * US, 500 * US)]
    entries = [entry("a", "all_reduce", 7, 10 * US), entry("b", "all_reduce", 3, 390 * US)]
    assert numbers_of(calls, entries) == [("a", 7), ("b", 3)]
    assert numbers_of([calls[1], calls[0]._replace(begin_ns=900 * US, end_ns=950 * US)], entries)[1] == (
        "",
        0,
    )
    forgotten = [call("all_reduce", 2, 5 * US, 9 * US), *calls]
    assert numbers_of(forgotten, entries)[0] == ("", 0), "its request was before the trace"


def test_order_of_two_threads_is_uncertain() -> None:
    entries = [entry("a", "all_reduce", 7, 10 * US), entry("a", "all_reduce", 8, 11 * US)]
    racing = [call("all_reduce", 2, 20 * US, 90 * US), call("all_reduce", 3, 21 * US, 60 * US)]
    assert numbers_of(racing, entries) == [("", 0), ("", 0)]
    entries[1]["time_created_ns"] = 20 * US + 1
    assert numbers_of(racing, entries) == [("a", 7), ("a", 8)]


def test_ranges_close_what_is_inside() -> None:
    log: list[str] = []

    def open_range(kind: str, name: str) -> Any:
        log.append(name)
        return lambda: log.append(f"/{name}")

    stack = RangeStack(open_range)
    stack.begin_step(1)
    stack.begin_microbatch(0)
    stack.begin_phase("forward")
    stack.begin_microbatch(1)
    stack.begin_phase("update")
    stack.close()
    inner = ["micro-batch 0", "forward", "/forward", "/micro-batch 0", "micro-batch 1", "/micro-batch 1"]
    assert log == ["step 1", *inner, "update", "/update", "/step 1"]


def test_parameter_servers_are_refused(tmp_path: Path) -> None:
    request = ("train", "digits", "--ranks", "3", "--plan", "parameter-server", "--steps", "4")
    check_refused("leave trace=2:3 out", *request, "--trace", "2:3", at=tmp_path)


def test_profiler_is_off_while_another_is_active() -> None:
    with torch.autograd.profiler.profile():
        assert not TorchProfiler(torch.device("cpu"), False).is_running
