"""What a training computes, in FLOPs: unlike its minutes, they do not depend on what else a machine does."""

from argparse import ArgumentParser
from collections.abc import Sequence
from functools import cache

from mapet_mm.experiments.plan import Run
from mapet_mm.utils.config import ConfigOptions, read_config

TERAFLOPS = "pre-training/teraflops"


def teraflops_of(run: Run) -> float:
    """Teraflops of a training's products, whatever its seed (see `training_flops`)."""
    command = [word for word in run.command if not word.startswith("randomness.")]
    # Where it starts and writes changes nothing, so seeds share a count.
    options = [word for word in command[command.index("--cfg-options") + 1 :] if ".init_cfg." not in word]
    return _teraflops(run.config, run.data, run.processes, tuple(options))


@cache
def _teraflops(config: str, data: str | None, processes: int, options: Sequence[str]) -> float:
    from mapet_mm.models.flops import training_flops  # imports MMPretrain, which takes seconds

    parser = ArgumentParser()
    parser.add_argument("--cfg-options", nargs="*", action=ConfigOptions)  # as tools/train.py reads them
    cfg = read_config(config, data)
    cfg.merge_from_dict(parser.parse_args(["--cfg-options", *options]).cfg_options)
    return training_flops(cfg, processes) / 1e12
