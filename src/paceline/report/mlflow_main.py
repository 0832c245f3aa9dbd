"""The process that sends a run to MLflow while it trains: python -P -m paceline.report.mlflow_main RUN PARENT

The process that shows the progress starts it (see `paceline.report.mlflow_process`). It ends after the end of
its standard input, when all was sent. It prints a sentence for each kind of failure, once.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path

from paceline.errors import Error
from paceline.monitor.sampler_main import die_with_parent
from paceline.report.mlflow_client import MlflowRun, describe
from paceline.run import RunFolder

EVERY_S = 2.0  # between two requests
RETRY_S = 10.0  # after a failure
NICENESS = 5


def main(words: list[str]) -> int:
    """Send until the standard input ends. words: folder of the run, process id of the parent."""
    run = RunFolder(Path(words[0]))
    die_with_parent(int(words[1]))
    # Slurm and terminals send these to all processes of a job. The run may save after them.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    uri = run.request()[1].mlflow
    if uri is None:
        return 0
    has_failed = False
    sender: MlflowRun | None = None
    while True:
        is_over = _wait_for_end(RETRY_S if has_failed else EVERY_S)
        try:
            if sender is None:
                new = MlflowRun(run, uri)
                new.begin()
                sender = new
            if is_over:
                sender.end()
            else:
                sender.send_new()
            has_failed = False
        except Exception as error:  # of any kind, of MLflow and the libraries below it
            if not has_failed:
                print(f"MLflow at {uri} failed: {describe(error)}", flush=True)
            has_failed = True
        if is_over:
            return 1 if has_failed else 0


def _wait_for_end(limit_s: float) -> bool:
    """Wait, and return whether the standard input has ended."""
    end = time.monotonic() + limit_s
    while (left_s := end - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0] and not os.read(sys.stdin.fileno(), 1):
            return True
    return False


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Error as error:
        print(error, flush=True)
        sys.exit(2)
