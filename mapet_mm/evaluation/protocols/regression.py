"""Logistic regression of features, solved until it has converged: on all labels, or on few."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from mapet_mm.evaluation.features import Features
from mapet_mm.evaluation.images import ImageSet
from mapet_mm.evaluation.protocol import PROTOCOLS, Evaluated
from mapet_mm.evaluation.protocols.classification import Classification, at_edge, held_out
from mapet_mm.evaluation.protocols.linear import Chosen, rows_of_layers
from mapet_mm.evaluation.tables import Row

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

STRENGTHS = tuple(float(c) for c in 10 ** np.linspace(-6, 5, 8))  # CAPI's, of C
# L-BFGS takes thousands of steps at large C; at its default of 1e-4, from a smaller C, it takes none.
SOLVER = dict(solver="newton-cg", tol=1e-6, max_iter=1000)
GIB = 2**30
FEW = (1, 2, 5, 10)  # labels a class, where nobody names the protocol
# Numbers that a step of the solver multiplies (rows x width x classes) up to which it takes seconds: for one
# strength, and for a sweep, whose weakest regularisation needs far more steps (docs/evaluation.md).
QUICK = 10**8
QUICK_SWEEP = 5 * 10**6


def require_scikit_learn() -> None:
    """Raise ImportError, which says what to install, before any features are computed."""
    import sklearn  # noqa: F401


def num_products(train: Features, num_rows: int) -> int:
    """How many numbers a regression of some rows of the widest pooling multiplies in a step."""
    columns = train.columns(train.settings[-1])
    num_classes = int(train.labels.max()) + 1
    return num_rows * (columns.stop - columns.start) * num_classes


def regression(
    rows: Float[np.ndarray, "row dim"],
    labels: Int[np.ndarray, " row"],
    strength: float,
    balanced: bool = False,
) -> LogisticRegression:
    """scikit-learn's logistic regression (L2) at one `C`; `balanced` lets all classes count alike."""
    # Imported here, because a backbone's user needs no scikit-learn.
    from sklearn.linear_model import LogisticRegression

    rows = rows.astype(np.float64)  # gradients of float32 do not get that small
    class_weight = "balanced" if balanced else None
    return LogisticRegression(C=strength, class_weight=class_weight, **SOLVER).fit(rows, labels)


def scores_of(
    model: LogisticRegression,
    scaler: StandardScaler,
    num_classes: int,
    pooling: str,
    features: Features,
    layer: int = -1,
) -> Float[Tensor, "image class"]:
    """A fitted model's log-probabilities of all classes; classes that it has not seen have none."""
    rows = features.pooled(pooling, layer).numpy()
    scores = torch.full((len(rows), num_classes), float("-inf"), dtype=torch.float64)
    chances = model.predict_log_proba(scaler.transform(rows))
    scores[:, model.classes_.tolist()] = torch.from_numpy(chances).double()
    return scores


@PROTOCOLS.register_module()
@dataclass(eq=False)
class Regression(Classification):
    """Logistic regression of every layer and pooling on standardised features, solved at each strength.

    When held-out images have chosen the strength, the regression is solved again with all images.
    `LinearProbes` trains the same classifiers by SGD, on features of any size.

    Args:
        strengths: scikit-learn's `C`.
        layers: number of last layers that are probed; all by default.
        memory: GiB that the features of a probe may take in float32. The solver holds a few copies of them.
    """

    strengths: Sequence[float] = STRENGTHS
    layers: int | None = None
    memory: float = 0.5

    name = "linear (solved)"

    def unfit(self, images: Mapping[str, ImageSet], features: Mapping[str, Features]) -> str | None:
        """Labels that do not suit, no image that can be held out, or features beyond its memory."""
        super().unfit(images, features)
        held_out(images["train"].labels, images["train"].groups)
        require_scikit_learn()
        train = features["train"]
        columns = train.columns(train.settings[-1])
        needed = 4 * len(train) * (columns.stop - columns.start) / GIB
        if needed > self.memory:
            return (
                f"the features of {len(train)} images take {needed:.1f} GiB, and `memory` is "
                f"{self.memory:g}: LinearProbes trains on features of any size"
            )
        return None

    def takes(self, features: Mapping[str, Features]) -> Mapping[str, Any] | None:
        """The last layer; of many images it takes minutes."""
        train = features["train"]
        return {"layers": 1} if num_products(train, len(train)) <= QUICK_SWEEP else None

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """See `rows_of_layers`."""
        return rows_of_layers(self, evaluated, partial(self.best_of_layer, evaluated))

    def best_of_layer(self, evaluated: Evaluated, layer: int) -> dict[str, Chosen]:
        """Each pooling's regression with the best strength on the held-out images, of equals the least."""
        from sklearn.preprocessing import StandardScaler

        train = evaluated.features["train"]
        labels = train.labels.numpy()
        chooses = held_out(train.labels, evaluated.images["train"].groups).numpy()
        weights = evaluated.class_weights
        balanced = weights is not None
        counted = weights[train.labels[chooses]].numpy() if balanced else None
        chosen = {}
        for pooling in train.settings:
            scaler = StandardScaler()
            rows = scaler.fit_transform(train.pooled(pooling, layer).numpy())
            # Choose on the held-out images, then learn from them, too.
            top1 = {}
            for strength in tqdm(sorted(self.strengths), "logistic regression", unit="fit", delay=5):
                model = regression(rows[~chooses], labels[~chooses], strength, balanced)
                top1[strength] = 100 * model.score(rows[chooses], labels[chooses], counted)
            best = max(top1, key=top1.get)
            model = regression(rows, labels, best, balanced)
            scores = partial(scores_of, model, scaler, evaluated.num_classes, pooling, layer=layer)
            note = f"C {best:.3g}{at_edge(best, self.strengths)}"
            chosen[pooling] = Chosen(train.layers[layer], top1[best], scores, note)
        return chosen


@PROTOCOLS.register_module()
@dataclass(eq=False)
class LowShot(Classification):
    """Logistic regression (scikit-learn's, L2, C = 1) on a few labelled images, of the last layer's features.

    The features are class token and patch mean side by side, or the one that there is. They are standardised
    by mean and deviation of all training images, which takes no labels.

    Of images in groups, whole groups are drawn, so many of each class: ten slices of one patient say less
    than one each of ten.

    Args:
        shots: images (groups) of each class, or a share of the training images (groups) below 1.
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
        num_rows = max(FEW) * (int(train.labels.max()) + 1)
        return {"shots": FEW} if num_products(train, num_rows) <= QUICK else None

    def rows(self, evaluated: Evaluated) -> list[Row]:
        """A row for each number of labels that every class has images enough for."""
        train = evaluated.features["train"]
        scaler = fitted_scaler(train)  # it passes over all features
        in_groups = evaluated.images["train"].groups is not None
        rows = []
        for share in self.shots:
            scorers = self.scorers(evaluated, share, scaler)
            if not scorers:
                continue
            if share < 1:
                shown = f"{100 * share:g}% of the {'groups' if in_groups else 'images'}"
            else:
                shown = f"{share} groups a class" if in_groups else f"{share} a class"
            note = "one draw, of all images" if len(scorers) < self.draws else ""
            rows += self.rows_of(evaluated, f"{train.settings[-1]}, {shown}", *scorers, note=note)
        return rows

    def scorers(
        self, evaluated: Evaluated, share: int | float, scaler: StandardScaler
    ) -> list[Callable[[Features], Tensor]]:
        """The regression of each draw, as a function of a set's features that gives scores.

        There is none if a class has too few images, or if the row would repeat `1 a class`.
        """
        train = evaluated.features["train"]
        setting = train.settings[-1]
        labels = train.labels.numpy()
        groups = evaluated.images["train"].groups
        if groups is not None:
            groups = groups.numpy()
        balanced = evaluated.class_weights is not None
        scorers = []
        for seed in range(self.draws):
            images = draw(labels, share, seed, groups)
            repeats = share < 1 and seed == 0 and np.array_equal(images, draw(labels, 1, 0, groups))
            if images is None or (repeats and 1 in self.shots):
                return []
            rows = scaler.transform(train.pooled(setting, images=torch.from_numpy(images)).numpy())
            model = regression(rows, labels[images], strength=1.0, balanced=balanced)
            scorers.append(partial(scores_of, model, scaler, evaluated.num_classes, setting))
            if len(images) == len(train):  # all other draws are the same
                break
        return scorers


def draw(
    labels: np.ndarray, share: int | float, seed: int, groups: np.ndarray | None = None
) -> np.ndarray | None:
    """Indices of images drawn from each class, in ascending order; None if a class has too few.

    Args:
        labels: class of each image.
        share: images of each class, or below 1 the share of its images, at least one; of images in groups,
            groups, with all of their images of the class.
        seed: of the draw.
        groups: number of each image's group, if there are any.
    """
    if groups is None:
        groups = np.arange(len(labels))
    rng = np.random.default_rng(seed)
    chosen = []
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        groups_of_class = np.unique(groups[of_class])
        count = int(share) if share >= 1 else max(1, round(share * len(groups_of_class)))
        if count > len(groups_of_class):
            return None
        drawn = rng.choice(groups_of_class, count, replace=False)
        chosen.append(of_class[np.isin(groups[of_class], drawn)])
    return np.sort(np.concatenate(chosen))


def fitted_scaler(train: Features) -> StandardScaler:
    """Mean and deviation of the widest pooling of all training images."""
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    for _, values in train.blocks("pooled"):
        scaler.partial_fit(values[:, train.columns(train.settings[-1])].numpy())
    return scaler
