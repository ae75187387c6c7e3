#!/usr/bin/env bash
# Test on a Slurm cluster:
#     bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of tools/test.py]
# Environment: GPUS (8 in all), GPUS_PER_NODE (8), CPUS_PER_TASK (14), SRUN_ARGS, PYTHON.
set -euo pipefail
if [ $# -lt 4 ]; then
    echo "usage: bash tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [arguments of tools/test.py]" >&2
    exit 2
fi
exec bash "$(dirname "$0")/slurm_launch.sh" "$1" "$2" test.py "${@:3}"
