"""Logistic regression on few labels: the images are drawn several times."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch

from mapet_mm.evaluation.features import POOLINGS
from mapet_mm.evaluation.protocol import PROTOCOLS, Classification, Evaluated, Row
from mapet_mm.utils.dist import print_once


def draw(labels: np.ndarray, share: int | float, seed: int) -> np.ndarray | None:
    """Images drawn from each class, in ascending order.

    Args:
        labels: class of each image.
        share: number of images, or a share of the class's images below 1 (at least one image).
        seed: of the draw.

    Returns:
        The images' places; None if a class has too few.
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
class LowShot(Classification):
    """Logistic regression (scikit-learn's, L2) on a few labelled images, of the last layer's features.

    Features are standardised by mean and deviation of all training images, which takes no labels.

    Args:
        shots: images of each class, or a share of the training images below 1.
        draws: how often they are drawn; the row is the mean, with the standard deviation.
        C: inverse strength of the regularisation.
        pooling: 'class token', 'mean' or 'both'; 'both' by default, where there are both.
    """

    def __init__(
        self,
        shots: Sequence[int | float] = (1, 2, 5, 10, 0.01, 0.1),
        draws: int = 5,
        C: float = 1.0,
        pooling: str | None = None,
    ) -> None:
        if any(share <= 0 or (share > 1 and share % 1) for share in shots):
            raise ValueError(f"shots={list(shots)}: whole numbers of images, or shares below 1")
        if pooling not in (None, *POOLINGS):
            raise ValueError(f"pooling={pooling!r}: one of {', '.join(POOLINGS)}")
        self.shots, self.draws, self.C, self.pooling = list(shots), draws, C, pooling

    def run(self, evaluated: Evaluated) -> list[Row]:
        """A row for each number of labels that every class has images enough for."""
        # Imported here, because a backbone's user needs no scikit-learn.
        from sklearn.exceptions import ConvergenceWarning
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        train, val, _ = self.labelled(evaluated)
        pooling = self.pooling or train.poolings[-1]
        if pooling not in train.poolings:
            print_once(f"no logistic regression on {pooling}: the backbone gives {train.poolings[0]} only")
            return []
        scaler = StandardScaler()
        for _, values in train.blocks("pooled"):
            scaler.partial_fit(values[:, train.columns(pooling)].numpy())
        queries = scaler.transform(val.pooled(pooling).numpy())
        rows = []
        for share in self.shots:
            tops = []
            for seed in range(self.draws):
                if (chosen := draw(train.labels.numpy(), share, seed)) is None:
                    break
                known = scaler.transform(train.pooled(pooling, images=torch.from_numpy(chosen)).numpy())
                model = LogisticRegression(C=self.C, max_iter=1000)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConvergenceWarning)
                    model.fit(known, train.labels[chosen].numpy())
                tops.append(100 * model.score(queries, val.labels.numpy()))
            if tops:
                spread = float(np.std(tops, ddof=1)) if len(tops) > 1 else None
                shown = f"{share} a class" if share >= 1 else f"{100 * share:g}% of the images"
                setting = f"{pooling}, {shown}"
                rows.append(Row("logistic regression", setting, float(np.mean(tops)), spread=spread))
        return rows
