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

export PYTHONPATH="$TOOLS/..${PYTHONPATH:+:$PYTHONPATH}"

exec "$PYTHON" "$TOOLS/torchrun.py" \
    --nnodes="${NNODES:-1}" \
    --node_rank="${NODE_RANK:-0}" \
    --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" \
    --nproc_per_node="$PROCESSES" \
    "$TOOLS/$TOOL" "${@:3}" --launcher pytorch
