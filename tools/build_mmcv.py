"""Build a wheel of MMCV with its compiled operators for the CPU, which MMDetection and MMRotate import.

    python tools/build_mmcv.py OUT_FOLDER

builds the installed version of MMCV against the installed PyTorch. Three quarters of the time for each of the
78 files goes into PyTorch's headers, so these are precompiled once. Needs g++ and, to use all cores, ninja.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

from torch.utils.cpp_extension import include_paths

import mapet_mm.utils.logging  # noqa: F401
from mapet_mm.utils.errors import one_line_errors

# All flags of a file: a header that was compiled with others is silently read as text.
FLAGS = ["-O1", "-g0", "-w", "-fPIC", "-DNDEBUG"]
EXTENSION = ["-std=c++17", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_ext"]


def precompile_header(folder: Path) -> Path:
    """Compile the header that each file of MMCV includes; g++ finds the result beside the header."""
    header = folder / "torch_types.h"
    header.write_text("#include <torch/types.h>\n")
    folders = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    output = ["-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(["c++", *FLAGS, *folders, *EXTENSION, *output], check=True)
    return header


def build_wheel(out: Path, header: Path) -> None:
    """Build without pip's cache: a wheel in it would be installed in place of the one without operators."""
    environment = dict(
        os.environ,
        CFLAGS=" ".join([*FLAGS, "-include", str(header)]),
        MAX_JOBS=os.environ.get("MAX_JOBS", str(os.cpu_count())),
        CUDA_VISIBLE_DEVICES="",
        PATH=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
    )
    options = ["--quiet", "--no-cache-dir", "--no-build-isolation", "--no-deps", "--no-binary", ":all:"]
    requirement = f"onedl-mmcv=={version('onedl-mmcv')}"
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(out), requirement]
    subprocess.run(command, env=environment, check=True)


@one_line_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the wheel")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        build_wheel(out, precompile_header(Path(folder)))
    print(f"{out}: {', '.join(path.name for path in out.glob('onedl_mmcv-*.whl'))}")


if __name__ == "__main__":
    main()
