#!/bin/bash
#SBATCH --job-name=a
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --partition=gpu
#SBATCH --account=physics
#SBATCH --qos=long
#SBATCH --constraint=a100&nvlink
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=240G
#SBATCH --output=/home/me/runs/a/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --exclusive
#SBATCH --mail-type=END
# Trains, or continues from the last checkpoint. To start it again: sbatch /home/me/runs/a/job.sh

run=/home/me/runs/a
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    echo "paceline: tasks of a job array would all train in $run; submit each training separately" >&2
    exit 2
fi
cd /home/me || exit
echo "$SLURM_JOB_ID" > "$run/job"
module load cuda/12.4 python/3.11
eval "$(conda shell.bash hook)"
conda activate train
export GLOO_SOCKET_IFNAME=ib0
export NCCL_SOCKET_IFNAME=ib0
export OMP_PROC_BIND=false
export SRUN_CPUS_PER_TASK=8

# Unpack once on each node, even if several jobs start at the same time; unpack again if the tar is newer.
stage_in() {
    scratch="$TMPDIR/data" tar=/store/physics/data.tar
    mkdir -p "$scratch" && exec 9> "$scratch/.${tar##*/}.lock" && flock 9 || return
    [ "$scratch/.${tar##*/}.done" -nt "$tar" ] && return
    tar -xf "$tar" -C "$scratch" && touch "$scratch/.${tar##*/}.done"
}
export -f stage_in
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
    bash -c stage_in || exit

# USR1 comes before the time limit: all ranks save and end, and the job is requeued.
# scancel signals the ranks itself.
near_end= ranks=
trap 'near_end=1; kill -USR1 $ranks' USR1
trap : TERM
before=$(ls "$run/ckpt" 2> /dev/null)
srun --kill-on-bad-exit=0 --wait=60 --cpu-bind=none python -m paceline rank "$run" &
ranks=$!
while wait "$ranks"; status=$?; kill -0 "$ranks" 2> /dev/null; do :; done
if [ -n "$near_end" ] && [ "$status" != 0 ]; then
    if [ "$before" != "$(ls "$run/ckpt" 2> /dev/null)" ]; then
        echo "paceline: the time limit is reached; job $SLURM_JOB_ID is queued again"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "paceline: not requeued: no new checkpoint since the last start; increase --time" >&2
    fi
fi
exit "$status"
