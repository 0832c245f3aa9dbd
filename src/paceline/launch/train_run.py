"""`paceline.train`: trains in this process, or starts ranks on this machine and yields their events."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from pydantic import ValidationError

from paceline import errors, events
from paceline import task as tasks
from paceline.cluster.precision import AUTO, choose_precision
from paceline.distributed.world import World, read_world
from paceline.doctor.rank_state import read_heartbeats
from paceline.errors import Error, LaunchError, RankError, RunError, SpecError, TaskError
from paceline.events import Event, Failed, Noted, Started, Step
from paceline.files import reason
from paceline.launch.interrupt import shorten_interrupt
from paceline.launch.sent_task import send_task
from paceline.launch.spawn import Child
from paceline.plan.plan import Plan
from paceline.run import RunFolder, create, open_run
from paceline.spec import KEYS, Launch, Spec, describe_error
from paceline.task import Task
from paceline.training.node_sampler import NodeSampler, check_monitor

if TYPE_CHECKING:
    from torch import nn

# In a private folder: the task, if it is sent; the class and message of the error that ended the training.
TASK_FILE, ERROR_FILE = "task.pickle", "error.json"
POLL_S = 0.05


def train(
    spec: Spec,
    plan: Plan | str | None = None,
    world: World | None = None,
    *,
    ranks: int | None = None,
    task: Task | type[Task] | None = None,
    run: RunFolder | Path | str | None = None,
    device: str | None = None,
    restarts: int = 0,
    stop: Callable[[], bool] | None = None,
    observe: Callable[[nn.Module, str, int], None] | None = None,
    monitor: float | Literal["off"] = 1.0,
) -> Generator[Event]:
    """Train as `spec` and `plan` say, and yield an event for each thing that happens.

        for event in paceline.train(spec, ranks=4, plan="zero3"):
            if isinstance(event, paceline.Step):
                print(event.step, event.loss)

    With `ranks`, that many processes are started on this machine, also from a notebook. They end when the
    loop ends for any reason, or this process does. Without `ranks`, this process trains: alone, or under
    torchrun, mpirun or srun as one of the ranks, which must all iterate in step.

    spec: what to train.
    plan: a Plan, or its text on the command line, such as "zero3" [default: single on one rank, ddp on
    several]; "auto": the plan that is predicted to be the fastest that fits.
    world: which rank this process is [default: read from the environment].
    ranks: number of processes to start [default: none].
    task: an instance or a class, instead of the task that `spec` names. It may be defined in a script or in a
    notebook. `spec.set` has the fields of a class.
    run: where checkpoints are saved. If it has checkpoints, training resumes from the last complete one
    [default: nothing is saved]. With `ranks`, it becomes a run folder like that of `paceline train`.
    device: "cpu" or "cuda" [default: cuda if it is available].
    restarts: with `ranks`: how often all ranks are restarted after one of them failed.
    stop: called at each step. If it returns True on any rank, all ranks save and end. With `ranks`, it is
    called in this process for each step that it receives, while the ranks continue.
    observe: called on every rank with the distributed model, and with ("gradients", step) before or
    ("weights", step) after each update; not with `ranks`.
    monitor: with `run`: seconds between samples of processors, memory and GPUs of each node, or "off".

    Raises SpecError, PlanError, DataError, TaskError and CheckpointError before the first step, DivergedError
    if the loss is not finite, CheckpointError at the end if the last checkpoint could not be written,
    LaunchError if `ranks` contradicts the launcher of this process, and RankError if a rank failed.
    """
    tasks.check_not_importing("paceline.train")
    if run is not None and not isinstance(run, (RunFolder, Path, str)):
        raise RunError(f"run must be a path or a RunFolder, got {type(run).__name__}")
    monitor = check_monitor(monitor)
    world = world if world is not None else read_world()
    if spec.precision == AUTO:
        spec = spec.model_copy(update={"precision": choose_precision(device).precision})
    if ranks is not None and world.launcher is None and world.size == 1:
        if observe is not None:
            raise LaunchError(
                f"observe is called on the ranks, which are other processes with ranks={ranks}; leave out "
                "one of them, or start this script with torchrun"
            )
        with shorten_interrupt():
            yield from _train_on_ranks(spec, plan, ranks, task, run, device, restarts, stop, monitor)
        return
    _check_own_world(world, ranks, restarts)
    from paceline.training.train import train as train_rank

    if task is not None:
        task = _build_task(spec, task)
    folder = RunFolder(Path(run)) if isinstance(run, (str, Path)) else run
    training = train_rank(spec, plan, world, task=task, run=folder, device=device, stop=stop, observe=observe)
    if folder is not None:
        _create_folder(folder)
    yield from training if folder is None else _sample_node(training, folder, monitor, world)


def _create_folder(run: RunFolder) -> None:
    """Create the folder for checkpoints, heartbeats and samples. Raises RunError."""
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot create {run.path}: {reason(error)}") from error


def _sample_node(
    training: Generator[Event], run: RunFolder, every_s: float | Literal["off"], world: World
) -> Generator[Event]:
    """Yield the events of a training while this node is sampled, and notes about the sampler."""
    sampler, step = NodeSampler(run, every_s, world), 0
    with contextlib.closing(training), contextlib.ExitStack() as at_end:
        at_end.callback(sampler.stop)
        for event in training:
            if isinstance(event, (Started, Step)):
                step = event.step
            yield event
            yield from (Noted(step=step, message=note) for note in sampler.check())


def _check_own_world(world: World, ranks: int | None, restarts: int) -> None:
    """Raise LaunchError for arguments that apply only to ranks that this process starts."""
    if ranks is not None and ranks != world.size:
        raise LaunchError(
            f"ranks={ranks}, but {world.launcher or 'world'} has {world.size} ranks, and this process is one "
            f"of them; leave ranks out, or use ranks={world.size}"
        )
    if restarts:
        who = f"{world.launcher} starts" if world.launcher is not None else "this process does not start"
        raise LaunchError(f"restarts={restarts} requires ranks that paceline starts, but {who} the ranks")


def _build_task(spec: Spec, task: Task | type[Task]) -> Task:
    """Return an instance with the fields of `spec.set`, if `task` is a class. Raises TaskError."""
    if isinstance(task, Task):
        return task
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise TaskError(f"task must be a paceline.Task or a subclass, got {task!r:.80}")
    tasks.check_task_class(task, task.__name__)
    return tasks.build_task(task, task.__name__, spec.set)


def _train_on_ranks(
    spec: Spec,
    plan: Plan | str | None,
    ranks: int,
    task: Task | type[Task] | None,
    run: RunFolder | Path | str | None,
    device: str | None,
    restarts: int,
    stop: Callable[[], bool] | None,
    monitor: float | Literal["off"],
) -> Generator[Event]:
    """Start ranks on this machine, and yield their events. The parameters are those of `train`."""
    from paceline.launch.check_launch import check_launch

    if plan is not None and not isinstance(plan, (Plan, str)):
        raise errors.PlanError(
            f"plan must be a Plan or its words, such as 'zero3', got {type(plan).__name__}"
        )
    try:
        launch = Launch.model_validate(
            {
                "plan": str(plan) if plan is not None else None,
                "ranks": ranks,
                "launcher": "local",
                "device": device,
                "restarts": restarts,
                "monitor": monitor,
            }
        )
    except ValidationError as error:
        raise SpecError(describe_error(error, KEYS)) from error
    spec, sent = _resolve_task(spec, task, run is not None)
    launch = check_launch(spec, launch, World(), sent)
    with _private_folder() as private:
        if sent is not None:
            send_task(sent, spec.task, private / TASK_FILE)
        with _open_folder(run, private, spec, launch) as folder:
            begin = events.end(folder.events)
            launcher = _start_launcher(folder, private)
            try:
                yield from _follow(folder, launcher, begin, stop)
            finally:
                _end(launcher, folder)
            _raise_error(folder, private, launcher.poll())


def _resolve_task(spec: Spec, task: Task | type[Task] | None, is_kept: bool) -> tuple[Spec, Task | None]:
    """Return a spec that names the task, and the task if it must be sent to the ranks.

    is_kept: whether the spec is stored in a run folder, so that it must have all fields of the task.
    """
    if task is None:
        named = tasks.load_task(spec.task, spec.set)
        if type(named).__module__ != "__main__":
            return spec.model_copy(update={"task": tasks.resolve_reference(spec.task)}), None
        return spec.model_copy(update={"task": tasks.portable_reference_to(named)}), named
    task = _build_task(spec, task)
    tasks.check_task_class(type(task), type(task).__name__)
    fields = tasks.storable_fields(task)
    if fields is None and is_kept:
        raise TaskError(
            f"the fields of task {type(task).__name__} cannot be stored in spec.toml of the run folder; give "
            "them values that TOML has (numbers, texts, lists, tables), or leave out run="
        )
    update = {"task": tasks.portable_reference_to(task), "set": fields or {}}
    return spec.model_copy(update=update), task


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """Yield a folder that only this user can open, and delete it."""
    private = Path(tempfile.mkdtemp(prefix="paceline-"))
    try:
        yield private
    finally:
        shutil.rmtree(private, ignore_errors=True)


@contextlib.contextmanager
def _open_folder(
    run: RunFolder | Path | str | None, private: Path, spec: Spec, launch: Launch
) -> Iterator[RunFolder]:
    """Yield the folder of the run with its request, which is created if necessary. Raises RunError.

    If the training fails before its first event, a new folder is deleted, and another keeps its request.
    """
    if run is None:
        folder = create(private / "run", spec, launch)
        folder.temporary.touch()
        yield folder
        return
    path = run.path if isinstance(run, RunFolder) else Path(run)
    is_new = not (path / "spec.toml").exists()
    if is_new:
        folder = create(path, spec, launch)
    else:
        folder = open_run(path)
        folder.lock().close()  # raises if another process trains this run
        folder.write_next_request(spec, launch)
    try:
        yield folder
    except Error:
        if is_new and not events.last(folder.events, Started):
            folder.delete()
        raise
    finally:
        folder.next_spec.unlink(missing_ok=True)


def _start_launcher(run: RunFolder, private: Path) -> Child:
    """Start the process that starts and supervises the ranks, as the command line does."""
    words = ["launcher", str(run.path.absolute()), str(os.getpid()), str(private)]
    # so that the ranks find the modules that this process finds
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return _start_command(words, environ)


def _start_command(words: Sequence[str], environ: Mapping[str, str]) -> Child:
    return subprocess.Popen(
        [sys.executable, "-m", "paceline", *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C reaches this process only, which stops the ranks
    )


def _follow(run: RunFolder, launcher: Child, begin: int, stop: Callable[[], bool] | None) -> Iterator[Event]:
    """Yield the events of a training until its launcher ends."""
    is_stopping = False
    for event in events.follow(run.events, lambda: launcher.poll() is not None, begin, POLL_S):
        if isinstance(event, Failed) and event.what == "run":
            continue  # the error that is raised at the end reports the rank that was the cause
        yield event
        if stop is not None and not is_stopping and isinstance(event, Step) and stop():
            is_stopping = True
            _ask_to_stop(run, launcher)


def _ask_to_stop(run: RunFolder, launcher: Child) -> None:
    """Ask one rank to stop, which makes all ranks save and end. There is no time limit for the save."""
    ranks = {beat.pid for beat in read_heartbeats(run) if beat is not None}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher.pid).children():
            if child.pid in ranks:
                child.send_signal(signal.SIGTERM)


def _end(launcher: Child, run: RunFolder) -> None:
    """End the training if it still runs. If checkpoints are kept, the ranks save first."""
    try:
        if not run.is_temporary:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()
    finally:  # also after a second Ctrl-C
        _kill(launcher)


def _kill(launcher: Child) -> None:
    if launcher.poll() is not None:
        return
    descendants = psutil.Process(launcher.pid).children(recursive=True)
    launcher.send_signal(signal.SIGKILL)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    launcher.wait()


def _raise_error(run: RunFolder, private: Path, status: int | None) -> None:
    """Raise the error that ended the training, if there was one."""
    from paceline.launch.signals import STOPPED

    file = private / ERROR_FILE
    if file.exists():
        name, message = json.loads(file.read_text())
        kind = getattr(errors, name, Error)
        raise kind(message)
    if status not in (0, STOPPED):
        how = (
            f"was killed by {signal.Signals(-status).name}"
            if status is not None and status < 0
            else f"ended with exit status {status}"
        )
        raise RankError(f"the launcher of the ranks {how}; {run.hint()}")
