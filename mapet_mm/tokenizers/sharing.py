"""Work handed out through a folder: any number of processes and machines may join, die and come back.

Nothing but the file system coordinates them. A claim, a file made exclusively, says only that somebody has
started on a task; whether it is done, its result says. Whoever finds nothing unclaimed does again what is
claimed and not done, so nobody waits for a slow process or a dead one. Results do not depend on who does it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

# How long ago a process has looked whether others have done its task: a look lists a folder.
LOOK_SECONDS = 2.0


def process_number() -> tuple[int, int]:
    """Number of this process and of all that were started with it, by torchrun or Slurm; (0, 1) if alone."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if rank in os.environ and size in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


class SharedTasks:
    """Tasks to do until all of them are done, by whomever; a process does each at most once.

    Args:
        folder: of the claims; all processes see it.
        tasks: the same in all processes, by number.
        done: which of the given tasks are done, by a look at their results.
    """

    def __init__(self, folder: Path, tasks: Sequence[int], done: Callable[[Sequence[int]], set[int]]) -> None:
        self.folder, self.tasks, self._done = folder, tasks, done
        self._looked: dict[int, float] = {}

    def __iter__(self) -> Iterator[int]:
        left, tried = list(self.tasks), set()
        for attempt in count():
            done = self._done(left)
            left = [task for task in left if task not in done | tried]
            if not left:
                return
            # In the first attempt in order; later, processes that look at the same moment go apart.
            for task in left if attempt == 0 else random.Random().sample(left, len(left)):
                if self._claim(task, attempt) and not self._done([task]):
                    tried.add(task)
                    self._looked[task] = time.monotonic()
                    yield task

    def is_lost(self, task: int) -> bool:
        """Whether another process has done a task of this one by now (as far as was looked lately)."""
        now = time.monotonic()
        if now - self._looked[task] < LOOK_SECONDS:
            return False
        self._looked[task] = now
        return bool(self._done([task]))

    def _claim(self, task: int, attempt: int) -> bool:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{task}.{attempt}").touch(exist_ok=False)
        except OSError as error:
            # Claimed, or all are done and the folder is gone; stale, if another machine removed it over NFS.
            if error.errno in (errno.EEXIST, errno.ENOENT, errno.ESTALE):
                return False
            raise
        return True

    def clear(self) -> None:
        """Remove all claims, once all tasks are done."""
        with contextlib.suppress(OSError):  # it was never made, or another process claims or clears as well
            for claim in self.folder.glob("*"):
                with contextlib.suppress(OSError):
                    claim.unlink()
            self.folder.rmdir()
