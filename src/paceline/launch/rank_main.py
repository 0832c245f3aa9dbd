"""The main function of a rank: train, write the events, and report why it fails."""

import collections
import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
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
from paceline.events import Ended, Event, Failed, Noted, Stalled, Started, Step
from paceline.inspect.conclude import conclude
from paceline.launch.signals import STOPPED, Interrupt
from paceline.plan.plan import AUTO, Plan, parse
from paceline.report.progress import watch
from paceline.run import RunFolder, create, release, reserve
from paceline.spec import Launch, Spec
from paceline.training.node_sampler import NodeSampler
from paceline.training.train import train
from paceline.user_code import LOST_PEER


def run_started(
    run: RunFolder,
    world: World,
    launcher: int,
    importer: int | None = None,
    task_file: Path | None = None,
) -> None:
    """Train as a rank of Paceline's launcher, which has created the run folder and shows the progress.

    launcher: the process id of the launcher.
    importer: the process id of the fork server that imported the modules, if the rank was forked.
    task_file: a task that another process sent.
    """
    os.dup2(2, 1)  # one log per rank
    faulthandler.enable()  # a crash in compiled code prints where it happened
    spec, launch = run.next_request()  # it may be for more ranks, if nodes were lost
    started = threading.Event()
    with (
        Interrupt(launcher, is_child=not launch.nsys) as interrupt,
        contextlib.closing(
            _train_recorded(spec, launch, world, run, interrupt, importer, task_file)
        ) as training_events,
    ):
        threading.Thread(target=_exit_if_orphaned, args=(interrupt, started), daemon=True).start()
        for _ in training_events:
            started.set()
        run.unfinished(world.rank).unlink(missing_ok=True)


def _exit_if_orphaned(interrupt: Interrupt, started: threading.Event) -> None:
    """End this rank if its launcher is killed before the training loop starts, which checks it from then on.

    The store by which the ranks connect ends with the launcher, and the ranks would wait for it.
    """
    while not started.wait(0.5):
        if interrupt.is_orphaned():
            os._exit(1)


def run_alone(
    spec: Spec,
    launch: Launch,
    world: World,
    run: RunFolder | None,
    conclude: Callable[[RunFolder], Sequence[str]] = conclude,
) -> int:
    """Train as a rank of a foreign launcher, or as the only rank, and return the exit status.

    Rank 0 shows the progress.
    run: the run to continue. None: a new run.
    conclude: returns lines that are shown at the end.
    """
    with (
        Interrupt() as interrupt,
        process_group(
            world,
            choose_device(world, launch.device),
            spec.timeout_s,
            run.path if run is not None else Path("runs"),
            len(spec.trace_steps),
        ),
    ):
        try:
            if run is None:
                run = RunFolder(Path(_agree_on_folder(launch, spec, world)))
            with contextlib.closing(_train_recorded(spec, launch, world, run, interrupt)) as training_events:
                if world.rank:
                    return _exit_status(_consume(training_events))
                watchdog = HangWatchdog(run, on_hang=lambda ranks: _exit_on_hang(run, watchdog.diagnosis))
                with watchdog:
                    return _exit_status(watch(training_events, run, _build_console(world), conclude))
        except (Error, RuntimeError, ConnectionError) as error:
            if not isinstance(error, Error) and not is_of_lost_peer(error):
                raise
            # of all failing ranks only the first prints its error
            if not _claim_first_failure(world):
                sys.exit(2)
            if isinstance(error, Error) or run is None:
                raise
            raise RankError(f"rank {world.rank} {_describe_lost_peer(run)}; {run.hint()}") from error
        finally:
            if run is not None and world.rank == 0:
                release(run.path)


def _measure_start(launcher: int | None, importer: int | None) -> dict[str, float]:
    """Return the seconds since this rank or its fork server started, and of the launcher before."""
    imports_s = process_age_s(importer or os.getpid())
    launcher_s = process_age_s(launcher) if launcher is not None else None
    if imports_s is None:
        return {}
    before = {"launcher": launcher_s - imports_s} if launcher_s is not None else {}
    return {**before, "imports": imports_s}


def _exit_on_hang(run: RunFolder, diagnosis: Diagnosis | None) -> None:
    """End this process, which waits in torch where no exception reaches it.

    The launcher, or their lost connections, end the other ranks.
    """
    from paceline.launch.failure_cause import record_hang  # imports torch's agent, which ranks do not need

    if diagnosis is not None:
        print(f"paceline: {record_hang(run, diagnosis, diagnosis.step)}", file=sys.stderr, flush=True)
        for line in conclude(run):
            print(line, file=sys.stderr, flush=True)
        os._exit(2)


def is_of_lost_peer(error: Exception) -> bool:
    """Return whether an error says that the connection to another rank was lost."""
    return isinstance(error, (RuntimeError, ConnectionError)) and bool(LOST_PEER.search(str(error)))


def _describe_lost_peer(run: RunFolder) -> str:
    """Return the diagnosis of the watchdog, if there is one since the last start."""
    stalled = next(iter(events.last(run.events, Stalled, Started, until=(Stalled, Started))), None)
    return (
        f"lost the connection to another rank: {stalled.message}"
        if isinstance(stalled, Stalled)
        else f"lost the connection to another rank; for the state of all ranks see paceline doctor {run.path}"
    )


def _build_console(world: World) -> Console | None:
    """Return a console without a terminal for mpirun and srun, which give ranks one even for a file."""
    return (
        None
        if world.launcher in (None, "torchrun")
        else Console(highlight=False, soft_wrap=True, force_terminal=False)
    )


def _consume(training_events: Iterator[Event]) -> Event | None:
    """Run the training to its end and return the last event."""
    return next(iter(collections.deque(training_events, maxlen=1)), None)


def _exit_status(last: Event | None) -> int:
    return STOPPED if isinstance(last, Ended) and last.reason == "stopped" else 0


def _agree_on_folder(launch: Launch, spec: Spec, world: World) -> str:
    """Return the run folder that rank 0 reserves. Raises RunError on all ranks if it cannot."""
    answer: list[str | None] = [None, None]
    if world.rank == 0:
        try:
            answer[0] = str(reserve(launch.run, spec.task))
        except RunError as error:
            answer[1] = str(error)
    if world.size > 1:
        dist.broadcast_object_list(answer, src=0)
    path, error_message = answer
    if path is None:
        raise RunError(error_message)
    return path


def _claim_first_failure(world: World) -> bool:
    """Return whether this rank is the first to fail."""
    if world.size == 1:
        return True
    with contextlib.suppress(RuntimeError):  # the store ended with its rank, which has printed its error
        return dist.distributed_c10d._get_default_store().add("paceline/failed", 1) == 1
    return False


def _train_recorded(
    spec: Spec,
    launch: Launch,
    world: World,
    run: RunFolder,
    interrupt: Interrupt,
    importer: int | None = None,
    task_file: Path | None = None,
) -> Generator[Event]:
    """Train and yield the events. Rank 0 writes each event to the run folder before it is yielded."""
    keep_freed_memory()
    writer: events.EventWriter | None = None
    step, is_reported = 0, False

    def stop() -> bool:
        return interrupt.is_requested or interrupt.is_orphaned()

    def report(error: Exception) -> None:
        """Write the first error to the events."""
        nonlocal is_reported
        if run.path.exists() and not is_reported:
            events.append(run.events, _describe_failure(error, step, world))
        is_reported = True

    with contextlib.ExitStack() as at_exit:
        try:
            if run.path.exists() and world.rank == 0:
                at_exit.enter_context(run.lock())
            if task_file is not None:
                from paceline.launch.sent_task import receive_task

                receive_task(task_file)
            if launch.ranks not in (None, world.size):
                from paceline.training.planning.replan import replan

                launch = replan(spec, launch, launch.model_copy(update={"ranks": world.size}))
            plan: Plan | Literal["auto"] | None = None
            if launch.plan is not None:
                plan = AUTO if launch.plan == AUTO else parse(launch.plan)
            notes = (launch.chosen,) if launch.chosen is not None else ()
            start_s = _measure_start(interrupt.launcher, importer)
            elapsed_s = sum(start_s.values())  # since the command: max_time includes what a restart repeats
            start_s = _measure_start(None, None) if world.restart else start_s
            sampler = NodeSampler(run, launch.monitor, world)
            at_exit.callback(sampler.stop)
            for event in train(
                spec,
                plan,
                world,
                run=run,
                device=launch.device,
                stop=stop,
                notes=notes,
                elapsed_s=elapsed_s,
                saves=not run.is_temporary,
                # The other ranks fail when this rank disconnects; the launcher then kills what still runs.
                on_error=report,
            ):
                if isinstance(event, Started):
                    event = replace(event, start_s={**start_s, **event.start_s})
                if world.rank == 0:
                    if writer is None:
                        writer = _begin_recording(run, spec, launch, event, world.size, at_exit)
                    writer.write(event)
                if isinstance(event, (Started, Step, Ended)):
                    step = event.step
                yield event
                for note in sampler.check():
                    noted = Noted(step=step, message=note)
                    if writer is not None:
                        writer.write(noted)
                        yield noted
                    else:
                        events.append(run.events, noted)
        except Exception as error:  # the top of a rank: report the error, then raise it
            report(error)
            reported = _name_rank(error, world)
            if reported is error:
                raise
            raise reported from error


def _begin_recording(
    run: RunFolder, spec: Spec, launch: Launch, first: Event, ranks: int, at_exit: contextlib.ExitStack
) -> events.EventWriter:
    """Return the writer of the events. Creates and locks the run folder if it is new.

    first: the first event of the training.
    """
    if isinstance(first, Started) and launch.plan == AUTO:
        launch = launch.model_copy(update={"plan": first.plan, "asked": AUTO, "ranks": ranks})
        if run.path.exists():
            run.write_request(spec, launch)
    run.accept_next_request()
    if not run.path.exists():
        create(run.path, spec, launch.model_copy(update={"ranks": ranks}))
        at_exit.enter_context(run.lock())
    return at_exit.enter_context(contextlib.closing(events.EventWriter(run.events)))


def _name_rank(error: Exception, world: World) -> Exception:
    """Return the error with the rank in its message, if the task raised it."""
    is_of_task = isinstance(error, (TaskError, DataError))  # code of a task may fail on this rank only
    return type(error)(f"rank {world.rank}: {error}") if is_of_task and world.rank else error


def _describe_failure(error: Exception, step: int, world: World) -> Failed:
    """Return the event of the error that ends this rank."""
    meant = isinstance(error, Error)
    return Failed(
        what="run",
        step=step,
        rank=world.rank,
        message=(
            str(_name_rank(error, world))
            if meant
            else f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        ),
        lost_peer=is_of_lost_peer(error) or isinstance(error, RankError),
        meant=meant,
        error=type(error).__name__,
    )
