"""A GPU that PyTorch cannot use is an error, because the run would compute on the CPU, for days."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from glob import glob
from typing import Any

import torch

from mapet_mm.utils.errors import UserError, reason_of

DEVICE_FILES = "/dev/nvidia[0-9]*"  # made by NVIDIA's driver, one for each GPU
ON_PURPOSE = 'CUDA_VISIBLE_DEVICES="" computes on the CPU on purpose'
CUDA_12_6 = "torch==2.11.0 and torchvision==0.26.0 built for CUDA 12.6 (`cu126`)"


def require_usable_gpu(local_rank: int = 0) -> None:
    """Raise UserError if there is a GPU for this process, and this PyTorch cannot compute on it.

    Args:
        local_rank: number of this process on its machine.
    """
    if torch.version.cuda is None:
        return
    if torch.cuda.is_available():
        require_kernels(local_rank % torch.cuda.device_count())
    elif visible_device_files():
        raise UserError(
            f"PyTorch {torch.__version__} cannot use this machine's NVIDIA GPU ({reason_without_cuda()}): if "
            f"the driver is too old for CUDA {torch.version.cuda}, update it (CUDA 13 takes 580 or newer) or "
            f"install {CUDA_12_6}, for drivers from 525 on; {ON_PURPOSE}"
        )


def require_kernels(device: int) -> None:
    """Raise UserError if this PyTorch was not built for a GPU."""
    major, minor = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    if runs_on((major, minor), built_for):
        return
    remedy = f"install {CUDA_12_6}, which run on Volta (V100)"
    if major >= 10:
        remedy = "install a newer PyTorch"
    raise UserError(
        f"{torch.cuda.get_device_name(device)} is an sm_{major}{minor}, and PyTorch {torch.__version__} was "
        f"built for {', '.join(built_for)}: {remedy}; {ON_PURPOSE}"
    )


def runs_on(capability: tuple[int, int], built_for: Iterable[str]) -> bool:
    """Whether a build has code for a GPU: binary (`sm_80`) of its generation, or portable (`compute_80`)."""
    for name in built_for:
        kind, _, number = name.partition("_")
        digits = "".join(character for character in number if character.isdigit())  # of `90a`, too
        built = int(digits[:-1]), int(digits[-1])
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def allow_deterministic_products(randomness: Mapping[str, Any]) -> None:
    """Give cuBLAS the workspace without which PyTorch before 2.11 refuses `deterministic=True` on a GPU.

    Args:
        randomness: a config's.
    """
    if randomness.get("deterministic") and torch.__version__ < "2.11":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def visible_device_files() -> list[str]:
    """Files of the GPUs that this process may open; none where CUDA_VISIBLE_DEVICES hides all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):  # the last one is Slurm's
        return []
    return [file for file in glob(DEVICE_FILES) if os.access(file, os.R_OK | os.W_OK)]


def reason_without_cuda() -> str:
    """Why CUDA cannot start: the first sentence of PyTorch's error."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return reason_of(error).partition(". ")[0]
    return "no reason given"
