#!/usr/bin/env bash
# Train on a Slurm cluster:
#     bash tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [arguments of tools/train.py]
# Environment: GPUS (8 in all), GPUS_PER_NODE (8), CPUS_PER_TASK (14), SRUN_ARGS, PYTHON.
set -euo pipefail
if [ $# -lt 4 ]; then
    echo "usage: bash tools/slurm_train.sh PARTITION JOB_NAME CONFIG WORK_DIR [arguments of tools/train.py]" >&2
    exit 2
fi
exec bash "$(dirname "$0")/slurm_launch.sh" "$1" "$2" train.py "$3" --work-dir "$4" "${@:5}"
