#!/usr/bin/env bash
# Start a tool with torchrun; used by dist_train.sh and dist_test.sh: launch.sh PROCESSES TOOL ARGUMENTS...
set -euo pipefail
TOOLS="$(cd "$(dirname "$0")" && pwd)"
PROCESSES=$1
TOOL=$2
source "$TOOLS/python.sh"

case $PROCESSES in
    '' | *[!0-9]* | 0)
        echo "error: GPUS is '$PROCESSES': the number of processes on this machine, 1 or more" >&2
        exit 2
        ;;
esac

# On CPUs, glibc keeps the memory that a process frees: a training step is up to a third faster.
if ! nvidia-smi -L >/dev/null 2>&1; then
    export MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-1}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-2147483647}
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-2147483647}
fi
export PYTHONPATH="$TOOLS/..${PYTHONPATH:+:$PYTHONPATH}"

exec "$PYTHON" "$TOOLS/torchrun.py" \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$PROCESSES" \
    "$TOOLS/$TOOL" "${@:3}" --launcher pytorch
