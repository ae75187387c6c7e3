"""The command lines of a plan for a cluster, and the GPU-hours that the paper gives for them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from mapet_mm.experiments.plan import Run


def command_line(run: Run, launcher: str, partition: str = "PARTITION") -> str:
    """The exact line that does a run on a cluster.

    Args:
        run: a run of a plan.
        launcher: 'dist' (tools/dist_train.sh) or 'slurm' (tools/slurm_train.sh).
        partition: Slurm's partition.
    """
    if run.config is None:
        return shlex.join(["python", *run.command])
    gpus = gpus_of(run.config)
    resume = ["--resume", "--cfg-options", *(f"{key}={value}" for key, value in run.options.items())]
    if launcher == "slurm":
        job = Path(run.config).stem.split("_")[0]
        words = ["bash", "tools/slurm_train.sh", partition, job, run.config, run.work_dir, *resume]
        return f"GPUS={gpus} {shlex.join(words)}"
    words = ["bash", "tools/dist_train.sh", run.config, str(gpus), "--work-dir", run.work_dir, *resume]
    return shlex.join(words)


def gpus_of(config: str) -> int:
    """GPUs that a recipe is meant for, from its name (`16xb128`)."""
    return int(re.search(r"_(\d+)xb\d+", Path(config).stem)[1])


def hours_report(runs: Sequence[Run], gpu_hours: Mapping[str, float]) -> list[str]:
    """GPU-hours of each kind of training as far as the paper gives them, and their sum."""
    lines, total, unknown = [], 0.0, 0
    trained = [Path(run.config).stem for run in runs if run.config]
    for stem in dict.fromkeys(trained):
        count = trained.count(stem)
        if stem in gpu_hours:
            total += count * gpu_hours[stem]
            lines.append(f"{count} x {stem}: {gpu_hours[stem]:.0f} GPU-hours each (paper, V100)")
        else:
            unknown += count
            lines.append(f"{count} x {stem}: the paper gives no time")
    rest = f", and {unknown} trainings that the paper gives no time for" if unknown else ""
    return [*lines, f"in all {total:.0f} GPU-hours (paper, V100){rest}"]
