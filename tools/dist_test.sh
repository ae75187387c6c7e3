#!/usr/bin/env bash
# Test in several processes, on GPUs (NCCL) or, without any, on the CPU (gloo):
#     bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]
# Several machines: the same command on each, with NNODES, NODE_RANK, MASTER_ADDR and PORT set.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: bash tools/dist_test.sh CONFIG CHECKPOINT GPUS [arguments of tools/test.py]" >&2
    exit 2
fi
CONFIG=$1
CHECKPOINT=$2
GPUS=$3
exec bash "$(dirname "$0")/launch.sh" "$GPUS" test.py "$CONFIG" "$CHECKPOINT" "${@:4}"
