"""Why a training ended: the rank or node that failed first, as opposed to those that failed because of it."""

import platform
import signal
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline import errors, events
from paceline.doctor.diagnose import Diagnosis
from paceline.doctor.rank_state import read_heartbeats
from paceline.errors import Error, RankError
from paceline.events import Failed, Started, Step
from paceline.launch.spawn import describe_exit
from paceline.launch.worker_processes import LOST, Failures
from paceline.run import RunFolder
from paceline.units import numbered

LOG_LINES = 20  # of the log of the failed rank
AGENT_WAITS_S = 30  # torch 2.13: time between SIGTERM and SIGKILL of the agent
REPORT_S = 5.0  # for the failures that agents of other nodes report
ERRORS = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Error)
}


class _Cause(NamedTuple):
    rank: int | None
    text: str  # what happened, and after which step
    shows_log: bool = False
    is_new: bool = False  # not in the events yet
    is_expected: bool = False  # an Error with a message for users
    error: str = ""  # the name of its class


def find_cause(
    run: RunFolder, failures: Failures, begin: int, killed: Container[int], hang: Diagnosis | None
) -> Error:
    """Return the Error that ended the training, and write it to the events if no rank did.

    failures: failed processes of this machine.
    begin: position of the first event of this training.
    killed: ids of processes that were killed because they had not ended with the others.
    hang: the diagnosis, if the training was stalled.
    """
    cause, step = _identify_cause(run, failures, begin, killed, hang)
    log = _find_log(run, cause.rank or 0)
    output = log.read_text(errors="replace") if log.exists() else ""
    if cause.is_expected:
        error = ERRORS.get(cause.error, Error)(cause.text)
        error.__cause__ = RankError(output)  # for --debug
        return error
    message = f"{cause.text}; {run.hint()}"
    if cause.is_new:
        events.append(run.events, Failed(what="run", step=step, rank=cause.rank, message=message))
    if not cause.shows_log:
        return RankError(message)
    end = "\n".join(f"  {line}" for line in _read_end(output))
    return RankError(f"{message}\nThe end of {log}:\n{end}" if end else f"{message}\n{log} is empty")


def _read_end(output: str) -> list[str]:
    """Return the last lines, or the beginning of the stack of the thread that crashed in compiled code."""
    lines = output.splitlines()
    crash = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error: ")), None)
    if crash is None:
        return lines[-LOG_LINES:]
    stacks = lines[crash + 1 :]
    begin = next((at for at, line in enumerate(stacks) if line.startswith("Current thread ")), 0)
    return [lines[crash], *stacks[begin : begin + LOG_LINES]]


def log_restart(
    run: RunFolder, failures: Failures, begin: int, killed: Container[int], hang: Diagnosis | None
) -> None:
    """Write to the events why all ranks restart. The arguments are those of `find_cause`."""
    cause, step = _identify_cause(run, failures, begin, killed, hang)
    events.append(
        run.events,
        Failed(what="rank", step=step, rank=cause.rank, message=f"{cause.text}; all ranks are restarted"),
    )


def _identify_cause(
    run: RunFolder, failures: Failures, begin: int, killed: Container[int], hang: Diagnosis | None
) -> tuple[_Cause, int]:
    """Return the cause and the last step."""
    reports, step = read_failures(run, begin)
    after = f", after step {step}"
    silent = [] if any(event.meant for event in reports.values()) else _find_killed(failures, reports, killed)
    exited = _find_exited(failures, reports, killed)
    if (
        not silent
        and not exited
        and all(event.lost_peer and not event.meant for event in reports.values())
        and hang is None
    ):
        reports, silent_elsewhere = _wait_for_other_nodes(run, begin)
        if silent_elsewhere and all(event.lost_peer for event in reports.values()):
            return (
                _Cause(
                    silent_elsewhere[0], describe_silent_ranks(run, silent_elsewhere) + after, is_new=True
                ),
                step,
            )
    if expected := [event for event in reports.values() if event.meant]:
        first = next((event for event in expected if not event.lost_peer), expected[0])
        everywhere = next(
            (event for event in expected if first.message == f"rank {first.rank}: {event.message}"), first
        )
        return _Cause(first.rank, everywhere.message, is_expected=True, error=first.error), step
    causes = [event for event in reports.values() if not event.lost_peer]
    if hang is not None and not silent and not causes:
        return _Cause(next(iter(hang.at_fault), None), _describe_hang(run, hang, step), is_new=True), step
    if silent:
        rank, child = silent[0]
        return _Cause(
            rank, f"rank {rank} {_describe_exit(child.exitcode)}{after}", shows_log=True, is_new=True
        ), step
    if causes or (reports and not failures):
        event = (causes or [*reports.values()])[0]
        return _Cause(event.rank or 0, describe_failure(event) + after, shows_log=True), step
    if exited:
        rank, child = exited[0]
        return _Cause(
            rank, f"rank {rank} {_describe_exit(child.exitcode)}{after}", shows_log=True, is_new=True
        ), step
    if not failures:
        return _Cause(0, f"nothing is known of rank 0{after}", shows_log=True), step
    rank, child = min(failures.items(), key=lambda item: item[1].timestamp)
    what = (
        describe_failure(reports[rank])
        if rank in reports
        else f"rank {rank} {_describe_exit(child.exitcode)}"
    )
    return _Cause(rank, what + after, shows_log=True), step


def _describe_exit(status: int) -> str:
    """Return how a rank ended that reported no error."""
    return "was lost with its node" if status == LOST else describe_exit(status)


def describe_failure(event: Failed) -> str:
    """Return which rank failed, and how."""
    return (
        event.message
        if event.message.startswith("rank ")
        else f"rank {event.rank or 0} failed: {event.message}"
    )


def record_hang(run: RunFolder, hang: Diagnosis, step: int) -> RankError:
    """Write to the events that the training ended since it was stalled after `step`, and return the error."""
    message = f"{_describe_hang(run, hang, step)}; {run.hint()}"
    events.append(
        run.events, Failed(what="run", step=step, rank=next(iter(hang.at_fault), None), message=message)
    )
    return RankError(message)


def _describe_hang(run: RunFolder, hang: Diagnosis, step: int) -> str:
    return f"{hang.sentence}; the training was ended after step {step}, see {run.diagnosis}"


def record_silent_failure(
    run: RunFolder, failures: Failures, begin: int, killed: Container[int], hang: Diagnosis | None = None
) -> None:
    """Write to the events which rank of this node was killed or exited, for the agent that reports.

    The arguments are those of `find_cause`.
    """
    reports, step = read_failures(run, begin)
    found = [*_find_killed(failures, reports, killed), *_find_exited(failures, reports, killed)]
    for rank, child in found[:1]:
        message = f"rank {rank} on {platform.node()} {_describe_exit(child.exitcode)}"
        events.append(run.events, Failed(what="run", step=step, rank=rank, message=message))


def describe_silent_ranks(run: RunFolder, ranks: Iterable[int]) -> str:
    """Return a sentence on ranks of the last start that ended without an error message."""
    hosts: dict[str, list[int]] = {}
    for beat in read_heartbeats(run):
        if beat is not None and beat.rank in ranks:
            hosts.setdefault(beat.host, []).append(beat.rank)
    parts = [f"{host} with {numbered('rank', on_host)}" for host, on_host in hosts.items()]
    return f"{' and '.join(parts)} ended without an error message"


def find_silent_ranks(run: RunFolder, begin: int) -> list[int]:
    """Return the ranks of the last start on other machines that have not reported a failure."""
    reports, _ = read_failures(run, begin)
    return [
        beat.rank
        for beat in read_heartbeats(run)
        if beat is not None and beat.rank not in reports and beat.host != platform.node()
    ]


def read_failures(run: RunFolder, begin: int) -> tuple[dict[int | None, Failed], int]:
    """Return the failures that ranks of the last start reported, by rank, and the last step of that start.

    A rank may fail before rank 0 reports the start.
    """
    reports: dict[int | None, Failed] = {}
    early: dict[int | None, Failed] = {}  # those before the `Started` of their start
    is_starting = True
    for event in events.EventReader(run.events, begin).new(Started, Failed):
        if isinstance(event, Started):
            reports, early, is_starting = early, {}, False
        elif isinstance(event, Failed) and event.what == "run":
            reports[event.rank] = event
            # on several nodes, ranks of the previous start may still report that they lost another rank
            if is_starting and not event.lost_peer:
                early[event.rank] = event
        elif isinstance(event, Failed) and event.what in ("rank", "node"):  # all ranks are restarted
            early, is_starting = {}, True
    newest = events.last(run.events, Started, Step, until=(Started, Step), begin=begin)
    return reports, max((event.step for event in newest if isinstance(event, (Started, Step))), default=0)


def _wait_for_other_nodes(run: RunFolder, begin: int) -> tuple[dict[int | None, Failed], list[int]]:
    """Wait a few seconds for other nodes. Return the reported failures, and the ranks that reported none."""
    deadline = time.monotonic() + REPORT_S
    while True:
        reports, _ = read_failures(run, begin)
        silent = find_silent_ranks(run, begin)
        has_cause = not all(event.lost_peer for event in reports.values())
        if not silent or has_cause or time.monotonic() > deadline:
            return reports, silent
        time.sleep(0.1)


def _find_killed(
    failures: Failures, reported: Container[int | None], killed: Container[int]
) -> list[tuple[int, ProcessFailure]]:
    """Return ranks that were killed, without those that the agent ended afterwards.

    Neither report a failure.
    """
    first_at = min((child.timestamp for child in failures.values()), default=0)
    return [
        (rank, child)
        for rank, child in failures.items()
        if child.exitcode < 0
        and child.exitcode != -signal.SIGTERM
        and child.timestamp < first_at + AGENT_WAITS_S
        and rank not in reported
        and child.pid not in killed
    ]


def _find_exited(
    failures: Failures, reported: Container[int | None], killed: Container[int]
) -> list[tuple[int, ProcessFailure]]:
    """Return ranks that exited without reporting a failure: their code called sys.exit or os._exit."""
    return [
        (rank, child)
        for rank, child in failures.items()
        if child.exitcode >= 0 and rank not in reported and child.pid not in killed
    ]


def _find_log(run: RunFolder, rank: int) -> Path:
    """Return the log of the last start of a rank."""
    return max(
        run.ranks.glob(f"{rank}.*log"), key=lambda path: path.stat().st_mtime, default=run.rank_log(rank)
    )
