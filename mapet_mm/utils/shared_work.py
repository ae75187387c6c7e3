"""Work that any number of processes and machines share through a folder."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from mapet_mm.utils.dist import process_number


def my_blocks(number: int, done: Callable[[int], bool]) -> Iterator[int]:
    """Blocks of shared work for this process: its own by rank, then what others have left undone.

    A block's result is a file that appears complete in one step, so `done` only looks whether it is there,
    and a block that two processes compute has one result. Processes and machines may die and come back.

    Args:
        number: of blocks; they are numbered from 0.
        done: whether a block's result is there.
    """
    rank, size = process_number()
    for blocks in range(rank, number, size), range(number):
        # Another order in each process, so that processes started by hand do not do the same ones.
        for block in random.SystemRandom().sample(blocks, len(blocks)):
            if not done(block):
                yield block
