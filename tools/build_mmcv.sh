#!/usr/bin/env bash
# Build a wheel of MMCV with its compiled operators for the CPU, which MMDetection and MMRotate import:
#     bash tools/build_mmcv.sh OUT_FOLDER [mmcv==2.1.0]
# Builds this MMCV, or the installed onedl-mmcv, against the installed PyTorch. Three quarters of the time for
# each of the 78 files goes into PyTorch's headers, so these are precompiled once. Needs g++, setuptools below
# 82, wheel and, to use all cores, ninja; of this package nothing. PYTHON names the interpreter.
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "usage: bash tools/build_mmcv.sh OUT_FOLDER [mmcv==2.1.0]" >&2
    exit 2
fi
PYTHON=${PYTHON:-python}
HEADER=$(mktemp -d)/torch_types.h
trap 'rm -r "$(dirname "$HEADER")"' EXIT

# All flags of a file: a header that was compiled with others is silently read as text.
ABI=$("$PYTHON" -W ignore -c "import torch; print(+torch.compiled_with_cxx11_abi())")
FLAGS=(-O1 -g0 -w -fPIC -DNDEBUG "-D_GLIBCXX_USE_CXX11_ABI=$ABI")
EXTENSION=(-std=c++17 -DTORCH_API_INCLUDE_EXTENSION_H -DTORCH_EXTENSION_NAME=_ext)
mapfile -t FOLDERS < <("$PYTHON" -W ignore -c "
import sysconfig
from torch.utils.cpp_extension import include_paths
print(*(f'-I{path}' for path in [*include_paths(), sysconfig.get_path('include')]), sep='\n')")
echo '#include <torch/types.h>' > "$HEADER"
c++ "${FLAGS[@]}" "${FOLDERS[@]}" "${EXTENSION[@]}" -x c++-header "$HEADER" -o "$HEADER.gch"

# Without pip's cache: a wheel in it would be installed in place of the one without operators.
REQUIREMENT=${2:-onedl-mmcv==$("$PYTHON" -c "from importlib.metadata import version; print(version('onedl-mmcv'))")}
SCRIPTS=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_path('scripts'))")
export CFLAGS="${FLAGS[*]} -include $HEADER" MAX_JOBS=${MAX_JOBS:-$(nproc)} CUDA_VISIBLE_DEVICES='' PATH="$SCRIPTS:$PATH"
"$PYTHON" -m pip wheel --quiet --no-cache-dir --no-build-isolation --no-deps --no-binary :all: \
    --wheel-dir "$1" "$REQUIREMENT"
