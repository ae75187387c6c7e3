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
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.datasets.label_files import check_label_files
from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.images import ImageSet, ImageSetError
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
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated, Protocol
from mapet_mm.evaluation.protocols.classification import at_edge, check_class_names, every_tenth
from mapet_mm.evaluation.protocols.regression import require_scikit_learn
from mapet_mm.evaluation.tables import Row
from mapet_mm.utils.dist import print_once

DENSE = ("dense_train", "dense_val")
DISTANCES = ("cosine", "L2")
# Query patches that are compared with all training patches in one pass over them.
QUERIES = 2**15


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
        images = evaluated.images["dense_train"]
        grid = evaluated.features["dense_train"].grid
        has_labels = all("gt_sem_seg" in evaluated.images[name][0].get("data_samples", ()) for name in DENSE)
        if not (has_labels and images.class_names and grid != (0, 0)):
            print_once(f"no {self.name}: it takes pixel labels, names of classes and patch tokens")
            return []
        train, test = (
            LabelledImages(evaluated.features[name], pixel_labels(evaluated.images[name])) for name in DENSE
        )
        # As many labels per side of a patch as it has pixels.
        num_pixels = math.prod(images[0]["inputs"].shape[1:])
        side = max(1, round((num_pixels / math.prod(grid)) ** 0.5))
        voters = labelled_patches(train, len(images.class_names), side, evaluated.device)
        chosen_on, tested = measured(voters, test, self.ks)
        setting = best_setting(chosen_on)
        best = tested[setting]
        chosen = int(setting.rpartition("=")[2])
        note = setting + at_edge(min(self.ks, key=lambda k: abs(k - chosen)), self.ks)
        rows = [Row(self.name, "patch tokens", best.miou, "mIoU, %", interval=best.interval, note=note)]
        for where, found in (("test images", tested), ("held-out training images", chosen_on)):
            for name, areas in found.items():
                rows.append(Row(self.name, f"{where}: {name}", areas.miou, "mIoU, %", detail=True))
        for name, iou in zip(images.class_names, best.ious.tolist(), strict=True):
            rows.append(Row(self.name, f"class: {name}", iou, "IoU, %", detail=True))
        return [row for row in rows if not (row.detail and math.isnan(row.value))]


class LabelledImages(NamedTuple):
    """Features of images, and the labels of their pixels: class indices, and 255, ignored, at their sizes."""

    features: Features
    labels: Sequence[Int[np.ndarray, "height width"]]


def measured(
    voters: Voters, test: LabelledImages, ks: Sequence[int]
) -> tuple[dict[str, Areas], dict[str, Areas]]:
    """Each setting's areas on the held-out training images and on the test images.

    A tenth of the training images chooses the setting, by the votes of the others, and votes on the test
    images, too. k is at most the number of patches that vote for the choice.

    Raises:
        ImageSetError: the training images that are not held out have patches of fewer than two classes.
    """
    num_images = len(voters.images.labels)
    chooses = every_tenth(num_images).nonzero().flatten().tolist()
    others = voters.without(chooses)
    if len(np.unique(others.cells[others.mask.numpy()])) < 2:
        raise ImageSetError(
            f"the {num_images} labelled training images, without the {len(chooses)} that choose the setting, "
            "have fewer than two classes: give more, or look at `reduce_zero_label`"
        )
    ks = sorted({min(k, int(others.mask.sum())) for k in ks})
    return others.areas(voters.images, chooses, ks), voters.areas(test, range(len(test.labels)), ks)


def labelled_patches(
    images: LabelledImages, num_classes: int, side: int = 1, device: torch.device | str = "cpu"
) -> Voters:
    """The patches of some images, of which those vote that are mostly labelled.

    Args:
        images: features and labels.
        num_classes: number of classes.
        side: labels per side of a patch.
        device: where neighbours are compared.
    """
    from sklearn.preprocessing import StandardScaler

    cells = []
    is_labelled = []
    for image in images.labels:
        own = label_cells(image, images.features.grid, side)
        most = majority(own, num_classes)
        # In patches that are mostly labelled, ignored pixels vote as most of the patch.
        cells.append(np.where(own == IGNORED, most[:, None], own))
        is_labelled.append(most != IGNORED)
    scaler = StandardScaler()
    for _, tokens in images.features.blocks("tokens"):
        scaler.partial_fit(tokens.flatten(0, 1).numpy())
    return Voters(
        images,
        np.concatenate(cells),
        torch.from_numpy(np.concatenate(is_labelled)),
        num_classes,
        torch.from_numpy(scaler.mean_).float(),
        torch.from_numpy(scaler.scale_).float(),
        torch.device(device),
    )


@dataclass(frozen=True)
class Voters:
    """Patches with labels, which vote for those of patches that are near them.

    Args:
        images: in which they are.
        cells: labels of each patch, pixel by pixel.
        mask: which patches vote.
        num_classes: number of classes.
        mean, scale: by which tokens are standardised.
        device: where neighbours are compared.
    """

    images: LabelledImages
    cells: UInt8[np.ndarray, "patch pixel"]
    mask: Bool[Tensor, " patch"]
    num_classes: int
    mean: Float[Tensor, " dim"]
    scale: Float[Tensor, " dim"]
    device: torch.device

    def without(self, images: Sequence[int]) -> Voters:
        """The patches of the other images alone."""
        mask = self.mask.clone().unflatten(0, (len(self.images.labels), -1))  # image patch
        mask[images] = False
        return replace(self, mask=mask.flatten())

    def areas(self, images: LabelledImages, chosen: Sequence[int], ks: Sequence[int]) -> dict[str, Areas]:
        """Areas of each distance and k on the chosen ones of some images, as the votes go."""
        areas: dict[str, Areas] = defaultdict(lambda: Areas(self.num_classes))
        grid = images.features.grid
        at_once = max(1, QUERIES // math.prod(grid))
        for start in tqdm(range(0, len(chosen), at_once), "segmentation", unit="part"):
            some = chosen[start : start + at_once]
            tokens = self.scaled(images.features.tokens(some))
            for distance in DISTANCES:
                _, patches = nearest(as_query(tokens, distance), self.keys(distance), ks[-1])  # query k
                for image, neighbours in zip(some, patches.cpu().split(math.prod(grid)), strict=True):
                    truth = images.labels[image]
                    voted = vote(self.cells[neighbours.numpy()], self.num_classes, ks)
                    for k, cells in voted.items():
                        areas[f"{distance}, k={k}"].add(join_cells(cells, grid, truth.shape), truth)
        return dict(areas)

    def keys(self, distance: str) -> Iterator[tuple[Tensor, Tensor]]:
        """The voting patches as keys for `nearest`, with their indices."""
        features = self.images.features
        num_patches = math.prod(features.grid)  # of an image
        for rows, tokens in features.blocks("tokens"):
            first = rows.start * num_patches
            own = self.mask[first : rows.stop * num_patches].nonzero().flatten()
            keys = as_key(self.scaled(tokens.flatten(0, 1)[own]), distance)
            yield from zip(keys.split(COLUMNS), (own + first).split(COLUMNS), strict=True)

    def scaled(self, tokens: Float[Tensor, "*patch dim"]) -> Float[Tensor, "row dim"]:
        """Standardised tokens, on the device."""
        return ((tokens.flatten(0, -2) - self.mean) / self.scale).to(self.device)


def as_query(rows: Float[Tensor, "row dim"], distance: str) -> Float[Tensor, "row width"]:
    """Rows of which the nearest keys have the largest products."""
    if distance == "cosine":
        return F.normalize(rows, dim=1)
    return torch.cat([rows, torch.ones_like(rows[:, :1])], 1)


def as_key(rows: Float[Tensor, "row dim"], distance: str) -> Float[Tensor, "row width"]:
    """Rows that have the largest products with the nearest queries."""
    if distance == "cosine":
        return F.normalize(rows, dim=1)
    # |q - t|^2 = |q|^2 - 2 (q t - |t|^2 / 2), and |q|^2 is the same for all keys.
    return torch.cat([rows, -rows.square().sum(1, keepdim=True) / 2], 1)


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


def best_setting(held_out: dict[str, Areas]) -> str:
    """The setting with the highest mean IoU; the first one where the held-out images have no label."""
    return max(held_out, key=lambda setting: np.nan_to_num(held_out[setting].miou))
