"""Work that any number of processes and machines share through a folder."""

from __future__ import annotations

import errno
import fcntl
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path

from filelock import FileLock

from mapet_mm.utils.dist import print_to_user, process_number

# What file systems without locks answer: Lustre without `flock`, NFS without a lock daemon, some of FUSE.
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


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


def shared_lock(path: Path, timeout: float = -1) -> AbstractContextManager:
    """A lock of all processes and machines that share a folder, to be held in a `with` block.

    On a file system without locks nothing is held, and a line says so.

    Args:
        path: the lock's file, in a folder that exists.
        timeout: seconds to wait for others, without end if negative; then `filelock.Timeout` is raised.
    """
    return FileLock(path, timeout=timeout) if has_locks(path) else nullcontext()


@cache
def has_locks(path: Path) -> bool:
    """Whether a file, which is made if it is absent, can be locked; a line says so if it cannot."""
    try:
        with open(path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            print_to_user(
                f"note: {path.parent} is on a file system without locks ({error.strerror}): let no other "
                "command write into it meanwhile"
            )
            return False
    return True
