"""What one rank does from its start to its end: train, write down what happens, and say why it fails."""

import collections
import contextlib
import os
import sys
import threading
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from rich.console import Console

from paceline import events
from paceline.distributed.process_group import choose_device, keep_freed_memory, process_group
from paceline.distributed.world import World
from paceline.doctor.diagnose import Diagnosis
from paceline.doctor.heartbeat import process_age_s
from paceline.doctor.watchdog import HangWatchdog
from paceline.errors import DataError, Error, RankError, RunError, TaskError
from paceline.events import Ended, Event, Failed, Stalled, Started, Step
from paceline.launch.signals import STOPPED, Interrupt
from paceline.plan.plan import AUTO, Plan, parse
from paceline.report.progress import watch
from paceline.run import RunFolder, create, release, reserve
from paceline.spec import Launch, Spec
from paceline.training.loop import train
from paceline.user_code import LOST_PEER


def run_started(run: RunFolder, world: World, launcher: int, importer: int | None = None) -> None:
    """A rank of our own launcher: the folder is there, the launcher shows what happens. `importer`: the process that imported for it."""
    os.dup2(2, 1)  # one log a rank
    spec, launch = run.next_request()  # for more ranks, where nodes were lost
    started = threading.Event()
    with (
        Interrupt(launcher) as interrupt,
        contextlib.closing(_recorded(spec, launch, world, run, interrupt, importer)) as happening,
    ):
        threading.Thread(target=_leave_if_orphaned, args=(interrupt, started), daemon=True).start()
        for _ in happening:
            started.set()
        run.unfinished(world.rank).unlink(missing_ok=True)


def _leave_if_orphaned(interrupt: Interrupt, started: threading.Event) -> None:
    """Until the loop looks after it: the store by which the ranks find each other went with the launcher, and they would wait for it."""
    while not started.wait(0.5):
        if interrupt.orphaned():
            os._exit(1)


def run_alone(spec: Spec, launch: Launch, world: World, run: RunFolder | None) -> int:
    """A rank of somebody else's launcher, or the only one; rank 0 shows what happens. `run`: one to go on with; None: a new one.

    Returns the exit status.
    """
    with (
        Interrupt() as interrupt,
        process_group(
            world,
            choose_device(world, launch.device),
            spec.timeout_s,
            run.path if run is not None else Path("runs"),
        ),
    ):
        try:
            if run is None:
                run = RunFolder(Path(_agree_on_folder(launch, spec, world)))
            with contextlib.closing(_recorded(spec, launch, world, run, interrupt)) as happening:
                if world.rank:
                    return _status(_last(happening))
                watchdog = HangWatchdog(run, on_hang=lambda ranks: _give_up(run, watchdog.diagnosis))
                with watchdog:
                    return _status(watch(happening, run, _console(world)))
        except (Error, RuntimeError, ConnectionError) as error:
            if not isinstance(error, Error) and not is_of_lost_peer(error):
                raise
            # One sentence for all ranks: the first one says it.
            if not _first_to_fail(world):
                sys.exit(2)
            if isinstance(error, Error) or run is None:
                raise
            raise RankError(f"rank {world.rank} {_what_was_lost(run)}; {run.hint()}") from error
        finally:
            if run is not None and world.rank == 0:
                release(run.path)


def _begun_s(launcher: int | None, importer: int | None) -> dict[str, float]:
    """How long this rank took until now, or the process that imported for it, and its launcher before that."""
    own = process_age_s(importer or os.getpid())
    before = process_age_s(launcher) if launcher is not None else None
    if own is None:
        return {}
    return {"launcher": before - own, "imports": own} if before is not None else {"imports": own}


def _give_up(run: RunFolder, found: Diagnosis | None) -> None:
    """Of a rank that waits in torch and would not hear of an exception; the launcher, or their lost connections, end the others."""
    from paceline.launch.failure_cause import given_up  # with torch's agent, which a rank does not need

    if found is not None:
        print(f"paceline: {given_up(run, found, found.step)}", file=sys.stderr, flush=True)
        os._exit(2)


def is_of_lost_peer(error: Exception) -> bool:
    return isinstance(error, (RuntimeError, ConnectionError)) and bool(LOST_PEER.search(str(error)))


def _what_was_lost(run: RunFolder) -> str:
    """In the words of the doctor, where it was asked since the last start."""
    said = next(iter(events.last(run.events, Stalled, Started, until=(Stalled, Started))), None)
    return (
        f"lost another one: {said.message}"
        if isinstance(said, Stalled)
        else f"lost another one; where they were tells paceline doctor {run.path}"
    )


def _console(world: World) -> Console | None:
    """mpirun and srun may give a rank a terminal of its own, also where what it prints goes to a file."""
    return (
        None
        if world.launcher in (None, "torchrun")
        else Console(highlight=False, soft_wrap=True, force_terminal=False)
    )


def _last(happening: Iterator[Event]) -> Event | None:
    return next(iter(collections.deque(happening, maxlen=1)), None)


def _status(last: Event | None) -> int:
    return STOPPED if isinstance(last, Ended) and last.reason == "stopped" else 0


def _agree_on_folder(launch: Launch, spec: Spec, world: World) -> str:
    answer: list[str | None] = [None, None]
    if world.rank == 0:
        try:
            answer[0] = str(reserve(launch.run, spec.task))
        except RunError as error:
            answer[1] = str(error)
    if world.size > 1:
        dist.broadcast_object_list(answer, src=0)
    path, wrong = answer
    if path is None:
        raise RunError(wrong)
    return path


def _first_to_fail(world: World) -> bool:
    if world.size == 1:
        return True
    with contextlib.suppress(RuntimeError):  # the store is gone with the rank that held it, which has spoken
        return dist.distributed_c10d._get_default_store().add("paceline/failed", 1) == 1
    return False


def _recorded(
    spec: Spec,
    launch: Launch,
    world: World,
    run: RunFolder,
    interrupt: Interrupt,
    importer: int | None = None,
) -> Generator[Event]:
    """The events of the training, each written to the run before it is passed on; on all ranks, but rank 0 alone writes."""
    keep_freed_memory()
    writer: events.EventWriter | None = None
    step = 0

    def stop() -> bool:
        return interrupt.asked or interrupt.orphaned()

    with contextlib.ExitStack() as held:
        try:
            if run.path.exists() and world.rank == 0:
                held.enter_context(run.lock())
            if launch.ranks not in (None, world.size):
                from paceline.training.replan import replan

                launch = replan(spec, launch, launch.model_copy(update={"ranks": world.size}))
            plan: Plan | Literal["auto"] | None = None
            if launch.plan is not None:
                plan = AUTO if launch.plan == AUTO else parse(launch.plan)
            notes = (launch.chosen,) if launch.chosen is not None else ()
            begun = _begun_s(interrupt.launcher, importer) if not world.restart else _begun_s(None, None)
            for event in train(spec, plan, world, run=run, device=launch.device, stop=stop, notes=notes):
                if isinstance(event, Started):
                    event = replace(event, start_s={**begun, **event.start_s})
                if world.rank == 0:
                    if writer is None:
                        if isinstance(event, Started) and plan == AUTO:
                            launch = launch.model_copy(
                                update={"plan": event.plan, "asked": AUTO, "ranks": world.size}
                            )
                            if run.path.exists():
                                run.write_request(spec, launch)
                        run.accept_next_request()
                        if not run.path.exists():
                            create(run.path, spec, launch.model_copy(update={"ranks": world.size}))
                            held.enter_context(run.lock())
                        writer = held.enter_context(contextlib.closing(events.EventWriter(run.events)))
                    writer.write(event)
                if isinstance(event, (Started, Step, Ended)):
                    step = event.step
                yield event
        except Exception as error:  # the top of a rank: say why it ends, then let it end
            of_task = isinstance(error, (TaskError, DataError))
            told = (
                type(error)(f"rank {world.rank}: {error}") if of_task and world.rank else error
            )  # it may have failed here alone
            lost_peer = is_of_lost_peer(error) or isinstance(error, RankError)
            message = (
                str(told)
                if isinstance(error, Error)
                else f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            )
            if run.path.exists():
                meant = isinstance(error, Error)
                events.append(
                    run.events,
                    Failed(
                        what="run",
                        step=step,
                        rank=world.rank,
                        message=message,
                        lost_peer=lost_peer,
                        meant=meant,
                    ),
                )
            if told is error:
                raise
            raise told from error
