"""Exercise: find out which rank a process is."""

# %% exercise
# Write `find_rank(environment)`. `environment` is a dict of environment variables, and the result is the
# pair of rank and world size. torchrun sets RANK and WORLD_SIZE, Open MPI sets OMPI_COMM_WORLD_RANK and
# OMPI_COMM_WORLD_SIZE, and Slurm sets SLURM_PROCID and SLURM_NTASKS. If torchrun or Open MPI runs inside
# a Slurm job, Slurm's variables are set too, and they are those of another program. Without any of
# them, the process is alone: return (0, 1).


def find_rank(environment):
    raise NotImplementedError


# %% solution
NAMES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def find_rank(environment):
    for rank, size in NAMES:
        if rank in environment:
            return int(environment[rank]), int(environment[size])
    return 0, 1


# %% grade
from paceline.lesson import check, num_ranks
from paceline.lesson.attempts import run_solution

slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
mpi = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "6"}
torchrun = {"RANK": "0", "WORLD_SIZE": "8"}
check("without a launcher: rank 0 of 1", find_rank({"HOME": "/"}), (0, 1))
check("srun: rank 1 of 2", find_rank(slurm), (1, 2))
check("mpirun: rank 5 of 6", find_rank(mpi), (5, 6))
check("torchrun: rank 0 of 8", find_rank(torchrun), (0, 8))
check("torchrun in a Slurm job: rank 0 of 8", find_rank(slurm | torchrun), (0, 8))
check("mpirun in a Slurm job: rank 5 of 6", find_rank(slurm | mpi), (5, 6))


def read_own():
    import os

    return find_rank(dict(os.environ) | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})


n = num_ranks()
check("the ranks of this machine find themselves", run_solution(read_own), [(rank, n) for rank in range(n)])
