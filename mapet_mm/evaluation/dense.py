"""Segmentation by frozen patch tokens, with nothing trained or with a logistic regression: CAPI's protocol.

Patch tokens are scaled to mean 0 and standard deviation 1. A test patch takes, pixel by pixel, the most
frequent label of its k nearest training patches; or it takes one class from a logistic regression. k, the
distance and the strength of the regularisation are chosen on a tenth of the training images, which then go
back into training. Predictions are brought to the size of each image's labels and measured by
MMSegmentation's `IoUMetric`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mapet_mm.evaluation.dense_images import DenseImages
from mapet_mm.evaluation.logistic import fit_logistic
from mapet_mm.evaluation.patch_labels import IGNORED, Areas, check_classes, join_cells, label_cells, majority
from mapet_mm.evaluation.protocols.knn import nearest
from mapet_mm.utils.dist import is_first_process
from mapet_mm.utils.errors import UserError

NEIGHBOURS = (1, 3, 10, 30)
DISTANCES = ("cosine", "L2")
STRENGTHS = tuple(float(c) for c in 10 ** np.linspace(-6, 5, 8))
# Every so many-th training image chooses between the settings.
HELD_OUT = 10
# Rows of queries that are compared with all training patches in one pass over them.
QUERIES = 2**14
# Numbers of scaled features that a regression keeps; more are read again in every step.
KEPT = 2**28
Setting = TypeVar("Setting")


@dataclass(frozen=True)
class DenseScores:
    """What a protocol measured.

    Args:
        miou: mean IoU on the test images, in percent, with the chosen setting.
        setting: the chosen setting.
        held_out: mean IoU of each setting on the held-out training images.
        test: mean IoU of settings on the test images; the chosen one is not the best of them.
        ious: IoU of each class with the chosen setting; None where the class is not there.
    """

    miou: float
    setting: str
    held_out: dict[str, float]
    test: dict[str, float] = field(default_factory=dict)
    ious: Sequence[float | None] = ()


class DenseEvaluation:
    """The dense protocols on one training set, whose patches are labelled once.

    Args:
        train: labelled training images, at least two.
        classes: names of the classes.
        device: where neighbours are compared and the regression is computed.

    Raises:
        UserError: fewer than two training images, no labelled patch in those that are not held out, one
            class, more classes than 255, or a label of none.
    """

    def __init__(
        self, train: DenseImages, classes: Sequence[str], device: torch.device | str = "cpu"
    ) -> None:
        if len(train) < 2:
            raise UserError(f"{len(train)} labelled training image: segmentation needs two, one is held out")
        if len(classes) > IGNORED:
            raise UserError(f"{len(classes)} classes: labels are bytes, of which 255 means ignored")
        if not train.num_patches:
            raise UserError("the backbone gives no patch tokens: its images cannot be segmented by them")
        self.train, self.classes, self.device = train, list(classes), torch.device(device)
        self._label_patches()
        images = np.arange(len(train)).repeat(train.num_patches)
        self.labelled = torch.from_numpy(self.labels != IGNORED)
        self.kept = self.labelled & torch.from_numpy(images % HELD_OUT != min(HELD_OUT, len(train)) - 1)
        if not self.kept.any():
            raise UserError(
                f"of {len(train)} labelled training images, all patches are ignored (255) but those of the "
                "images that are held out to choose the setting: label more images"
            )
        self.mean, self.scale = _mean_and_scale(train)

    def _label_patches(self) -> None:
        """Give each training patch its label and those of its pixels."""
        train, num_classes = self.train, len(self.classes)
        patches = len(train) * train.num_patches
        self.cells = np.empty((patches, train.side**2), np.uint8)
        self.labels, found = np.empty(patches, np.uint8), set()
        for index in range(len(train)):
            own = slice(index * train.num_patches, (index + 1) * train.num_patches)
            cells = label_cells(train.checked_labels(index, num_classes), train.grid, train.side)
            most = self.labels[own] = majority(cells, num_classes)
            # Of patches that are labelled for the most part, the other pixels vote as most of the patch.
            self.cells[own] = np.where(cells == IGNORED, most[:, None], cells)
            found |= set(np.unique(self.cells[own])) - {IGNORED}
        check_classes(found, self.classes)

    def knn(
        self, test: DenseImages, ks: Sequence[int] = NEIGHBOURS, distances: Sequence[str] = DISTANCES
    ) -> DenseScores:
        """Segment by the votes of the nearest training patches, over `ks` and `distances`.

        As many neighbours vote at most as the images that are not held out have labelled patches.
        """
        # The same settings for the choice and the test, which has more patches.
        ks = sorted({min(k, int(self.kept.sum())) for k in ks})
        chosen_on = self._knn_areas(self._held_out_images(), self.kept, ks, distances)
        areas = self._knn_areas(test, self.labelled, ks, distances)
        return _scores(_best(chosen_on), chosen_on, areas)

    def logistic(self, test: DenseImages, strengths: Sequence[float] = STRENGTHS) -> DenseScores:
        """Segment by a logistic regression of the patches' most frequent labels.

        Args:
            test: the images to segment.
            strengths: scikit-learn's `C`, the inverse of the regularisation, in ascending order.
        """
        held_out, chosen_on, weights = self._held_out_images(), {}, None
        hidden = not is_first_process()
        for strength in tqdm(dict.fromkeys(strengths), "logistic regression", unit="fit", disable=hidden):
            weights = self._fit(self.kept, strength, weights)
            chosen_on[strength] = self._logistic_areas(held_out, weights)
        strength = _best(chosen_on)
        weights = self._fit(self.labelled, strength, None)
        names = strength_names(strengths)
        named = {names[each]: areas for each, areas in chosen_on.items()}
        return _scores(names[strength], named, {names[strength]: self._logistic_areas(test, weights)})

    def _held_out_images(self) -> DenseImages:
        places = range(min(HELD_OUT, len(self.train)) - 1, len(self.train), HELD_OUT)
        tokens = np.concatenate([np.asarray(self.train.tokens[i : i + 1]) for i in places])
        return DenseImages(tokens, [self.train.labels[i] for i in places])

    def _rows(self, tokens: Float[Tensor, "patch dim"]) -> Float[Tensor, "patch dim"]:
        return (tokens.to(self.device) - self.mean.to(self.device)) / self.scale.to(self.device)

    def _training_blocks(
        self, mask: Bool[Tensor, " patch"]
    ) -> Iterator[tuple[Float[Tensor, "patch dim"], Int64[Tensor, " patch"]]]:
        """Scaled tokens of the masked training patches, with their places among all of them."""
        for start, tokens in self.train.blocks():
            first = start * self.train.num_patches
            places = first + mask[first : first + len(tokens)].nonzero().flatten()
            if len(places):
                yield self._rows(tokens[places - first]), places.to(self.device)

    def _knn_areas(
        self, images: DenseImages, mask: Bool[Tensor, " patch"], ks: Sequence[int], distances: Sequence[str]
    ) -> dict[str, Areas]:
        areas = {f"{distance}, k={k}": Areas(len(self.classes)) for distance in distances for k in ks}
        patches, at_once = images.num_patches, max(1, QUERIES // images.num_patches)
        hidden = not is_first_process()
        with tqdm(total=len(images), desc="k-NN segmentation", unit="image", disable=hidden) as bar:
            for start in range(0, len(images), at_once):
                tokens = torch.as_tensor(images.tokens[start : start + at_once]).flatten(0, -2).float()
                found = self._nearest(self._rows(tokens), mask, ks[-1], distances)
                for place in range(len(tokens) // patches):
                    own = slice(place * patches, (place + 1) * patches)
                    voters = {distance: neighbours[own] for distance, neighbours in found.items()}
                    self._add_votes(areas, images, start + place, voters, ks)
                    bar.update()
        return areas

    def _add_votes(
        self,
        areas: dict[str, Areas],
        images: DenseImages,
        index: int,
        voters: dict[str, Int64[np.ndarray, "patch k"]],
        ks: Sequence[int],
    ) -> None:
        """Segment an image by its patches' nearest training patches, by each distance and each k."""
        labels = images.checked_labels(index, len(self.classes))
        for distance, neighbours in voters.items():
            for k, voted in vote(self.cells[neighbours], len(self.classes), ks).items():
                areas[f"{distance}, k={k}"].add(join_cells(voted, images.grid, labels.shape), labels)

    def _nearest(
        self, rows: Float[Tensor, "query dim"], mask: Bool[Tensor, " patch"], k: int, distances: Sequence[str]
    ) -> dict[str, Int64[np.ndarray, "query k"]]:
        """The k nearest masked training patches of each query, nearest first, in one pass over them."""
        found = {}
        for distance in distances:
            queries, _ = _comparable(rows, rows[:1], distance)
            keys = (
                (_comparable(rows[:1], block, distance)[1], own) for block, own in self._training_blocks(mask)
            )
            found[distance] = nearest(queries, keys, k)[1].cpu().numpy()
        return found

    def _fit(
        self, mask: Bool[Tensor, " patch"], strength: float, start: Float[Tensor, "classes dim"] | None
    ) -> Float[Tensor, "classes dim"]:
        labels = torch.from_numpy(self.labels).long().to(self.device)

        def blocks() -> Iterator[tuple[Float[Tensor, "row dim"], Int64[Tensor, " row"]]]:
            return ((rows, labels[places]) for rows, places in self._training_blocks(mask))

        if int(mask.sum()) * self.train.dim <= KEPT:
            kept = list(blocks())
            return fit_logistic(lambda: kept, len(self.classes), strength, start)
        return fit_logistic(blocks, len(self.classes), strength, start)

    def _logistic_areas(self, images: DenseImages, weights: Float[Tensor, "classes dim"]) -> Areas:
        areas = Areas(len(self.classes))
        for start, tokens in images.blocks():
            logits = self._rows(tokens) @ weights[:, :-1].T + weights[:, -1]
            predicted = logits.argmax(1).byte().cpu().numpy()
            for index, patches in enumerate(predicted.reshape(-1, images.num_patches), start):
                labels = images.checked_labels(index, len(self.classes))
                areas.add(join_cells(patches[:, None], images.grid, labels.shape), labels)
        return areas


def vote(
    cells: UInt8[np.ndarray, "query k pixel"], num_classes: int, ks: Sequence[int]
) -> dict[int, UInt8[np.ndarray, "query pixel"]]:
    """For some k, the most frequent label of the first k neighbours at each pixel; the lower of equals.

    Args:
        cells: `(Q, K, P)`, the neighbours' labels, nearest neighbour first.
        num_classes: number of classes.
        ks: in ascending order, the last one at most `K`.
    """
    neighbours = torch.from_numpy(cells).long()
    votes = torch.zeros(len(cells), cells.shape[2], num_classes, dtype=torch.int16)
    voted, one = {}, torch.ones((), dtype=torch.int16)
    for place in range(ks[-1]):
        votes.scatter_add_(2, neighbours[:, place, :, None], one.expand(*votes.shape[:2], 1))
        if place + 1 in ks:
            voted[place + 1] = votes.argmax(2).byte().numpy()
    return voted


def strength_names(strengths: Sequence[float]) -> dict[float, str]:
    """What the results call each strength: in three digits or, where some would be alike, in all."""
    names = {strength: f"C={strength:.3g}" for strength in strengths}
    alike = len(set(names.values())) < len(names)
    return {strength: f"C={strength!r}" for strength in names} if alike else names


def _comparable(queries: Tensor, keys: Tensor, distance: str) -> tuple[Tensor, Tensor]:
    """Both such that the nearest keys have the largest products with a query."""
    if distance == "cosine":
        return F.normalize(queries, dim=1), F.normalize(keys, dim=1)
    # |q - t|^2 = |q|^2 - 2 (q t - |t|^2 / 2), and |q|^2 is the same for all keys.
    return F.pad(queries, (0, 1), value=1), torch.cat([keys, -keys.square().sum(1, keepdim=True) / 2], 1)


def _mean_and_scale(images: DenseImages) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    for _, rows in images.blocks():
        scaler.partial_fit(rows.numpy())
    return torch.from_numpy(scaler.mean_).float(), torch.from_numpy(scaler.scale_).float()


def _best(held_out: dict[Setting, Areas]) -> Setting:
    """The setting with the highest mean IoU; the first one where the held-out images have no label."""
    return max(held_out, key=lambda setting: np.nan_to_num(held_out[setting].miou))


def _scores(setting: str, held_out: dict[str, Areas], test: dict[str, Areas]) -> DenseScores:
    if np.isnan(test[setting].miou):
        raise UserError("the labels of the images to segment are all ignored (255): nothing to measure")
    ious = [None if np.isnan(each) else float(each) for each in test[setting].ious]
    return DenseScores(
        miou=test[setting].miou,
        setting=setting,
        held_out={each: areas.miou for each, areas in held_out.items()},
        test={each: areas.miou for each, areas in test.items()},
        ious=ious,
    )
