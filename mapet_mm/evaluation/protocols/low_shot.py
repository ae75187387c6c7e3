"""Logistic regression on few labels: the images are drawn several times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from mapet_mm.evaluation.protocol import PROTOCOLS, Classification, Evaluated, Row
from mapet_mm.evaluation.protocols.regression import regressions, scores_of


def draw(labels: np.ndarray, share: int | float, seed: int) -> np.ndarray | None:
    """Places of images drawn from each class, in ascending order; None if a class has too few.

    They are `share` of each class, or below 1 this share of its images, at least one.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        number = share if share >= 1 else max(1, round(share * len(of_class)))
        if number > len(of_class):
            return None
        chosen.append(rng.choice(of_class, int(number), replace=False))
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

    def run(self, evaluated: Evaluated) -> list[Row]:
        """A row for each number of labels that every class has images enough for."""
        # Imported here, because a backbone's user needs no scikit-learn.
        from sklearn.preprocessing import StandardScaler

        train, _, num_classes = self.labelled(evaluated)
        pooling = train.poolings[-1]
        scaler = StandardScaler()
        for _, values in train.blocks("pooled"):
            scaler.partial_fit(values[:, train.columns(pooling)].numpy())
        rows = []
        for share in self.shots:
            scorers = []
            for seed in range(self.draws):
                if (chosen := draw(train.labels.numpy(), share, seed)) is None:
                    break
                if share < 1 and len(chosen) == num_classes and 1 in self.shots:
                    break  # it repeats `1 a class`
                known = scaler.transform(train.pooled(pooling, images=torch.from_numpy(chosen)).numpy())
                model = regressions(known, train.labels[chosen].numpy(), [1.0])[1.0]
                scorers.append(partial(scores_of, model, scaler, num_classes, pooling))
            if scorers:
                shown = f"{share} a class" if share >= 1 else f"{100 * share:g}% of the images"
                rows += self.rows(evaluated, f"{pooling}, {shown}", *scorers)
        return rows
