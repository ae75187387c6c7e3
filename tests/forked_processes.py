"""Several processes run a tool together, as under torchrun, but forked: an import in each takes seconds.

A training has to be forked from an interpreter of its own: a fork of a process that has used autograd cannot.
"""

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch.multiprocessing as mp

ROOT = Path(__file__).parents[1]


def run_python(*words: object, code: int = 0) -> str:
    """Run an interpreter that finds the repository and these modules, on the CPU; return what it printed."""
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tools")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-W", "ignore", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr + done.stdout


def run_together(processes: int, tool: str, *arguments: object, folder: Path) -> str:
    """What all processes have printed; their output goes to files in the folder."""
    start_together(processes, _run, tool, [str(argument) for argument in arguments], folder)
    return "".join((folder / f"said_{rank}.txt").read_text() for rank in range(processes))


def start_together(processes: int, work: Callable, *arguments: object) -> None:
    """Call `work(rank, *arguments)` in forked processes that meet as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = (processes, port, work, arguments)
    mp.start_processes(_meet, told, nprocs=processes, start_method="fork")


def _meet(rank: int, processes: int, port: int, work: Callable, arguments: tuple) -> None:
    numbers = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes)
    meeting = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="tests")
    os.environ.update({name: str(value) for name, value in (numbers | meeting).items()})
    work(rank, *arguments)


def _run(rank: int, tool: str, arguments: list[str], folder: Path) -> None:
    sys.argv = [tool, *arguments]
    with open(folder / f"said_{rank}.txt", "w") as said, redirect_stdout(said):
        runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")
