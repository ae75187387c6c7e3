#!/usr/bin/env bash
# Start a tool with srun; used by slurm_train.sh and slurm_test.sh:
#     slurm_launch.sh PARTITION JOB_NAME TOOL ARGUMENTS...
set -euo pipefail
TOOLS="$(cd "$(dirname "$0")" && pwd)"
source "$TOOLS/python.sh"
if ! command -v srun >/dev/null; then
    echo "error: srun is not here: start this where Slurm is, or take tools/dist_${3%.py}.sh" >&2
    exit 1
fi
GPUS=${GPUS:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
# The smaller of both: a job of 4 GPUs asks for no 8, and one of 16 for 8 on each machine.
PER_NODE=$((GPUS < GPUS_PER_NODE ? GPUS : GPUS_PER_NODE))
export PYTHONPATH="$TOOLS/..${PYTHONPATH:+:$PYTHONPATH}"

# SRUN_ARGS holds several arguments, so it stays without quotes.
# shellcheck disable=SC2086
exec srun --partition="$1" \
    --job-name="$2" \
    --gres=gpu:"$PER_NODE" \
    --ntasks="$GPUS" \
    --ntasks-per-node="$PER_NODE" \
    --cpus-per-task="${CPUS_PER_TASK:-14}" \
    --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} \
    "$PYTHON" -u "$TOOLS/$3" "${@:4}" --launcher slurm
