#!/usr/bin/env bash
# Fetch, where there is a network, the wheels that an offline GPU node lacks:
#     bash tools/benchmarks/fetch_wheels.sh [FOLDER]        (work_dirs/wheels)
# At the versions of requirements.lock, for the interpreter PYTHON, which has to be of the node's version and platform.
# The node has PyTorch, torchvision, NumPy, SciPy, scikit-learn, Pillow, OpenCV, matplotlib, transformers, jaxtyping,
# pytest and hypothesis itself; name what it lacks of them, or has and should not be fetched, in NAMES.
set -euo pipefail
FOLDER=${1:-work_dirs/wheels}
TOOLS=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$TOOLS/python.sh"
NAMES=${NAMES:-onedl-mmengine onedl-mmcv onedl-mmpretrain onedl-mmsegmentation
    addict termcolor yapf platformdirs modelindex model-index ordered-set mat4py prettytable wcwidth ftfy
    open-clip-torch timm beartype}
mkdir -p "$FOLDER"
# Lines of the lock that are for this interpreter, without those that follow from them.
for name in $NAMES; do
    grep -iE "^${name//-/[-_]}==" "$TOOLS/../requirements.lock" || { echo "error: $name is not in requirements.lock" >&2; exit 1; }
done > "$FOLDER/requirements.txt"
# MMCV is published as source, and its operators are not needed.
MMCV_WITH_OPS=0 "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$FOLDER" -r "$FOLDER/requirements.txt"
echo "$(ls "$FOLDER"/*.whl | wc -l) wheels, $(du -cm "$FOLDER"/*.whl | tail -1 | cut -f1) MB, in $FOLDER"
