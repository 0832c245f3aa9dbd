"""Tests of World with recorded environments of launchers, shortened to the variables about ranks."""

import pytest

from paceline.distributed.hostlist import expand_hosts
from paceline.distributed.world import World, expand_task_counts, read_world
from paceline.errors import LaunchError

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "3",
    "ROLE_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPENMPI = {  # mpirun of Open MPI 4.1
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "2",
    "OMPI_MCA_ess_base_jobid": "1790902273",
    "PMIX_NAMESPACE": "1790902273",
    "PMIX_RANK": "1",
    "PMIX_ID": "1790902273.1",
}
MPICH = {  # mpiexec.hydra of MPICH 4.0.2; PMI_FD differs between ranks, and no variable identifies the start
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
    "MPIR_CVAR_CH3_INTERFACE_HOSTNAME": "vm",
}
ALLOCATION = {  # of 2 nodes with 2 tasks each
    "SLURM_JOB_ID": "42",
    "SLURM_JOBID": "42",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[0-1]",
}
BATCH_SCRIPT = ALLOCATION | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASK_PID": "4711",
    "ENVIRONMENT": "BATCH",
}
SRUN = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
# an srun that does not report what it did
OLD_SRUN = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_TASKS_PER_NODE"}


def test_process_without_a_launcher_has_world_size_1():
    assert read_world({}) == World(rank=0, size=1, local_rank=0, local_size=1, launcher=None)
    assert read_world({"PATH": "/bin", "MASTER_ADDR": "somewhere", "MASTER_PORT": "1"}).launcher is None


def test_torchrun():
    assert read_world(TORCHRUN) == World(
        3, 4, 1, 2, "torchrun", job="none", address="node0:29500", restart=2, old_store=True
    )


def test_torchrun_with_a_new_store_after_each_start():
    assert not read_world(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).old_store


def test_open_mpi():
    assert read_world(OPENMPI) == World(1, 2, 1, 2, "openmpi", job="1790902273")


def test_open_mpi_with_master_address():
    assert read_world(OPENMPI | {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}).address == "node0:1234"


def test_mpich():
    assert read_world(MPICH) == World(1, 2, 1, 2, "mpich", pmi=8)


def test_srun():
    assert read_world(SRUN) == World(3, 4, 1, 2, "slurm", job="42-0-0", host="node0")


def test_step_overrides_requested_tasks_per_node():
    """sbatch --ntasks-per-node 1, and in it srun --ntasks 4 --overcommit."""
    assert read_world(SRUN | {"SLURM_NTASKS_PER_NODE": "1"}) == read_world(SRUN)


def test_consistent_world_size():
    assert (
        read_world(SRUN | {"WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}).launcher
        == "slurm"
    )
    assert read_world(SRUN | {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}).rank == 3


def test_steps_of_a_slurm_job_have_different_jobs():
    assert read_world(SRUN).job != read_world(SRUN | {"SLURM_STEP_ID": "1", "SLURM_STEPID": "1"}).job


def test_changed_number_of_tasks():
    with pytest.raises(LaunchError, match=r"SLURM_NTASKS=8, but SLURM_STEP_TASKS_PER_NODE=2\(x2\) makes 4"):
        read_world(SRUN | {"SLURM_NTASKS": "8"})


def test_requeued_job_has_a_different_job():
    """Its id and those of its steps are unchanged, and so would be the file at which ranks meet."""
    assert read_world(SRUN).job != read_world(SRUN | {"SLURM_RESTART_COUNT": "1"}).job


def test_host_is_the_first_node_of_a_step():
    assert read_world(SRUN | {"SLURM_STEP_NODELIST": "gpu[07-08,10]"}).host == "gpu07"
    with pytest.raises(
        LaunchError,
        match=r"SLURM_STEP_NODELIST cannot be read: '7-' in \[7-\] is not a number or a range",
    ):
        read_world(SRUN | {"SLURM_STEP_NODELIST": "gpu[7-]"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("n[1-3,07]", ["n1", "n2", "n3", "n07"]),
        ("n[008-010],login,b2", ["n008", "n009", "n010", "login", "b2"]),
        (
            "rack[1-2]node[3,5].local",
            ["rack1node3.local", "rack1node5.local", "rack2node3.local", "rack2node5.local"],
        ),
        ("a-b[1],c[2-2]", ["a-b1", "c2"]),
    ],
)
def test_expand_hosts(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-", "n]1[", "a,,b", "n[1-x]", "n[]"])
def test_invalid_host_lists(text):
    with pytest.raises(ValueError, match="is not"):
        expand_hosts(text)


def test_srun_with_different_task_counts():
    world = read_world(
        SRUN
        | {"SLURM_NTASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_PROCID": "2", "SLURM_LOCALID": "0"}
    )
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 3, 0, 1)


@pytest.mark.parametrize(
    "step", [None, "4294967291", "4294967290", "4294967292"], ids=["none", "batch", "interactive", "extern"]
)
def test_batch_script_is_not_a_rank(step):
    """With SLURM_PROCID=0 and the requested SLURM_NTASKS it would wait for other ranks forever."""
    environ = BATCH_SCRIPT if step is None else BATCH_SCRIPT | {"SLURM_STEP_ID": step, "SLURM_STEPID": step}
    assert read_world(environ) == World()


def test_allocation_is_not_a_rank():
    assert read_world(ALLOCATION) == World()


def test_torchrun_under_srun():
    assert read_world(SRUN | TORCHRUN) == read_world(TORCHRUN)


def test_torchrun_under_mpirun():
    assert read_world(OPENMPI | TORCHRUN) == read_world(TORCHRUN)


def test_mpirun_in_a_batch_script_and_under_srun():
    assert read_world(BATCH_SCRIPT | OPENMPI) == read_world(OPENMPI)
    daemons = SRUN | {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }  # one a node
    over_nodes = OPENMPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    assert read_world(daemons | over_nodes) == read_world(over_nodes)


def test_srun_with_pmix_is_srun():
    assert read_world(SRUN | {"PMIX_RANK": "3", "PMIX_NAMESPACE": "slurm.pmix.42.0"}).launcher == "slurm"


def test_incomplete_environment():
    """Any program may use RANK."""
    assert read_world({"RANK": "1", "WORLD_SIZE": "1"}).launcher is None
    assert read_world({"RANK": "admiral"}).launcher is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            TORCHRUN | {"RANK": "4"},
            "RANK=4 is outside WORLD_SIZE=4: the variables of two launchers are mixed; unset them",
        ),
        (
            TORCHRUN | {"RANK": "-1"},
            "RANK=-1 is outside WORLD_SIZE=4: the variables of two launchers are mixed; unset them",
        ),
        (
            TORCHRUN | {"WORLD_SIZE": "0"},
            "RANK=3 is outside WORLD_SIZE=0: the variables of two launchers are mixed; unset them",
        ),
        (TORCHRUN | {"RANK": "first"}, "RANK='first' is not a number"),
        (OPENMPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE='' is not a number"),
        (
            TORCHRUN | {"LOCAL_RANK": "2"},
            "LOCAL_RANK=2 is outside LOCAL_WORLD_SIZE=2: the variables of two launchers are mixed; unset "
            "them",
        ),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE='two' is not a number"),
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4 without RANK and LOCAL_RANK: this process is not a rank; unset WORLD_SIZE, or "
            "start ranks with "
            "--ranks or torchrun",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            "WORLD_SIZE=2 without LOCAL_RANK: this process is not a rank; "
            "unset WORLD_SIZE, or start ranks with --ranks or torchrun",
        ),
        (
            SRUN | {"WORLD_SIZE": "8"},
            "WORLD_SIZE=8, but SLURM_NTASKS=4: slurm started this process; unset WORLD_SIZE",
        ),
        (
            SRUN | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
            "WORLD_SIZE=2, but SLURM_NTASKS=4: srun sets the rank of each task; "
            "unset RANK, LOCAL_RANK and WORLD_SIZE",
        ),
        (
            SRUN | {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
            "RANK=1, but SLURM_PROCID=3: srun sets the rank of each task; "
            "unset RANK, LOCAL_RANK and WORLD_SIZE",
        ),
        (
            SRUN | OPENMPI,
            "OMPI_COMM_WORLD_SIZE=2, all on this machine, but SLURM_NTASKS=4: each srun task started "
            "separate ranks; "
            "use srun without mpirun, or mpirun without srun",
        ),
        (
            SRUN | MPICH,
            "PMI_SIZE=2, all on this machine, but SLURM_NTASKS=4: each srun task started separate ranks; "
            "use srun without mpirun, or mpirun without srun",
        ),
        (
            OLD_SRUN | {"SLURM_NTASKS_PER_NODE": "1"},
            "SLURM_NTASKS=4, but SLURM_NTASKS_PER_NODE=1 on SLURM_NNODES=2 allows at most 2; "
            "use --ntasks=2, or omit --ntasks-per-node",
        ),
        (
            OLD_SRUN | {"SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_NTASKS=4, but SLURM_STEP_NUM_TASKS=2: srun sets both, so one was changed; unset it",
        ),
        (
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": "two"},
            "SLURM_STEP_TASKS_PER_NODE='two' is not a list of tasks per node",
        ),
    ],
)
def test_contradictions(environ, message):
    with pytest.raises(LaunchError) as caught:
        read_world(environ)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2,3", [1, 2, 3]), ("16(x2)", [16, 16]), ("1(x10)", [1] * 10)],
)
def test_expand_task_counts(text, counts):
    assert expand_task_counts(text) == counts
