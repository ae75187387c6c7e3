"""Work that any number of processes and machines share through a folder."""

from __future__ import annotations

import contextlib
import errno
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from mapet_mm.utils.dist import process_number

LOOK_SECONDS = 2.0


def my_blocks(number: int, done: Callable[[int], bool]) -> Iterator[int]:
    """Blocks of shared work for this process: its own by rank, then those that others have left undone.

    A block's result is a file that appears complete in one step, so `done` only looks whether it is there,
    and a block that two processes compute has one result. Processes and machines may die and come back.

    Args:
        number: of blocks; they are numbered from 0.
        done: whether a block's result is there.
    """
    rank, size = process_number()
    for block in range(rank, number, size):
        if not done(block):
            yield block
    # From another place in each process, so that the slowest one's blocks are shared out.
    start = rank * number // size
    for block in [*range(start, number), *range(start)]:
        if not done(block):
            yield block


class SharedTasks:
    """Iterates over tasks until all are done by any process; one process does each task at most once.

    Args:
        folder: holds the claims; all processes must see it.
        tasks: task numbers, the same in all processes.
        done: returns which of the given tasks are done, by looking at their results.
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
            # First attempt: in order. Later: shuffled, so that processes that look at once take different
            # tasks.
            for task in left if attempt == 0 else random.Random().sample(left, len(left)):
                if self._claim(task, attempt) and not self._done([task]):
                    tried.add(task)
                    self._looked[task] = time.monotonic()
                    yield task

    def is_lost(self, task: int) -> bool:
        """Whether another process has done this process's task (checked every `LOOK_SECONDS`)."""
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
            # Claimed, or the folder is gone because all tasks are done (ESTALE: removed over NFS).
            if error.errno in (errno.EEXIST, errno.ENOENT, errno.ESTALE):
                return False
            raise
        return True

    def clear(self) -> None:
        """Remove all claims, once all tasks are done."""
        with contextlib.suppress(OSError):  # the folder is not there, or another process uses it
            for claim in self.folder.glob("*"):
                with contextlib.suppress(OSError):
                    claim.unlink()
            self.folder.rmdir()
