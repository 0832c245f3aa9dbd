#!/bin/bash
#SBATCH --job-name=a
#SBATCH --nodes=2-4
#SBATCH --cpus-per-task=32
#SBATCH --time=02:00:00
#SBATCH --output=/home/me/runs/a/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --no-kill
# Trains, or continues from the last checkpoint. To start it again: sbatch /home/me/runs/a/job.sh

run=/home/me/runs/a
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    echo "paceline: tasks of a job array would all train in $run; submit each training separately" >&2
    exit 2
fi
cd /home/me || exit
# Paceline passes a word to the script for a node that joins the training of another job.
join=${1:+--join=$1}
export join
[ -n "$join" ] || echo "$SLURM_JOB_ID" > "$run/job"
export SRUN_CPUS_PER_TASK=32

# USR1 comes before the time limit: all ranks save and end, and the job is requeued.
# scancel signals the ranks itself.
near_end= ranks=
trap 'near_end=1; kill -USR1 $ranks' USR1
trap : TERM
before=$(ls "$run/ckpt" 2> /dev/null)
srun --kill-on-bad-exit=0 --wait=60 --cpu-bind=none --no-kill --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 /home/me/.venv/bin/python3 -m paceline agent "$run" $join &
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
