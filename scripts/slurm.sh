#!/bin/bash
# A training run under Slurm, on one machine or on many:
#
#   sbatch --nodes=2 --gpus-per-node=8 scripts/slurm.sh name=big model=gpt2-xl parallel=fsdp ...
#
# The arguments are those of train.py. name= is required: a requeued job resumes the run of this name.
# Do not use trainer.resume=.../step_N: a requeued job would start from this step again and fail.
# Put options of sbatch before the script name; they override the options below. Each machine runs
# one torchrun, which starts one process for each GPU. Set PROCESSES= for another number of
# processes, for example on machines without GPUs. If a process dies, torchrun restarts all processes
# from the last checkpoint, up to RESTARTS times. Before the time limit, and when Slurm preempts the
# job, training saves a checkpoint and stops, and the job is requeued. The environment (venv, modules)
# is the environment of the shell that calls sbatch. Use --exclusive or --cpus-per-task=; without
# them, some clusters allocate only one core. All machines need access to this folder, or at least to
# the same data; only rank 0 writes. GLOO_SOCKET_IFNAME= and NCCL_SOCKET_IFNAME= choose another network
# interface than the one that reaches the machine of rank 0.
#SBATCH --job-name=clearhead
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180
#SBATCH --output=slurm-%j.log

set -uo pipefail
restarts=${RESTARTS:-3}
grace=${GRACE:-150} # seconds for the last checkpoint; less than the 180 seconds above
port=$((20000 + SLURM_JOB_ID % 20000))
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

if [[ " $* " != *" name="* ]]; then
  echo "name=: missing; a requeued job resumes the run of this name; add name=NAME" >&2
  exit 2
fi

# After SIGTERM, torchrun waits this many seconds for its processes.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$grace

# One torchrun on each machine. The processes of a machine share its cores.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-1}}" bash -c '
  processes=${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((${SLURM_CPUS_ON_NODE:-1} + processes - 1) / processes))}
  exec torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="$processes" --max-restarts="$0" \
    --rdzv_backend=c10d --rdzv_endpoint="$1" --rdzv_id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
    train.py "${@:2}"' "$restarts" "$first:$port" "$@" &
step=$!

stopped=
stop() { # called near the time limit or on preemption
  stopped=yes
  scancel --signal=TERM "$SLURM_JOB_ID.0"
}
trap stop USR1 TERM

# A signal interrupts wait, so wait again until the step has ended.
code=1
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

if [[ -n $stopped && $code -ne 0 ]]; then
  echo "stopped by Slurm; the job is requeued and resumes from the last checkpoint" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
