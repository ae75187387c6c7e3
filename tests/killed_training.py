"""Trainings of nine steps, killed at random times and started again: `killed_training.py FOLDER KILLS`.

Each start goes on from the last whole checkpoint. Prints, for each training, how often it was killed and
whether its weights are those of an undisturbed one, bit for bit. The processes are forked off this one, which
only imports.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from mmengine.config import Config
from trainings import build, final, same

from mapet_mm.engine.runners.resume import find_checkpoint

SHARES = (0.2, 1.2)  # of the seconds that an undisturbed run takes


def train(folder: Path, workers: int) -> None:
    hook = dict(type="CheckpointHook", by_epoch=False, interval=1)
    cfg = Config(dict(work_dir=str(folder), default_hooks=dict(checkpoint=hook)))
    found = folder.exists() and find_checkpoint(cfg)
    # MMEngine's own search would take a checkpoint that was never written to the end.
    wrapper, average = dict(type="mapet_mm.AutocastOptimWrapper"), dict(type="EMAHook", momentum=0.1)
    runner = build(folder, resume=bool(found), workers=workers, optim_wrapper=wrapper, custom_hooks=[average])
    runner._load_from = found or None
    runner.train()


def start(folder: Path, workers: int, seconds: float) -> int:
    """Exit code of a process that trains, and is killed after so many seconds."""
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            train(folder, workers)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    folder, wanted, rng, results = Path(sys.argv[1]), int(sys.argv[2]), random.Random(0), []
    began = time.monotonic()
    assert start(folder / "whole", 0, 3600) == 0
    whole = time.monotonic() - began
    while sum(kills for kills, _ in results) < wanted:
        part, kills = folder / str(len(results)), 0
        while (code := start(part, kills % 3, whole * rng.uniform(*SHARES))) != 0:
            assert code == -signal.SIGKILL, code
            kills += 1
        results.append((kills, same(final(folder / "whole"), final(part))))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
