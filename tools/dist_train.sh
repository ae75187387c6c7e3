#!/usr/bin/env bash
# Train in several processes, on GPUs (NCCL) or, without any, on the CPU (gloo):
#     bash tools/dist_train.sh CONFIG GPUS [arguments of tools/train.py]
# Several machines: the same command on each, with NNODES, NODE_RANK, MASTER_ADDR and PORT set.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: bash tools/dist_train.sh CONFIG GPUS [arguments of tools/train.py]" >&2
    exit 2
fi
CONFIG=$1
GPUS=$2
exec bash "$(dirname "$0")/launch.sh" "$GPUS" train.py "$CONFIG" "${@:3}"
