"""Read again what a storage, such as a network's, does not give at first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from mapet_mm.utils.errors import reason_of

# Seconds to wait before an image is read again.
RETRIES = (0.5, 2.0, 8.0)
Result = TypeVar("Result")


def read_patiently(read: Callable[[], Result]) -> Result:
    """What `read` returns; it is tried again after 0.5, 2 and 8 s while the storage gives errors."""
    for wait in RETRIES:
        try:
            return read()
        except Exception as error:  # of any backend
            if not is_of_storage(error):
                raise
            time.sleep(wait)
    return read()


def is_of_storage(error: Exception) -> bool:
    """Whether the storage is to blame, perhaps only now: its errors have a number."""
    has_number = bool(getattr(error, "errno", None)) or isinstance(error, ConnectionError | TimeoutError)
    return has_number and not isinstance(error, FileNotFoundError)  # a file that is not there stays away


def storage_message(path: str | None, error: Exception) -> str:
    """A line about an image that `read_patiently` could not read."""
    return (
        f"image `{path}` cannot be read ({reason_of(error)}), in {len(RETRIES) + 1} tries: "
        "look at the storage, then run the same command again, which continues"
    )
