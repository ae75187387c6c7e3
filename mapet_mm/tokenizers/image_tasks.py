"""Work on images (features for k-means, token grids), handed out in tasks of some images each."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mapet_mm.tokenizers.image_groups import GroupLoader, ImageGroup, split
from mapet_mm.tokenizers.images import UnreadableImagesError, check_on_error
from mapet_mm.utils.shared_work import SharedTasks, process_number


class ImageTasks(ABC):
    """Computes a result per image in any number of processes; a task's results are written in one step.

    Images are identified by their index in the loader's dataset, results by the `key` under which they are
    written.

    Args:
        folder: holds the claims; all processes must see it.
        sizes: number of images without a result, by task number.
    """

    def __init__(self, folder: Path, sizes: Mapping[int, int]) -> None:
        self.shared = SharedTasks(folder, list(sizes), self.done)
        self.total = sum(sizes.values())
        self._before = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))

    @abstractmethod
    def lacking(self, task: int) -> dict[int, Any]:
        """Indices and keys of a task's images for which nothing has been written yet."""

    @abstractmethod
    def encode(self, group: ImageGroup) -> Iterable[Any]:
        """The results of a group's images, in order."""

    @abstractmethod
    def checked(self, results: Mapping[int, Any]) -> dict[int, Any]:
        """Results on the host, by index; in place of one that is not finite, the reason for having none."""

    @abstractmethod
    def write(self, task: int, results: Mapping[Any, Any], skipped: Mapping[Any, str]) -> None:
        """Write results, and why other images are skipped, by key; both are on disk when this returns."""

    def done(self, tasks: Sequence[int]) -> set[int]:
        """Which of these tasks are complete."""
        return {task for task in tasks if not self.lacking(task)}

    def run(self, loader: GroupLoader, what: str, on_error: str, kept: str) -> int:
        """Do unclaimed tasks until none is left; returns the number of images that cannot be encoded.

        An image cannot be if it cannot be decoded, or if its result is not finite.

        Args:
            loader: loads the images.
            what: name of the progress bar, which counts the images of all processes.
            on_error: for images that cannot be encoded: 'raise' once all others are done, or 'skip' and
                record them.
            kept: what has been kept, for that error's message.

        Raises:
            UnreadableImagesError: after the results of all other images are written.
        """
        check_on_error(on_error)
        unreadable: dict[int, str] = {}
        start = time.perf_counter()
        bar = tqdm(total=self.total, desc=what, unit="image", disable=process_number()[0] > 0)
        with bar:
            loaded = loader.load(self._groups(loader.group_size))
            for task, groups in groupby(loaded, key=lambda group: group.task):
                bar.update(max(0, self._before[task] - bar.n))
                unreadable |= self._do(task, groups, on_error == "skip", bar)
                waiting = loader.waited / (time.perf_counter() - start)
                bar.set_postfix_str(f"{waiting:.0%} of the time waiting for data", refresh=False)
            bar.update(self.total - bar.n)
        if unreadable and on_error == "raise":
            reasons = {loader.images.path(place): reason for place, reason in unreadable.items()}
            raise UnreadableImagesError(reasons, kept)
        return len(unreadable)

    def _groups(self, size: int) -> Iterator[tuple[int, Sequence[int]]]:
        for task in self.shared:
            for places in split(list(self.lacking(task)), size):
                if self.shared.is_lost(task):
                    break
                yield task, places

    def _do(self, task: int, groups: Iterable[ImageGroup], skip: bool, bar: tqdm) -> dict[int, str]:
        results: dict[int, Any] = {}
        kept: dict[int, Any] = {}
        reasons: dict[int, str] = {}
        for group in groups:
            if not self.shared.is_lost(task):
                results |= zip(group.places, self.encode(group), strict=False)
                reasons |= group.unreadable
            bar.update(min(len(group.places) + len(group.unreadable), self.total - bar.n))
        for place, result in self.checked(results).items():
            (reasons if isinstance(result, str) else kept)[place] = result
        lacking = self.lacking(task)  # another process may have been faster
        named = {lacking[place]: result for place, result in kept.items() if place in lacking}
        unreadable = {place: reason for place, reason in reasons.items() if place in lacking}
        skipped = {lacking[place]: reason for place, reason in unreadable.items()} if skip else {}
        if named or skipped:
            self.write(task, named, skipped)
        return unreadable
