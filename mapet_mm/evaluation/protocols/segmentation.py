"""k-NN segmentation of frozen patch tokens, after CAPI's evaluation (Darcet et al., 2025).

Tokens are standardised by the mean and deviation of the training images. A patch takes each pixel's label by
a vote of its k nearest training patches. k and the distance are chosen on a tenth of the training images,
which then go back into training. Predictions are brought to the size of each image's labels and measured by
MMSegmentation's `IoUMetric`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.datasets.label_files import check_label_files
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import ImageSet, ImageSetError, check_class_names
from mapet_mm.evaluation.metrics.neighbours import COLUMNS, nearest
from mapet_mm.evaluation.pixel_labels import (
    IGNORED,
    Areas,
    classes_of,
    join_cells,
    label_cells,
    majority,
    pixel_labels,
)
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol, Row, at_edge, every_tenth
from mapet_mm.evaluation.protocols.regression import require_scikit_learn
from mapet_mm.utils.dist import print_once

DENSE = ("dense_train", "dense_val")
DISTANCES = ("cosine", "L2")
# Query patches that are compared with all training patches in one pass over them.
QUERIES = 2**15
# Patches' labels (patch, pixel) by setting.
Segments = dict[str, UInt8[np.ndarray, "patch pixel"]]


@PROTOCOLS.register_module()
@dataclass(eq=False)
class SegmentationByNeighbours(Protocol):
    """k-NN segmentation of patch tokens, as in CAPI.

    Args:
        ks: neighbours that vote, from which the held-out images choose.
    """

    ks: Sequence[int] = (1, 3, 10, 30)

    name = "k-NN segmentation"

    def needs(self, images: Mapping[str, ImageSet]) -> Mapping[str, Sequence[str]]:
        """Patch tokens of images with pixel labels."""
        return {name: ["tokens"] for name in DENSE}

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """Label files that are no class indices, or sets that number them differently."""
        require_scikit_learn()
        check_class_names(images["dense_train"], images["dense_val"])
        for name in DENSE:
            if images[name].class_names:
                check_label_files(images[name].dataset, classes_of(images[name]))
        return None

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """mIoU with the setting that held-out training images chose; no rows without pixel labels."""
        if not can_segment(evaluated):
            print_once(f"no {self.name}: it takes pixel labels, names of classes and patch tokens")
            return []
        chosen_on, tested = prepared(evaluated).neighbours(self.ks)
        setting = best_setting(chosen_on)
        best = tested[setting]
        chosen = int(setting.rpartition("=")[2])
        note = setting + at_edge(min(self.ks, key=lambda k: abs(k - chosen)), self.ks)
        row = Row(self.name, "patch tokens", best.miou, "mIoU, %", interval=best.interval, note=note)
        details = [
            *self.details("test images", tested),
            *self.details("held-out training images", chosen_on),
        ]
        for name, iou in zip(evaluated.images["dense_train"].class_names, best.ious.tolist(), strict=True):
            details.append(Row(self.name, f"class: {name}", iou, "IoU, %", detail=True))
        return [row, *(detail for detail in details if not math.isnan(detail.value))]

    def details(self, where: str, found: Mapping[str, Areas]) -> list[Row]:
        """A row of the JSON file for each setting."""
        return [
            Row(self.name, f"{where}: {setting}", areas.miou, "mIoU, %", detail=True)
            for setting, areas in found.items()
        ]


def can_segment(evaluated: Evaluated) -> bool:
    """True if the images have pixel labels and names of classes, and the backbone patch tokens."""
    for name in DENSE:
        if "gt_sem_seg" not in evaluated.images[name][0].get("data_samples", ()):
            return False
    has_patches = math.prod(evaluated.features["dense_train"].grid) > 0
    return has_patches and bool(evaluated.images["dense_train"].class_names)


def prepared(evaluated: Evaluated) -> SegmentationTask:
    """The tokens and labels of a model's images."""
    train = evaluated.images["dense_train"]
    test = evaluated.images["dense_val"]
    features = evaluated.features["dense_train"]
    # As many labels per side of a patch as it has pixels.
    num_pixels = math.prod(train[0]["inputs"].shape[1:])
    side = max(1, round((num_pixels / math.prod(features.grid)) ** 0.5))
    return SegmentationTask(
        features,
        pixel_labels(train),
        evaluated.features["dense_val"],
        pixel_labels(test),
        len(train.class_names),
        side,
        evaluated.device,
    )


def vote(
    cells: UInt8[np.ndarray, "query k pixel"], num_classes: int, ks: Sequence[int]
) -> dict[int, UInt8[np.ndarray, "query pixel"]]:
    """The most frequent label of the k nearest neighbours, the lower of equals, for some ascending k."""
    neighbours = torch.from_numpy(cells).long()
    votes = torch.zeros(len(cells), cells.shape[2], num_classes, dtype=torch.int16)  # query pixel class
    one = torch.ones((), dtype=torch.int16).expand(len(cells), cells.shape[2], 1)
    voted = {}
    for rank in range(ks[-1]):
        votes.scatter_add_(2, neighbours[:, rank, :, None], one)
        if rank + 1 in ks:
            voted[rank + 1] = votes.argmax(2).byte().numpy()
    return voted


def labels_of_patches(
    labels: Sequence[Int[np.ndarray, "height width"]], grid: tuple[int, int], side: int, num_classes: int
) -> tuple[UInt8[np.ndarray, "patch pixel"], UInt8[np.ndarray, " patch"]]:
    """The labels of some images' patches, pixel by pixel, and the most frequent one of each.

    In patches that are mostly labelled, ignored pixels vote as most of the patch.
    """
    cells = []
    most_frequent = []
    for image in labels:
        own = label_cells(image, grid, side)
        most = majority(own, num_classes)
        cells.append(np.where(own == IGNORED, most[:, None], own))
        most_frequent.append(most)
    return np.concatenate(cells), np.concatenate(most_frequent)


class SegmentationTask:
    """Patch tokens and pixel labels of training and test images, prepared for votes.

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
        train: Features,
        train_labels: Sequence[Int[np.ndarray, "height width"]],
        test: Features,
        test_labels: Sequence[Int[np.ndarray, "height width"]],
        num_classes: int,
        side: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        from sklearn.preprocessing import StandardScaler

        self.train = train
        self.train_labels = train_labels
        self.test = test
        self.test_labels = test_labels
        self.num_classes = num_classes
        self.device = torch.device(device)
        self.num_patches = math.prod(train.grid)  # of an image
        self.cells, self.labels = labels_of_patches(train_labels, train.grid, side, num_classes)
        # Which training images choose, and which patches are learnt from: without these images, and with.
        self.held_out = every_tenth(len(train)).nonzero().flatten().tolist()
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
        self.mean = torch.from_numpy(scaler.mean_).float()
        self.scale = torch.from_numpy(scaler.scale_).float()

    def neighbours(self, ks: Sequence[int]) -> tuple[dict[str, Areas], ...]:
        """Each setting's areas on the held-out training images and on the test images, by neighbours' votes.

        k is at most the number of labelled patches that there are to choose a setting with.
        """
        ks = sorted({min(k, int(self.kept.sum())) for k in ks})
        chosen_on = self.measure(self.train, self.train_labels, self.held_out, self.kept, ks)
        every = range(len(self.test))
        return chosen_on, self.measure(self.test, self.test_labels, every, self.labelled, ks)

    def votes(
        self, mask: Bool[Tensor, " patch"], ks: Sequence[int], rows: Float[Tensor, "query dim"]
    ) -> Segments:
        """Labels of scaled patches for each distance and k, by votes of the masked training patches."""
        voted = {}
        for distance in DISTANCES:
            queries = comparable(rows, distance, is_key=False)
            _, patches = nearest(queries, self.keys(mask, distance), ks[-1])  # query k
            by_image = []
            for neighbours in patches.cpu().split(self.num_patches):
                by_image.append(vote(self.cells[neighbours.numpy()], self.num_classes, ks))
            for k in ks:
                voted[f"{distance}, k={k}"] = np.concatenate([segments[k] for segments in by_image])
        return voted

    def measure(
        self,
        features: Features,
        labels: Sequence[Int[np.ndarray, "height width"]],
        images: Sequence[int],
        mask: Bool[Tensor, " patch"],
        ks: Sequence[int],
    ) -> dict[str, Areas]:
        """Areas of each distance and k on some images, by votes of the masked training patches."""
        areas: dict[str, Areas] = defaultdict(lambda: Areas(self.num_classes))
        at_once = max(1, QUERIES // self.num_patches)
        for start in tqdm(range(0, len(images), at_once), "segmentation", unit="part"):
            some = images[start : start + at_once]
            segments = self.votes(mask, ks, self.scaled(features.tokens(some)))
            for offset, image in enumerate(some):
                own = slice(offset * self.num_patches, (offset + 1) * self.num_patches)
                truth = labels[image]
                for setting, cells in segments.items():
                    predicted = join_cells(cells[own], features.grid, truth.shape)
                    areas[setting].add(predicted, truth)
        return dict(areas)

    def scaled(self, tokens: Float[Tensor, "*patch dim"]) -> Float[Tensor, "row dim"]:
        """Tokens with mean 0 and standard deviation 1, on the device."""
        return ((tokens.flatten(0, -2) - self.mean) / self.scale).to(self.device)

    def masked(self, mask: Bool[Tensor, " patch"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Scaled tokens of the masked training patches, with their indices among all of them."""
        for images, tokens in self.train.blocks("tokens"):
            first = images.start * self.num_patches
            own = mask[first : images.stop * self.num_patches].nonzero().flatten()
            yield self.scaled(tokens.flatten(0, 1)[own]), own + first

    def keys(self, mask: Bool[Tensor, " patch"], distance: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The masked training patches as keys for `nearest`, with their indices."""
        for rows, patches in self.masked(mask):
            keys = comparable(rows, distance, is_key=True)
            yield from zip(keys.split(COLUMNS), patches.split(COLUMNS), strict=True)


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
