"""Ctrl-C in a cell of a notebook that waits for ranks: they end, and the next cell works."""

import contextlib

import psutil
import pytest

from command import clean_environment
from slurm import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CELLS = (
    "import paceline, time, torch\n"
    "import torch.distributed as dist\n"
    "class Net(paceline.Task):\n"
    "    def model(self): return torch.nn.Linear(2, 1)\n"
    "    def dataset(self, split): return torch.ones(64, 2) if split == 'train' else None\n"
    "    def loss(self, output, batch): return output.square().mean(1)\n"
    "def wait(): print('begun', flush=True); time.sleep(1000)\n"
    "def total(): x = torch.ones(1); dist.all_reduce(x); return x.item()\n"
)
TRAIN = (
    "for event in paceline.train(paceline.Spec(steps=10**7, batch=8), task=Net, ranks=2):\n"
    "    if isinstance(event, paceline.Step) and event.step == 1: print('begun')\n"
)


@contextlib.contextmanager
def start_kernel(folder):
    manager_module = pytest.importorskip("jupyter_client.manager")
    manager, client = manager_module.start_new_kernel(
        startup_timeout=120, cwd=str(folder), env=clean_environment(OMP_NUM_THREADS="1")
    )
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_cell(manager, client, code):
    """Run a cell, and interrupt it when it prints `begun`. Return its output without colours."""
    request, output, is_interrupted = client.execute(code), [], False
    while True:
        message = client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        output += [content.get("text", ""), *content.get("traceback", [])]
        output.append(content.get("data", {}).get("text/plain", ""))
        if "begun" in "".join(output) and not is_interrupted:
            is_interrupted = True
            manager.interrupt_kernel()
        if content.get("execution_state") == "idle":
            return "\n".join(filter(None, output))


def find_ranks(manager):
    """Return the processes of the kernel, except for that from which ranks are forked."""
    processes = psutil.Process(manager.provisioner.pid).children(recursive=True)
    return [process for process in processes if process.parent().pid != manager.provisioner.pid]


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_cell_ends_its_ranks(tmp_path):
    with start_kernel(tmp_path) as (manager, client):
        assert run_cell(manager, client, CELLS) == ""
        for code in (TRAIN, "paceline.spawn(wait, 2)"):
            output = run_cell(manager, client, code)
            assert (
                output.replace("begun\n", "").strip()
                == "KeyboardInterrupt: interrupted: the ranks have ended"
            )
            wait_until(lambda: not find_ranks(manager), "the ranks ended", tmp_path)
            assert run_cell(manager, client, "paceline.spawn(total, 2)") == "[2.0, 2.0]"
        # Negative control: other exceptions keep their traceback.
        assert "line 1" in run_cell(manager, client, "paceline.spawn(wait, 0)")
