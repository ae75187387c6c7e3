"""Room on a disk, said and required before something large is written."""

import shutil
from pathlib import Path

from mapet_mm.utils.dist import print_once
from mapet_mm.utils.errors import UserError

GIGABYTE = 10**9


def require_room(folder: Path, num_bytes: int, what: str, remedy: str) -> None:
    """Say how much will be written, if anything.

    Args:
        folder: where, if it exists or not.
        num_bytes: to be written.
        what: 'features', for the lines that say so.
        remedy: what to do where there is too little room, besides making some.

    Raises:
        UserError: the disk has less room.
    """
    if not num_bytes:
        return
    needed = f"{what}: {num_bytes / GIGABYTE:,.3g} GB to write into {folder}"
    free = free_bytes(folder)
    if free is None:
        print_once(f"{needed}, whose disk does not say how much is free")
        return
    needed += f", {free / GIGABYTE:,.3g} GB free"
    print_once(needed)
    if num_bytes > free:
        raise UserError(f"{needed}: make room, or {remedy}")


def free_bytes(folder: Path) -> int | None:
    """Bytes that are free on the disk of a folder, if it exists or not.

    None where the disk does not say: some network disks report 0, however much is free.
    """
    existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        return shutil.disk_usage(existing).free or None
    except OSError:
        return None
