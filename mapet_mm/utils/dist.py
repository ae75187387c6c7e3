"""Processes of a run, with or without GPUs, and the device and precision of each."""

from __future__ import annotations

import datetime
import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from mmengine.device import get_device
from mmengine.dist import barrier, init_dist, is_distributed
from mmengine.model import is_model_wrapper
from torch import nn

from mapet_mm.utils.errors import UserError, printable
from mapet_mm.utils.gpus import require_usable_gpu

# Seconds that processes wait for each other: longer than an evaluation in the first process.
TIMEOUT_SECONDS = 1800
# Variables for a process's rank and the number of processes: of torchrun, Slurm and Open MPI.
RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
# What else they set that says which process this is.
OF_A_LAUNCHER = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID", "TORCHELASTIC_RUN_ID")
WAIT_SECONDS = 10  # for other processes, without a word


def process_number() -> tuple[int, int]:
    """Rank of this process and number of processes, as torchrun, Slurm or MPI says; (0, 1) if alone."""
    for rank, size in RANKS:
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def run_alone() -> None:
    """Take this process, and those that it starts, for alone, whatever a launcher has set; a line says so.

    The variables of a launcher are also in every pod, and in a shell in `srun --pty`.
    """
    if process_number()[1] == 1:
        return
    names = [name for name in (*sum(RANKS, ()), *OF_A_LAUNCHER) if name in os.environ]
    print(f"this command runs alone: left out {', '.join(names)} of the environment", file=sys.stderr)
    for name in names:
        del os.environ[name]


def say_share() -> None:
    """Say that this is one of several processes, if nothing but RANK in the environment says so."""
    rank, size = process_number()
    if size > 1 and "RANK" in os.environ and not torch.distributed.is_torchelastic_launched():
        line = (
            f"RANK and WORLD_SIZE say that this is process {rank} of {size}, of which process 0 reports: "
            "unset them for a command that runs alone"
        )
        print(line, file=sys.stderr)


@contextmanager
def saying_that_it_waits() -> Iterator[None]:
    """Say so if the other processes do not come, as if none but this one was started."""
    rank, size = process_number()
    names = next((pair for pair in RANKS if set(pair) <= os.environ.keys()), ())
    line = (
        f"process {rank} of {size}, as {' and '.join(names)} in the environment say, waits for the others: "
        "unset them for a command that runs alone"
    )
    waiting = threading.Timer(WAIT_SECONDS, print, [line], dict(file=sys.stderr))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def is_first_process() -> bool:
    """True in the run's first process, also before the processes have joined."""
    return process_number()[0] == 0


def print_once(text: str) -> None:
    """Print in the first process alone."""
    if is_first_process():
        print(printable(text), flush=True)


def print_to_user(text: str) -> None:
    """Tell the user something before there is a log: on the terminal, in the first process alone."""
    if is_first_process():
        print(text, file=sys.stderr)


def start_processes(launcher: str | None = None, timeout: int = TIMEOUT_SECONDS) -> None:
    """Join the other processes of the run; each has a GPU of its own where there are any.

    Args:
        launcher: 'none', 'pytorch' (torchrun), 'slurm' or 'mpi'; None for the one that started this process.
        timeout: seconds that processes wait for each other.

    Raises:
        UserError: a launcher that needs GPUs, without them.
    """
    launcher = launcher or own_launcher()
    if launcher == "none" or is_distributed():
        return
    number_slurm_task()
    on_gpus = get_device() != "cpu"
    if launcher != "pytorch" and not on_gpus:
        raise UserError(
            f"launcher {launcher} needs CUDA devices: without them use launcher pytorch, or --launcher none "
            "for a command that runs alone"
        )
    with saying_that_it_waits():
        if on_gpus:
            init_dist(launcher, backend="nccl", timeout=timeout)
        else:  # MMEngine's own start sets a CUDA device
            torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout))


def own_launcher() -> str:
    """What started this process together with others, by its environment; 'none' if it is alone."""
    if process_number()[1] == 1 and not torch.distributed.is_torchelastic_launched():
        return "none"
    if "RANK" in os.environ:
        return "pytorch"
    return "slurm" if "SLURM_PROCID" in os.environ else "mpi"


def number_slurm_task() -> None:
    """Number a Slurm task among the GPUs that it sees; `--gpus-per-task` shows each task its own only.

    MMEngine looks for the GPU of the task's number on the machine.
    """
    if "SLURM_LOCALID" in os.environ and (gpus := torch.cuda.device_count()):
        os.environ["SLURM_LOCALID"] = str(int(os.environ["SLURM_LOCALID"]) % gpus)


def choose_device() -> None:
    """Take the GPU of this process's number on its machine, where there are any, without joining others.

    Raises:
        UserError: there is one that this PyTorch cannot use.
    """
    require_usable_gpu(local_rank())
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())


def require_gpu_of_its_own() -> None:
    """Raise UserError if this machine has GPUs, and fewer than processes of a training, which share none."""
    gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and local_rank() >= gpus:
        raise UserError(
            f"more processes than GPUs: {gpus} visible, and this is process {local_rank() + 1} here. "
            "Start one for each GPU, and keep the images of a step by a larger train_dataloader.batch_size"
        )


def local_rank() -> int:
    """Number of this process on its machine, as torchrun or Slurm says; 0 if alone."""
    return int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))


def stop_processes() -> None:
    """Leave the run once all processes have come here.

    A process that goes while another still talks to it can end in an abort, with all its work done.
    """
    if is_distributed():
        gc.collect()  # a wrapped model holds on to the group, in cycles
        barrier()
        torch.distributed.destroy_process_group()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside MMEngine's data-parallel wrapper, or the model itself."""
    return model.module if is_model_wrapper(model) else model
