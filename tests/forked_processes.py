"""Several processes run a tool together, as under torchrun, but forked: an import in each takes seconds.

Not for tools that train: a fork of a process that has used autograd cannot use it.
"""

import os
import runpy
import socket
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch.multiprocessing as mp
from config_building import ROOT


def run_together(processes: int, tool: str, *arguments: object, folder: Path) -> str:
    """What all processes have printed; their output goes to files in the folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = (processes, port, tool, [str(argument) for argument in arguments], folder)
    mp.start_processes(_run, told, nprocs=processes, start_method="fork")
    return "".join((folder / f"said_{rank}.txt").read_text() for rank in range(processes))


def _run(rank: int, processes: int, port: int, tool: str, arguments: list[str], folder: Path) -> None:
    numbers = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes)
    meeting = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="tests")
    os.environ.update({name: str(value) for name, value in (numbers | meeting).items()})
    sys.argv = [tool, *arguments]
    with open(folder / f"said_{rank}.txt", "w") as said, redirect_stdout(said):
        runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")
