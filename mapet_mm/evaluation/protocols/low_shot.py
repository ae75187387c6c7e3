"""Logistic regression on few labels: the images are drawn several times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.image_sets import ImageSet
from mapet_mm.evaluation.protocol import PROTOCOLS, Classification, Evaluated, Row
from mapet_mm.evaluation.protocols.regression import (
    QUICK,
    is_quick,
    num_classes_of,
    regressions,
    require_scikit_learn,
    scores_of,
)

if TYPE_CHECKING:
    from sklearn.preprocessing import StandardScaler


FEW = (1, 2, 5, 10)  # labels a class, where nobody names the protocol


def draw(labels: np.ndarray, share: int | float, seed: int) -> np.ndarray | None:
    """Indices of images drawn from each class, in ascending order; None if a class has too few.

    Args:
        labels: class of each image.
        share: images of each class, or below 1 the share of its images, at least one.
        seed: of the draw.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        count = int(share) if share >= 1 else max(1, round(share * len(of_class)))
        if count > len(of_class):
            return None
        chosen.append(rng.choice(of_class, count, replace=False))
    return np.sort(np.concatenate(chosen))


@PROTOCOLS.register_module()
@dataclass(eq=False)
class LowShot(Classification):
    """Logistic regression (scikit-learn's, L2, C = 1) on a few labelled images, of the last layer's features.

    The features are class token and patch mean side by side, or the one that there is. They are standardised
    by mean and deviation of all training images, which takes no labels.

    Args:
        shots: images of each class, or a share of the training images below 1.
        draws: how often they are drawn; the row is the mean, with the standard deviation.
    """

    shots: Sequence[int | float] = (1, 2, 5, 10, 0.01, 0.1)
    draws: int = 5

    name = "logistic regression"

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """Labels that do not suit; ImportError without scikit-learn."""
        reason = super().unfit(images, features)
        require_scikit_learn()
        return reason

    def takes(self, features: Mapping[str, Features]) -> Mapping[str, Any] | None:
        """Ten labels a class at most; of many classes they take minutes."""
        train = features["train"]
        num_rows = max(FEW) * num_classes_of(train)
        return {"shots": FEW} if is_quick(train, num_rows, QUICK) else None

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """A row for each number of labels that every class has images enough for."""
        train = evaluated.features["train"]
        setting = train.settings[-1]
        scaler = fitted_scaler(train)  # it passes over all features
        rows = []
        for share in self.shots:
            scorers = self.scorers(evaluated, share, scaler)
            shown = f"{share} a class" if share >= 1 else f"{100 * share:g}% of the images"
            note = "one draw, of all images" if len(scorers) < self.draws else ""
            if scorers:
                rows += self.rows_of(evaluated, f"{setting}, {shown}", *scorers, note=note)
        return rows

    def scorers(
        self, evaluated: Evaluated, share: int | float, scaler: StandardScaler
    ) -> list[Callable[[Features], Tensor]]:
        """The regression of each draw, as a function of a set's features that gives scores."""
        train, _, num_classes = self.labelled(evaluated)
        draws = self.drawn(train, share, num_classes)
        return [fitted(train, images, train.settings[-1], scaler, num_classes) for images in draws]

    def drawn(self, train: Features, share: int | float, num_classes: int) -> list[np.ndarray]:
        """The images of each draw; none if a class has too few, or if the row would repeat `1 a class`."""
        draws = []
        for seed in range(self.draws):
            images = draw(train.labels.numpy(), share, seed)
            if images is None:
                return []
            draws.append(images)
            if len(images) == len(train):  # all other draws are the same
                break
        one_per_class = share < 1 and draws and len(draws[0]) == num_classes
        return [] if one_per_class and 1 in self.shots else draws


def fitted_scaler(train: Features) -> StandardScaler:
    """Mean and deviation of the widest pooling of all training images."""
    # Imported here, because a backbone's user needs no scikit-learn.
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    for _, values in train.blocks("pooled"):
        scaler.partial_fit(values[:, train.columns(train.settings[-1])].numpy())
    return scaler


def fitted(
    train: Features, images: np.ndarray, setting: str, scaler: StandardScaler, num_classes: int
) -> Callable[[Features], Tensor]:
    """A regression of some images, as a function of a set's features that gives scores."""
    known = scaler.transform(train.pooled(setting, images=torch.from_numpy(images)).numpy())
    model = regressions(known, train.labels[images].numpy(), [1.0])[1.0]
    return partial(scores_of, model, scaler, num_classes, setting)
