"""The images that a tokenizer reads: any MMPretrain datasets, with a name for each image."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.datasets.pipelines import label_of, path_of
from mapet_mm.registry import DATASETS
from mapet_mm.structures.image_names import relative_name
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError, listed, reason_of

# Seconds to wait before an image is read again that the storage did not give.
RETRIES = (0.5, 2.0, 8.0)
# Passes over the first image that have to agree.
REPEATS = 8
LARGEST_SKIPPED = 0.05


class UnreadableImagesError(UserError, RuntimeError):
    """Images that could not be decoded or encoded; everything else was computed and written."""

    def __init__(self, unreadable: Mapping[str, str], kept: str) -> None:
        (path, reason), *others = unreadable.items()
        more = f" and {len(others)} more ({listed([one for one, _ in others], most=5)})" if others else ""
        super().__init__(
            f"image `{path}` could not be decoded or encoded ({reason}){more}: repair or remove it, or leave "
            f"such images out with --on-error skip, and run the same command again; {kept}"
        )


def note_left_out(left_out: Mapping[str, str], total: int, listing: Path, most: float) -> str:
    """List the images that were left out, with reasons, in a file; returns the end of a message about them.

    Raises:
        UserError: a larger share of the images than `most` was left out.
    """
    if not left_out:
        listing.unlink(missing_ok=True)
        return ""
    lines = (f"{path}\t{reason}\n" for path, reason in left_out.items())
    replace_file(listing, "".join(lines).encode("utf-8", "surrogateescape"))
    said = (
        f"left {len(left_out)} of {total} images out that could not be decoded or encoded, see "
        f"{listing.absolute()}"
    )
    if len(left_out) > most * total:
        raise UserError(
            f"{said}: that is more than {most:.0%}; repair them and run the same command again (with "
            "--retry-skipped where tokens are extracted), or go on without them: --max-skipped 1"
        )
    return f"; {said}"


class NamedImages(Dataset):
    """The images of datasets, concatenated; an image's name is its path relative to the data root.

    Args:
        configs: a dataset config of MMPretrain, or a list of them.
        data_root: folder that names are relative to; None for the one that all datasets have.

    Raises:
        UserError: there is no data root, or several.
    """

    def __init__(
        self, configs: Mapping[str, Any] | Sequence[Mapping[str, Any]], data_root: str | None
    ) -> None:
        configs = [configs] if isinstance(configs, Mapping) else configs
        self._datasets = [DATASETS.build(config) for config in configs]
        self._ends = list(accumulate(map(len, self._datasets)))
        roots = {str(getattr(dataset, "data_root", "") or "") for dataset in self._datasets}
        self.data_root = data_root or (roots.pop() if len(roots) == 1 else "")
        if not self.data_root:
            raise UserError(
                f"the datasets have data roots {sorted(roots)}: set `data_root` in the config to the one "
                "folder that image names shall be relative to"
            )
        for dataset in self._datasets:
            steps = dataset.pipeline.transforms
            steps[:1] = map(_Reader, steps[:1])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def path(self, index: int) -> str:
        """Path of an image; UserError if a dataset holds its images itself."""
        dataset, place = self._at(index)
        return path_of(dataset.get_data_info(place), dataset)

    def name(self, index: int) -> str:
        """Name of an image; UserError if it is not under the data root."""
        if (name := relative_name(path := self.path(index), self.data_root)) is None:
            raise UserError(f"image `{path}` is not under data_root `{self.data_root}`: correct `data_root`")
        return name

    def names(self) -> list[str]:
        """Names of all images by index; shows a progress bar if this takes long."""
        return list(map(self.name, tqdm(range(len(self)), desc="reading names", unit="image", delay=2)))

    def places(self) -> dict[str, int]:
        """Index of the first image with each name, sorted by name."""
        names = self.names()
        backwards = sorted(range(len(names) - 1, -1, -1), key=names.__getitem__)
        return {names[index]: index for index in backwards}  # of equal names, the first one's index stays

    def labels(self) -> dict[str, int] | None:
        """Class index of each image by its name, or None where images have no label, or several."""
        labels: dict[str, int | None] = {}
        for name, index in self.places().items():
            dataset, place = self._at(index)
            labels[name] = label_of(dataset.get_data_info(place))
        return None if None in labels.values() else labels

    def class_names(self) -> list[str] | None:
        """Names of the classes by index, or None where the first dataset has none."""
        classes = self._datasets[0].metainfo.get("classes")
        return None if classes is None else list(classes)

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        """Index and pipeline output `inputs` (3, H, W), or the reason why the image could not be decoded."""
        dataset, place = self._at(index)
        try:
            inputs = dataset.prepare_data(place)["inputs"]
        except _UndecodableError as error:
            return index, str(error)
        if not isinstance(inputs, Tensor):
            raise UserError(
                f"the pipeline gives image `{self.path(index)}` as {type(inputs).__name__}, not as a tensor "
                "`inputs`: end it with PackInputs, on one view of the image"
            )
        return index, inputs

    def require_repeatable(self) -> None:
        """Raise UserError if the first image that can be decoded does not always come out alike."""
        decoded = (index for index in range(len(self)) if isinstance(self[index][1], Tensor))
        for index in islice(decoded, 1):
            first, *others = (self[index][1] for _ in range(REPEATS))
            if not all(torch.equal(first, other) for other in others):
                raise UserError(
                    f"the pipeline draws random numbers: it gives image `{self.path(index)}` differently "
                    "each time, so its tokens would be other ones; remove the random step"
                )

    def _at(self, index: int) -> tuple[Dataset, int]:
        """The dataset of an image, and the image's index in it."""
        which = bisect_right(self._ends, index)
        return self._datasets[which], index - (self._ends[which - 1] if which else 0)


class _UndecodableError(Exception):
    """An image cannot be decoded; the message is the reason."""


class _Reader:
    """A pipeline's first step, which reads the image: if it fails, the image or the storage is to blame."""

    def __init__(self, step: Callable[[dict], dict | None]) -> None:
        self.step = step

    def __call__(self, results: dict) -> dict:
        waits = iter(RETRIES)
        while True:
            try:
                return self.step(results)
            except Exception as error:
                # Errors of decoders have no number.
                of_storage = getattr(error, "errno", None) or isinstance(
                    error, ConnectionError | TimeoutError
                )
                if not of_storage or isinstance(error, FileNotFoundError):
                    raise _UndecodableError(reason_of(error)) from error
                if (wait := next(waits, None)) is None:
                    raise UserError(
                        f"image `{results.get('img_path')}` cannot be read ({reason_of(error)}), in "
                        f"{len(RETRIES) + 1} tries: look at the storage, then run the same command again"
                    ) from error
                time.sleep(wait)
