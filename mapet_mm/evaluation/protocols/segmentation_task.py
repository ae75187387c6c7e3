"""What both protocols of segmentation share: patch tokens and pixel labels, and the areas of each setting."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import ImageSetError
from mapet_mm.evaluation.metrics.neighbours import COLUMNS, nearest
from mapet_mm.evaluation.pixel_labels import IGNORED, Areas, join_cells, label_cells, majority
from mapet_mm.evaluation.protocol import every_tenth
from mapet_mm.evaluation.protocols.regression import regressions

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

DISTANCES = ("cosine", "L2")
# Query patches that are compared with all training patches in one pass over them.
QUERIES = 2**15
# Numbers of scaled features that a regression is fitted to: 0.5 GB. Of more, patches are drawn at random.
FITTED = 2**27
# Patches' labels (patch, pixel) by setting.
Segments = dict[str, UInt8[np.ndarray, "patch pixel"]]


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
        chosen_on = self.measure_held_out(partial(self.votes, self.kept, ks))
        tested = self.measure_test(partial(self.votes, self.labelled, ks))
        return chosen_on, tested

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

    def regression(self, strengths: Sequence[float]) -> tuple[dict[str, Areas], ...]:
        """Each strength's areas on the held-out training images, and the best one's on the test images.

        The model is scikit-learn's logistic regression of the patches' most frequent labels.
        """
        fits = regressions(*self.fitted(self.kept), strengths)
        models = {f"C={strength:.3g}": model for strength, model in fits.items()}
        chosen_on = self.measure_held_out(partial(predictions, models))
        best = best_setting(chosen_on)
        models[best].fit(*self.fitted(self.labelled))
        return chosen_on, self.measure_test(partial(predictions, {best: models[best]}))

    def measure_held_out(self, segment: Callable[[Tensor], Segments]) -> dict[str, Areas]:
        """Areas of each setting that `segment` gives, on the held-out training images."""
        return self.measure(self.train, self.train_labels, self.held_out, segment)

    def measure_test(self, segment: Callable[[Tensor], Segments]) -> dict[str, Areas]:
        """Areas of each setting that `segment` gives, on the test images."""
        return self.measure(self.test, self.test_labels, list(range(len(self.test))), segment)

    def measure(
        self,
        features: Features,
        labels: Sequence[Int[np.ndarray, "height width"]],
        images: Sequence[int],
        segment: Callable[[Tensor], Segments],
    ) -> dict[str, Areas]:
        """Areas of each setting that `segment` gives for the scaled patches of some images."""
        areas: dict[str, Areas] = defaultdict(lambda: Areas(self.num_classes))
        at_once = max(1, QUERIES // self.num_patches)
        for start in tqdm(range(0, len(images), at_once), "segmentation", unit="part"):
            some = images[start : start + at_once]
            segments = segment(self.scaled(features.tokens(some)))
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

    def fitted(
        self, mask: Bool[Tensor, " patch"]
    ) -> tuple[Float[np.ndarray, "row dim"], UInt8[np.ndarray, " row"]]:
        """Scaled tokens and labels that a regression is fitted to: the masked patches, or a random sample."""
        patches = mask.nonzero().flatten()
        most = max(1, FITTED // self.train.dim)
        if len(patches) > most:
            drawn = torch.randperm(len(patches), generator=torch.Generator().manual_seed(0))[:most]
            mask = torch.zeros_like(mask)
            mask[patches[drawn]] = True
        rows = torch.cat([rows.cpu() for rows, _ in self.masked(mask)])
        return rows.numpy(), self.labels[mask.numpy()]


def predictions(models: Mapping[str, LogisticRegression], rows: Float[Tensor, "query dim"]) -> Segments:
    """Each model's class of some patches."""
    return {setting: model.predict(rows.cpu().numpy())[:, None] for setting, model in models.items()}


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
