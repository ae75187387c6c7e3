"""Read images from a storage that may give errors, and tell whether the storage or the image is to blame."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Event
from typing import TypeVar

from tqdm import tqdm

from mapet_mm.datasets.pictures import look_at_path, reads_photographs, require_kept
from mapet_mm.utils.errors import UserError, reason_of

RETRIES = (0.5, 2.0, 8.0)  # seconds to wait before an image is read again
# What stays so: no such file, a folder in its place, links that go round in a circle.
WRONG_PATHS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
THREADS = 16  # that wait for a network's storage
AT_ONCE = 64  # files for a thread
Item = TypeVar("Item")
Result = TypeVar("Result")


class UndecodableError(Exception):
    """An image cannot be decoded; the message is the reason."""


class ImageReader:
    """A pipeline's first step, which reads the image: if it fails, the image or the storage is to blame.

    Raises:
        UndecodableError: the image is.
        UserError: the storage is, after several tries.
    """

    def __init__(self, step: Callable[[dict], dict | None]) -> None:
        self.step = step

    def __call__(self, results: dict) -> dict:
        try:
            return read_patiently(lambda: read_whole(self.step, results))
        except Exception as error:  # of any decoder
            if is_of_storage(error):
                raise UserError(storage_message(results.get("img_path"), error)) from error
            raise UndecodableError(reason_of(error)) from error


def read_whole(step: Callable[[dict], dict | None], results: dict) -> dict:
    """What a pipeline's first step reads; PictureError if it reads photographs, and the image is more."""
    if reads_photographs(step):
        path = results["img_path"]
        require_kept({path: look_at_path(path)})
    return step(results)


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
    return has_number and error.errno not in WRONG_PATHS


def storage_message(path: str | None, error: Exception) -> str:
    """A line about an image that `read_patiently` could not read."""
    return (
        f"image `{path}` cannot be read ({reason_of(error)}), in {len(RETRIES) + 1} tries: "
        "look at the storage, then run the same command again, which continues"
    )


def in_threads(look: Callable[[Item], Result], items: Sequence[Item], title: str) -> Iterator[Result]:
    """What a function that waits for a storage gives for each of many files, in their order.

    A million files take a minute or two. `title` is the text of a progress bar, if it takes long.
    """
    parts = [items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE)]
    has_ended = Event()  # also by a signal, which is not to wait for the parts that are looked at

    def look_at(part: Sequence[Item]) -> list[Result]:
        return [look(item) for item in part if not has_ended.is_set()]

    with ThreadPoolExecutor(THREADS) as threads:
        try:
            found = threads.map(look_at, parts)
            yield from chain.from_iterable(tqdm(found, title, total=len(parts), delay=2))
        finally:
            has_ended.set()
