"""A run: one command of a tool, named by what decides its result."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lab.paths import RUNS, data_variables

TRAIN = "tools/train.py"
TEST = "tools/test.py"
TESTED = "test.json"  # metrics of a training that was killed before its last validation


@dataclass(frozen=True)
class Run:
    """One command of a table's plan."""

    id: str  # its identity
    name: str  # shown to people
    kind: str  # "data", "tokenizer", "pre-training" or "evaluation"
    command: Sequence[str]  # a tool and its arguments, as typed after `python`
    outputs: Sequence[str]  # files or folders that exist once it is done
    needs: Sequence[str] = ()  # keys of the runs before it
    config: str | None = None
    data: str | None = None  # name of the dataset that the config is read for
    options: Mapping[str, Any] = field(default_factory=dict)  # the row's or column's changes to the config
    seed: int | None = None
    evaluation: int | None = None  # version of the protocols, of a frozen evaluation
    processes: int = 1  # the number that the recipe is meant for
    folders: Sequence[str] = ()  # of data that nobody makes; they have to be there

    @property
    def key(self) -> str:
        """Name and identity, unique: the name of its folder."""
        return f"{self.name}-{self.id}"

    @property
    def folder(self) -> str:
        """Its record, its log, and a training's work dir."""
        return f"{RUNS}/{self.key}"

    def to_json(self) -> str:
        """The run as a word of a command line."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Run:
        """The run that `to_json` wrote."""
        return cls(**json.loads(text))


def measurement_of(run: Run) -> Run:
    """The run that measures a training's last checkpoint, as its last validation would have done."""
    options = run.command[run.command.index("--cfg-options") :]
    out = f"{run.folder}/{TESTED}"
    words = [TEST, run.command[1], run.outputs[0], "--work-dir", f"{run.folder}/test", "--out", out, *options]
    return replace(run, command=words, outputs=[out], processes=1)


def nodes_of(run: Run, gpus_per_node: int) -> int:
    """Number of machines with so many GPUs that a run takes."""
    return math.ceil(run.processes / max(1, gpus_per_node))


def launch_words(run: Run, nodes: int = 1, python: str = sys.executable) -> list[str]:
    """The command line that starts a run's tool in the run's number of processes, on so many machines."""
    processes = str(run.processes)
    if run.processes == 1:
        return [python, *run.command]
    if run.command[0] != TRAIN:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [python, *torchrun, *run.command]
    if nodes == 1:
        return ["bash", "tools/dist_train.sh", run.command[1], processes, *run.command[2:]]
    srun = ["srun", f"--nodes={nodes}", f"--ntasks={processes}", "--kill-on-bad-exit=1"]
    return [*srun, python, "-u", *run.command, "--launcher", "slurm"]


def environment_of(run: Run, threads: int) -> dict[str, str]:
    """Variables of a run: the dataset, and a fixed number of threads, on which results depend."""
    variables = {"OMP_NUM_THREADS": str(threads)}
    data = data_variables(run.data) if run.data else {}
    # Configs in this building may name algorithms and encoders of `lab`.
    if any("research/" in read for read in (run.config or "", *data.values())):
        variables["PYTHONPATH"] = "research"
    return variables | data


def typed(run: Run, gpus_per_node: int, threads: int) -> str:
    """The whole command as typed in a shell at the repository's root."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment_of(run, threads).items()]
    words = launch_words(run, nodes_of(run, gpus_per_node), "python")
    return " ".join([*variables, shlex.join(words)])
