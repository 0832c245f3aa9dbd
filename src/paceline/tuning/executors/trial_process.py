"""The process of a trial, and the server from which such processes are forked.

The server has imported PyTorch once. A trial of one rank trains in the forked process itself, as `paceline
train` does. For several ranks, the forked process launches them, and first forks a copy of itself, still
without user code, that serves as the fork server of the ranks. So no trial imports PyTorch again.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from paceline.errors import Error
from paceline.launch.fork_server import Forked, RankForkServer, ServerProcess, make_sockets
from paceline.run import open_run

WORDS = ("-m", "paceline.tuning.executors.trial_process")
FAILED = 2
NICENESS = 19  # of predictions, which must not slow down trials
# What trials import while they train or end, such as for the first checkpoint.
IMPORTED_LATE = (
    "paceline.inspect.find",
    "paceline.inspect.read_facts",
    "paceline.inspect.report.write",
    "paceline.inspect.text",
    "paceline.launch.local",
    "paceline.launch.rank_main",
    "paceline.launch.supervise",
    "numpy.ma",
    "rich._emoji_codes",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.checkpoint.state_dict_saver",
)


def main() -> None:
    """Be what the first argument says.

    `server SOCKET`: fork processes that get the other arguments. `train RUN RANKS HOSTS CALLER`: be a
    trial; HOSTS are the names of its nodes, with commas, if Slurm starts its ranks on several.
    `predict SPEC LAUNCH RANKS CALLER`: predict one, and print its quantities as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the controller, which stops the trials
    if sys.argv[1:2] == ["server"]:
        _import_late_modules()
        from paceline.launch.fork_ranks import serve

        forked = serve(int(sys.argv[2]))
        if forked is None:
            return
        _, [request] = forked
        with os.fdopen(request, "rb") as file:
            words = json.loads(file.read())
        is_forked = True
    else:
        words, is_forked = sys.argv[1:], False
    caller = int(words[-1])
    if words[0] == "predict":
        status = _predict(words[1], words[2], int(words[3]), caller)
    else:
        status = _train(Path(words[1]), int(words[2]), words[3], caller, is_forked)
    sys.stdout.flush()
    sys.stderr.flush()
    # The end of the interpreter writes to most pages that the process shares with the server, which takes
    # longer than a short training. The training has closed its files and process groups.
    os._exit(status)


def _import_late_modules() -> None:
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    if importlib.util.find_spec("tensorboard") is not None:
        importlib.import_module("paceline.report.tensorboard.scalar_writer")


def _predict(spec: str, launch: str, ranks: int, caller: int) -> int:
    """Print what is predicted of a training and return the exit status.

    An error is the last line of the output.
    """
    os.nice(NICENESS)
    _follow_caller(caller)
    from paceline.spec import Launch, Spec
    from paceline.tuning.prediction.predict import predict_quantities

    try:
        quantities = predict_quantities(
            Spec.model_validate_json(spec), Launch.model_validate_json(launch), ranks
        )
    except Error as error:
        print(f"paceline: {error}", file=sys.stderr)
        return FAILED
    print(json.dumps(quantities), file=sys.stderr)
    return 0


def _train(run: Path, ranks: int, hosts: str, caller: int, is_forked: bool) -> int:
    """Train the request of a run and return the exit status. An error is the last line of the output."""
    from paceline.distributed.world import World
    from paceline.launch.launchers import is_rank

    _, launch = open_run(run).next_request()
    if hosts:
        return _launch_on_nodes(run, hosts, caller)
    if not is_rank(launch, World()):
        return _launch_with_fork(run, ranks, caller) if is_forked else _launch(run, ranks, caller, None)
    from paceline.inspect.conclude import conclude
    from paceline.launch.rank_main import run_alone

    _follow_caller(caller)
    folder = open_run(run)
    spec, launch = folder.next_request()
    try:
        # Nobody waits for findings here, and `paceline doctor` computes them when somebody does.
        return run_alone(spec, launch, World(), folder, conclude if launch.report else lambda run: ())
    except Error as error:
        print(f"paceline: {error}", file=sys.stderr)
    except Exception:  # the top of a rank: `run_alone` has written it to the events
        traceback.print_exc()
    return FAILED


def _launch_with_fork(run: Path, ranks: int, caller: int) -> int:
    """Fork the fork server of the ranks, then launch them. In a rank, return its exit status."""
    launcher = os.getpid()
    own, remote = make_sockets()
    pid = os.fork()
    if pid:
        remote.close()
        with contextlib.closing(RankForkServer(ServerProcess(own, Forked(pid)))) as server:
            return _launch(run, ranks, caller, server)
    own.close()
    os.setsid()
    from paceline.launch.fork_ranks import serve

    forked = serve(remote.detach())
    if forked is None:
        os._exit(0)
    importer, _ = forked
    from paceline.distributed.world import read_world
    from paceline.launch.rank_main import run_started

    run_started(open_run(run), read_world(), launcher, importer)
    return 0


def _launch(run: Path, ranks: int, caller: int, server: RankForkServer | None) -> int:
    """Launch the ranks of a run and return the exit status. An error is the last line of the output."""
    _follow_caller(caller)
    from paceline.launch import local

    try:
        return local.start(open_run(run), ranks, 0, early=server)
    except Error as error:
        print(f"paceline: {error}", file=sys.stderr)
        return FAILED


def _launch_on_nodes(run: Path, hosts: str, caller: int) -> int:
    """Launch the ranks of a run with srun and return the exit status.

    An error is the last line of the output.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # srun passes it on; the agent ignores it
    _follow_caller(caller)
    from paceline.launch.slurm import srun

    folder = open_run(run)
    try:
        return srun.start(folder, folder.next_request()[1], hosts)
    except Error as error:
        print(f"paceline: {error}", file=sys.stderr)
        return FAILED


def _follow_caller(caller: int) -> None:
    """Send the output to the log, and stop the training when the controller is gone."""
    os.dup2(2, 1)
    threading.Thread(target=_stop_without, args=(caller,), daemon=True).start()


def _stop_without(caller: int) -> None:
    while os.getppid() == caller:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from paceline.tuning.executors import trial_process

    trial_process.main()
