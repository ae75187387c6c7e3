"""The images that a tokenizer reads: those of any MMPretrain datasets, each once, by name."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from mapet_mm.errors import UserError
from mapet_mm.registry import DATASETS


class UnreadableImagesError(UserError, RuntimeError):
    """Images that could not be decoded; everything else was computed and written."""

    def __init__(self, unreadable: Sequence[tuple[str, str]], kept: str) -> None:
        path, reason = unreadable[0]
        others = f" and {len(unreadable) - 1} more ({_listing(unreadable[1:])})" if unreadable[1:] else ""
        super().__init__(
            f"image `{path}` could not be decoded ({reason}){others}: replace or remove it and run the same "
            f"command again; {kept}"
        )


class ImageBatch(NamedTuple):
    """Images of one batch, and those that could not be decoded."""

    positions: np.ndarray
    images: Shaped[Tensor, "batch 3 height width"] | None
    unreadable: list[tuple[int, str]]


class NamedImages(Dataset):
    """The images of several datasets, each once, sorted by name.

    Args:
        configs: a dataset config of MMPretrain, or a list of them; an image in several is read once.
        data_root: folder that names are relative to; None takes the datasets' own.

    Raises:
        ValueError: no data root, several different ones, or images outside it.
    """

    def __init__(
        self, configs: Mapping[str, Any] | Sequence[Mapping[str, Any]], data_root: str | None
    ) -> None:
        configs = [configs] if isinstance(configs, Mapping) else list(configs)
        self._datasets = [DATASETS.build(config) for config in configs]
        self._ends = list(accumulate(map(len, self._datasets)))
        self.data_root = data_root or _common_root(self._datasets)
        found: dict[str, int] = {}
        for index in range(self._ends[-1]):
            found.setdefault(_name(self._info(index)["img_path"], self.data_root), index)
        self.names = sorted(found)
        self._indices = np.array([found[name] for name in self.names], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def path(self, position: int) -> str:
        """Path of the image at a position."""
        return self._info(int(self._indices[position]))["img_path"]

    def labels(self) -> dict[str, int] | None:
        """Class index of each image by its name, or None where a dataset has no labels."""
        infos = (
            (name, self._info(int(index))) for name, index in zip(self.names, self._indices, strict=True)
        )
        found = {name: info.get("gt_label") for name, info in infos}
        return None if None in found.values() else {name: int(label) for name, label in found.items()}

    def class_names(self) -> list[str] | None:
        """Names of the classes by index, or None where the first dataset has none."""
        classes = self._datasets[0].metainfo.get("classes")
        return None if classes is None else list(classes)

    def __getitem__(self, position: int) -> tuple[int, Tensor | str]:
        """Position and pipeline output `inputs` (3, H, W), or why the image could not be decoded."""
        index = int(self._indices[position])
        load, *steps = self._datasets[bisect_right(self._ends, index)].pipeline.transforms
        results = self._info(index)
        # Only loading may fail for an image's own fault; a mistake in the pipeline stops the run at once.
        try:
            results = load(results)
        except Exception as error:
            return position, f"{type(error).__name__}: {error}".split("\n", 1)[0]
        if results is None:
            return position, "the pipeline's first step returned nothing"
        for step in steps:
            results = step(results)
        return position, results["inputs"]

    def _info(self, index: int) -> dict[str, Any]:
        which = bisect_right(self._ends, index)
        return self._datasets[which].get_data_info(index - (self._ends[which - 1] if which else 0))


def image_loader(
    images: NamedImages, batches: Iterable[Sequence[int]], num_workers: int, pin_memory: bool
) -> DataLoader:
    """Loader of `ImageBatch`es that reads exactly the given positions, in order."""
    return DataLoader(
        images,
        batch_sampler=[list(map(int, batch)) for batch in batches],
        num_workers=num_workers,
        collate_fn=_collate,
        pin_memory=pin_memory,
    )


def normalise(
    preprocessor: nn.Module, images: Shaped[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch 3 height width"]:
    """Images on the data preprocessor's device, in its channel order, mean and standard deviation."""
    return preprocessor({"inputs": images, "data_samples": None})["inputs"]


def _collate(samples: Sequence[tuple[int, Tensor | str]]) -> ImageBatch:
    read = [(position, image) for position, image in samples if isinstance(image, Tensor)]
    unreadable = [(position, reason) for position, reason in samples if isinstance(reason, str)]
    shapes = {tuple(image.shape) for _, image in read}
    if len(shapes) > 1:
        raise ValueError(
            f"images of one batch differ in shape ({', '.join(map(str, sorted(shapes)))}): end the dataset's "
            "pipeline with a crop to one size before PackInputs"
        )
    positions = np.array([position for position, _ in read], dtype=np.int64)
    return ImageBatch(positions, torch.stack([image for _, image in read]) if read else None, unreadable)


def _common_root(datasets: Sequence[Dataset]) -> str:
    roots = sorted({str(getattr(dataset, "data_root", "") or "") for dataset in datasets})
    if len(roots) != 1 or not roots[0]:
        raise ValueError(
            f"the datasets have data roots {roots}: set `data_root` in the config to the one folder that "
            "image names shall be relative to"
        )
    return roots[0]


def _name(img_path: str, data_root: str) -> str:
    name = PurePath(os.path.relpath(img_path, data_root)).as_posix()
    if name.startswith("../"):
        raise ValueError(f"image `{img_path}` is not under data_root `{data_root}`: correct `data_root`")
    return name


def _listing(unreadable: Sequence[tuple[str, str]]) -> str:
    paths = ", ".join(f"`{path}`" for path, _ in unreadable[:5])
    return paths + (", ..." if len(unreadable) > 5 else "")
