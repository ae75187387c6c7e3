"""Segmentation by frozen patch tokens, with nothing trained or with a logistic regression: CAPI's protocols.

Patch tokens are scaled to mean 0 and standard deviation 1. A test patch takes, pixel by pixel, the most
frequent label of its k nearest training patches; or it takes one class from a logistic regression. k, the
distance and the strength of the regularisation are chosen on a tenth of the training images, which then go
back into training. Predictions are brought to the size of each image's labels and measured by
MMSegmentation's `IoUMetric`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.evaluation.features import FeatureBank
from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError, check_class_names
from mapet_mm.evaluation.pixel_labels import IGNORED, Areas, PixelLabels, join_cells, label_cells, majority
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol, Row, at_edge, held_out
from mapet_mm.evaluation.protocols.knn import COLUMNS, nearest
from mapet_mm.evaluation.protocols.regression import STRENGTHS, regressions
from mapet_mm.utils.dist import print_once

DISTANCES = ("cosine", "L2")
# Query patches that are compared with all training patches in one pass over them.
QUERIES = 2**15
# Numbers of scaled features that a regression is fitted to: 0.5 GB. Of more, patches are drawn at random.
FITTED = 2**27

# Patches' labels (patch, pixel), by setting.
Segments = dict[str, UInt8[np.ndarray, "patch pixel"]]


def vote(
    cells: UInt8[np.ndarray, "query k pixel"], num_classes: int, ks: Sequence[int]
) -> dict[int, UInt8[np.ndarray, "query pixel"]]:
    """The most frequent label of the k nearest neighbours, the lower of equals, for some ascending k."""
    neighbours = torch.from_numpy(cells).long()
    votes = torch.zeros(len(cells), cells.shape[2], num_classes, dtype=torch.int16)
    voted, one = {}, torch.ones((), dtype=torch.int16)
    for place in range(ks[-1]):
        votes.scatter_add_(2, neighbours[:, place, :, None], one.expand(*votes.shape[:2], 1))
        if place + 1 in ks:
            voted[place + 1] = votes.argmax(2).byte().numpy()
    return voted


class SegmentationTask:
    """Patch tokens and pixel labels of training and test images, prepared for both protocols.

    Args:
        train, test: features of the images.
        train_labels, test_labels: of each image at its own size, class indices and 255, ignored.
        num_classes: number of classes.
        side: labels per side of a training patch.
        device: where neighbours are compared.

    Raises:
        ImageSetError: the training images that are not held out have patches of fewer than two classes.
    """

    def __init__(
        self,
        train: FeatureBank,
        train_labels: Sequence[Int[np.ndarray, "height width"]],
        test: FeatureBank,
        test_labels: Sequence[Int[np.ndarray, "height width"]],
        num_classes: int,
        side: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        from sklearn.preprocessing import StandardScaler

        self.train, self.train_labels, self.test, self.test_labels = train, train_labels, test, test_labels
        self.num_classes, self.device, self.patches = num_classes, torch.device(device), math.prod(train.grid)
        cells, labels = [], []
        for one in train_labels:
            own = label_cells(one, train.grid, side)
            labels.append(majority(own, num_classes))
            # In patches that are mostly labelled, ignored pixels vote as most of the patch.
            cells.append(np.where(own == IGNORED, labels[-1][:, None], own))
        self.cells, self.labels = np.concatenate(cells), np.concatenate(labels)
        self.held_out = held_out(len(train)).nonzero().flatten().tolist()
        self.labelled = torch.from_numpy(self.labels != IGNORED)
        self.kept = self.labelled.clone()
        self.kept.view(len(train), -1)[self.held_out] = False
        if len(np.unique(self.cells[self.kept.numpy()])) < 2:
            raise ImageSetError(
                f"the {len(train)} labelled training images, without the {len(self.held_out)} that choose "
                "the setting, have fewer than two classes: give more, or look at `reduce_zero_label`"
            )
        scaler = StandardScaler()
        for _, tokens in train.blocks("tokens"):
            scaler.partial_fit(tokens.flatten(0, 1).numpy())
        self.mean, self.scale = (torch.from_numpy(each).float() for each in (scaler.mean_, scaler.scale_))

    def neighbours(self, ks: Sequence[int]) -> tuple[dict[str, Areas], ...]:
        """Each setting's areas on the held-out training images and on the test images, by neighbours' votes.

        k is at most the number of labelled patches that there are to choose a setting with.
        """
        ks = sorted({min(k, int(self.kept.sum())) for k in ks})

        def segmenter(mask: Bool[Tensor, " patch"]) -> Callable[[Tensor], Iterator[Segments]]:
            def segment(rows: Float[Tensor, "query dim"]) -> Iterator[Segments]:
                places = {}
                for distance in DISTANCES:
                    queries = comparable(rows, distance, is_key=False)
                    places[distance] = nearest(queries, self._keys(mask, distance), ks[-1])[1].cpu().numpy()
                for start in range(0, len(rows), self.patches):
                    voted: Segments = {}
                    for distance, found in places.items():
                        cells = self.cells[found[start : start + self.patches]]
                        for k, segments in vote(cells, self.num_classes, ks).items():
                            voted[f"{distance}, k={k}"] = segments
                    yield voted

            return segment

        return self._measure(True, segmenter(self.kept)), self._measure(False, segmenter(self.labelled))

    def regression(self, strengths: Sequence[float]) -> tuple[dict[str, Areas], ...]:
        """Each strength's areas on the held-out training images, and the best one's on the test images.

        The model is scikit-learn's logistic regression of the patches' most frequent labels.
        """
        found = regressions(*self._fitted(self.kept), strengths)
        models = {f"C={strength:.3g}": model for strength, model in found.items()}

        def segment(rows: Float[Tensor, "query dim"]) -> Iterator[Segments]:
            for own in rows.cpu().split(self.patches):
                yield {name: each.predict(own.numpy())[:, None] for name, each in models.items()}

        chosen_on = self._measure(True, segment)
        name = best_setting(chosen_on)
        models = {name: models[name].fit(*self._fitted(self.labelled))}
        return chosen_on, self._measure(False, segment)

    def _measure(self, chooses: bool, segment: Callable[[Tensor], Iterator[Segments]]) -> dict[str, Areas]:
        """Areas of each setting that `segment` gives, image by image, for the scaled rows of some images."""
        bank, labels = (self.train, self.train_labels) if chooses else (self.test, self.test_labels)
        images = self.held_out if chooses else list(range(len(bank)))
        areas: dict[str, Areas] = defaultdict(lambda: Areas(self.num_classes))
        at_once = max(1, QUERIES // self.patches)
        for start in tqdm(range(0, len(images), at_once), "segmentation", unit="part"):
            some = images[start : start + at_once]
            for index, segments in zip(some, segment(self._rows(bank.tokens(some))), strict=True):
                truth = labels[index]
                for setting, cells in segments.items():
                    areas[setting].add(join_cells(cells, bank.grid, truth.shape), truth)
        return dict(areas)

    def _rows(self, tokens: Float[Tensor, "*patch dim"]) -> Float[Tensor, "row dim"]:
        return ((tokens.flatten(0, -2) - self.mean) / self.scale).to(self.device)

    def _blocks(self, mask: Bool[Tensor, " patch"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Scaled tokens of the masked training patches, with their places among all of them."""
        for images, tokens in self.train.blocks("tokens"):
            own = mask[images.start * self.patches : images.stop * self.patches]
            places = own.nonzero().flatten()
            yield self._rows(tokens.flatten(0, 1)[places]), places + images.start * self.patches

    def _keys(self, mask: Bool[Tensor, " patch"], distance: str) -> Iterator[tuple[Tensor, Tensor]]:
        for rows, places in self._blocks(mask):
            keys = comparable(rows, distance, is_key=True)
            yield from zip(keys.split(COLUMNS), places.split(COLUMNS), strict=True)

    def _fitted(
        self, mask: Bool[Tensor, " patch"]
    ) -> tuple[Float[np.ndarray, "row dim"], UInt8[np.ndarray, " row"]]:
        """Scaled tokens and labels that a regression is fitted to: the masked patches, or a random sample."""
        places = mask.nonzero().flatten()
        most = max(1, FITTED // self.train.dim)
        if len(places) > most:
            drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(0))[:most]
            mask = torch.zeros_like(mask)
            mask[places[drawn]] = True
        rows = torch.cat([rows.cpu() for rows, _ in self._blocks(mask)])
        return rows.numpy(), self.labels[mask.numpy()]


def comparable(rows: Float[Tensor, "row dim"], distance: str, is_key: bool) -> Float[Tensor, "row width"]:
    """Rows such that the nearest keys have the largest products with a query."""
    if distance == "cosine":
        return F.normalize(rows, dim=1)
    # |q - t|^2 = |q|^2 - 2 (q t - |t|^2 / 2), and |q|^2 is the same for all keys.
    last = -rows.square().sum(1, keepdim=True) / 2 if is_key else torch.ones_like(rows[:, :1])
    return torch.cat([rows, last], 1)


def best_setting(held_out: dict[str, Areas]) -> str:
    """The setting with the highest mean IoU; the first one where the held-out images have no label."""
    return max(held_out, key=lambda setting: np.nan_to_num(held_out[setting].miou))


class Segmentation(Protocol):
    """Base of both protocols: labels and training patches are read once per checkpoint."""

    needs: ClassVar = {"dense_train": ["tokens"], "dense_val": ["tokens"]}
    name: ClassVar[str]
    grid: ClassVar[str]  # the option with the numbers that settings end with

    def check(self, images: Mapping[str, ImageSet]) -> None:
        """Raise ImageSetError if both sets name their classes in different orders."""
        check_class_names(*(images[name] for name in self.needs))

    def run(self, evaluated: Evaluated) -> list[Row]:
        """mIoU with the setting that held-out training images chose; no rows without pixel labels."""
        train, test = (evaluated.images[name] for name in self.needs)
        classes = train.class_names
        known, queries = (evaluated.features[images.name] for images in (train, test))
        labelled = all("gt_sem_seg" in images.dataset[0].get("data_samples", ()) for images in (train, test))
        if not (labelled and classes and math.prod(known.grid)):
            print_once(f"no {self.name}: it takes pixel labels, names of classes and patch tokens")
            return []
        chosen_on, tested = self.segment(_task(known, train, queries, test, evaluated.device))
        setting = best_setting(chosen_on)
        best, value, grid = tested[setting], float(setting.rpartition("=")[2]), getattr(self, self.grid)
        note = setting + at_edge(min(grid, key=lambda one: abs(one - value)), grid)
        row = Row(self.name, "patch tokens", best.miou, "mIoU, %", interval=best.interval, note=note)
        details = []
        for where, found in (("test images", tested), ("held-out training images", chosen_on)):
            details += [(f"{where}: {name}", areas.miou, "mIoU, %") for name, areas in found.items()]
        ious = zip(classes, best.ious.tolist(), strict=True)
        details += [(f"class: {name}", iou, "IoU, %") for name, iou in ious]
        return [row, *(Row(self.name, *each, detail=True) for each in details if not math.isnan(each[1]))]


@PROTOCOLS.register_module()
@dataclass(eq=False)
class SegmentationByNeighbours(Segmentation):
    """k-NN segmentation of patch tokens, as in CAPI.

    Args:
        ks: neighbours that vote, from which the held-out images choose.
    """

    ks: Sequence[int] = (1, 3, 10, 30)

    name, grid = "k-NN segmentation", "ks"

    def segment(self, task: SegmentationTask) -> tuple[dict[str, Areas], ...]:
        """Areas by setting on the held-out training images and on the test images."""
        return task.neighbours(self.ks)


@PROTOCOLS.register_module()
@dataclass(eq=False)
class SegmentationByRegression(Segmentation):
    """Logistic regression of patch tokens, as in CAPI.

    Args:
        strengths: scikit-learn's `C`, from which the held-out images choose.
    """

    strengths: Sequence[float] = STRENGTHS

    name, grid = "logistic segmentation", "strengths"

    def segment(self, task: SegmentationTask) -> tuple[dict[str, Areas], ...]:
        """Areas by setting on the held-out training images and on the test images."""
        return task.regression(self.strengths)


_labels = lru_cache(maxsize=2)(PixelLabels)  # read once for all checkpoints


@lru_cache(maxsize=1)
def _task(
    known: FeatureBank, train: ImageSet, queries: FeatureBank, test: ImageSet, device: torch.device
) -> SegmentationTask:
    pixels = math.prod(train.dataset[0]["inputs"].shape[1:])
    side = max(1, round((pixels / math.prod(known.grid)) ** 0.5))
    return SegmentationTask(
        known, _labels(train), queries, _labels(test), len(train.class_names), side, device
    )
