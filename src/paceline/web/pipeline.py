"""One traced step of a pipeline as a panel: what each stage computed when, and its ideal schedule."""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceline.errors import PlanError, RunError
from paceline.events import Started
from paceline.files import open_regular, reason
from paceline.plan.plan import ResolvedPlan, parse
from paceline.run import RunFolder

EVERY_S = 2.0  # between two looks at the traces
FOLDER = re.compile(r"steps_(\d{1,12})-(\d{1,12})")
KINDS = ("forward", "backward", "weight gradients")
MAX_STAGES = 64
MAX_ACTIONS = 4000
MAX_BYTES = 2**28  # of the text of one trace
MAX_LINE_BYTES = 2**16


class Action(NamedTuple):
    """A pass of a micro-batch on a stage. kind: its number in KINDS. begin and end: in microseconds."""

    stage: int
    kind: int
    microbatch: int
    begin: float
    end: float


def find_traces(run: RunFolder) -> list[Path]:
    """Return the folders of traces, the latest step first."""
    try:
        found = [(match, path) for path in run.traces.iterdir() if (match := FOLDER.fullmatch(path.name))]
    except OSError:
        return []
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][2]), reverse=True)]


def compute_pipeline(run: RunFolder, started: Started | None) -> dict[str, Any] | None:
    """Return the last traced step of the first pipeline of a run; None for a plan without a pipeline.

    Raises RunError for an unreadable file."""
    try:
        plan = parse(started.plan).resolve(started.ranks) if started is not None else None
    except PlanError:
        return None
    if plan is None or started is None or plan.pp == 1:
        return None
    hint = "train or resume with --trace FIRST:LAST to see when each stage computes"
    folders = find_traces(run)
    if not folders:
        return {"problem": f"no step was traced; {hint}"}
    step = int(folders[0].name.rpartition("-")[2])
    order: list[list[Action]] = []
    for rank in _find_ranks(plan, started.ranks)[:MAX_STAGES]:
        actions = read_actions(folders[0] / f"{rank}.json.gz", f"step {step}")
        if not actions:
            return {
                "problem": f"the trace of rank {rank} in {folders[0]} has no pipeline in step {step}; {hint}"
            }
        order.append(actions)
    return build_timeline(order, step)


def _find_ranks(plan: ResolvedPlan, ranks: int) -> list[int]:
    """Return the ranks of the first pipeline, in the order of their stages."""
    places = [(plan.place(rank), rank) for rank in range(ranks)]
    first = [(place.pp, rank) for place, rank in places if not (place.dp or place.cp or place.tp)]
    return [rank for _, rank in sorted(first)]


def read_actions(path: Path, step: str) -> list[Action]:
    """Return what a rank computed in a step, in order of time. Raises RunError for an unreadable file."""
    actions, span = [], (0.0, -1.0)
    for event in _read_events(path):
        if event.get("cat") == "step" and event.get("name") == step:
            span = (event["ts"], event["ts"] + event["dur"])
        elif event.get("cat") == "schedule":
            what = event["name"].rpartition(" ")[0]
            stage, microbatch = event["args"]["stage"], event["args"]["micro_batch"]
            begin, end = event["ts"], event["ts"] + event["dur"]
            if what in KINDS:
                actions.append(Action(stage, KINDS.index(what), microbatch, begin, end))
    return sorted((action for action in actions if span[0] <= action.begin <= span[1]), key=lambda a: a.begin)


def _read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the steps and the actions of the schedule, each of which is a line of its own."""
    size = 0
    try:
        with open_regular(path) as file, gzip.open(file) as text:
            while line := text.readline(MAX_LINE_BYTES):
                size += len(line)
                if size > MAX_BYTES:
                    raise RunError(
                        f"{path} is not shown: it has more than {MAX_BYTES / 2**20:.0f} MiB of text"
                    )
                if b'"cat":"schedule"' in line or b'"cat":"step"' in line:
                    event = json.loads(line.strip().removesuffix(b","))
                    if _is_event(event):
                        yield event
    except (ValueError, EOFError, gzip.BadGzipFile, zlib.error, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason(error)}") from error


def _is_event(event: Any) -> bool:
    """Return whether an event has what is read of it; another user may have written the file."""
    if not isinstance(event, dict) or not isinstance(event.get("name"), str):
        return False
    args = event.get("args", {"stage": 0, "micro_batch": 0})
    times = [event.get("ts"), event.get("dur")]
    numbers = [args.get("stage"), args.get("micro_batch")] if isinstance(args, dict) else [None]
    return all(_is_within(number, 10**6) and type(number) is int for number in numbers) and all(
        _is_within(time, 1e15) for time in times
    )


def _is_within(value: Any, limit: float) -> bool:
    return type(value) in (int, float) and bool(0 <= value < limit)


def build_timeline(order: Sequence[Sequence[Action]], step: int) -> dict[str, Any]:
    """Return measured and ideal actions, from the begin of the step, and the shares of time without work.

    order: the actions of each rank in their order."""
    measured = [action for actions in order for action in actions]
    begin = min(action.begin for action in measured)
    ideal = simulate(order)
    return {
        "step": step,
        "stages": sorted({action.stage for action in measured})[:MAX_STAGES],
        "actions": _to_rows(measured, begin),
        "ideal": _to_rows([action for actions in ideal for action in actions], 0.0),
        "bubble": measure_bubble(order),
        "ideal_bubble": measure_bubble(ideal) if ideal else None,
        "span_us": round(max(action.end for action in measured) - begin),
    }


def measure_bubble(order: Sequence[Sequence[Action]]) -> float:
    """Return the share of time in which a rank computes nothing, from the first begin to the last end."""
    everything = [action for actions in order for action in actions]
    span = max(action.end for action in everything) - min(action.begin for action in everything)
    busy = sum(action.end - action.begin for action in everything)
    return round(1 - busy / (span * len(order)), 4) if span else 0.0


def simulate(order: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Return the same actions in the same order if all stages were equally fast and sends took no time.

    Each kind of action takes its mean time. Empty if an action waits for one that the trace lacks."""
    times: dict[int, list[float]] = defaultdict(list)
    for actions in order:
        for action in actions:
            times[action.kind].append(action.end - action.begin)
    mean = {kind: sum(values) / len(values) for kind, values in times.items()}
    last_stage = max(action.stage for actions in order for action in actions)
    ends: dict[tuple[int, int, int], float] = {}
    done: list[list[Action]] = [[] for _ in order]
    is_moving = True
    while is_moving:
        is_moving = False
        for actions, placed in zip(order, done, strict=True):
            while len(placed) < len(actions):
                action = actions[len(placed)]
                needed = _find_sources(action, last_stage)
                if not all(source in ends for source in needed):
                    break
                begin = max([ends[source] for source in needed] + ([placed[-1].end] if placed else [0.0]))
                end = begin + mean[action.kind]
                ends[action[:3]] = end
                placed.append(action._replace(begin=begin, end=end))
                is_moving = True
    is_complete = all(len(actions) == len(placed) for actions, placed in zip(order, done, strict=True))
    return done if is_complete else []


def _find_sources(action: Action, last_stage: int) -> list[tuple[int, int, int]]:
    """Return the actions whose results an action needs."""
    stage, kind, microbatch = action[:3]
    if kind == 0:
        return [(stage - 1, 0, microbatch)] if stage else []
    own = (stage, kind - 1, microbatch)
    return [own, (stage + 1, 1, microbatch)] if kind == 1 and stage < last_stage else [own]


def _to_rows(actions: Sequence[Action], begin: float) -> list[list[int]]:
    rows = [[*action[:3], round(action.begin - begin), round(action.end - begin)] for action in actions]
    return rows[:MAX_ACTIONS]
