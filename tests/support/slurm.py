"""A real Slurm of two nodes on this machine, each with its host name. It changes nothing outside its folder.

with cluster(folder) as slurm: slurm.run("squeue")   -> output of a Slurm command
"""

import contextlib
import os
import platform
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from command import (
    clean_environment,
)

NODES = ("n1", "n2")
CPUS = 4
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "setpriv", "unshare")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd-%n.log
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MinJobAge=3600
JobRequeue=1
RebootProgram=/bin/true
NodeName=n1 NodeAddr=127.0.77.1 Port={ports[1]} CPUs={cpus} RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeAddr=127.0.77.2 Port={ports[2]} CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=n[1-2] MaxTime=30 State=UP
PartitionName=closed Nodes=n[1-2] AllowAccounts=physics State=UP
"""
# With a database of accounts and qualities of service (QOS), which Slurm then enforces.
ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={at}/munge.socket
AccountingStorageEnforce=associations,limits,qos
"""
DATABASE = """
AuthType=auth/munge
AuthInfo=socket={at}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={at}/slurmdbd.log
PidFile={at}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""
# cred_expire: a requeued job waits for this time. The default, also for values below 5, is 121 s.


def find_missing_requirement() -> str | None:
    """Return why this machine cannot start the cluster, or None if it can."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]:
        return f"needs {', '.join(missing)}: apt-get install slurm-wlm munge"
    result = subprocess.run(
        ["unshare", "-u", "-m", "hostname", "n1"], capture_output=True, text=True, timeout=20
    )
    return f"needs namespaces ({result.stderr.strip()})" if result.returncode else None


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    configuration: Path
    running: contextlib.ExitStack  # ends the daemons

    @property
    def env(self) -> dict[str, str]:
        """Variables with which a command finds the cluster."""
        return {"SLURM_CONF": str(self.configuration), "PATH": PATH}

    def run(self, *words: str) -> str:
        """Return the output of a command of Slurm, which must succeed."""
        done = subprocess.run(
            words, capture_output=True, text=True, env=clean_environment(**self.env), timeout=30
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def power_off(self, node: str) -> None:
        """Kill all processes of a node without notice, as a loss of power does."""
        [namespace] = {
            os.readlink(f"/proc/{process.pid}/ns/uts")
            for process in psutil.process_iter()
            if self._is_slurmd(process, node)
        }
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.readlink(f"/proc/{process.pid}/ns/uts") == namespace:
                    process.kill()

    def _is_slurmd(self, process: psutil.Process, node: str) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            return process.cmdline() == ["slurmd", "-D", "-N", node] and process.environ().get(
                "SLURM_CONF"
            ) == str(self.configuration)
        return False

    def restore(self, node: str) -> None:
        """Start a node again after `power_off`."""
        _start_node(self.running, self, node)
        deadline = time.monotonic() + 60
        while "down" in self.run("sinfo", "-h", "-N", "-n", node, "-o", "%T"):
            assert time.monotonic() < deadline, f"{node} does not come back"
            time.sleep(0.1)

    def state(self, job: str) -> str:
        """Return the state of a job."""
        return next(
            word.partition("=")[2]
            for word in self.run("scontrol", "show", "job", "-o", job).split()
            if word.startswith("JobState=")
        )

    def wait_for_state(self, job: str, *states: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            has_failed = (
                state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
                or time.monotonic() > deadline
            )
            assert not has_failed, f"job {job} is {state}, not {states}"
            time.sleep(0.1)


def find_missing_accounting() -> str | None:
    """Return why this machine cannot start a cluster with accounting, or None if it can."""
    if shutil.which("slurmdbd", path=PATH) and shutil.which("mariadbd", path=PATH):
        return None
    return "needs slurmdbd, mariadbd: apt-get install slurmdbd slurm-wlm-mysql-plugin mariadb-server-core"


@contextlib.contextmanager
def start_cluster(at: Path, has_accounting: bool = False) -> Iterator[Slurm]:
    """Start a cluster and wait until it is ready. At the end of the context, end its jobs and daemons."""
    _write_configuration(at)
    with contextlib.ExitStack() as running:
        slurm = Slurm(at / "slurm.conf", running)
        munge = [
            "munged",
            "--foreground",
            "--force",
            f"--socket={at}/munge.socket",
            f"--key-file={at}/key",
            f"--pid-file={at}/munged.pid",
        ]
        _start_daemon(
            running, slurm, [*munge, f"--log-file={at}/munged.log", f"--seed-file={at}/munged.seed"]
        )
        if has_accounting:
            _start_accounting(running, slurm)
        _start_daemon(running, slurm, ["slurmctld", "-D", "-i"])
        for node in NODES:
            _start_node(running, slurm, node)
        running.callback(_cancel_all, slurm)
        _wait_until_ready(slurm)
        yield slurm


def _write_configuration(at: Path) -> None:
    at.chmod(0o755)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (at / name).mkdir()
    (at / "key").write_bytes(secrets.token_bytes(128))
    (at / "key").chmod(0o600)
    host = platform.node().partition(".")[0]
    (at / "slurm.conf").write_text(CONFIGURATION.format(host=host, at=at, ports=_free_ports(3), cpus=CPUS))
    (at / "hosts").write_text(f"127.0.0.1 localhost {host}\n127.0.77.1 n1\n127.0.77.2 n2\n")
    (at / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")


def _start_accounting(running: contextlib.ExitStack, slurm: Slurm) -> None:
    """Start a database and Slurm's access to it, and let the cluster use them."""
    at, (port, sql_port) = slurm.configuration.parent, _free_ports(2)
    env, password, data = clean_environment(PATH=PATH), secrets.token_hex(16), at / "database"
    data.mkdir()
    tables = [
        Path("/usr/share/mysql", name).read_text()
        for name in ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
    ]
    bootstrap = ["mariadbd", "--no-defaults", "--bootstrap", f"--datadir={data}", "--user=root"]
    sql = "\n".join(["create database mysql;", "use mysql;", *tables])
    subprocess.run(bootstrap, env=env, check=True, capture_output=True, timeout=120, input=sql, text=True)
    grants = at / "grants.sql"
    grants.write_text(
        f"CREATE USER slurm@'127.0.0.1' IDENTIFIED BY '{password}';\n"  # a statement per line
        "GRANT ALL ON slurm.* TO slurm@'127.0.0.1';\n"
    )
    database = ["mariadbd", "--no-defaults", f"--datadir={data}", "--user=root", f"--init-file={grants}"]
    listening = [
        "--bind-address=127.0.0.1",
        f"--port={sql_port}",
        f"--socket={at}/sql",
        "--skip-name-resolve",
    ]
    _start_daemon(running, slurm, [*database, *listening])
    _wait_for_port(sql_port, slurm)
    configuration = at / "slurmdbd.conf"
    configuration.touch(mode=0o600)
    configuration.write_text(DATABASE.format(at=at, port=port, sql_port=sql_port, password=password))
    with slurm.configuration.open("a") as file:
        file.write(ACCOUNTING.format(at=at, port=port))
    slurm.configuration.write_text(
        slurm.configuration.read_text().replace("AccountingStorageType=accounting_storage/none\n", "")
    )
    _start_daemon(running, slurm, ["slurmdbd", "-D"])
    _wait_for_port(port, slurm)
    slurm.run("sacctmgr", "-i", "add", "cluster", "tests")


def _wait_for_port(port: int, slurm: Slurm) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if time.monotonic() > deadline:
            log = slurm.configuration.with_name("daemons.log").read_text()
            raise AssertionError(f"nothing listens on port {port}:\n{log[-4000:]}")
        time.sleep(0.1)


def _start_node(running: contextlib.ExitStack, slurm: Slurm, node: str) -> None:
    # The node has a separate /etc/hosts, because torch's store waits minutes for a slow name server.
    at = slurm.configuration.parent
    mounts = " && ".join(f"mount --bind {at}/{name} /etc/{name}" for name in ("hosts", "nsswitch.conf"))
    inside = f"hostname {node} && {mounts} && exec slurmd -D -N {node}"
    _start_daemon(running, slurm, ["unshare", "-u", "-m", "--propagation", "private", "sh", "-c", inside])


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(count)]


def _start_daemon(running: contextlib.ExitStack, slurm: Slurm, words: list[str]) -> None:
    output = running.enter_context(open(slurm.configuration.with_name("daemons.log"), "a"))  # noqa: SIM115 (closed with the context)
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", *words],  # ends even if the tests are killed
        env=clean_environment(**slurm.env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    running.callback(_end, process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cancel_all(slurm: Slurm) -> None:
    deadline = time.monotonic() + 15
    while slurm.run("squeue", "-h", "-o", "%i") and time.monotonic() < deadline:
        slurm.run("scancel", "--state=RUNNING", "--signal=KILL", "--full")
        slurm.run("scancel", "--user=root")
        time.sleep(0.2)


def _wait_until_ready(slurm: Slurm) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(AssertionError):
            if slurm.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%T").split() == ["idle"] * len(NODES):
                return
        if time.monotonic() > deadline:
            log = slurm.configuration.with_name("daemons.log").read_text()
            raise AssertionError(f"Slurm did not start:\n{log[-4000:]}")
        time.sleep(0.1)


def wait_until(holds, what: str, run: Path, timeout_s: float = 300.0) -> None:
    """Wait until `holds()` is true. The error shows `what` and the output of the jobs of `run`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        logs = "\n".join(path.read_text() for path in run.glob("slurm-*.out"))
        assert time.monotonic() < deadline, f"not {what} in {timeout_s:.0f} s\n{logs}"
        time.sleep(0.05)
