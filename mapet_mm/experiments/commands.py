"""How a run's tool is started: its command line, and its end when the runner is killed."""

from __future__ import annotations

import ctypes
import signal
import sys

from mapet_mm.experiments.plan import Run
from mapet_mm.experiments.recipes import TRAIN

PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it


def launch_words(run: Run, launcher: str, cpus: int) -> list[str]:
    """The command line that starts a run's tool in the run's number of processes."""
    python, processes = sys.executable, str(run.processes)
    if run.processes == 1:
        return [python, *run.command]
    if run.command[0] != TRAIN:
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [*torchrun, *run.command]
    if launcher == "dist":
        return ["bash", "tools/dist_train.sh", run.command[1], processes, *run.command[2:]]
    srun = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={cpus}", python, "-u"]
    return [*srun, *run.command, "--launcher", "slurm"]


def end_with_runner() -> None:
    """Called in the tool's process before it starts: Linux then ends the tool when its runner is killed."""
    if PRCTL is not None:  # pragma: no cover, between fork and exec nothing is recorded
        PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
