"""Cost of the hooks that watch a training: its steps with and without them in turns, in one Runner.

It runs the ImageNet recipe as `end_to_end.py` does. Time is the process's CPU time on a CPU, which other
processes disturb less than the clock, and the clock's on a GPU. Loading images is not part of it.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_path import write_photographs
from end_to_end import make_runner, recipe_options
from harness import ON_GPU, machine, report
from mmengine.runner import IterBasedTrainLoop

from mapet_mm.engine.hooks.epoch_seed_hook import EpochSeedHook
from mapet_mm.engine.hooks.health_hook import HealthHook
from mapet_mm.engine.hooks.interruption_hook import InterruptionHook
from mapet_mm.engine.hooks.non_finite_hook import NonFiniteHook
from mapet_mm.engine.hooks.stuck_loader_hook import StuckLoaderHook

WATCHING = (EpochSeedHook, HealthHook, InterruptionHook, NonFiniteHook, StuckLoaderHook)
WARM_UP = 4
clock = time.perf_counter if ON_GPU else time.process_time


class TurnsLoop(IterBasedTrainLoop):
    """Takes every other step without the watching hooks; `taken` has the seconds of both kinds."""

    def run(self) -> Any:
        runner, self.taken = self.runner, {True: [], False: []}
        others = [hook for hook in runner.hooks if not isinstance(hook, WATCHING)]
        self.hooks = {True: runner.hooks, False: others}
        return super().run()

    def run_iter(self, data_batch: Any) -> None:
        """Time a step; those in which `HealthHook` looks are of the watched ones."""
        on, runner = (self.iter + 1) % 2 == 0, self.runner
        model, optimizer = runner.model, runner.optim_wrapper.optimizer
        if self.iter == 0:  # what the hooks have put into the model and the optimizer
            self.inside = model._forward_hooks, optimizer._optimizer_step_pre_hooks, model.head.statistics
        inside = self.inside if on else ({}, {}, None)
        model._forward_hooks, optimizer._optimizer_step_pre_hooks, model.head.statistics = inside
        vars(optimizer).pop("found_inf", None)
        runner._hooks = self.hooks[on]
        start = clock()
        super().run_iter(data_batch)
        if ON_GPU:
            torch.cuda.synchronize()
        self.taken[on].append(clock() - start)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and print the cost."""
    args = recipe_options(__doc__, arguments, pairs=300)
    args.iterations = 2 * args.pairs
    with tempfile.TemporaryDirectory() as temporary:
        write_photographs(Path(temporary))
        runner = make_runner(args, Path(temporary))
        interval = runner.cfg.default_hooks.health.get("interval", 100)
        runner._train_loop = dict(type=TurnsLoop, max_iters=2 * WARM_UP + args.iterations)
        runner.train()
        with_, without = (np.array(runner.train_loop.taken[on][WARM_UP:]) for on in (True, False))
    looks = np.zeros(args.pairs, bool)
    looks[interval // 2 - WARM_UP - 1 :: interval // 2] = True
    bare, differences = np.median(without), with_ - without
    each = np.median(differences[~looks])
    look = np.median(differences[looks]) - each if looks.any() else float("nan")
    drawn = np.random.default_rng(0).choice(differences[~looks], (2000, (~looks).sum()))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5]) / bare
    rows = [
        ["a step without them", f"{1000 * bare:.2f}", ""],
        ["what they add to each step", f"{1000 * each:.3f}", f"{each / bare:.2%} ({low:.2%} to {high:.2%})"],
        [f"and once in {interval} steps", f"{1000 * look:.2f}", f"{look / interval / bare:.2%}"],
    ]
    what = f"ViT-{args.size}, batch {args.batch}, {args.pairs} pairs of steps, medians; {machine()}"
    report(what, ["", "ms", "of a step"], rows)


if __name__ == "__main__":
    main()
