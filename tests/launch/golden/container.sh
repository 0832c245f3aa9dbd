#!/bin/bash
#SBATCH --job-name="it's"
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --time=02:00:00
#SBATCH --gpus-per-node=4
#SBATCH --output="/home/me/my runs/it's/slurm-%j.out"
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
# Trains, or continues from the last checkpoint. To start it again: sbatch '/home/me/my runs/it'"'"'s/job.sh'

run='/home/me/my runs/it'"'"'s'
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    echo "paceline: tasks of a job array would all train in $run; submit each training separately" >&2
    exit 2
fi
cd '/home/me/my work' || exit
echo "$SLURM_JOB_ID" > "$run/job"
module load apptainer
export DATA='a b'

# The container starts with an empty environment, so pass on the variables that identify a rank.
in_container() {
    for name in ${!SLURM_*} CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES DATA; do
        [ -z "${!name+set}" ] || export "APPTAINERENV_$name=${!name}"
    done
    [ -e /dev/kfd ] && [ ! -e /dev/nvidiactl ] && gpu=--rocm || gpu=--nv
    exec apptainer exec -e "$gpu" --bind '/home/me/my work' --bind '/home/me/my runs' --bind "/local/$USER" '/images/torch 2.sif' "$@"
}
export -f in_container
export run

# USR1 comes before the time limit: all ranks save and end, and the job is requeued.
# scancel signals the ranks itself.
near_end= ranks=
trap 'near_end=1; kill -USR1 $ranks' USR1
trap : TERM
before=$(ls "$run/ckpt" 2> /dev/null)
srun --kill-on-bad-exit=0 --wait=60 --cpu-bind=none bash -c 'in_container python -m paceline rank "$run"' &
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
