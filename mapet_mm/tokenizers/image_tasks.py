"""What is made of images, handed out in tasks of some images each: features for k-means, and token grids."""

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
from mapet_mm.tokenizers.sharing import SharedTasks, process_number


class ImageTasks(ABC):
    """Results of images, made by any number of processes, a task at a time; each is written as a whole.

    An image is known by its place in the loader's images, a result by the image's `key` where it is written.

    Args:
        folder: of the claims; all processes see it.
        sizes: how many images each task lacks, by its number.
    """

    def __init__(self, folder: Path, sizes: Mapping[int, int]) -> None:
        self.shared = SharedTasks(folder, list(sizes), self.done)
        self.total = sum(sizes.values())
        self._before = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))

    @abstractmethod
    def lacking(self, task: int) -> dict[int, Any]:
        """Places of a task's images of which nothing is written by now, with their keys."""

    @abstractmethod
    def encode(self, group: ImageGroup) -> Iterable[Any]:
        """The result of each of a group's images."""

    @abstractmethod
    def write(self, task: int, results: Mapping[Any, Any], skipped: Mapping[Any, str]) -> None:
        """Write results, and the reasons for which others are skipped, by key; they are on disk then."""

    def done(self, tasks: Sequence[int]) -> set[int]:
        """Which of these tasks lack nothing."""
        return {task for task in tasks if not self.lacking(task)}

    def run(self, loader: GroupLoader, what: str, on_error: str, kept: str) -> int:
        """Do what nobody else does, until nothing is left; the number of images that cannot be decoded.

        Args:
            loader: of the images.
            what: for the progress bar, which counts the images of all processes.
            on_error: 'raise', after all others, for images that cannot be decoded, or 'skip': record them.
            kept: for that error, what is there nevertheless.

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
        reasons: dict[int, str] = {}
        for group in groups:
            if not self.shared.is_lost(task):
                results |= zip(group.places, self.encode(group), strict=False)
                reasons |= group.unreadable
            bar.update(min(len(group.places) + len(group.unreadable), self.total - bar.n))
        lacking = self.lacking(task)  # another process may have been faster
        named = {lacking[place]: result for place, result in results.items() if place in lacking}
        unreadable = {place: reason for place, reason in reasons.items() if place in lacking}
        skipped = {lacking[place]: reason for place, reason in unreadable.items()} if skip else {}
        if named or skipped:
            self.write(task, named, skipped)
        return unreadable
