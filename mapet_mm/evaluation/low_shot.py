"""Logistic regression on few labels: the images are drawn several times."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from mapet_mm.evaluation.image_sets import check_labels
from mapet_mm.evaluation.protocols import PROTOCOLS, Evaluated, Protocol, Row


def draw(labels: np.ndarray, share: int | float, seed: int) -> np.ndarray | None:
    """Images drawn from each class, in ascending order: so many, or a share of them (at least one).

    Args:
        labels: class of each image.
        share: a whole number, or a share below 1.
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
class LowShot(Protocol):
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
        self.shots, self.draws, self.C, self.pooling = list(shots), draws, C, pooling

    def run(self, evaluated: Evaluated) -> list[Row]:
        """A row for each number of labels that every class has images enough for."""
        check_labels(*(evaluated.images[name] for name in ("train", "val")))
        train, val = evaluated.features["train"], evaluated.features["val"]
        pooling = self.pooling or train.poolings[-1]
        known, queries = (features.pooled(pooling).numpy() for features in (train, val))
        mean, deviation = known.mean(0), known.std(0) + 1e-6
        known, queries = (known - mean) / deviation, (queries - mean) / deviation
        labels = train.labels.numpy()
        rows = []
        for share in self.shots:
            tops = []
            for seed in range(self.draws):
                if (chosen := draw(labels, share, seed)) is None:
                    break
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConvergenceWarning)
                    model = LogisticRegression(C=self.C, max_iter=1000).fit(known[chosen], labels[chosen])
                tops.append(100 * model.score(queries, val.labels.numpy()))
            if tops:
                setting = f"{share} a class" if share >= 1 else f"{share:.0%} of the images"
                spread = float(np.std(tops, ddof=1)) if len(tops) > 1 else None
                rows.append(
                    Row("logistic regression", f"{pooling}, {setting}", float(np.mean(tops)), spread=spread)
                )
        return rows
