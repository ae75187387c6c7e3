"""Build a wheel of MMCV with its compiled operators for the CPU, which MMDetection and MMRotate import.

    python tools/build_mmcv.py OUT_FOLDER [mmcv==2.1.0]

builds this MMCV, or the installed onedl-mmcv, against the installed PyTorch. Three quarters of the time for
each of the 78 files goes into PyTorch's headers, so these are precompiled once. Needs g++, setuptools below
82, wheel and, to use all cores, ninja; of this package nothing.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths

# All flags of a file: a header that was compiled with others is silently read as text.
FLAGS = [
    "-O1",
    "-g0",
    "-w",
    "-fPIC",
    "-DNDEBUG",
    f"-D_GLIBCXX_USE_CXX11_ABI={+torch.compiled_with_cxx11_abi()}",
]
EXTENSION = ["-std=c++17", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_ext"]


def precompile_header(folder: Path) -> Path:
    """Compile the header that each file of MMCV includes; g++ finds the result beside the header."""
    header = folder / "torch_types.h"
    header.write_text("#include <torch/types.h>\n")
    folders = [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    output = ["-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(["c++", *FLAGS, *folders, *EXTENSION, *output], check=True)
    return header


def build_wheel(requirement: str, out: Path, header: Path) -> None:
    """Build without pip's cache: a wheel in it would be installed in place of the one without operators."""
    environment = dict(
        os.environ,
        CFLAGS=" ".join([*FLAGS, "-include", str(header)]),
        MAX_JOBS=os.environ.get("MAX_JOBS", str(os.cpu_count())),
        CUDA_VISIBLE_DEVICES="",
        PATH=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]),
    )
    options = ["--quiet", "--no-cache-dir", "--no-build-isolation", "--no-deps", "--no-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(out), requirement]
    subprocess.run(command, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the wheel")
    parser.add_argument(
        "requirement", nargs="?", help="for example mmcv==2.1.0; without, the MMCV that is installed"
    )
    args = parser.parse_args()
    requirement = args.requirement or f"onedl-mmcv=={version('onedl-mmcv')}"
    with tempfile.TemporaryDirectory() as folder:
        build_wheel(requirement, args.out, precompile_header(Path(folder)))
    print(f"{args.out}: {', '.join(path.name for path in args.out.glob('*mmcv-*.whl'))}")


if __name__ == "__main__":
    main()
