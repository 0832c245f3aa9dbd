"""Why a training ended: the one rank or node that failed first, of those that failed with it."""

import platform
import signal
import time
from collections.abc import Container, Iterable
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from paceline import events
from paceline.doctor.diagnose import Diagnosis
from paceline.doctor.rank_state import read_heartbeats
from paceline.errors import Error, RankError
from paceline.events import Failed, Started, Step
from paceline.launch.spawn import UNFINISHED
from paceline.launch.worker_processes import LOST, Failures
from paceline.run import RunFolder
from paceline.units import numbered

LOG_LINES = 20  # of a dead rank, shown with its name
AGENT_WAITS_S = 30  # for ranks that it has sent SIGTERM, before it kills them (torch 2.13)
WORDS_S = 5.0  # for what agents of other nodes have to say


class _Why(NamedTuple):
    rank: int | None
    text: str  # what it was, and after which step
    shows_log: bool = False
    is_news: bool = False  # nobody has written it down
    meant: bool = False


def cause(
    run: RunFolder, failures: Failures, before: int, left: Container[int], stuck: Diagnosis | None
) -> Error:
    """What ended the last start; `failures`: of processes on this machine; `left`: those that were ended since they did not end with it.
    `before`: where its events begin."""
    why, step = _why(run, failures, before, left, stuck)
    log = _log(run, why.rank or 0)
    said = log.read_text(errors="replace") if log.exists() else ""
    if why.meant:
        error = Error(why.text)
        error.__cause__ = RankError(said)  # for --debug
        return error
    message = f"{why.text}; {run.hint()}"
    if why.is_news:
        events.append(run.events, Failed(what="run", step=step, rank=why.rank, message=message))
    if not why.shows_log:
        return RankError(message)
    end = "\n".join(f"  {line}" for line in said.splitlines()[-LOG_LINES:])
    return RankError(f"{message}\nThe end of {log}:\n{end}" if end else f"{message}\n{log} is empty")


def log_restart(
    run: RunFolder, failures: Failures, before: int, left: Container[int], stuck: Diagnosis | None
) -> None:
    """Write down why all ranks are started again."""
    why, step = _why(run, failures, before, left, stuck)
    events.append(
        run.events,
        Failed(what="rank", step=step, rank=why.rank, message=f"{why.text}; all ranks are started again"),
    )


def _why(
    run: RunFolder, failures: Failures, before: int, left: Container[int], stuck: Diagnosis | None
) -> tuple[_Why, int]:
    """And the last step."""
    told, step = last_words(run, before)
    after = f", after step {step}"
    silent = [] if any(event.meant for event in told.values()) else _silent(failures, told, left)
    exited = _exited(failures, told, left)
    if (
        not silent
        and not exited
        and all(event.lost_peer and not event.meant for event in told.values())
        and stuck is None
    ):
        told, silent_elsewhere = _wait_for_others(run, before)
        if silent_elsewhere and all(event.lost_peer for event in told.values()):
            return _Why(silent_elsewhere[0], gone(run, silent_elsewhere) + after, is_news=True), step
    if meant := [event for event in told.values() if event.meant]:
        first = next((event for event in meant if not event.lost_peer), meant[0])
        everywhere = next(
            (event for event in meant if first.message == f"rank {first.rank}: {event.message}"), first
        )
        return _Why(first.rank, everywhere.message, meant=True), step
    own = [event for event in told.values() if not event.lost_peer]
    if stuck is not None and not silent and not own:
        return _Why(next(iter(stuck.at_fault), None), _gave_up(run, stuck, step), is_news=True), step
    if silent:
        rank, child = silent[0]
        return _Why(rank, f"rank {rank} {_how(child.exitcode)}{after}", shows_log=True, is_news=True), step
    if own or (told and not failures):
        event = (own or [*told.values()])[0]
        return _Why(event.rank or 0, words(event) + after, shows_log=True), step
    if exited:
        rank, child = exited[0]
        return _Why(rank, f"rank {rank} {_how(child.exitcode)}{after}", shows_log=True, is_news=True), step
    if not failures:
        return _Why(0, f"nothing is known of rank 0{after}", shows_log=True), step
    rank, child = min(failures.items(), key=lambda item: item[1].timestamp)
    what = words(told[rank]) if rank in told else f"rank {rank} {_how(child.exitcode)}"
    return _Why(rank, what + after, shows_log=True), step


def _how(status: int) -> str:
    """A rank ended that has said nothing."""
    if status == LOST:
        return "was lost with its node"
    if status == UNFINISHED:
        return "failed: ended with exit status 0 before the training was over, as after sys.exit or os._exit"
    return (
        f"was killed by {signal.Signals(-status).name}"
        if status < 0
        else f"failed: ended with exit status {status}"
    )


def words(event: Failed) -> str:
    """Which rank failed, and how."""
    return (
        event.message
        if event.message.startswith("rank ")
        else f"rank {event.rank or 0} failed: {event.message}"
    )


def given_up(run: RunFolder, stuck: Diagnosis, step: int) -> RankError:
    """A training that stood still after `step`."""
    message = f"{_gave_up(run, stuck, step)}; {run.hint()}"
    events.append(
        run.events, Failed(what="run", step=step, rank=next(iter(stuck.at_fault), None), message=message)
    )
    return RankError(message)


def _gave_up(run: RunFolder, stuck: Diagnosis, step: int) -> str:
    return f"{stuck.sentence}; it was given up after step {step}, more in {run.diagnosis}"


def tell_of_silent(
    run: RunFolder, failures: Failures, before: int, left: Container[int], stuck: Diagnosis | None = None
) -> None:
    """Write down which rank of this node was killed, for the agent that speaks."""
    told, step = last_words(run, before)
    for rank, child in [*_silent(failures, told, left), *_exited(failures, told, left)][:1]:
        message = f"rank {rank} on {platform.node()} {_how(child.exitcode)}"
        events.append(run.events, Failed(what="run", step=step, rank=rank, message=message))


def gone(run: RunFolder, ranks: Iterable[int]) -> str:
    """Of ranks of the last start that said nothing."""
    hosts: dict[str, list[int]] = {}
    for one in read_heartbeats(run):
        if one is not None and one.rank in ranks:
            hosts.setdefault(one.host, []).append(one.rank)
    each = [f"{host} with {numbered('rank', there)}" for host, there in hosts.items()]
    return f"{' and '.join(each)} ended without a word"


def unheard(run: RunFolder, before: int) -> list[int]:
    """The ranks of the last start on other machines that have not said why they end."""
    told, _ = last_words(run, before)
    return [
        one.rank
        for one in read_heartbeats(run)
        if one is not None and one.rank not in told and one.host != platform.node()
    ]


def last_words(run: RunFolder, before: int) -> tuple[dict[int | None, Failed], int]:
    """What the ranks of the last start said as they ended, and the last step of it."""
    told: dict[int | None, Failed] = {}
    for event in events.EventReader(run.events, before).new(Started, Failed):
        if isinstance(event, Started):
            told = {}
        elif isinstance(event, Failed) and event.what == "run":
            told[event.rank] = event
    newest = events.last(run.events, Started, Step, until=(Started, Step), begin=before)
    return told, max((event.step for event in newest if isinstance(event, (Started, Step))), default=0)


def _wait_for_others(run: RunFolder, before: int) -> tuple[dict[int | None, Failed], list[int]]:
    """What ranks on other nodes say, and those that say nothing."""
    deadline = time.monotonic() + WORDS_S
    while True:
        told, _ = last_words(run, before)
        others = unheard(run, before)
        if not others or not all(event.lost_peer for event in told.values()) or time.monotonic() > deadline:
            return told, others
        time.sleep(0.1)


def _silent(
    failures: Failures, told: Container[int | None], left: Container[int]
) -> list[tuple[int, ProcessFailure]]:
    """A rank that was killed said nothing, and neither did those that the agent then ended."""
    first_at = min((child.timestamp for child in failures.values()), default=0)
    return [
        (rank, child)
        for rank, child in failures.items()
        if child.exitcode < 0
        and child.exitcode != -signal.SIGTERM
        and child.timestamp < first_at + AGENT_WAITS_S
        and rank not in told
        and child.pid not in left
    ]


def _exited(
    failures: Failures, told: Container[int | None], left: Container[int]
) -> list[tuple[int, ProcessFailure]]:
    """Ranks that ended by themselves and said nothing: something in them has called an exit."""
    return [
        (rank, child)
        for rank, child in failures.items()
        if child.exitcode >= 0 and rank not in told and child.pid not in left
    ]


def _log(run: RunFolder, rank: int) -> Path:
    """The log of its last start."""
    return max(
        run.ranks.glob(f"{rank}.*log"), key=lambda path: path.stat().st_mtime, default=run.rank_log(rank)
    )
