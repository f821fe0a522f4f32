# shellcheck shell=bash
# What the sbatch files have in common: the environment, the launch by srun, queueing again after a preemption.
# Every setting can be overridden from the environment that sbatch is called in.

# Communication
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}          # say why a communicator failed, and nothing else
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}  # ride out a busy InfiniBand fabric: 4.096 us x 2^22 = 17 s a try
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # NVLink multicast holds GPU memory for each of about ten groups
# NCCL and gloo pick the network themselves. Where a node has several, name it before sbatch:
#   export NCCL_SOCKET_IFNAME=… GLOO_SOCKET_IFNAME=… NCCL_IB_HCA=…

# Memory and threads
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True} # experts' batches vary: less fragmentation
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} # host threads of a rank; the default is all cores, for every rank
export PYTHONUNBUFFERED=1                    # a log is complete up to the moment that its rank was killed
ulimit -Sn "$(ulimit -Hn)"                   # descriptors: rank 0 has some 1,500 at 512 ranks, the soft limit is 1,024

# run_recipe SCRIPT FLAG…: a script of the repository $root; one process a GPU, one log a rank.
run_recipe() {
  local code=0
  if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "error: SLURM_JOB_ID is not set: submit this file with sbatch, or run $1 without SLURM" >&2
    exit 2
  fi
  export LOGS=${LOGS:-logs/${SLURM_JOB_NAME:-job}-$SLURM_JOB_ID} # a run that hangs leaves its stacks there, too
  mkdir -p "$LOGS"
  if [ -z "${MASTER_ADDR:-}" ]; then # the first node is the meeting point
    MASTER_ADDR=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" | sed -n 1p) || true
  fi
  if [ -z "$MASTER_ADDR" ]; then
    echo "error: scontrol names no node of '${SLURM_JOB_NODELIST:-}': set MASTER_ADDR to the name of the first node" >&2
    exit 2
  fi
  export MASTER_ADDR
  export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun does not take this over from sbatch by itself

  trap : TERM USR1 # the ranks get the signal too, and save; this shell waits for them
  # Not --kill-on-bad-exit: the first rank to leave with 75 would have the others killed. --wait ends the rest of a step
  # whose ranks were lost, after two minutes.
  srun --kill-on-bad-exit=0 --wait=120 --open-mode=append --output="$LOGS/rank-%t.log" bash "$root/$1" "${@:2}" || code=$?
  echo "$(date +%FT%T) $1 ended with code $code (75: saved, to be continued), attempt ${SLURM_RESTART_COUNT:-0};" \
    "what the ranks said: $LOGS/rank-*.log"
  if [ "$code" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
  fi
  exit "$code"
}
