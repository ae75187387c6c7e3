"""The images that a tokenizer reads: any MMPretrain datasets, with a name for each image."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from mapet_mm.datasets.building import build_dataset
from mapet_mm.datasets.pipelines import image_paths, label_of, path_of
from mapet_mm.datasets.reading import ImageReader, UndecodableError
from mapet_mm.structures.names import relative_name, relative_names
from mapet_mm.utils.atomic_files import replace_file
from mapet_mm.utils.errors import UserError, listed

# Passes over the first image that have to agree.
REPEATS = 8
LARGEST_SKIPPED = 0.05


class UnreadableImagesError(UserError, RuntimeError):
    """Images that could not be decoded or encoded; everything else was computed and written.

    Args:
        reasons: why, by the image's path.
        kept: says where the results of the others are.
    """

    def __init__(self, reasons: Mapping[str, str], kept: str) -> None:
        first, *others = reasons
        more = f" and {len(others)} more ({listed(others, most=5)})" if others else ""
        super().__init__(
            f"image `{first}` could not be decoded or encoded ({reasons[first]}){more}: repair or remove it, "
            "or leave such images out with --on-error skip, and run the same command again; " + kept
        )


def note_skipped(skipped: Mapping[str, str], num_images: int, listing: Path, max_skipped: float) -> str:
    """List the images that were skipped, with reasons, in a file; returns the end of a message about them.

    Args:
        skipped: the reason by the image's path.
        num_images: among which they are.
        listing: the file, which is removed if none was skipped.
        max_skipped: largest share of the images that may be skipped.

    Raises:
        UserError: more were skipped.
    """
    if not skipped:
        listing.unlink(missing_ok=True)
        return ""
    lines = [f"{path}\t{reason}\n" for path, reason in skipped.items()]
    replace_file(listing, "".join(lines).encode("utf-8", "surrogateescape"))
    note = (
        f"left {len(skipped)} of {num_images} images out that could not be decoded or encoded, see "
        f"{listing.absolute()}"
    )
    if len(skipped) > max_skipped * num_images:
        raise UserError(
            f"{note}: that is more than {max_skipped:.0%}; repair them and run the same command again, or go "
            "on without them: --max-skipped 1"
        )
    return f"; {note}"


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
        self._datasets = [build_dataset(config) for config in configs]
        self._ends = list(accumulate(len(dataset) for dataset in self._datasets))
        roots = {str(getattr(dataset, "data_root", "") or "") for dataset in self._datasets}
        self.data_root = data_root or (roots.pop() if len(roots) == 1 else "")
        if not self.data_root:
            raise UserError(
                f"the datasets have data roots {sorted(roots)}: set `data_root` in the config to the one "
                "folder that image names shall be relative to"
            )
        for dataset in self._datasets:
            steps = dataset.pipeline.transforms
            if steps:
                steps[0] = ImageReader(steps[0])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def path(self, index: int) -> str:
        """Path of an image; UserError if a dataset holds its images itself."""
        dataset, index_within = self._locate(index)
        return path_of(dataset.get_data_info(index_within), dataset)

    def name(self, index: int) -> str:
        """Name of an image; UserError if it is not under the data root."""
        return self._name_of(self.path(index))

    def _name_of(self, path: str) -> str:
        name = relative_name(path, self.data_root)
        if name is None:
            raise UserError(f"image `{path}` is not under data_root `{self.data_root}`: correct `data_root`")
        return name

    def names(self) -> list[str]:
        """Names of all images by index; shows a progress bar if this takes long."""
        paths = chain.from_iterable(map(image_paths, self._datasets))
        names = relative_names(paths, self.data_root, self._name_of)
        return list(tqdm(names, "reading names", len(self), unit="image", delay=2))

    def distinct_names(self) -> tuple[Shaped[np.ndarray, " names"], Int64[np.ndarray, " names"]]:
        """The names in order, each once, and the index of the first image with each."""
        return np.unique(np.array(self.names(), object), return_index=True)

    def labels(self) -> dict[str, int] | None:
        """Class index of each image by its name, or None where images have no label, or several."""
        labels: dict[str, int] = {}
        for name, index in zip(*self.distinct_names(), strict=True):
            dataset, index_within = self._locate(index)
            label = label_of(dataset.get_data_info(index_within))
            if label is None:
                return None
            labels[name] = label
        return labels

    def class_names(self) -> list[str] | None:
        """Names of the classes by index, or None where the first dataset has none."""
        classes = self._datasets[0].metainfo.get("classes")
        return None if classes is None else list(classes)

    def __getitem__(self, index: int) -> tuple[int, Tensor | str]:
        """Index and pipeline output `inputs` (3, H, W), or the reason why the image could not be decoded."""
        dataset, index_within = self._locate(index)
        try:
            inputs = dataset.prepare_data(index_within)["inputs"]
        except UndecodableError as error:
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
        index = next(decoded, None)
        if index is None:
            return
        _, first = self[index]
        for _ in range(REPEATS - 1):
            _, again = self[index]
            if not torch.equal(first, again):
                raise UserError(
                    f"the pipeline draws random numbers: it gives image `{self.path(index)}` differently "
                    "each time, so its tokens would be other ones; remove the random step"
                )

    def _locate(self, index: int) -> tuple[Dataset, int]:
        """The dataset of an image, and the image's index in it."""
        which = bisect_right(self._ends, index)
        first = self._ends[which - 1] if which else 0
        return self._datasets[which], index - first
