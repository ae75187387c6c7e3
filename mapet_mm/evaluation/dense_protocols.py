"""The dense protocols on image sets: MMSegmentation's datasets, and features in blocks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from mapet_mm.evaluation.dense import DISTANCES, NEIGHBOURS, STRENGTHS, DenseEvaluation, DenseScores
from mapet_mm.evaluation.dense_images import DenseImages
from mapet_mm.evaluation.features import BLOCK
from mapet_mm.evaluation.features import FeatureBank as Features
from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError
from mapet_mm.evaluation.patch_labels import IGNORED
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol, Row
from mapet_mm.utils.dist import is_first_process, print_once


class PatchTokens:
    """Patch tokens of a set's features, `(n, H, W, D)` for a slice of images; holds one block.

    Args:
        features: with tokens.
    """

    def __init__(self, features: Features) -> None:
        self.features = features
        self._block = lru_cache(maxsize=1)(lambda number: features.read("tokens", number))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, images: slice) -> Float[Tensor, "image row column dim"]:
        start, stop, _ = images.indices(len(self))
        parts = [
            self._block(block)[max(0, start - block * BLOCK) : stop - block * BLOCK]
            for block in range(start // BLOCK, -(-stop // BLOCK))
        ]
        return torch.cat(parts).unflatten(1, self.features.grid)


class PixelLabels(Sequence):
    """Pixel labels of an image set at each image's own size, read once and kept compressed.

    Args:
        images: a dataset of MMSegmentation whose pipeline loads annotations.

    Raises:
        ImageSetError: labels that are no bytes, or of another part of the image than the model sees.
    """

    def __init__(self, images: ImageSet) -> None:
        reader = _LabelReader(images)
        loader = DataLoader(reader, batch_size=None, num_workers=images.num_workers)
        bar = tqdm(loader, desc=f"labels of {images.name}", unit="image", disable=not is_first_process())
        self._maps = [(labels.shape, zlib.compress(labels.numpy().tobytes(), 1)) for labels in bar]

    def __len__(self) -> int:
        return len(self._maps)

    def __getitem__(self, index: int) -> UInt8[np.ndarray, "height width"]:
        shape, data = self._maps[index]
        return np.frombuffer(zlib.decompress(data), np.uint8).reshape(shape)


class _LabelReader(Dataset):
    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> UInt8[Tensor, "height width"]:
        sample = self.images.dataset[index]["data_samples"]
        labels = sample.gt_sem_seg.data[0]
        if labels.max() > IGNORED or labels.min() < 0:
            raise ImageSetError(
                f"labels of `{self.images.path(index)}` go from {int(labels.min())} to {int(labels.max())}: "
                "classes are 0 to 254, and 255 is ignored"
            )
        scale = sample.get("scale_factor", (1, 1))
        seen = tuple(round(size / by) for size, by in zip(sample.img_shape, scale[::-1], strict=True))
        if tuple(labels.shape) != tuple(sample.img_shape) and max(abs(np.subtract(seen, labels.shape))) > 1:
            raise ImageSetError(
                f"of `{self.images.path(index)}` the model sees {seen[0]} x {seen[1]} pixels, its labels are "
                f"of {labels.shape[0]} x {labels.shape[1]}: resize to the model's size without crop or "
                "padding (`keep_ratio=False`), and load the annotations after that"
            )
        return labels.byte()


class DenseProtocol(Protocol):
    """What both dense protocols share: labels and training patches, read once a checkpoint."""

    needs: ClassVar = {"dense_train": ["tokens"], "dense_val": ["tokens"]}
    name: ClassVar[str]

    def identity(self, evaluated: Evaluated) -> list[str]:
        """What the files of pixel labels hold."""
        return [evaluated.images[name].annotation_digest for name in self.needs]

    def run(self, evaluated: Evaluated) -> list[Row]:
        """mIoU with the setting that held-out training images chose; none where there are no labels."""
        train, test = (evaluated.images[name] for name in self.needs)
        for images in (train, test):
            if "gt_sem_seg" not in images.dataset[0].get("data_samples", ()):
                print_once(f"no {self.name}: the `{images.name}` images have no pixel labels")
                return []
        classes = train.class_names or [str(index) for index in range(_num_labels(train, test))]
        known, queries = (_dense_images(evaluated.features[images.name], images) for images in (train, test))
        scores = self.segment(_evaluation(known, tuple(classes), evaluated.device), queries)
        return [
            Row(self.name, "patch tokens", scores.miou, "mIoU, %", note=scores.setting),
            *self._details("test images", scores.test, "mIoU, %"),
            *self._details("held-out training images", scores.held_out, "mIoU, %"),
            *self._details("class", dict(zip(classes, scores.ious, strict=True)), "IoU, %"),
        ]

    def _details(self, what: str, values: Mapping[str, float | None], unit: str) -> list[Row]:
        known = {name: value for name, value in values.items() if value is not None}
        return [Row(self.name, f"{what}: {name}", value, unit, detail=True) for name, value in known.items()]

    def segment(self, evaluation: DenseEvaluation, test: DenseImages) -> DenseScores:
        """The protocol on what is prepared."""
        raise NotImplementedError


@PROTOCOLS.register_module()
class SegmentationByNeighbours(DenseProtocol):
    """k-NN segmentation of patch tokens, as CAPI has it.

    Args:
        ks: neighbours that vote, from which the held-out images choose.
        distances: of 'cosine' and 'L2', likewise.
    """

    name = "k-NN segmentation"

    def __init__(self, ks: Sequence[int] = NEIGHBOURS, distances: Sequence[str] = DISTANCES) -> None:
        self.ks, self.distances = tuple(ks), tuple(distances)
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"ks={list(ks)}: neighbours are counted from 1")
        if not self.distances or not set(self.distances) <= set(DISTANCES):
            raise ValueError(f"distances={list(distances)}: some of {', '.join(DISTANCES)}")

    def segment(self, evaluation: DenseEvaluation, test: DenseImages) -> DenseScores:
        """By votes."""
        return evaluation.knn(test, self.ks, self.distances)


@PROTOCOLS.register_module()
class SegmentationByRegression(DenseProtocol):
    """Logistic regression of patch tokens, as CAPI has it.

    Args:
        strengths: scikit-learn's `C`, from which the held-out images choose.
    """

    name = "logistic segmentation"

    def __init__(self, strengths: Sequence[float] = STRENGTHS) -> None:
        self.strengths = tuple(sorted(set(strengths)))
        if not self.strengths or self.strengths[0] <= 0:
            raise ValueError(f"strengths={list(strengths)}: numbers above 0")

    def segment(self, evaluation: DenseEvaluation, test: DenseImages) -> DenseScores:
        """By one class a patch."""
        return evaluation.logistic(test, self.strengths)


# Of one checkpoint at a time; the labels of both sets stay for the checkpoints that it is compared with.
@lru_cache(maxsize=2)
def _dense_images(features: Features, images: ImageSet) -> DenseImages:
    side = round((math.prod(images.dataset[0]["inputs"].shape[1:]) / math.prod(features.grid)) ** 0.5)
    names = [images.path(index) for index in range(len(images))]
    return DenseImages(PatchTokens(features), _labels(images), names, max(1, side))


@lru_cache(maxsize=2)
def _labels(images: ImageSet) -> PixelLabels:
    return PixelLabels(images)


@lru_cache(maxsize=1)
def _evaluation(train: DenseImages, classes: tuple[str, ...], device: torch.device) -> DenseEvaluation:
    return DenseEvaluation(train, classes, device)


def _num_labels(*sets: ImageSet) -> int:
    """One more than the highest label of some image sets."""
    return 1 + max(int(one[one != IGNORED].max(initial=0)) for images in sets for one in _labels(images))
